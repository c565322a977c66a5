//! Checksums: decode ranks that ask for them compare them before this rank says Success.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use common::check::CheckMode;
use common::ids::{Endpoint, Generation};
use common::wire::{
    CheckGroup, Checked, Checks, ControlMessage, KvPoll, MOST_CHECK_BYTES, MOST_CHECK_GROUPS,
    Register,
};

use crate::api::Verification;
use crate::rank::core::event::Effect;
use crate::rank::core::prefill::{PrefillCore, late};
use crate::rank::core::prefill_room::{Age, PrefillRoom, Target};
use crate::rank::core::rules::{Rule, holds};

/// What decode ranks are told of a room's bytes, and what they found.
#[derive(Debug, Default)]
pub(in crate::rank::core) struct Comparison {
    told: BTreeMap<Endpoint, Told>,
    is_asked: bool,
    equal: BTreeSet<Endpoint>,
    is_different: bool,
}

/// What one decode rank will be told.
#[derive(Debug, Default)]
struct Told {
    groups: Vec<CheckGroup>,
    bytes: usize,
}

impl Comparison {
    /// Takes the checksums of one piece of work.
    ///
    /// # Errors
    /// When one message cannot hold all of a room.
    pub fn add(&mut self, endpoint: &Endpoint, groups: &[CheckGroup]) -> Result<(), String> {
        if groups.is_empty() {
            return Ok(());
        }
        let told = self.told.entry(endpoint.clone()).or_default();
        told.bytes += groups.iter().map(CheckGroup::wire_bytes).sum::<usize>();
        let count = told.groups.len() + groups.len();
        if told.bytes > MOST_CHECK_BYTES || count > MOST_CHECK_GROUPS {
            return Err(format!(
                "its checksums take {} bytes in {count} groups, and one message holds {MOST_CHECK_BYTES} bytes in {MOST_CHECK_GROUPS} groups",
                told.bytes
            ));
        }
        told.groups.extend_from_slice(groups);
        Ok(())
    }

    /// The room is over, and tells nobody.
    pub fn forget(&mut self) {
        self.told.clear();
    }

    /// Whether decode ranks were told and have not all answered.
    pub const fn is_asked(&self) -> bool {
        self.is_asked
    }
}

impl Target {
    /// What the decode rank compares, if it is fed and does so.
    fn checks_opt(&self) -> Option<CheckMode> {
        self.link_opt.as_ref()?.checks_opt
    }
}

impl PrefillRoom {
    /// Whether every decode rank that compares checksums has found them equal; those that have not
    /// been told are told.
    pub fn compare(&mut self, rank: i64, now: Instant, effects: &mut Vec<Effect>) -> bool {
        if !std::mem::replace(&mut self.comparison.is_asked, true) {
            let mut told = std::mem::take(&mut self.comparison.told);
            for target in &self.targets {
                let Some(mode) = target.checks_opt() else {
                    continue;
                };
                self.touched = now;
                let endpoint = &target.info.endpoint;
                effects.push(Effect::Send {
                    to: endpoint.clone(),
                    message: ControlMessage::Checks(Box::new(Checks {
                        room: self.room,
                        prefill_rank: rank,
                        token: self.generation.get(),
                        mode,
                        groups: told.remove(endpoint).unwrap_or_default().groups,
                    })),
                    generation_opt: target.generation_opt,
                    about_opt: Some((self.room, self.generation)),
                });
            }
        }
        let mut asked = self
            .targets
            .iter()
            .filter(|target| target.checks_opt().is_some());
        asked.all(|target| self.comparison.equal.contains(&target.info.endpoint))
            || !holds(Rule::SuccessAfterAnswer)
    }

    /// How far the room was compared, for people.
    pub fn verification(&self, wanted_opt: Option<CheckMode>) -> Option<Verification> {
        let fed = self
            .targets
            .iter()
            .filter(|target| target.link_opt.is_some());
        let modes: Vec<Option<CheckMode>> = fed.map(Target::checks_opt).collect();
        let least_opt = modes.iter().flatten().min().copied();
        let is_wanted = wanted_opt.is_some() || least_opt.is_some();
        is_wanted.then_some(match least_opt {
            _ if self.comparison.is_different => Verification::Mismatch,
            _ if modes.contains(&None) => Verification::Unavailable,
            Some(mode) if self.poll == KvPoll::Success => mode.into(),
            _ => Verification::Pending,
        })
    }
}

impl PrefillCore {
    /// How a decode rank's bytes are compared: as it asks, or more, if this rank is to.
    pub(super) fn checks_for(&self, register: &Register) -> Option<CheckMode> {
        let asked = register.engine.asked_checks()?;
        Some(self.identity.checks_opt.map_or(asked, |own| own.max(asked)))
    }

    /// A decode rank has compared what it was told.
    pub(super) fn checked(
        &mut self,
        checked: Checked,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let Checked {
            room,
            endpoint,
            token,
            mismatch,
        } = checked;
        let is_asked = |state: &&mut PrefillRoom| {
            state.generation.get() == token
                && state.comparison.is_asked
                && !state.poll.is_terminal()
        };
        let Some(state) = self.rooms.get_mut(&room).filter(is_asked) else {
            return vec![late("checked")];
        };
        let mut targets = state.targets.iter();
        let is_one =
            targets.any(|target| target.info.endpoint == endpoint && target.checks_opt().is_some());
        if !is_one || state.age_of(&endpoint, generation_opt) != Age::Same {
            return vec![late("checked")];
        }
        let mut effects = Vec::new();
        match mismatch {
            None if !state.comparison.equal.insert(endpoint.clone()) => {
                effects.push(late("checked"));
            }
            None => state.touched = now,
            Some(reason) => {
                state.comparison.is_different = true;
                let reason = format!("decode rank {endpoint}: {reason}");
                self.fail(room, &reason, Some(&endpoint), now, &mut effects);
            }
        }
        self.settle(room, now, &mut effects);
        effects
    }
}
