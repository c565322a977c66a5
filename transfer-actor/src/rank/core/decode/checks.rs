//! Checksums: what prefill ranks say of their bytes is compared before their Success counts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use common::check::CheckMode;
use common::ids::{Endpoint, Generation, Room};
use common::wire::{CheckGroup, Checked, Checks, ControlMessage, KvPoll};

use crate::api::Verification;
use crate::rank::core::decode::lives::Met;
use crate::rank::core::decode::{DecodeCore, DecodeRoom, late};
use crate::rank::core::event::{Counted, Effect, Mismatch};
use crate::rank::core::rules::{Rule, holds};

/// Where the comparison with one prefill rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// Under way; the answer repeats this token.
    Running(u64),
    Equal,
    Different,
    /// Nothing was compared.
    Refused,
}

/// How far the bytes of a room's prefill ranks were compared.
#[derive(Debug, Default)]
pub(super) struct Comparisons {
    by_rank: BTreeMap<i64, Comparison>,
    /// Ranks whose Success counts without one, because they are none of Ferry's.
    not_to_be: BTreeSet<i64>,
    /// The least of what was compared; a prefill may do more than it is asked.
    least_opt: Option<CheckMode>,
}

/// Comparisons that are not over, and the bytes of memory that their checksums take.
#[derive(Debug, Default)]
pub(super) struct Comparing {
    by_rank: BTreeMap<(Room, Generation, i64), usize>,
    bytes: usize,
}

impl Comparing {
    fn begin(&mut self, key: (Room, Generation, i64), bytes: usize) {
        self.bytes += bytes;
        self.by_rank.insert(key, bytes);
    }

    fn end(&mut self, key: (Room, Generation, i64)) {
        self.bytes -= self.by_rank.remove(&key).unwrap_or_default();
    }

    fn has(&self, room: Room, generation: Generation) -> bool {
        let all = (room, generation, i64::MIN)..=(room, generation, i64::MAX);
        self.by_rank.range(all).next().is_some()
    }
}

impl Comparisons {
    /// Whether a prefill rank's Success may count.
    pub(super) fn allow_success(
        &self,
        prefill_rank: i64,
        asked_opt: Option<CheckMode>,
        met_opt: Option<&Met>,
    ) -> bool {
        match self.by_rank.get(&prefill_rank) {
            _ if asked_opt.is_none() => true,
            Some(comparison) => *comparison == Comparison::Equal,
            // A rank that has said that it lets its bytes be compared asks for it first.
            None => !met_opt.is_some_and(|met| met.is_current && met.compares),
        }
    }

    /// Notes a Success that counts; what is to be counted if nothing was asked or compared.
    pub(super) fn not_to_be(&mut self, prefill_rank: i64, peer: &Endpoint) -> Option<Effect> {
        let is_new =
            !self.by_rank.contains_key(&prefill_rank) && self.not_to_be.insert(prefill_rank);
        is_new.then(|| Effect::Count(Counted::Uncompared { peer: peer.clone() }))
    }
}

impl DecodeCore {
    /// Whether a comparison reads the places of this use of a room.
    pub(super) fn is_read(&self, room: Room, generation: Generation) -> bool {
        self.comparing.has(room, generation) && holds(Rule::ReadBeforeRelease)
    }

    /// How far a room was compared, for people.
    pub(super) fn verification(&self, state: &DecodeRoom) -> Option<Verification> {
        let mode = self.identity.checks_opt?;
        let comparisons = &state.comparisons;
        let is_different = |comparison: &Comparison| *comparison == Comparison::Different;
        Some(match state.poll {
            _ if comparisons.by_rank.values().any(is_different) => Verification::Mismatch,
            _ if !comparisons.not_to_be.is_empty() => Verification::Unavailable,
            KvPoll::Success => comparisons.least_opt.unwrap_or(mode).into(),
            _ => Verification::Pending,
        })
    }

    /// A prefill rank has written everything and says what checksums it has.
    pub(super) fn checks(
        &mut self,
        checks: Checks,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        let (room, rank) = (checks.room, checks.prefill_rank);
        let Some(asked) = self.identity.checks_opt else {
            return vec![late("checks")];
        };
        let is_open = |state: &&mut DecodeRoom| !state.poll.is_terminal() && state.is_published;
        let Some(state) = self.rooms.get_mut(&room).filter(is_open) else {
            return vec![late("checks")];
        };
        let target_opt = state.target(rank).filter(|target| !target.is_dummy);
        let Some(target) = target_opt else {
            return vec![late("checks")];
        };
        // As with a Success: without a generation they may be those of an older use.
        let is_certain = generation_opt.is_some() || !(target.is_ferry || state.is_ambiguous);
        if !is_certain || state.comparisons.by_rank.contains_key(&rank) {
            return vec![late("checks")];
        }
        let announcement = state.announcement_opt.clone().unwrap_or_default();
        state.touched = now;
        let mut effects = Vec::new();
        state.advance(room, KvPoll::Transferring, &mut effects);
        let comparison = Comparison::Running(checks.token);
        state.comparisons.by_rank.insert(rank, comparison);
        let least_opt = &mut state.comparisons.least_opt;
        *least_opt = Some(least_opt.map_or(checks.mode, |least| least.min(checks.mode)));
        let generation = state.generation;
        let bytes = checks.groups.iter().map(CheckGroup::wire_bytes).sum();
        let limit = self.limits.check_bytes;
        let refused_opt = if checks.mode < asked {
            Some(format!(
                "prefill rank {rank} sends checksums of the kind {}, this rank asks for {}",
                checks.mode.name(),
                asked.name()
            ))
        } else if self.comparing.bytes.saturating_add(bytes) > limit {
            Some(format!(
                "the {bytes} bytes of checksums of prefill rank {rank} are too many beside the {} that are being compared; this rank holds at most {limit}",
                self.comparing.bytes
            ))
        } else {
            None
        };
        if let Some(reason) = refused_opt {
            state.comparisons.by_rank.insert(rank, Comparison::Refused);
            effects.extend(self.answer(room, rank, checks.token, Some(reason.clone())));
            self.fail(room, &reason, now, &mut effects);
            return effects;
        }
        self.comparing.begin((room, generation, rank), bytes);
        effects.push(Effect::Compare {
            generation,
            announcement: Arc::new(announcement),
            checks: Box::new(checks),
        });
        effects
    }

    /// The answer goes out before anything else about the room, so that it is the first cause at
    /// the prefill, too.
    pub(super) fn compared(
        &mut self,
        (room, generation): (Room, Generation),
        prefill_rank: i64,
        result: Result<(), Mismatch>,
        now: Instant,
    ) -> Vec<Effect> {
        self.comparing.end((room, generation, prefill_rank));
        let is_it = |state: &&mut DecodeRoom| state.generation == generation;
        let Some(state) = self.rooms.get_mut(&room).filter(is_it) else {
            return vec![late("compared")];
        };
        if state.poll.is_terminal() {
            // Its places may be free now.
            return vec![late("compared"), Effect::Changed { room }];
        }
        let Some(Comparison::Running(token)) =
            state.comparisons.by_rank.get(&prefill_rank).copied()
        else {
            return vec![late("compared")];
        };
        state.touched = now;
        let (comparison, mismatch_opt) = match result {
            Ok(()) => (Comparison::Equal, None),
            Err(mismatch) => (Comparison::Different, Some(mismatch)),
        };
        state.comparisons.by_rank.insert(prefill_rank, comparison);
        let reason_opt = mismatch_opt.as_ref().map(Mismatch::text);
        let answer = self.answer(room, prefill_rank, token, reason_opt);
        let mut effects = Vec::from_iter(answer);
        if let Some(mismatch) = mismatch_opt {
            let component = mismatch.component;
            effects.push(Effect::Count(Counted::Mismatched { component }));
            self.fail(room, &mismatch.text(), now, &mut effects);
        }
        effects
    }

    /// Tells a prefill rank whether its room may succeed.
    fn answer(
        &self,
        room: Room,
        prefill_rank: i64,
        token: u64,
        mismatch: Option<String>,
    ) -> Option<Effect> {
        let state = self.rooms.get(&room)?;
        let target = state.target(prefill_rank)?;
        Some(Effect::Send {
            to: target.endpoint.clone(),
            message: ControlMessage::Checked(Checked {
                room,
                endpoint: self.identity.register.endpoint.clone(),
                token,
                mismatch,
            }),
            // Who sends checksums reads trailers.
            generation_opt: Some(state.generation),
            about_opt: Some((room, state.generation)),
        })
    }
}

impl Mismatch {
    fn text(&self) -> String {
        format!("{} is not what was sent: {}", self.component, self.reason)
    }
}
