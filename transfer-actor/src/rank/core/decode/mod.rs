//! The rules of a decode rank.

mod checks;
mod end;
mod grants;
mod lives;
mod message;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use common::check::CheckMode;
use common::ids::{Endpoint, Generation, Room};
use common::room::advance;
use common::schema::RankLayout;
use common::wire::{Bootstrap, ControlMessage, EngineDesc, KvPoll, Register, TransferInfo};

use crate::api::RoomView;
use crate::error::ApiError;
use crate::rank::core::event::{
    Announcement, Counted, Effect, Event, OpenCommand, PrefillTarget, ResolvedPrefill,
};
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::tombstones::{Epitaph, Tombstones};
use crate::rank::core::{
    Census, Limits, Reaction, Timeouts, draining, too_many_with_peer, unknown_room, wrong_role,
};

/// The policy under which the decode allocates only once the prefill is complete.
pub(crate) const PREFILL_COMPLETE: &str = "prefill_complete";

/// What a decode core knows of its own rank.
#[derive(Clone, Debug)]
pub struct DecodeIdentity {
    /// The rank's buffers.
    pub layout: RankLayout,
    /// Its REGISTER; also its endpoint and engine key.
    pub register: Register,
    /// `early` or `prefill_complete`; the prefill's must be the same.
    pub allocation_policy: String,
    /// Generations count from here. No two lives of a rank should share one, so that a late
    /// message to the older life means nothing to the newer.
    pub first_generation: u64,
    /// Whether all that a prefill's engine, the second, can write to this one passes this one's own
    /// hands, so that its permission can be taken back.
    pub is_only_way_in: fn(&EngineDesc, &EngineDesc) -> bool,
    /// Whether it compares checksums before it believes a Success, and of how much.
    pub checks_opt: Option<CheckMode>,
}

/// One use of a room.
#[derive(Debug)]
struct DecodeRoom {
    generation: Generation,
    poll: KvPoll,
    reason_opt: Option<String>,
    opened: Instant,
    touched: Instant,
    /// The bootstrap server and the data-parallel rank that the engine named.
    asked: (String, Option<u32>),
    /// Whether `prefill_opt` is from an earlier room, and nobody was asked for this one.
    is_remembered: bool,
    /// Ranks of a remembered prefill that a message did not reach, and why.
    unreached: BTreeMap<Endpoint, String>,
    /// Ranks that have certainly not been told where to write.
    untold: BTreeSet<Endpoint>,
    prefill_opt: Option<Arc<ResolvedPrefill>>,
    announcement_opt: Option<Announcement>,
    /// Whether prefill ranks know where to write.
    is_published: bool,
    successes: BTreeSet<i64>,
    /// Ranks that have said that they failed.
    failures: BTreeSet<i64>,
    /// Ranks that have proved that they write no more.
    acknowledged: BTreeSet<i64>,
    /// The processes behind its ranks, as far as they are known.
    told: BTreeMap<Endpoint, lives::Told>,
    /// Ranks whose process has exited.
    exited: BTreeSet<i64>,
    /// Permissions that were given with the announcement, by rank.
    grants: BTreeMap<i64, grants::Stage>,
    is_abort_sent: bool,
    /// Whether messages about an older use of the number may still come.
    is_ambiguous: bool,
    /// How far the bytes of its prefill ranks were compared.
    comparisons: checks::Comparisons,
}

/// All rooms of one decode rank.
#[derive(Debug)]
pub struct DecodeCore {
    identity: DecodeIdentity,
    timeouts: Timeouts,
    limits: Limits,
    rooms: BTreeMap<Room, DecodeRoom>,
    prefills: HashMap<(String, u32), Arc<ResolvedPrefill>>,
    registered: HashSet<Endpoint>,
    /// The REGISTERs to each.
    registers: HashMap<Endpoint, lives::Registers>,
    last_register: u64,
    /// Ferry ranks among them.
    met: HashMap<Endpoint, lives::Met>,
    last_life: u64,
    tombstones: Tombstones,
    /// Comparisons that are not over, of rooms that may be.
    comparing: checks::Comparing,
    last_generation: u64,
    /// Why no room is opened any more.
    draining_opt: Option<String>,
}

impl DecodeCore {
    /// A rank without rooms.
    pub fn new(identity: DecodeIdentity, timeouts: Timeouts, limits: Limits) -> Self {
        Self {
            timeouts,
            limits,
            rooms: BTreeMap::new(),
            prefills: HashMap::new(),
            registered: HashSet::new(),
            registers: HashMap::new(),
            last_register: identity.first_generation,
            met: HashMap::new(),
            last_life: 0,
            tombstones: Tombstones::new(limits.tombstones, timeouts.tombstone),
            comparing: checks::Comparing::default(),
            last_generation: identity.first_generation,
            draining_opt: None,
            identity,
        }
    }

    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.identity.clone(), self.timeouts, self.limits);
        std::mem::replace(self, empty)
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Reaction {
        match event {
            Event::Message(message, generation_opt) => {
                Reaction::done(self.message(message, generation_opt, now))
            }
            Event::Compared {
                room,
                generation,
                prefill_rank,
                result,
            } => Reaction::done(self.compared((room, generation), prefill_rank, result, now)),
            Event::Open(command) => Reaction::of(self.open(command, now)),
            Event::Announce { room, announcement } => {
                Reaction::of(self.announce(room, announcement, now))
            }
            Event::Abort { room, reason } => Reaction::of(self.abort(room, &reason, now)),
            Event::Clear { room } => Reaction::of(self.clear(room, now)),
            Event::Resolved {
                room,
                generation,
                result,
            } => Reaction::done(self.resolved(room, generation, result, now)),
            Event::SendFailed {
                to,
                about_opt,
                kind,
                register_opt,
                reason,
            } => {
                let mut effects = self.not_registered(&to, register_opt, now);
                effects.extend(self.send_failed(&to, about_opt, kind, &reason, now));
                Reaction::done(effects)
            }
            Event::PeerLost { endpoint, reason } => {
                Reaction::done(self.peer_lost(&endpoint, &reason, now))
            }
            Event::PeerExited {
                endpoint,
                life,
                reason,
            } => Reaction::done(self.peer_exited(&endpoint, life, &reason, now)),
            Event::Drain { reason } => {
                self.draining_opt = Some(reason);
                Reaction::default()
            }
            Event::TakenBack {
                room,
                generation,
                endpoint,
            } => Reaction::done(self.taken_back(room, generation, &endpoint)),
            Event::Tick => Reaction::done(self.tick(now)),
            Event::Shutdown { reason } => Reaction::done(self.shutdown(&reason, now)),
            Event::Restarted { reason } => {
                // Some REGISTER may not have been sent; registering twice does no harm.
                self.registered.clear();
                self.ask_again();
                // Nobody is left who would tell of their ends.
                self.comparing = checks::Comparing::default();
                Reaction::done(self.shutdown(&reason, now))
            }
            Event::Chunk { .. } => Reaction::refused(wrong_role("sending a chunk", "prefill")),
            Event::PrefillComplete { .. } => {
                Reaction::refused(wrong_role("prefill-complete", "prefill"))
            }
            Event::Component(_) | Event::Unreadable { .. } | Event::Lost { .. } => {
                Reaction::default()
            }
        }
    }

    pub(super) fn view(&self, room: Room) -> Option<RoomView> {
        let state = self.rooms.get(&room)?;
        Some(RoomView {
            room: room.get(),
            generation: state.generation.get(),
            status: state.poll.into(),
            reason: state.reason_opt.clone(),
            decode_prefix_len: None,
            transfers: Vec::new(),
            release_safe: state.is_release_safe() && !self.is_read(room, state.generation),
            verification: self.verification(state),
        })
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining_opt.is_some()
    }

    pub(super) fn census(&self) -> Census {
        let mut census = Census {
            tombstones: self.tombstones.len(),
            ..Census::default()
        };
        for room in self.rooms.values() {
            census.by_status[room.poll as usize] += 1;
        }
        census
    }

    /// The prefill ranks that this rank has registered with.
    pub fn registered(&self) -> Vec<String> {
        let mut registered: Vec<String> = self.registered.iter().map(Endpoint::to_string).collect();
        registered.sort();
        registered
    }

    /// The prefill ranks that may still write for open rooms.
    pub(super) fn watched(&self) -> HashSet<Endpoint> {
        let open = self
            .rooms
            .values()
            .filter(|state| !state.poll.is_terminal());
        let prefills = open.filter_map(|state| state.prefill_opt.as_ref());
        let targets = prefills.flat_map(|prefill| &prefill.targets);
        targets.map(|target| target.endpoint.clone()).collect()
    }

    fn open(&mut self, command: OpenCommand, now: Instant) -> Result<Vec<Effect>, ApiError> {
        let room = command.room;
        let bootstrap = command.bootstrap_opt.ok_or_else(|| {
            ApiError::new(
                400,
                "bootstrap_missing",
                format!(
                    "room {room}: a decode rank needs the prefill's bootstrap server (host:port)"
                ),
            )
        })?;
        if self.rooms.contains_key(&room) {
            let message = format!("room {room} is open on this rank; clear it first");
            return Err(ApiError::new(409, "room_exists", message));
        }
        if let Some(reason) = &self.draining_opt
            && holds(Rule::DrainTakesNoRooms)
        {
            return Err(draining(room, reason));
        }
        if self.rooms.len() >= self.limits.rooms {
            let message = format!(
                "this rank holds {} rooms, its limit; clear finished rooms",
                self.rooms.len()
            );
            return Err(ApiError::new(429, "too_many_rooms", message));
        }
        let limit = self.limits.rooms_per_peer;
        let is_with_it =
            |state: &&DecodeRoom| !state.poll.is_terminal() && state.asked.0 == bootstrap;
        if self.rooms.len() >= limit
            && self.rooms.values().filter(is_with_it).count() >= limit
            && holds(Rule::RoomsPerPeer)
        {
            let peer = format!("the prefill engine of bootstrap server {bootstrap}");
            let message = too_many_with_peer(&peer, limit);
            return Err(ApiError::new(429, "too_many_rooms_with_peer", message));
        }
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        let is_ambiguous = self.tombstones.lift(&room) == Some(Epitaph::Unsettled);
        let known = command
            .prefill_dp_rank_opt
            .and_then(|dp_rank| self.prefills.get(&(bootstrap.clone(), dp_rank)).cloned());
        let known = known.or_else(|| self.only_prefill(&bootstrap, command.prefill_dp_rank_opt));
        self.rooms.insert(
            room,
            DecodeRoom {
                generation,
                poll: KvPoll::Bootstrapping,
                reason_opt: None,
                opened: now,
                touched: now,
                asked: (bootstrap.clone(), command.prefill_dp_rank_opt),
                is_remembered: known.is_some(),
                unreached: BTreeMap::new(),
                untold: BTreeSet::new(),
                prefill_opt: None,
                announcement_opt: None,
                is_published: false,
                successes: BTreeSet::new(),
                failures: BTreeSet::new(),
                acknowledged: BTreeSet::new(),
                told: BTreeMap::new(),
                exited: BTreeSet::new(),
                grants: BTreeMap::new(),
                is_abort_sent: false,
                is_ambiguous,
                comparisons: checks::Comparisons::default(),
            },
        );
        let mut effects = vec![Effect::Changed { room }];
        match known {
            Some(prefill) => self.use_prefill(room, prefill, now, &mut effects),
            None => effects.push(Effect::Resolve {
                room,
                generation,
                bootstrap,
                dp_rank_opt: command.prefill_dp_rank_opt,
            }),
        }
        Ok(effects)
    }

    /// An engine without data parallelism needs no question about the rank.
    fn only_prefill(
        &self,
        bootstrap: &str,
        dp_rank_opt: Option<u32>,
    ) -> Option<Arc<ResolvedPrefill>> {
        if dp_rank_opt.is_some() {
            return None;
        }
        let known = self.prefills.get(&(bootstrap.to_owned(), 0))?;
        known.is_only_dp_rank.then(|| Arc::clone(known))
    }

    fn resolved(
        &mut self,
        room: Room,
        generation: Generation,
        result: Result<ResolvedPrefill, String>,
        now: Instant,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        let prefill = result.map(|mut prefill| {
            self.mark_known(&mut prefill);
            Arc::new(prefill)
        });
        if let Ok(prefill) = &prefill {
            let key = (prefill.bootstrap.clone(), prefill.dp_rank);
            self.prefills.insert(key, Arc::clone(prefill));
        }
        if !self.is_current(room, generation) && holds(Rule::ResolvedGeneration) {
            return vec![late("resolved")];
        }
        let has_prefill = |state: &DecodeRoom| state.prefill_opt.is_some();
        if self.rooms.get(&room).is_some_and(has_prefill) {
            // Those that were told where to write are those that must say that they have.
            return vec![late("resolved")];
        }
        match prefill {
            Ok(prefill) => self.use_prefill(room, prefill, now, &mut effects),
            Err(reason) => self.fail(room, &reason, now, &mut effects),
        }
        effects
    }

    fn use_prefill(
        &mut self,
        room: Room,
        prefill: Arc<ResolvedPrefill>,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) {
        if prefill.decode_allocation_policy != self.identity.allocation_policy {
            let reason = format!(
                "the decode allocation policy is {} at the prefill and {} here; set the same on both sides",
                prefill.decode_allocation_policy, self.identity.allocation_policy
            );
            return self.fail(room, &reason, now, effects);
        }
        let is_open = |state: &&DecodeRoom| !state.poll.is_terminal();
        if self.rooms.get(&room).filter(is_open).is_none() {
            return;
        }
        let targets = prefill.targets.iter();
        let registers: Vec<_> = targets
            .map(|target| self.register_at(&target.endpoint))
            .collect();
        let told = prefill.targets.iter().filter_map(|target| {
            let endpoint = &target.endpoint;
            Some((endpoint.clone(), self.told_at(endpoint)?))
        });
        let told = told.collect();
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        state.touched = now;
        state.told = told;
        for (target, register_opt) in prefill.targets.iter().zip(registers) {
            effects.extend(register_opt.map(|register| state.send(room, target, register)));
        }
        if self.identity.allocation_policy == PREFILL_COMPLETE {
            let bootstrap = Bootstrap {
                room,
                reply_to: self.identity.register.endpoint.clone(),
            };
            effects.extend(prefill.targets.iter().map(|target| {
                state.send(room, target, ControlMessage::Bootstrap(bootstrap.clone()))
            }));
        } else {
            state.advance(room, KvPoll::WaitingForInput, effects);
        }
        state.prefill_opt = Some(prefill);
        state.is_published = false;
        self.publish(room, now, effects);
    }

    fn announce(
        &mut self,
        room: Room,
        announcement: Announcement,
        now: Instant,
    ) -> Result<Vec<Effect>, ApiError> {
        let state = self
            .rooms
            .get_mut(&room)
            .ok_or_else(|| unknown_room(room))?;
        if state.poll.is_terminal() {
            let reason = state.reason_opt.clone().unwrap_or_default();
            let message = format!("room {room} has ended: {reason}");
            return Err(ApiError::new(409, "room_failed", message));
        }
        if state.announcement_opt.is_some() {
            let message = format!("room {room} was announced already");
            return Err(ApiError::new(409, "room_announced", message));
        }
        check_announcement(&self.identity.layout, &announcement).map_err(|reason| {
            ApiError::new(400, "bad_indices", format!("room {room}: {reason}"))
        })?;
        state.announcement_opt = Some(announcement);
        let mut effects = Vec::new();
        self.publish(room, now, &mut effects);
        Ok(effects)
    }

    /// Tells the prefill ranks where to write, once both are known: they, and where.
    fn publish(&mut self, room: Room, now: Instant, effects: &mut Vec<Effect>) {
        let grants = self.grants_for(room);
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        let ready = state.poll == KvPoll::WaitingForInput && !state.is_published;
        let (Some(prefill), Some(announcement)) = (&state.prefill_opt, &state.announcement_opt)
        else {
            return;
        };
        if !ready {
            return;
        }
        state.is_published = true;
        state.touched = now;
        // What a rank was not sent before, it is sent now.
        state.untold.clear();
        let given = grants.iter().filter(|(_, grant)| grant.key.is_some());
        state.grants = given
            .map(|(rank, _)| (*rank, grants::Stage::Given))
            .collect();
        let register = &self.identity.register;
        for target in &prefill.targets {
            let empty = TransferInfo {
                room,
                endpoint: register.endpoint.clone(),
                engine_key: register.engine.key.clone(),
                kv_indices: Vec::new(),
                aux_index: None,
                state_indices: Vec::new(),
                required_dst_info_num: prefill.mapping.required_dst_info_num,
                // Empty in a dummy: 0.5.23's prefill takes a dummy with a prefix for real.
                decode_prefix_len: None,
                grant_opt: None,
            };
            let info = if target.is_dummy {
                empty
            } else {
                TransferInfo {
                    kv_indices: announcement.kv_indices.clone(),
                    aux_index: announcement.aux_index_opt,
                    state_indices: announcement.state_indices.clone(),
                    decode_prefix_len: announcement.decode_prefix_len_opt,
                    grant_opt: grants.get(&target.unique_rank).cloned(),
                    ..empty
                }
            };
            effects.push(state.send(room, target, ControlMessage::TransferInfo(info)));
        }
    }

    fn is_current(&self, room: Room, generation: Generation) -> bool {
        self.rooms
            .get(&room)
            .is_some_and(|state| state.generation == generation)
    }
}

#[cfg(test)]
impl DecodeCore {
    pub(super) fn last_generation(&self) -> u64 {
        self.last_generation
    }

    pub(super) fn watched_of(&self, room: Room) -> Vec<Endpoint> {
        let state_opt = self.rooms.get(&room);
        let prefill_opt = state_opt.and_then(|state| state.prefill_opt.as_ref());
        let targets = prefill_opt.into_iter().flat_map(|prefill| &prefill.targets);
        targets.map(|target| target.endpoint.clone()).collect()
    }

    /// The state of a room, for the table of states and events.
    pub(super) fn state_name(&self, room: Room) -> &'static str {
        match self.rooms.get(&room) {
            Some(state) => match state.poll {
                KvPoll::Failed => "failed",
                KvPoll::Bootstrapping => "bootstrapping",
                KvPoll::WaitingForInput if state.is_published => "published",
                KvPoll::WaitingForInput => "unpublished",
                KvPoll::Transferring => "transferring",
                KvPoll::Success => "success",
            },
            None => match self.tombstones.get(&room) {
                None => "unknown",
                Some(Epitaph::Unsettled) => "unsettled",
                Some(_) => "cleared",
            },
        }
    }
}

impl DecodeRoom {
    fn advance(&mut self, room: Room, poll: KvPoll, effects: &mut Vec<Effect>) {
        let next = advance(Some(self.poll), poll).unwrap_or(self.poll);
        if next != self.poll {
            self.poll = next;
            effects.push(Effect::Changed { room });
        }
    }

    /// A message to a prefill rank, with a trailer if it reads one.
    fn send(&self, room: Room, target: &PrefillTarget, message: ControlMessage) -> Effect {
        Effect::Send {
            to: target.endpoint.clone(),
            message,
            generation_opt: target.is_ferry.then_some(self.generation),
            about_opt: Some((room, self.generation)),
        }
    }

    /// Whether nothing more about this use can come from any prefill rank. What one had sent before
    /// its process ended may still be on its way.
    fn is_settled(&self) -> bool {
        let Some(prefill) = self.prefill_opt.as_ref().filter(|_| self.is_published) else {
            return true;
        };
        let mut writers = prefill.targets.iter().filter(|target| !target.is_dummy);
        writers.all(|target| {
            let said = [&self.successes, &self.failures, &self.acknowledged];
            said.iter().any(|ranks| ranks.contains(&target.unique_rank))
        })
    }

    /// Whether the announcement is known not to have reached a rank: it was sent once.
    fn is_untold(&self, endpoint: &Endpoint) -> bool {
        self.is_published && self.untold.contains(endpoint)
    }

    /// The prefill rank of this number, if it is one of those that serve the room.
    fn target(&self, unique_rank: i64) -> Option<&PrefillTarget> {
        let mut targets = self.prefill_opt.as_ref()?.targets.iter();
        targets.find(|target| target.unique_rank == unique_rank)
    }

    /// Whether no prefill rank can write to the announced places any more.
    fn is_release_safe(&self) -> bool {
        match self.poll {
            KvPoll::Success => true,
            KvPoll::Failed if !self.is_published => true,
            KvPoll::Failed => self.prefill_opt.as_ref().is_some_and(|prefill| {
                let mut writers = prefill.targets.iter().filter(|target| !target.is_dummy);
                let proofs = [&self.acknowledged, &self.successes, &self.exited];
                let has_stopped = |target: &PrefillTarget| {
                    let rank = target.unique_rank;
                    proofs.iter().any(|ranks| ranks.contains(&rank))
                        || self.is_taken_back(rank)
                        || self.is_untold(&target.endpoint)
                };
                match holds(Rule::EveryWriterStops) {
                    true => writers.all(has_stopped),
                    false => writers.any(has_stopped),
                }
            }),
            _ => false,
        }
    }
}

/// The engine's own mistakes are told to it at once, before any prefill hears of them.
fn check_announcement(layout: &RankLayout, announcement: &Announcement) -> Result<(), String> {
    let within = |label: &str, indices: &[i32], tensors: &[common::schema::TensorLayout]| {
        let mut seen = HashSet::with_capacity(indices.len());
        for index in indices {
            let number =
                u64::try_from(*index).map_err(|_| format!("{label}: index {index} is negative"))?;
            if !seen.insert(number) {
                return Err(format!("{label}: index {index} stands in the list twice"));
            }
            for (position, tensor) in tensors.iter().enumerate() {
                let items = tensor.bytes.get().checked_div(tensor.item_len.get());
                if let Some(items) = items.filter(|items| *items > 0 && number >= *items) {
                    return Err(format!(
                        "{label}: index {index} leaves tensor {position}, which has {items} items"
                    ));
                }
            }
        }
        Ok(())
    };
    within("kv", &announcement.kv_indices, &layout.kv.tensors)?;
    if announcement.state_indices.len() > layout.states.len() {
        return Err(format!(
            "{} lists of state indices for {} components",
            announcement.state_indices.len(),
            layout.states.len()
        ));
    }
    for (state, indices) in layout.states.iter().zip(&announcement.state_indices) {
        within(state.kind.name(), indices, &state.tensors)?;
    }
    match announcement.aux_index_opt.map(i32::try_from) {
        None => Ok(()),
        Some(Ok(row)) => within("aux", &[row], &layout.aux),
        Some(Err(_)) => Err("aux: the row does not fit 31 bits".to_owned()),
    }
}

fn late(kind: &'static str) -> Effect {
    Effect::Count(Counted::Late { kind })
}
