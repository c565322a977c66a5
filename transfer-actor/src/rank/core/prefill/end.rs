//! How a room ends: by Success, by a failure, by an abort, by time.

use std::time::Instant;

use common::ids::{Endpoint, Generation, Room};
use common::wire::{Abort, AbortAck, ControlMessage, KvPoll};

use crate::error::ApiError;
use crate::rank::core::event::{ComponentOutcome, ComponentReport, Effect, Life};
use crate::rank::core::prefill::{Peer, PrefillCore, deferred_status, late, orphaned};
use crate::rank::core::prefill_room::Age;
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::tombstones::Epitaph;

impl PrefillCore {
    /// The decode gives a room up.
    pub(super) fn peer_abort(&mut self, abort: &Abort, now: Instant) -> Vec<Effect> {
        let room = abort.room;
        let mut effects = Vec::new();
        let asker = abort.reply_to.clone().zip(abort.generation);
        if let Some((endpoint, generation)) = &asker
            && let Ok(generation) = u64::try_from(*generation)
        {
            self.end_use(room, endpoint, generation, now);
        }
        // Beside a room that has ended, an early one is the next use of its number, and then it is
        // the one that the decode means.
        let is_early = self.early.contains(room);
        self.early.change_known(room, |early| {
            if !early.is_newer(abort) {
                early.give_up(abort.reply_to.clone());
            }
        });
        let Some(state) = self.rooms.get_mut(&room) else {
            let epitaph_opt = self.tombstones.get(&room);
            match epitaph_opt {
                _ if is_early => {}
                Some(_) => effects.push(late("abort")),
                None => self.tombstones.lay(room, Epitaph::GivenUp, now),
            }
            if epitaph_opt == Some(Epitaph::Poisoned) {
                return effects;
            }
            // Nothing is being written for a room that is not open.
            effects.extend(asker.map(|(to, generation)| self.ack(room, to, generation)));
            return effects;
        };
        if let Some((endpoint, generation)) = &asker {
            let generation = u64::try_from(*generation).map(Generation).ok();
            if state.age_of(endpoint, generation) == Age::Older {
                return vec![late("abort")];
            }
        }
        if let Some(asker) = asker
            && !state.abort_askers.contains(&asker)
        {
            state.abort_askers.push(asker);
        }
        if !state.poll.is_terminal() {
            let reason = match &abort.reply_to {
                Some(endpoint) => format!("decode rank {endpoint} gave the room up"),
                None => "the decode side gave the room up".to_owned(),
            };
            self.fail(room, &reason, abort.reply_to.as_ref(), now, &mut effects);
        }
        self.settle(room, now, &mut effects);
        effects
    }

    pub(super) fn abort(
        &mut self,
        room: Room,
        reason: &str,
        now: Instant,
    ) -> Result<Vec<Effect>, ApiError> {
        self.open_room(room)?;
        let mut effects = Vec::new();
        self.fail(room, reason, None, now, &mut effects);
        self.settle(room, now, &mut effects);
        Ok(effects)
    }

    pub(super) fn clear(&mut self, room: Room, now: Instant) -> Result<Vec<Effect>, ApiError> {
        self.open_room(room)?;
        let mut effects = Vec::new();
        self.fail(room, "the engine cleared the room", None, now, &mut effects);
        if let Some(state) = self.rooms.get_mut(&room) {
            state.is_cleared = true;
            let (generation, succeeded) = (state.generation, state.poll == KvPoll::Success);
            let rank = self.identity.unique_rank;
            // Under `prefill_complete` the decode may use the room again once it hears of the
            // Success, so it hears of it only now.
            if self.identity.is_deferred
                && succeeded
                && state.deferred.close(generation, true).is_some()
            {
                effects.extend(state.send_status_to_all(rank));
            }
        }
        effects.push(Effect::Changed { room });
        self.settle(room, now, &mut effects);
        Ok(effects)
    }

    /// A decode rank is gone: its open rooms end here.
    pub(super) fn peer_lost(
        &mut self,
        endpoint: &Endpoint,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        let rooms = self.rooms.values().filter(|state| {
            let mut targets = state.targets.iter();
            !state.poll.is_terminal()
                && targets.any(|target| target.info.endpoint == *endpoint)
                && holds(Rule::PeerLossFails)
        });
        let rooms: Vec<Room> = rooms.map(|state| state.room).collect();
        let reason = format!("decode rank {endpoint} is gone: {reason}");
        let mut effects = Vec::new();
        for room in rooms {
            self.fail(room, &reason, Some(endpoint), now, &mut effects);
            self.settle(room, now, &mut effects);
        }
        effects
    }

    /// The process of a decode rank has exited.
    pub(super) fn peer_exited(
        &mut self,
        endpoint: &Endpoint,
        life: Life,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        let is_current = |peer: &Peer| peer.endpoint == *endpoint && peer.life_opt == Some(life);
        if !self.peers.values().any(is_current) {
            return Vec::new();
        }
        self.peer_lost(endpoint, reason, now)
    }

    pub(super) fn report(&mut self, report: ComponentReport, now: Instant) -> Vec<Effect> {
        let ComponentReport { key, outcome } = report;
        let current = self
            .rooms
            .get_mut(&key.room)
            .filter(|state| state.generation == key.generation || !holds(Rule::ReportGeneration));
        let Some(state) = current else {
            let died = matches!(outcome, ComponentOutcome::Died { .. });
            return if died {
                Vec::new()
            } else {
                vec![late("component_report")]
            };
        };
        let mut effects = Vec::new();
        let (ended_bytes, failure_opt) = state.report(&key, &outcome, now);
        self.flight.ended(&key.endpoint, ended_bytes);
        if let Some(reason) = failure_opt.filter(|_| holds(Rule::FailedWriteFails)) {
            let label = self.identity.layout.component_label(key.component);
            let reason = format!("{label} to decode rank {}: {reason}", key.endpoint);
            self.fail(key.room, &reason, None, now, &mut effects);
        } else {
            effects.push(Effect::Changed { room: key.room });
        }
        self.settle(key.room, now, &mut effects);
        effects
    }

    /// Fails a room that has not ended: the first cause is kept, what runs is cancelled, and every
    /// decode rank that announced it is told, except the one that said so itself.
    pub(super) fn fail(
        &mut self,
        room: Room,
        reason: &str,
        except_opt: Option<&Endpoint>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        let rank = self.identity.unique_rank;
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        if state.poll.is_terminal() && holds(Rule::EndIsFinal) {
            return;
        }
        state.reason_opt.get_or_insert_with(|| reason.to_owned());
        state.finish(KvPoll::Failed, now, effects);
        state.cancel(effects);
        if state.waiting > 0 {
            let endpoints = state.targets.iter();
            let endpoints = endpoints.map(|target| target.info.endpoint.clone());
            for portion in self.flight.give_up(room, state.generation, endpoints) {
                state.give_up(&portion);
            }
        }
        let told = state
            .targets
            .iter()
            .filter(|target| Some(&target.info.endpoint) != except_opt);
        effects.extend(
            told.map(|target| {
                state.send_status(&target.info.endpoint, target.generation_opt, rank)
            }),
        );
        let generation = state.generation;
        if let Some(notice) = state.deferred.close(generation, false) {
            effects.push(deferred_status(state, &notice, rank));
        }
    }

    /// Draws the conclusions once nothing of a room is being written: Success, acknowledgements,
    /// and the end of a room that the engine has cleared.
    pub(super) fn settle(&mut self, room: Room, now: Instant, effects: &mut Vec<Effect>) {
        let rank = self.identity.unique_rank;
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        if state.poll.is_terminal() {
            let (proved, waiting) = std::mem::take(&mut state.abort_askers)
                .into_iter()
                .partition(|(to, generation)| state.may_acknowledge(to, *generation));
            state.abort_askers = waiting;
            effects.extend(
                proved
                    .into_iter()
                    .map(|(to, generation)| ack(room, to, generation, rank)),
            );
        }
        let is_drained = state.pending == 0;
        let is_written = (state.is_last_sent || !holds(Rule::SuccessAfterLastChunk))
            && (is_drained || !holds(Rule::SuccessAfterReports));
        let is_written = is_written && !state.poll.is_terminal();
        if is_written && state.compare(rank, now, effects) {
            state.finish(KvPoll::Success, now, effects);
            if !self.identity.is_deferred {
                effects.extend(state.send_status_to_all(rank));
            }
            state.stop(effects);
        }
        if state.is_cleared && (is_drained || !holds(Rule::ClearedRoomDrains)) {
            state.stop(effects);
            let epitaph = if state.is_poisoned || state.was_poisoned {
                Epitaph::Poisoned
            } else {
                Epitaph::Cleared
            };
            let forgotten = self.rooms.remove(&room);
            for ((endpoint, _), moved) in forgotten.iter().flat_map(|state| &state.moved) {
                self.flight.ended(endpoint, moved.under_way.iter().sum());
            }
            for target in forgotten.iter().flat_map(|state| &state.targets) {
                if let Some(generation) = target.generation_opt {
                    self.end_use(room, &target.info.endpoint, generation.get(), now);
                }
            }
            self.tombstones.lay(room, epitaph, now);
        }
    }

    pub(super) fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.tombstones.expire(now);
        self.over.expire(now);
        let lifetime = self.timeouts.bootstrap;
        effects.extend(orphaned(self.early.expire(now, lifetime)));
        let timeouts = self.timeouts;
        let overdue = self.rooms.values().filter_map(|state| {
            let (limit, reason) = match state.poll {
                KvPoll::Bootstrapping => (
                    timeouts.bootstrap,
                    "the decode side did not announce the room",
                ),
                KvPoll::WaitingForInput => (timeouts.waiting, "the engine sent nothing"),
                KvPoll::Transferring if state.has_begun() => {
                    (timeouts.transfer, "a write did not end")
                }
                KvPoll::Transferring if state.waiting > 0 => (
                    timeouts.waiting,
                    "bytes of other rooms took all there may be under way: no chunk began",
                ),
                KvPoll::Transferring if state.comparison.is_asked() => (
                    timeouts.waiting,
                    "the decode side did not compare its checksums",
                ),
                KvPoll::Transferring => (timeouts.waiting, "the engine sent no further chunk"),
                KvPoll::Failed | KvPoll::Success => (timeouts.retention, ""),
            };
            let is_overdue = now.duration_since(state.touched) >= limit;
            (is_overdue && state.is_timed()).then_some((state.room, limit, reason))
        });
        let overdue: Vec<_> = overdue.collect();
        for (room, limit, reason) in overdue {
            if reason.is_empty() {
                tracing::warn!(%room, "a room that ended long ago was never cleared; it is forgotten");
                if let Some(state) = self.rooms.get_mut(&room) {
                    state.is_cleared = true;
                    // Nothing is known of work without a report, so nothing is promised of it.
                    state.is_poisoned |= state.pending > 0;
                    state.pending = 0;
                }
            } else {
                let reason = format!("{reason} within {} s", limit.as_secs());
                self.fail(room, &reason, None, now, &mut effects);
            }
            self.settle(room, now, &mut effects);
        }
        effects
    }

    pub(super) fn shutdown(&mut self, reason: &str, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        let rooms: Vec<Room> = self.rooms.keys().copied().collect();
        for room in rooms {
            self.fail(room, reason, None, now, &mut effects);
            self.settle(room, now, &mut effects);
        }
        effects
    }

    /// Work may have been handed over and never begun, and a report may have come and not been
    /// counted: each component actor with work is asked once more, for all of it.
    pub(super) fn restarted(&mut self, reason: &str, now: Instant) -> Vec<Effect> {
        let mut effects = self.shutdown(reason, now);
        let asked = self
            .rooms
            .values()
            .filter(|_| holds(Rule::RestartAsksAgain));
        asked.for_each(|state| state.retire(&mut effects));
        effects
    }

    fn ack(&self, room: Room, to: Endpoint, generation: i64) -> Effect {
        ack(room, to, generation, self.identity.unique_rank)
    }
}

fn ack(room: Room, to: Endpoint, generation: i64, rank: i64) -> Effect {
    let generation = Some(generation);
    let message = ControlMessage::AbortAck(AbortAck {
        room,
        prefill_rank: rank,
        generation,
    });
    Effect::Send {
        to,
        message,
        generation_opt: None,
        about_opt: None,
    }
}
