//! What a prefill's engine hands over, and when it begins.

use std::time::Instant;

use common::ids::Room;
use common::wire::KvPoll;

use crate::error::ApiError;
use crate::rank::core::event::{ChunkCommand, Counted, Effect};
use crate::rank::core::flight::Portion;
use crate::rank::core::prefill::PrefillCore;
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::{Reaction, unknown_room};

impl PrefillCore {
    pub(super) fn chunk(&mut self, room: Room, chunk: &ChunkCommand, now: Instant) -> Reaction {
        let open = self.rooms.get(&room).filter(|state| !state.is_cleared);
        let Some(state) = open else {
            return Reaction::refused(unknown_room(room));
        };
        let refused = |code, message: String| Reaction::refused(ApiError::new(409, code, message));
        if state.poll == KvPoll::Failed && holds(Rule::NoWriteAfterFailure) {
            let reason = state.reason_opt.clone().unwrap_or_default();
            return refused("room_failed", format!("room {room} has failed: {reason}"));
        }
        if state.is_last_sent {
            return refused(
                "room_complete",
                format!("the last chunk of room {room} was sent already"),
            );
        }
        if !state.is_announced() {
            let message = format!(
                "the decode side of room {room} is not complete; wait for waiting_for_input"
            );
            return refused("not_ready", message);
        }
        let planned = state.plan_chunk(chunk, &self.item_bytes);
        let mut effects = Vec::new();
        match planned {
            Ok(portions) => {
                let waits = match self.flight.admit(&portions, &self.limits) {
                    Ok(waits) => waits,
                    Err(error) => return Reaction::refused(error),
                };
                self.begin_chunk(room, chunk, portions, &waits, now, &mut effects);
                self.settle(room, now, &mut effects);
                Reaction::done(effects)
            }
            Err(error) => {
                let reason = error.to_string();
                self.fail(room, &reason, None, now, &mut effects);
                Reaction {
                    effects,
                    error_opt: Some(ApiError::new(400, "bad_indices", reason)),
                }
            }
        }
    }

    /// Begins what need not wait of an accepted chunk.
    fn begin_chunk(
        &mut self,
        room: Room,
        chunk: &ChunkCommand,
        portions: Vec<Portion>,
        waits: &[bool],
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        state.accept_chunk(chunk, &portions, now, effects);
        let mut waiting = 0;
        for (portion, must_wait) in portions.into_iter().zip(waits) {
            if *must_wait {
                waiting += 1;
                self.flight.wait(portion);
            } else {
                self.flight.begin(&portion);
                state.begin(portion, now, effects);
            }
        }
        if waiting > 0 {
            state.waiting += waiting;
            effects.push(Effect::Count(Counted::Waiting { portions: waiting }));
        }
    }

    /// What waited begins where bytes have arrived.
    pub(super) fn begin_waiting(&mut self, now: Instant, effects: &mut Vec<Effect>) {
        while self.flight.waiting() > 0
            && holds(Rule::WaitingBegins)
            && let Some(portion) = self.flight.next(&self.limits)
        {
            let state = self.rooms.get_mut(&portion.room);
            match state.filter(|state| state.generation == portion.generation) {
                Some(state) => {
                    state.waiting -= 1;
                    state.begin(portion, now, effects);
                }
                // What waits for a room is given up with it, so there is none such.
                None => self.flight.ended(&portion.endpoint, portion.bytes()),
            }
        }
    }
}
