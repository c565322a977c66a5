//! What prefill ranks say.

use std::time::Instant;

use common::wire::{AbortAck, AuxData, ControlMessage, KvPoll, Status};

use crate::rank::core::decode::{DecodeCore, late};
use crate::rank::core::event::{Counted, Effect};

impl DecodeCore {
    pub(super) fn message(&mut self, message: ControlMessage, now: Instant) -> Vec<Effect> {
        match message {
            ControlMessage::Status(status) => self.status(status, now),
            ControlMessage::AbortAck(ack) => self.abort_ack(&ack),
            ControlMessage::AuxData(aux) => self.aux_data(aux),
            // A prefill's messages come to decode ranks only; the others are nobody's.
            other => vec![late(other.kind())],
        }
    }

    fn status(&mut self, status: Status, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        let room = status.room;
        let Some(state) = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.poll.is_terminal())
        else {
            return vec![late("status")];
        };
        let Some(target) = state.target(status.prefill_rank) else {
            // A rank that was not asked; perhaps of an older engine behind the same address.
            return vec![late("status")];
        };
        let (endpoint, is_dummy) = (target.endpoint.clone(), target.is_dummy);
        state.touched = now;
        match status.poll {
            KvPoll::Failed => {
                // It may have restarted at its address and know nobody; registering twice does no
                // harm.
                self.registered.remove(&endpoint);
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
            KvPoll::Success if is_dummy => effects.push(late("status")),
            KvPoll::Success => {
                state.successes.insert(status.prefill_rank);
                let required = state.prefill_opt.as_ref().map_or(u32::MAX, |prefill| {
                    prefill.mapping.required_prefill_response_num
                });
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
