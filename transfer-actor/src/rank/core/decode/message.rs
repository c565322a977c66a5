//! What prefill ranks say.

use std::time::Instant;

use common::ids::Generation;
use common::wire::{AbortAck, AuxData, ControlMessage, KvPoll, Status};

use crate::rank::core::decode::{DecodeCore, late};
use crate::rank::core::event::{Counted, Effect};
use crate::rank::core::rules::{Rule, holds};

impl DecodeCore {
    pub(super) fn message(
        &mut self,
        message: ControlMessage,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        if let (Some(generation), Some(room)) = (generation_opt, message.room())
            && !self.is_current(room, generation)
            && holds(Rule::StatusGeneration)
        {
            // About another use of the number, or another life of this rank.
            return vec![late(message.kind())];
        }
        match message {
            ControlMessage::Status(status) => self.status(status, generation_opt, now),
            ControlMessage::AbortAck(ack) => self.abort_ack(&ack),
            ControlMessage::AuxData(aux) => self.aux_data(aux),
            ControlMessage::Hello(hello) => self.hello(*hello),
            ControlMessage::Checks(checks) => self.checks(*checks, generation_opt, now),
            // A prefill's messages come to decode ranks only; the others are nobody's.
            other => vec![late(other.kind())],
        }
    }

    fn status(
        &mut self,
        status: Status,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let room = status.room;
        let Some(state) = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.poll.is_terminal())
        else {
            return self.last_word(&status);
        };
        let Some(target) = state.target(status.prefill_rank) else {
            // A rank that was not asked; perhaps of an older engine behind the same address.
            return vec![late("status")];
        };
        let (endpoint, is_dummy) = (target.endpoint.clone(), target.is_dummy);
        let is_compared = state.comparisons.allow_success(
            status.prefill_rank,
            self.identity.checks_opt,
            self.met.get(&endpoint),
        );
        let is_named = generation_opt.is_some();
        let is_certain = is_named || !(target.is_ferry || state.is_ambiguous);
        state.touched = now;
        match status.poll {
            KvPoll::Failed => {
                // It may have restarted at its address and know nobody; registering twice does no
                // harm.
                self.registered.remove(&endpoint);
                state.failures.insert(status.prefill_rank);
                let reason = status
                    .reason
                    .unwrap_or_else(|| "no reason given".to_owned());
                let reason = format!("prefill rank {}: {reason}", status.prefill_rank);
                self.fail(room, &reason, now, &mut effects);
            }
            // Nothing can move before it is known where to.
            KvPoll::Success | KvPoll::Transferring if !state.is_published => {
                effects.push(late("status"));
            }
            // 0.5.23 may take a dummy for real, and then says so before any byte has moved.
            KvPoll::Success if is_dummy && holds(Rule::DummyProvesNothing) => {
                effects.push(late("status"));
            }
            KvPoll::Success if !is_certain && holds(Rule::AmbiguousSuccess) => {
                let reason = format!(
                    "prefill rank {} reports a success of this or of an older use of the room's number, which cannot be told apart",
                    status.prefill_rank
                );
                // Perhaps another program has taken the place of a Ferry rank.
                self.forget_prefill(&endpoint);
                self.fail(room, &reason, now, &mut effects);
            }
            KvPoll::Success if !is_compared && holds(Rule::SuccessAfterComparison) => {
                let reason = format!(
                    "prefill rank {} reports a success without waiting for its checksums to be compared",
                    status.prefill_rank
                );
                self.fail(room, &reason, now, &mut effects);
            }
            KvPoll::Success => {
                if self.identity.checks_opt.is_some() {
                    effects.extend(state.comparisons.not_to_be(status.prefill_rank, &endpoint));
                }
                state.successes.insert(status.prefill_rank);
                let required = match holds(Rule::EveryPrefillSucceeds) {
                    true => state.prefill_opt.as_ref().map_or(u32::MAX, |prefill| {
                        prefill.mapping.required_prefill_response_num
                    }),
                    false => 1,
                };
                if state.successes.len() >= required as usize {
                    state.advance(room, KvPoll::Success, &mut effects);
                    let elapsed = now.duration_since(state.opened);
                    effects.push(Effect::Count(Counted::RoomFinished {
                        room,
                        poll: KvPoll::Success,
                        reason_opt: None,
                        elapsed,
                    }));
                } else {
                    state.advance(room, KvPoll::Transferring, &mut effects);
                }
            }
            poll => {
                state.advance(room, poll, &mut effects);
                self.publish(room, now, &mut effects);
            }
        }
        effects
    }

    /// A room that has ended learns no more from a prefill rank than that it has ended there too.
    fn last_word(&mut self, status: &Status) -> Vec<Effect> {
        if let Some(state) = self.rooms.get_mut(&status.room)
            && status.poll == KvPoll::Failed
        {
            state.failures.insert(status.prefill_rank);
        }
        vec![late("status")]
    }

    fn abort_ack(&mut self, ack: &AbortAck) -> Vec<Effect> {
        let room = ack.room;
        let Some(state) = self
            .rooms
            .get_mut(&room)
            .filter(|state| state.is_abort_sent)
        else {
            return vec![late("abort_ack")];
        };
        // Without a generation it may answer an older abort of the same number.
        let is_ours = ack.generation == i64::try_from(state.generation.get()).ok();
        let is_ours = is_ours || !holds(Rule::AckGeneration);
        if !is_ours || state.target(ack.prefill_rank).is_none() {
            return vec![late("abort_ack")];
        }
        state.acknowledged.insert(ack.prefill_rank);
        vec![Effect::Changed { room }]
    }

    fn aux_data(&mut self, aux: AuxData) -> Vec<Effect> {
        // 0.5.23 sends aux and STATUS over different sockets, so that a row may come behind Success.
        // It belongs to the room until the engine clears it.
        let state = self
            .rooms
            .get(&aux.room)
            .filter(|state| state.poll != KvPoll::Failed && state.is_published);
        let expected = state
            .and_then(|state| state.announcement_opt.as_ref())
            .is_some_and(|announcement| announcement.aux_index_opt == Some(aux.aux_index));
        if !expected {
            return vec![late("aux_data")];
        }
        vec![Effect::WriteAux {
            room: aux.room,
            buffer_index: aux.buffer_index,
            row: aux.aux_index,
            data: aux.data,
        }]
    }
}
