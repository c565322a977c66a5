//! An io engine that writes into the memory of other ranks: in time, late, half, or never.

use std::collections::BTreeMap;

use super::memory::{Range, Request};
use super::world::{
    Happening, Permission, Site, TICK, Tightness, World, engine_key, is_only_way_in,
};
use common::check::{CheckRun, Units, pieces};
use common::plan::ComponentPlan;
use common::wire::CheckGroup;

use crate::rank::core::Work;
use crate::rank::core::tests::*;

/// Bytes on their way, by the chunk that they belong to.
type Flown = BTreeMap<(Room, Duration), u64>;

/// A write that may still land.
#[derive(Clone, Debug)]
pub struct Running {
    pub site: Site,
    pub life: u32,
    pub key: ComponentKey,
    pub request: Request,
    pub begun: Duration,
    /// Whose items it writes to, if the decode rank's announcement told its generation.
    holder_opt: Option<Request>,
    /// Under what it comes in, if it passes the decode's hands.
    permission_opt: Option<Permission>,
    /// The engine that is written to.
    target: String,
    ranges: Vec<Range>,
    bytes: u64,
    pub is_reported: bool,
    /// When its rank panicked with the order for it, or with its report.
    pub lost_opt: Option<Duration>,
    /// Whether its bytes have left their source.
    has_left: bool,
    has_landed: bool,
}

/// What a decode rank finds of a prefill rank's spoilt bytes.
pub fn difference(prefill_rank: i64) -> Mismatch {
    Mismatch {
        component: "kv",
        reason: format!("not what prefill rank {prefill_rank} has"),
    }
}

impl World {
    /// Begins a write and decides how it will end.
    pub fn begin(&mut self, site: Site, key: ComponentKey, work: &Work) -> Result<(), String> {
        let place = &self.places[site];
        let life = place.life;
        let (link, is_granted) = place
            .links
            .get(&key)
            .cloned()
            .ok_or("work for an actor that was not started")?;
        let planned = crate::component::plan(&link, key.component, work)
            .map_err(|error| format!("checked work cannot be planned: {error}"))?;
        let checks = match link.checks_opt {
            Some(mode) => self.sums(site, &key, &planned, mode)?,
            None => Vec::new(),
        };
        let mut ranges = Vec::new();
        for pair in planned.pairs() {
            ranges.extend(pair.runs.iter_ranges().map(|range| Range {
                component: key.component,
                dst_tensor: pair.dst,
                src: range.src.get(),
                dst: range.dst.get(),
                len: range.len.get(),
            }));
        }
        let binding = (site, life, key.room, key.generation);
        let request = *self
            .bound
            .get(&binding)
            .ok_or("work for a use that nobody opened")?;
        let holder_opt = self.holder_of(site, &key);
        let has_other_ways = !is_only_way_in(&engine_key(site, life));
        let permission_opt = (is_granted && !has_other_ways)
            .then(|| self.permission_of(site, &key))
            .flatten();
        let is_refused = permission_opt
            .as_ref()
            .is_some_and(|permission| self.closed.contains(permission));
        let number = self.works.len() as u64;
        self.works.insert(
            number,
            Running {
                site,
                life,
                key: key.clone(),
                request,
                begun: self.now,
                holder_opt,
                permission_opt,
                target: link.engine.key.clone(),
                bytes: ranges.iter().map(|range| range.len).sum(),
                // Of what is refused nothing ever lands.
                ranges: if is_refused { Vec::new() } else { ranges },
                is_reported: false,
                lost_opt: None,
                has_left: false,
                has_landed: false,
            },
        );
        let mut end = self.now + self.random.between(1, 40);
        if is_refused {
            self.at(end, Happening::Report(number, failed(true)));
            return Ok(());
        }
        let moved = ComponentOutcome::Moved {
            bytes: 64,
            ranges: 1,
            truncated_items: 0,
            elapsed: Duration::from_millis(1),
            transport: "local",
            checks,
        };
        if !self.random.percent(self.weather.io_faults) {
            self.at(end, Happening::Land(number));
            self.at(end, Happening::Report(number, moved));
            return Ok(());
        }
        let died = ComponentOutcome::Died { panicked: true };
        match self.random.below(6) {
            // Slow, beyond its timeout perhaps.
            0 => {
                end += self.random.between(500, 9000);
                self.at(end, Happening::Land(number));
                self.at(end, Happening::Report(number, moved));
            }
            1 => self.at(end, Happening::Report(number, failed(true))),
            // Nobody can vouch for it, and it lands later.
            fate @ (2 | 3) => {
                let mut outcome = if fate == 2 { failed(false) } else { died };
                if let ComponentOutcome::Failed { is_source_free, .. } = &mut outcome
                    && self.random.percent(50)
                {
                    *is_source_free = true;
                    self.at(end, Happening::Sent(number));
                }
                self.at(end, Happening::Report(number, outcome));
                let late = end + self.random.between(0, 8000);
                self.at(late, Happening::Land(number));
            }
            4 => self.at(end, Happening::Report(number, died)),
            // Never reported.
            _ => {
                let late = end + self.random.between(0, 30_000);
                self.at(late, Happening::Land(number));
            }
        }
        self.log(|| format!("write {number} of {key:?} has a fault"));
        Ok(())
    }

    /// Which permission of the decode rank a prefill's write comes in under.
    fn permission_of(&self, site: Site, key: &ComponentKey) -> Option<Permission> {
        let RankCore::Prefill(core) = &self.places[site].core else {
            return None;
        };
        let generation = core.announced_generation(key.room, &key.endpoint)?;
        let mut places = self.places.iter();
        let decode = places.position(|place| place.endpoint == key.endpoint)?;
        let life = self.places[decode].life;
        let to = self.places[site].endpoint.clone();
        Some((decode, life, key.room, generation, to))
    }

    /// A decode rank takes a permission back: what has come in already lands within a while, and
    /// nothing after that.
    pub fn take_back(&mut self, site: Site, room: Room, generation: Generation, to: Endpoint) {
        let life = self.places[site].life;
        let permission = (site, life, room, generation, to.clone());
        self.closed.insert(permission.clone());
        let over = self.now + self.random.between(1, 300);
        let coming = self.works.iter().filter(|(_, work)| {
            work.permission_opt.as_ref() == Some(&permission) && !work.has_landed
        });
        for number in coming.map(|(number, _)| *number).collect::<Vec<_>>() {
            if self.random.percent(50) {
                let most = (over - self.now).as_millis() as u64;
                let when = self.now + self.random.between(0, most);
                self.at(when, Happening::Land(number));
            } else if let Some(work) = self.works.get_mut(&number) {
                work.ranges.clear();
                let when = self.now + self.random.between(0, 10);
                self.at(when, Happening::Report(number, failed(true)));
            }
        }
        let event = Event::TakenBack {
            room,
            generation,
            endpoint: to,
        };
        self.at(over, Happening::Event(site, life, event));
    }

    /// The bytes of a write have left their source, and are on their way.
    pub fn sent(&mut self, number: u64) {
        if let Some(work) = self.works.get_mut(&number) {
            work.has_left = true;
        }
    }

    /// In the place of a checksum stands the request whose bytes they are.
    fn sums(
        &self,
        site: Site,
        key: &ComponentKey,
        planned: &ComponentPlan,
        mode: CheckMode,
    ) -> Result<Vec<CheckGroup>, String> {
        let binding = (site, self.places[site].life, key.room, key.generation);
        let request = *self.bound.get(&binding).ok_or("a use that nobody opened")?;
        let groups = planned.groups().map(|(pairs, runs)| {
            let runs = CheckRun::destinations(runs);
            let units = Units::new(mode, key.room, key.component, &runs, pairs.len());
            let sums = units.ok_or("sums that cannot be counted")?.sums();
            Ok(CheckGroup {
                component: key.component,
                tensors: pairs.iter().map(|(_, dst)| *dst as u32).collect(),
                runs,
                sums: vec![request as u64; sums as usize],
            })
        });
        groups.collect()
    }

    /// Compares what a prefill rank says with what is in a decode rank's memory now.
    pub fn compare(
        &mut self,
        site: Site,
        generation: Generation,
        checks: &Checks,
    ) -> Result<(), String> {
        let place = &self.places[site];
        let is_equal = checks.groups.iter().all(|group| {
            let mut sums = group.sums.iter();
            let tensors = group.tensors.iter();
            let mut units = tensors.flat_map(|tensor| {
                let pieces = pieces(&group.runs);
                pieces.map(move |(offset, len)| (*tensor, offset.get(), len.get()))
            });
            units.all(|(tensor, offset, len)| {
                let found = place.memory.content(group.component, tensor, offset, len);
                found.map(|request| request as u64) == sums.next().copied()
            })
        });
        let binding = (site, place.life, checks.room, generation);
        let request = *self
            .bound
            .get(&binding)
            .ok_or("checksums of a use that nobody opened")?;
        if self.freed.contains(&(site, request)) {
            return Err(format!(
                "the items of request {request} are compared at {site}, and were free before"
            ));
        }
        let view_opt = place.core.view(checks.room).filter(|view| {
            view.generation == generation.get() && view.status == RoomStatus::Transferring
        });
        if !is_equal && view_opt.is_some() && !self.spoilt.contains(&request) {
            return Err(format!(
                "request {request} is found spoilt at {site}, and nobody spoilt it"
            ));
        }
        let result = match is_equal {
            true => Ok(()),
            false => Err(difference(checks.prefill_rank)),
        };
        let compared = Event::Compared {
            room: checks.room,
            generation,
            prefill_rank: checks.prefill_rank,
            result,
        };
        self.event(site, compared)
    }

    /// Which request of the decode rank the prefill takes this write to be for.
    fn holder_of(&self, site: Site, key: &ComponentKey) -> Option<Request> {
        let RankCore::Prefill(core) = &self.places[site].core else {
            return None;
        };
        let generation = core.announced_generation(key.room, &key.endpoint)?;
        let mut places = self.places.iter();
        let decode = places.position(|place| place.endpoint == key.endpoint)?;
        let binding = (decode, self.places[decode].life, key.room, generation);
        self.bound.get(&binding).copied()
    }

    /// What an engine has sent to a rank and has not landed never will.
    pub fn throw_away(&mut self, key: &str, to: Site) {
        let target = engine_key(to, self.places[to].life);
        for work in self.works.values_mut() {
            if work.target == target && engine_key(work.site, work.life) == key {
                work.ranges.clear();
            }
        }
    }

    pub fn cancel(&mut self, site: Site, key: &ComponentKey) {
        let life = self.places[site].life;
        let running = self.works.iter().filter(|(_, work)| {
            (work.site, work.life, &work.key) == (site, life, key)
                && !work.is_reported
                && !work.has_landed
        });
        let running: Vec<u64> = running.map(|(number, _)| *number).collect();
        for number in running {
            if self.random.percent(60) {
                // It writes nothing more; its report is on its way.
                let when = self.now + self.random.between(0, 10);
                if let Some(work) = self.works.get_mut(&number) {
                    work.ranges.clear();
                }
                self.at(when, Happening::Report(number, failed(true)));
            }
        }
    }

    /// A rank's actor panics: orders that it gave may not have come through, and reports to it.
    pub fn lose_works(&mut self, site: Site) {
        let life = self.places[site].life;
        let theirs = self.works.values_mut();
        let theirs =
            theirs.filter(|work| (work.site, work.life) == (site, life) && !work.is_reported);
        for work in theirs {
            if self.random.percent(30) {
                work.lost_opt = Some(self.now);
                let is_unbegun = !work.has_landed && self.random.percent(50);
                if is_unbegun {
                    work.ranges.clear();
                }
            }
        }
    }

    /// No more is on its way than may be, to one rank and in all, except for a chunk that goes
    /// alone.
    pub fn check_flight(&self, site: Site) -> Result<(), String> {
        let place = &self.places[site];
        let limits = &self.engines.limits;
        let (_, waiting) = place.core.in_flight();
        if waiting > limits.queued_chunks {
            return Err(format!("{waiting} chunks wait at {site}"));
        }
        if self.weather.limits == Tightness::Loose {
            return Ok(());
        }
        let mut total = Flown::new();
        let mut by_peer: BTreeMap<&Endpoint, Flown> = BTreeMap::new();
        for work in self.works.values() {
            let is_ours = (work.site, work.life) == (site, place.life) && !work.is_reported;
            let view_opt = place.core.view(work.key.room).filter(|_| is_ours);
            let generation_opt = view_opt.map(|view| view.generation);
            if generation_opt == Some(work.key.generation.get()) {
                let chunk = (work.key.room, work.begun);
                let to_peer = by_peer.entry(&work.key.endpoint).or_default();
                *to_peer.entry(chunk).or_default() += work.bytes;
                *total.entry(chunk).or_default() += work.bytes;
            }
        }
        let is_over =
            |flown: &Flown, limit: u64| flown.len() > 1 && flown.values().sum::<u64>() > limit;
        if is_over(&total, limits.in_flight_bytes) {
            return Err(format!("too much is on its way from {site}: {total:?}"));
        }
        let mut peers = by_peer.values();
        match peers.find(|flown| is_over(flown, limits.in_flight_bytes_per_peer)) {
            Some(flown) => Err(format!("too much is on its way from {site}: {flown:?}")),
            None => Ok(()),
        }
    }

    /// Work that was lost in a panic does not hold its room: somebody asks for its end.
    pub fn check_lost_works(&self, site: Site) -> Result<(), String> {
        let place = &self.places[site];
        let is_stopped = place.stopped_until + 2 * TICK > self.now;
        if is_stopped || place.core.pending_work() == 0 {
            return Ok(());
        }
        let mut theirs = self.works.values();
        let held = theirs.find(|work| {
            let is_ours = (work.site, work.life) == (site, place.life) && !work.is_reported;
            let mut lost = work.lost_opt.iter();
            is_ours && lost.any(|lost| self.now > *lost + 2 * TICK)
        });
        match held {
            Some(work) => Err(format!("nobody asks for what {:?} lost", work.key)),
            None => Ok(()),
        }
    }

    /// All work of an actor ends, and one report tells of it.
    pub fn retire(&mut self, site: Site, key: &ComponentKey) {
        let life = self.places[site].life;
        let report = |is_quiesced| ComponentReport {
            key: key.clone(),
            outcome: ComponentOutcome::Retired { is_quiesced },
        };
        let actor = (site, life, key.clone());
        if let Some((over, is_quiesced)) = self.retired.get(&actor).copied() {
            // Asked again, it answers the same, and no sooner than its work is over.
            let when = over.max(self.now + self.random.between(0, 10));
            return self.at(when, Happening::Retired(site, life, report(is_quiesced)));
        }
        let theirs = self.works.iter_mut().filter(|(_, work)| {
            (work.site, work.life, &work.key) == (site, life, key) && !work.is_reported
        });
        let fate = self.random.below(4);
        let mut landing = Vec::new();
        for (number, work) in theirs {
            work.is_reported = true;
            // Some of it was never begun, some is given up.
            if fate < 2 {
                work.ranges.clear();
            } else if !work.has_landed {
                landing.push(*number);
            }
        }
        let mut when = self.now + self.random.between(0, 10);
        let is_quiesced = fate < 3;
        let late = match is_quiesced {
            true => 2000,
            false => 8000,
        };
        for number in landing {
            let lands = self.now + self.random.between(0, late);
            self.at(lands, Happening::Land(number));
            if is_quiesced {
                when = when.max(lands);
            }
        }
        self.retired.insert(actor, (when, is_quiesced));
        self.at(when, Happening::Retired(site, life, report(is_quiesced)));
    }

    pub fn report(&mut self, number: u64, outcome: ComponentOutcome) -> Result<(), String> {
        let work_opt = self.works.get_mut(&number);
        let Some(work) = work_opt.filter(|work| work.lost_opt.is_none()) else {
            return Ok(());
        };
        if std::mem::replace(&mut work.is_reported, true) {
            return Ok(());
        }
        if matches!(
            outcome,
            ComponentOutcome::Failed {
                is_quiesced: true,
                ..
            }
        ) {
            work.ranges.clear();
        }
        let (site, key) = (work.site, work.key.clone());
        if matches!(outcome, ComponentOutcome::Died { .. }) {
            // The actor takes all of its work with it.
            let theirs = self.works.values_mut().filter(|work| work.key == key);
            theirs
                .filter(|work| work.site == site)
                .for_each(|work| work.is_reported = true);
        }
        self.event(site, Event::Component(ComponentReport { key, outcome }))
    }

    /// The bytes of a write reach the other side's memory.
    pub fn land(&mut self, number: u64) -> Result<(), String> {
        let Some(work) = self.works.get_mut(&number) else {
            return Ok(());
        };
        if std::mem::replace(&mut work.has_landed, true) {
            return Ok(());
        }
        let work = work.clone();
        self.log(|| format!("write {number} of {:?} lands", work.key));
        let is_target = |site: &Site| {
            self.places[*site].is_alive && engine_key(*site, self.places[*site].life) == work.target
        };
        let Some(target) = (0..self.places.len()).find(is_target) else {
            return Ok(());
        };
        for range in &work.ranges {
            let writer = &self.places[work.site];
            let is_there = writer.is_alive && writer.life == work.life;
            // What left a process before it died had been read from its memory.
            let source_opt = match is_there && !work.has_left {
                true => writer.memory.source(range),
                false => Some(work.request),
            };
            if source_opt != Some(work.request) {
                return Err(format!(
                    "a write of request {} reads a source that {source_opt:?} holds: {:?}",
                    work.request, work.key
                ));
            }
            let outcomes = &self.outcomes;
            let has_succeeded = |request| {
                let outcome_opt = outcomes.get(&(target, request));
                outcome_opt.is_some_and(|(status, _)| *status == RoomStatus::Success)
            };
            let is_spoilt = self.random.percent(self.weather.spoilt);
            if is_spoilt {
                self.spoilt.insert(work.request);
            }
            let memory = &mut self.places[target].memory;
            memory.land(
                range,
                work.request,
                work.holder_opt,
                (!is_spoilt).then_some(work.request),
                has_succeeded,
            )?;
        }
        Ok(())
    }

    /// The process of a rank is gone; what it had given to the kernel may still land.
    pub fn let_go_of_works(&mut self, site: Site) {
        let life = self.places[site].life;
        let theirs = self.works.iter_mut();
        let theirs = theirs.filter(|(_, work)| (work.site, work.life) == (site, life));
        let mut landing = Vec::new();
        for (number, work) in theirs {
            if !work.has_landed && !work.ranges.is_empty() {
                landing.push((*number, std::mem::take(&mut work.ranges)));
            }
        }
        for (number, ranges) in landing {
            if self.random.percent(30) {
                let when = self.now + self.random.between(0, 300);
                if let Some(work) = self.works.get_mut(&number) {
                    work.ranges = ranges;
                }
                self.at(when, Happening::Land(number));
            }
        }
    }
}
