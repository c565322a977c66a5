//! How a room ends other than by Success: by the engine, by an unreachable prefill, by time.

use std::time::{Duration, Instant};

use common::ids::{Endpoint, Generation, Room};
use common::wire::{Abort, ControlMessage, KvPoll};

use crate::error::ApiError;
use crate::rank::core::decode::DecodeCore;
use crate::rank::core::event::{Counted, Effect, PrefillTarget};
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::tombstones::Epitaph;
use crate::rank::core::unknown_room;

/// Time for the sends to a remembered prefill to fail at all of its ranks, once one has failed.
const UNREACHED_TIMEOUT: Duration = Duration::from_secs(2);

/// The kind of message that names places to write to.
const TRANSFER_INFO: &str = "transfer_info";

impl DecodeCore {
    pub(super) fn abort(
        &mut self,
        room: Room,
        reason: &str,
        now: Instant,
    ) -> Result<Vec<Effect>, ApiError> {
        if !self.rooms.contains_key(&room) {
            return Err(unknown_room(room));
        }
        let mut effects = Vec::new();
        self.fail(room, reason, now, &mut effects);
        Ok(effects)
    }

    pub(super) fn clear(&mut self, room: Room, now: Instant) -> Result<Vec<Effect>, ApiError> {
        if !self.rooms.contains_key(&room) {
            return Err(unknown_room(room));
        }
        let mut effects = Vec::new();
        self.fail(room, "the engine cleared the room", now, &mut effects);
        self.forget(room, now, &mut effects);
        Ok(effects)
    }

    fn forget(&mut self, room: Room, now: Instant, effects: &mut Vec<Effect>) {
        let is_settled = self
            .rooms
            .remove(&room)
            .is_none_or(|state| state.is_settled());
        let epitaph = match is_settled {
            true => Epitaph::Cleared,
            false => Epitaph::Unsettled,
        };
        self.tombstones.lay(room, epitaph, now);
        effects.push(Effect::Changed { room });
    }

    /// Fails a room that has not ended. Every prefill rank that may be writing is asked to stop and
    /// to say so, whoever failed first.
    pub(super) fn fail(
        &mut self,
        room: Room,
        reason: &str,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.poll.is_terminal() || !holds(Rule::EndIsFinal))
        else {
            return;
        };
        state.reason_opt.get_or_insert_with(|| reason.to_owned());
        state.advance(room, KvPoll::Failed, effects);
        state.touched = now;
        let elapsed = now.duration_since(state.opened);
        effects.push(Effect::Count(Counted::RoomFinished {
            room,
            poll: KvPoll::Failed,
            reason_opt: state.reason_opt.clone(),
            elapsed,
        }));
        let Some(prefill) = &state.prefill_opt else {
            return;
        };
        state.is_abort_sent = true;
        for target in &prefill.targets {
            effects.push(Effect::Send {
                to: target.endpoint.clone(),
                message: ControlMessage::Abort(Abort {
                    room,
                    reply_to: Some(self.identity.register.endpoint.clone()),
                    generation: i64::try_from(state.generation.get()).ok(),
                }),
                generation_opt: target.is_ferry.then_some(state.generation),
                about_opt: None,
            });
        }
    }

    /// What is known of this prefill may be old: it is asked for again by the next room.
    pub(super) fn forget_prefill(&mut self, rank: &Endpoint) {
        self.registered.remove(rank);
        if let Some(met) = self.met.get_mut(rank) {
            met.is_current = false;
        }
        self.prefills
            .retain(|_, prefill| !prefill.has_rank_at(rank));
    }

    /// A prefill rank is gone: nothing more comes for the rooms that wait for it.
    pub(super) fn peer_lost(
        &mut self,
        endpoint: &Endpoint,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        self.forget_prefill(endpoint);
        let waiting = self.rooms.iter().filter(|(_, state)| {
            let prefill = state.prefill_opt.as_ref();
            !state.poll.is_terminal()
                && prefill.is_some_and(|prefill| prefill.has_rank_at(endpoint))
                && holds(Rule::PeerLossFails)
        });
        let waiting: Vec<Room> = waiting.map(|(room, _)| *room).collect();
        let reason = format!("prefill rank {endpoint} is gone: {reason}");
        let mut effects = Vec::new();
        for room in waiting {
            self.fail(room, &reason, now, &mut effects);
        }
        self.take_back(Some(endpoint), now, &mut effects);
        effects
    }

    pub(super) fn send_failed(
        &mut self,
        to: &Endpoint,
        about_opt: Option<(Room, Generation)>,
        kind: &'static str,
        reason: &str,
        now: Instant,
    ) -> Vec<Effect> {
        self.forget_prefill(to);
        let mut effects = Vec::new();
        let Some((room, generation)) = about_opt else {
            return effects;
        };
        let state = self
            .rooms
            .get_mut(&room)
            .filter(|state| state.generation == generation);
        let Some(state) = state else {
            return effects;
        };
        let prefill = state.prefill_opt.as_ref();
        if !prefill.is_some_and(|prefill| prefill.has_rank_at(to)) {
            // An address that the room has given up.
            return effects;
        }
        // A message before it may be lost, and the announcement arrive.
        if !state.is_published || kind == TRANSFER_INFO {
            state.untold.insert(to.clone());
        }
        if state.poll.is_terminal() {
            // It may be what its places wait for.
            effects.push(Effect::Changed { room });
            return effects;
        }
        let reason = format!("prefill rank {to} cannot be reached ({kind}): {reason}");
        if !state.is_remembered {
            self.fail(room, &reason, now, &mut effects);
            return effects;
        }
        // The prefill may have been replaced since. Only when no rank of it can have heard of the
        // room is it safe to name the same pages to others.
        state.touched = now;
        state.unreached.entry(to.clone()).or_insert(reason);
        let is_untold = |target: &PrefillTarget| state.untold.contains(&target.endpoint);
        if prefill.is_some_and(|prefill| prefill.targets.iter().all(is_untold)) {
            tracing::info!(%room, %to, "a remembered prefill is gone; its bootstrap server is asked again");
            state.is_remembered = false;
            state.prefill_opt = None;
            state.is_published = false;
            state.unreached.clear();
            state.untold.clear();
            state.told.clear();
            let (bootstrap, dp_rank_opt) = state.asked.clone();
            effects.push(Effect::Resolve {
                room,
                generation,
                bootstrap,
                dp_rank_opt,
            });
        }
        effects
    }

    pub(super) fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.tombstones.expire(now);
        let unreached = self.rooms.iter().filter_map(|(room, state)| {
            let reason = state.unreached.values().next()?;
            let is_due = now.duration_since(state.touched) >= UNREACHED_TIMEOUT;
            is_due.then(|| (*room, reason.clone()))
        });
        for (room, reason) in unreached.collect::<Vec<_>>() {
            self.fail(room, &reason, now, &mut effects);
        }
        let timeouts = self.timeouts;
        let overdue = self.rooms.iter().filter_map(|(room, state)| {
            let (limit, reason) = match state.poll {
                KvPoll::Bootstrapping => (timeouts.bootstrap, "the prefill side was not ready"),
                KvPoll::WaitingForInput if !state.is_published => {
                    (timeouts.waiting, "the engine did not announce the room")
                }
                KvPoll::WaitingForInput | KvPoll::Transferring => {
                    (timeouts.waiting, "the prefill side did not finish")
                }
                KvPoll::Failed | KvPoll::Success => (timeouts.retention, ""),
            };
            let is_overdue = now.duration_since(state.touched) >= limit;
            let is_timed = state.poll.is_terminal() || holds(Rule::WaitingTimeout);
            (is_overdue && is_timed).then_some((*room, limit, reason))
        });
        let overdue: Vec<_> = overdue.collect();
        for (room, limit, reason) in overdue {
            if reason.is_empty() {
                tracing::warn!(%room, "a room that ended long ago was never cleared; it is forgotten");
                self.forget(room, now, &mut effects);
            } else {
                let reason = format!("{reason} within {} s", limit.as_secs());
                self.fail(room, &reason, now, &mut effects);
            }
        }
        self.take_back(None, now, &mut effects);
        effects
    }

    pub(super) fn shutdown(&mut self, reason: &str, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        let rooms: Vec<Room> = self.rooms.keys().copied().collect();
        for room in rooms {
            self.fail(room, reason, now, &mut effects);
        }
        effects
    }
}
