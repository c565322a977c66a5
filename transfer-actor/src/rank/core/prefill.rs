//! The rules of a prefill rank.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use common::ids::{Endpoint, Generation, Room};
use common::plan::{PeerPlanner, PlannerOptions};
use common::room::DeferredNotice;
use common::schema::{PeerLayout, RankLayout};
use common::topology::ParallelConfig;
use common::wire::{
    Abort, AbortAck, Bootstrap, ControlMessage, KvPoll, Register, Status, TransferInfo,
};
use serde::Serialize;

use crate::api::{RoomView, TransferView};
use crate::error::ApiError;
use crate::rank::core::event::{
    ChunkCommand, ComponentOutcome, ComponentReport, Counted, Effect, Event, OpenCommand, PeerLink,
};
use crate::rank::core::prefill_room::{PrefillRoom, Target};
use crate::rank::core::tombstones::{Epitaph, Tombstones};
use crate::rank::core::{Census, Limits, Reaction, Timeouts, unknown_room, wrong_role};

/// Why a room fails at its opening.
const GIVEN_UP_EARLY: &str = "the decode side gave the room up before it was opened here";

/// What a prefill core knows of its own rank.
#[derive(Clone, Debug)]
pub struct PrefillIdentity {
    /// The rank's buffers.
    pub layout: RankLayout,
    /// Its place in the parallel groups.
    pub parallel: ParallelConfig,
    /// How strict plans are.
    pub planner: PlannerOptions,
    /// Its number in STATUS messages.
    pub unique_rank: i64,
    /// Whether Success is said only after the engine has cleared the room.
    pub is_deferred: bool,
}

/// A registered decode rank.
#[derive(Clone, Debug)]
struct Peer {
    endpoint: Endpoint,
    release: &'static str,
    /// Why no room of this peer can work, else whom to write to.
    link: Result<Arc<PeerLink>, String>,
}

/// A registered decode rank, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeerSummary {
    /// Key of its io engine.
    pub engine_key: String,
    /// Its control socket.
    pub endpoint: String,
    /// SGLang's release, as far as its messages tell.
    pub release: String,
    /// Why it was refused.
    pub refused: Option<String>,
}

/// Messages for a room that the engine has not opened.
#[derive(Debug)]
struct Early {
    since: Instant,
    infos: Vec<TransferInfo>,
    bootstrap_opt: Option<Bootstrap>,
    /// Decode ranks that gave the room up and did not announce it again since; `None` is one that
    /// did not say who it is. They may have been promised that nothing is written.
    given_up: Vec<Option<Endpoint>>,
}

/// All rooms and peers of one prefill rank.
#[derive(Debug)]
pub struct PrefillCore {
    identity: PrefillIdentity,
    timeouts: Timeouts,
    limits: Limits,
    peers: HashMap<String, Peer>,
    rooms: HashMap<Room, PrefillRoom>,
    early: BTreeMap<Room, Early>,
    tombstones: Tombstones,
    last_generation: u64,
}

impl PrefillCore {
    /// A rank without rooms.
    pub fn new(identity: PrefillIdentity, timeouts: Timeouts, limits: Limits) -> Self {
        Self {
            identity,
            timeouts,
            limits,
            peers: HashMap::new(),
            rooms: HashMap::new(),
            early: BTreeMap::new(),
            tombstones: Tombstones::new(limits.tombstones, timeouts.tombstone),
            last_generation: 0,
        }
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Reaction {
        match event {
            Event::Message(message) => Reaction::done(self.message(message, now)),
            Event::Open(command) => Reaction::of(self.open(&command, now)),
            Event::Chunk { room, chunk } => self.chunk(room, &chunk, now),
            Event::PrefillComplete { room } => Reaction::of(self.prefill_complete(room)),
            Event::Abort { room, reason } => Reaction::of(self.abort(room, &reason, now)),
            Event::Clear { room } => Reaction::of(self.clear(room, now)),
            Event::Component(report) => Reaction::done(self.report(report, now)),
            Event::SendFailed { .. } => Reaction::default(),
            Event::Tick => Reaction::done(self.tick(now)),
            Event::Shutdown { reason } => Reaction::done(self.shutdown(&reason, now)),
            Event::Announce { .. } => Reaction::refused(wrong_role("announce", "decode")),
            Event::Resolved { .. } => Reaction::default(),
        }
    }

    pub(super) fn view(&self, room: Room) -> Option<RoomView> {
        let state = self.rooms.get(&room).filter(|state| !state.is_cleared)?;
        let transfers = state
            .moved
            .iter()
            .map(|((endpoint, component), moved)| TransferView {
                component: self.identity.layout.component_label(*component).to_owned(),
                peer: endpoint.to_string(),
                transport: moved.transport.to_owned(),
                bytes: moved.bytes,
                ranges: moved.ranges,
                seconds: moved.elapsed.as_secs_f64(),
                outcome: match moved.outcome_opt {
                    Some(outcome) if moved.pending == 0 => outcome.to_owned(),
                    _ => "pending".to_owned(),
                },
            });
        let prefixes = state
            .targets
            .iter()
            .filter(|target| target.link_opt.is_some());
        Some(RoomView {
            room: room.get(),
            generation: state.generation.get(),
            status: state.poll.into(),
            reason: state.reason_opt.clone(),
            decode_prefix_len: prefixes
                .filter_map(|target| target.info.decode_prefix_len)
                .next()
                .filter(|_| state.is_announced()),
            transfers: transfers.collect(),
            release_safe: state.poll.is_terminal() && state.pending == 0 && !state.is_poisoned,
        })
    }

    pub(super) fn census(&self) -> Census {
        let mut census = Census {
            early: self.early.len(),
            tombstones: self.tombstones.len(),
            ..Census::default()
        };
        for room in self.rooms.values() {
            census.by_status[room.poll as usize] += 1;
        }
        census
    }

    pub(super) fn pending_work(&self) -> usize {
        self.rooms.values().map(|state| state.pending).sum()
    }

    /// The registered decode ranks.
    pub fn peers(&self) -> Vec<PeerSummary> {
        let mut peers: Vec<PeerSummary> = self
            .peers
            .iter()
            .map(|(engine_key, peer)| PeerSummary {
                engine_key: engine_key.clone(),
                endpoint: peer.endpoint.to_string(),
                release: peer.release.to_owned(),
                refused: peer.link.as_ref().err().cloned(),
            })
            .collect();
        peers.sort_by(|one, other| one.engine_key.cmp(&other.engine_key));
        peers
    }

    fn message(&mut self, message: ControlMessage, now: Instant) -> Vec<Effect> {
        match message {
            ControlMessage::Register(register) => self.register(&register),
            ControlMessage::TransferInfo(info) => self.transfer_info(info, now),
            ControlMessage::Abort(abort) => self.peer_abort(&abort, now),
            ControlMessage::Bootstrap(bootstrap) => self.bootstrap(bootstrap, now),
            // A decode's messages come to prefill ranks only; the others are nobody's.
            other => vec![late(other.kind())],
        }
    }

    /// A REGISTER has no answer: what cannot work is kept and told to each of the peer's rooms.
    fn register(&mut self, register: &Register) -> Vec<Effect> {
        let key = register.engine.key.clone();
        if !self.peers.contains_key(&key) && self.peers.len() >= self.limits.peers {
            tracing::warn!(
                limit = self.limits.peers,
                peer = key,
                "a peer beyond the limit was refused"
            );
            return Vec::new();
        }
        let identity = &self.identity;
        let layout = PeerLayout::from(register);
        let planner = PeerPlanner::new(
            &identity.layout,
            &identity.parallel,
            &layout,
            identity.planner,
        );
        let link = match planner {
            Ok(planner) => Ok(Arc::new(PeerLink {
                engine: register.engine.clone(),
                kv: register.kv.clone(),
                aux: register.aux.clone(),
                states: register.states.clone(),
                planner,
            })),
            Err(error) => {
                tracing::warn!(peer = key, endpoint = %register.endpoint, %error, "a decode rank cannot be served");
                Err(format!(
                    "decode rank {} cannot be served: {error}",
                    register.endpoint
                ))
            }
        };
        let release = register.release.name();
        self.peers.insert(
            key,
            Peer {
                endpoint: register.endpoint.clone(),
                release,
                link,
            },
        );
        Vec::new()
    }

    fn transfer_info(&mut self, info: TransferInfo, now: Instant) -> Vec<Effect> {
        let room = info.room;
        match self.rooms.get(&room) {
            Some(state) if state.poll == KvPoll::Failed && !state.is_announced() => {
                // This decode rank does not know yet that the room has failed.
                vec![state.send_status(&info.endpoint, self.identity.unique_rank)]
            }
            Some(state) if state.poll.is_terminal() => self.keep_early(info, now),
            Some(_) => {
                let mut effects = Vec::new();
                self.add_info(info, now, &mut effects);
                effects
            }
            None => self.keep_early(info, now),
        }
    }

    fn keep_early(&mut self, info: TransferInfo, now: Instant) -> Vec<Effect> {
        let room = info.room;
        let mut effects = Vec::new();
        if self.tombstones.get(room).is_some() {
            // Early metadata of the next use cannot be told from late metadata of the last.
            effects.push(late("transfer_info"));
        }
        let early = self.early_entry(room, now);
        early
            .given_up
            .retain(|who| who.as_ref().is_some_and(|who| *who != info.endpoint));
        match early
            .infos
            .iter_mut()
            .find(|known| known.endpoint == info.endpoint)
        {
            Some(known) => *known = info,
            None => early.infos.push(info),
        }
        effects
    }

    fn early_entry(&mut self, room: Room, now: Instant) -> &mut Early {
        if !self.early.contains_key(&room) && self.early.len() >= self.limits.early_rooms {
            let oldest = self
                .early
                .iter()
                .min_by_key(|(_, early)| early.since)
                .map(|(room, _)| *room);
            if let Some(oldest) = oldest {
                tracing::warn!(room = %oldest, "an announced room that nobody opened was dropped, there are too many");
                self.early.remove(&oldest);
            }
        }
        self.early.entry(room).or_insert(Early {
            since: now,
            infos: Vec::new(),
            bootstrap_opt: None,
            given_up: Vec::new(),
        })
    }

    fn open(&mut self, command: &OpenCommand, now: Instant) -> Result<Vec<Effect>, ApiError> {
        let room = command.room;
        if self.rooms.contains_key(&room) {
            return Err(ApiError::new(
                409,
                "room_exists",
                format!(
                    "room {room} is open on this rank, or its last writes have not drained; clear it and wait"
                ),
            ));
        }
        if self.rooms.len() >= self.limits.rooms {
            return Err(ApiError::new(
                429,
                "too_many_rooms",
                format!(
                    "this rank holds {} rooms, its limit; clear finished rooms",
                    self.rooms.len()
                ),
            ));
        }
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        let mut state = PrefillRoom::new(room, generation, command.aux_index_opt, now);
        let failed_before = state.deferred.open(generation) == Some(true);
        debug_assert!(!failed_before, "a new room has not failed");
        self.rooms.insert(room, state);
        let mut effects = vec![Effect::Changed { room }];
        let was_given_up = self.tombstones.lift(room) == Some(Epitaph::GivenUp);
        let Some(early) = self.early.remove(&room) else {
            if was_given_up {
                self.fail(room, GIVEN_UP_EARLY, None, now, &mut effects);
            }
            return Ok(effects);
        };
        if !early.given_up.is_empty() {
            // Failed first, so that no actor starts for it.
            self.fail(room, GIVEN_UP_EARLY, None, now, &mut effects);
        }
        let has_given_up = |who: &Endpoint| early.given_up.iter().flatten().any(|one| one == who);
        if let Some(bootstrap) = early
            .bootstrap_opt
            .filter(|bootstrap| !has_given_up(&bootstrap.reply_to))
        {
            effects.extend(self.bootstrap(bootstrap, now));
        }
        for info in early.infos {
            if !has_given_up(&info.endpoint) {
                self.add_info(info, now, &mut effects);
            }
        }
        Ok(effects)
    }

    /// One more decode rank says where the room must land.
    fn add_info(&mut self, info: TransferInfo, now: Instant, effects: &mut Vec<Effect>) {
        let room = info.room;
        let Some(state) = self.rooms.get_mut(&room) else {
            return;
        };
        if state.poll.is_terminal() {
            effects.push(state.send_status(&info.endpoint, self.identity.unique_rank));
            return;
        }
        if let Some(known) = state
            .targets
            .iter()
            .find(|target| target.info.endpoint == info.endpoint)
        {
            if known.info == info {
                effects.push(late("transfer_info"));
                return;
            }
            let reason = format!(
                "decode rank {} announced the room twice, differently",
                info.endpoint
            );
            return self.fail(room, &reason, None, now, effects);
        }
        if state.is_announced() {
            // Bytes may have moved already; what it is told of the others' Success would not be
            // true for it.
            let reason = format!(
                "room {room} was announced by all of its decode ranks before {} did",
                info.endpoint
            );
            tracing::warn!(%room, endpoint = %info.endpoint, "a decode rank too many was refused");
            effects.push(Effect::Send {
                to: info.endpoint,
                message: ControlMessage::Status(Status {
                    room,
                    poll: KvPoll::Failed,
                    prefill_rank: self.identity.unique_rank,
                    reason: Some(reason),
                }),
                about_opt: None,
            });
            return;
        }
        let required = *state.required_opt.get_or_insert(info.required_dst_info_num);
        let endpoint = info.endpoint.clone();
        let accepted = accept_info(&self.peers, &info, required);
        let dst_pages: Arc<[i32]> = info.kv_indices.clone().into();
        let reason = match accepted {
            Ok(link_opt) => {
                state.targets.push(Target {
                    info,
                    dst_pages,
                    link_opt,
                });
                None
            }
            Err(reason) => {
                // It is to be told like the others.
                state.targets.push(Target {
                    info,
                    dst_pages,
                    link_opt: None,
                });
                Some(reason)
            }
        };
        if let Some(reason) = reason {
            tracing::warn!(%room, %endpoint, reason, "a room cannot be served");
            return self.fail(room, &reason, None, now, effects);
        }
        if state.is_announced() {
            state.announced(now, effects);
        }
    }

    fn chunk(&mut self, room: Room, chunk: &ChunkCommand, now: Instant) -> Reaction {
        let state = match self.open_room(room) {
            Ok(state) => state,
            Err(error) => return Reaction::refused(error),
        };
        let refused = |code, message: String| Reaction::refused(ApiError::new(409, code, message));
        if state.poll == KvPoll::Failed {
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
        let mut effects = Vec::new();
        match state.plan_chunk(chunk) {
            Ok(works) => {
                state.begin_chunk(chunk, works, now, &mut effects);
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

    fn prefill_complete(&mut self, room: Room) -> Result<Vec<Effect>, ApiError> {
        let rank = self.identity.unique_rank;
        let state = self.open_room(room)?;
        let generation = state.generation;
        let notice_opt = state.deferred.complete(generation);
        Ok(notice_opt
            .map(|notice| deferred_status(room, generation, &notice, rank))
            .into_iter()
            .collect())
    }

    fn bootstrap(&mut self, bootstrap: Bootstrap, now: Instant) -> Vec<Effect> {
        let (room, rank) = (bootstrap.room, self.identity.unique_rank);
        // After Success the decode can only mean the next use of the number.
        let current = self
            .rooms
            .get_mut(&room)
            .filter(|state| !state.is_cleared && state.poll != KvPoll::Success);
        let Some(state) = current else {
            let early = self.early_entry(room, now);
            early
                .given_up
                .retain(|who| who.as_ref().is_some_and(|who| *who != bootstrap.reply_to));
            early.bootstrap_opt = Some(bootstrap);
            return Vec::new();
        };
        let notice_opt = state.deferred.register(bootstrap.reply_to);
        let generation = state.generation;
        notice_opt
            .map(|notice| deferred_status(room, generation, &notice, rank))
            .into_iter()
            .collect()
    }

    /// The decode gives a room up.
    fn peer_abort(&mut self, abort: &Abort, now: Instant) -> Vec<Effect> {
        let room = abort.room;
        let mut effects = Vec::new();
        let asker = abort.reply_to.clone().zip(abort.generation);
        // Beside a room that has ended, an early one is the next use of its number, and then it is
        // the one that the decode means.
        let is_early = self.early.contains_key(&room);
        if let Some(early) = self.early.get_mut(&room)
            && !early.given_up.contains(&abort.reply_to)
        {
            early.given_up.push(abort.reply_to.clone());
        }
        let Some(state) = self.rooms.get_mut(&room) else {
            let epitaph_opt = self.tombstones.get(room);
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

    fn abort(&mut self, room: Room, reason: &str, now: Instant) -> Result<Vec<Effect>, ApiError> {
        self.open_room(room)?;
        let mut effects = Vec::new();
        self.fail(room, reason, None, now, &mut effects);
        self.settle(room, now, &mut effects);
        Ok(effects)
    }

    fn clear(&mut self, room: Room, now: Instant) -> Result<Vec<Effect>, ApiError> {
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
                let targets = state
                    .targets
                    .iter()
                    .filter(|target| target.link_opt.is_some());
                effects
                    .extend(targets.map(|target| state.send_status(&target.info.endpoint, rank)));
            }
        }
        effects.push(Effect::Changed { room });
        self.settle(room, now, &mut effects);
        Ok(effects)
    }

    fn report(&mut self, report: ComponentReport, now: Instant) -> Vec<Effect> {
        let ComponentReport { key, outcome } = report;
        let current = self
            .rooms
            .get_mut(&key.room)
            .filter(|state| state.generation == key.generation);
        let Some(state) = current else {
            let died = matches!(outcome, ComponentOutcome::Died { .. });
            return if died {
                Vec::new()
            } else {
                vec![late("component_report")]
            };
        };
        let mut effects = Vec::new();
        if let Some(reason) = state.report(&key, &outcome, now) {
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
    fn fail(
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
        if state.poll.is_terminal() {
            return;
        }
        state.reason_opt.get_or_insert_with(|| reason.to_owned());
        state.advance(KvPoll::Failed, effects);
        state.touched = now;
        let elapsed = now.duration_since(state.opened);
        effects.push(Effect::Count(Counted::RoomFinished {
            poll: KvPoll::Failed,
            elapsed,
        }));
        state.cancel(effects);
        let told = state.targets.iter().map(|target| &target.info.endpoint);
        let mut told: Vec<&Endpoint> = told
            .filter(|endpoint| Some(*endpoint) != except_opt)
            .collect();
        told.dedup();
        effects.extend(
            told.into_iter()
                .map(|endpoint| state.send_status(endpoint, rank)),
        );
        let generation = state.generation;
        if let Some(notice) = state.deferred.close(generation, false) {
            effects.push(deferred_status(room, generation, &notice, rank));
        }
    }

    /// Draws the conclusions once nothing of a room is being written: Success, acknowledgements,
    /// and the end of a room that the engine has cleared.
    fn settle(&mut self, room: Room, now: Instant, effects: &mut Vec<Effect>) {
        let rank = self.identity.unique_rank;
        let Some(state) = self.rooms.get_mut(&room).filter(|state| state.pending == 0) else {
            return;
        };
        if state.is_last_sent && !state.poll.is_terminal() {
            state.advance(KvPoll::Success, effects);
            state.touched = now;
            let elapsed = now.duration_since(state.opened);
            effects.push(Effect::Count(Counted::RoomFinished {
                poll: KvPoll::Success,
                elapsed,
            }));
            if !self.identity.is_deferred {
                let targets = state
                    .targets
                    .iter()
                    .filter(|target| target.link_opt.is_some());
                effects
                    .extend(targets.map(|target| state.send_status(&target.info.endpoint, rank)));
            }
            state.stop(effects);
        }
        if state.poll.is_terminal() && !state.is_poisoned {
            let askers = std::mem::take(&mut state.abort_askers);
            effects.extend(
                askers
                    .into_iter()
                    .map(|(to, generation)| ack(room, to, generation, rank)),
            );
        }
        if state.is_cleared {
            state.stop(effects);
            let epitaph = if state.is_poisoned {
                Epitaph::Poisoned
            } else {
                Epitaph::Cleared
            };
            self.rooms.remove(&room);
            self.tombstones.lay(room, epitaph, now);
        }
    }

    fn tick(&mut self, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.tombstones.expire(now);
        let lifetime = self.timeouts.bootstrap;
        self.early
            .retain(|_, early| now.duration_since(early.since) < lifetime);
        let timeouts = self.timeouts;
        let overdue = self.rooms.values().filter_map(|state| {
            let (limit, reason) = match state.poll {
                KvPoll::Bootstrapping => (
                    timeouts.bootstrap,
                    "the decode side did not announce the room",
                ),
                KvPoll::WaitingForInput => (timeouts.waiting, "the engine sent nothing"),
                KvPoll::Transferring if state.pending > 0 => {
                    (timeouts.transfer, "a write did not end")
                }
                KvPoll::Transferring => (timeouts.waiting, "the engine sent no further chunk"),
                KvPoll::Failed | KvPoll::Success => (timeouts.retention, ""),
            };
            (now.duration_since(state.touched) >= limit).then_some((state.room, limit, reason))
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

    fn shutdown(&mut self, reason: &str, now: Instant) -> Vec<Effect> {
        let mut effects = Vec::new();
        let rooms: Vec<Room> = self.rooms.keys().copied().collect();
        for room in rooms {
            self.fail(room, reason, None, now, &mut effects);
            self.settle(room, now, &mut effects);
        }
        effects
    }

    fn open_room(&mut self, room: Room) -> Result<&mut PrefillRoom, ApiError> {
        self.rooms
            .get_mut(&room)
            .filter(|state| !state.is_cleared)
            .ok_or_else(|| unknown_room(room))
    }

    fn ack(&self, room: Room, to: Endpoint, generation: i64) -> Effect {
        ack(room, to, generation, self.identity.unique_rank)
    }
}

/// Whom an announcement lets this rank write to; `None` for a dummy.
fn accept_info(
    peers: &HashMap<String, Peer>,
    info: &TransferInfo,
    required: u32,
) -> Result<Option<Arc<PeerLink>>, String> {
    if info.required_dst_info_num != required {
        return Err(format!(
            "decode rank {} says that {} ranks announce the room, another said {required}",
            info.endpoint, info.required_dst_info_num
        ));
    }
    if info.is_dummy() {
        return Ok(None);
    }
    let peer = peers.get(&info.engine_key).ok_or_else(|| {
        format!(
            "engine {} of decode rank {} is not registered here; this prefill may have restarted",
            info.engine_key, info.endpoint
        )
    })?;
    let link = peer.link.clone()?;
    link.planner
        .check_announcement(&info.kv_indices, info.aux_index, &info.state_indices)
        .map_err(|error| format!("decode rank {}: {error}", info.endpoint))?;
    Ok(Some(link))
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
        about_opt: None,
    }
}

fn deferred_status(
    room: Room,
    generation: Generation,
    notice: &DeferredNotice,
    rank: i64,
) -> Effect {
    let (poll, reason) = if notice.failed {
        (KvPoll::Failed, Some("the prefill failed".to_owned()))
    } else {
        (KvPoll::WaitingForInput, None)
    };
    Effect::Send {
        to: notice.endpoint.clone(),
        message: ControlMessage::Status(Status {
            room,
            poll,
            prefill_rank: rank,
            reason,
        }),
        about_opt: Some((room, generation)),
    }
}

fn late(kind: &'static str) -> Effect {
    Effect::Count(Counted::Late { kind })
}
