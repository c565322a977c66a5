//! Permissions to write, given with an announcement and taken back when its room has failed: the proof
//! that a rank writes no more where neither its answer nor its exit can be had.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::ids::{Endpoint, Generation, Room};
use common::wire::{Grant, KvPoll};

use crate::rank::core::decode::{DecodeCore, DecodeRoom, late};
use crate::rank::core::event::Effect;
use crate::rank::core::rules::{Rule, holds};

/// How long an acknowledgement of an abort may take before permissions are taken back. A rank that
/// is well is spared that its last writes are refused.
const TAKEN_BACK_AFTER: Duration = Duration::from_secs(1);

/// Where a permission stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Given,
    /// It is being taken back; whether what comes in under it is ended.
    Asked {
        is_lost: bool,
    },
    Over,
}

impl DecodeCore {
    /// Which processes the announcement of a room is for, as far as they are known, with permissions
    /// for those that have no other way in.
    pub(super) fn grants_for(&self, room: Room) -> BTreeMap<i64, Grant> {
        let prefill = self
            .rooms
            .get(&room)
            .and_then(|state| state.prefill_opt.as_ref());
        let targets = prefill.into_iter().flat_map(|prefill| &prefill.targets);
        let writers = targets.filter(|target| target.is_ferry && !target.is_dummy);
        let addressed = writers.filter_map(|target| {
            // Only a process that has answered the newest REGISTER is known to be there.
            let register_opt = self.newest_register(&target.endpoint);
            let met = self.met.get(&target.endpoint)?;
            if !met.is_current || register_opt != Some(met.register) {
                return None;
            }
            let own = &self.identity.register.engine;
            let is_only_way = (self.identity.is_only_way_in)(own, &met.engine);
            // The shell asks the io engine for a true one.
            let key = (is_only_way || !holds(Rule::OnlyWayIn)).then_some([0; 16]);
            let engine = met.engine.key.clone();
            Some((target.unique_rank, Grant { engine, key }))
        });
        addressed.collect()
    }

    /// Takes permissions of failed rooms back: all that nobody has vouched for in time, or those of
    /// a rank that is lost, at once.
    pub(super) fn take_back(
        &mut self,
        lost_opt: Option<&Endpoint>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        for (room, state) in &mut self.rooms {
            let is_late = now.duration_since(state.touched) >= TAKEN_BACK_AFTER;
            if state.poll != KvPoll::Failed || !(is_late || lost_opt.is_some()) {
                continue;
            }
            let prefill = state.prefill_opt.as_ref();
            let targets = prefill.into_iter().flat_map(|prefill| &prefill.targets);
            for target in targets {
                let rank = target.unique_rank;
                let is_lost = lost_opt == Some(&target.endpoint);
                if lost_opt.is_some() && !is_lost {
                    continue;
                }
                let has_said = [&state.acknowledged, &state.successes, &state.exited];
                let Some(stage) = state.grants.get_mut(&rank) else {
                    continue;
                };
                let is_due = match stage {
                    Stage::Given => true,
                    Stage::Asked { is_lost: before } => is_lost && !*before,
                    Stage::Over => false,
                };
                if !is_due || has_said.iter().any(|ranks| ranks.contains(&rank)) {
                    continue;
                }
                *stage = Stage::Asked { is_lost };
                effects.push(Effect::TakeBack {
                    room: *room,
                    generation: state.generation,
                    endpoint: target.endpoint.clone(),
                    is_lost,
                });
            }
        }
    }

    /// Whoever waited for the end of what came in under a permission is gone.
    pub(super) fn ask_again(&mut self) {
        let stages = self
            .rooms
            .values_mut()
            .flat_map(|state| state.grants.values_mut());
        for stage in stages.filter(|stage| **stage != Stage::Over) {
            *stage = Stage::Given;
        }
    }

    pub(super) fn taken_back(
        &mut self,
        room: Room,
        generation: Generation,
        endpoint: &Endpoint,
    ) -> Vec<Effect> {
        let state = self.rooms.get_mut(&room);
        let Some(state) = state.filter(|state| state.generation == generation) else {
            return vec![late("taken_back")];
        };
        let prefill = state.prefill_opt.as_ref();
        let targets = prefill.into_iter().flat_map(|prefill| &prefill.targets);
        for target in targets.filter(|target| target.endpoint == *endpoint) {
            if let Some(stage) = state.grants.get_mut(&target.unique_rank) {
                *stage = Stage::Over;
            }
        }
        vec![Effect::Changed { room }]
    }
}

impl DecodeRoom {
    /// Whether nothing that a rank writes for the room lands any more, since it may not.
    pub(super) fn is_taken_back(&self, rank: i64) -> bool {
        match self.grants.get(&rank) {
            Some(Stage::Over) => true,
            Some(Stage::Asked { .. }) => !holds(Rule::TakenBackWhenOver),
            Some(Stage::Given) | None => false,
        }
    }
}
