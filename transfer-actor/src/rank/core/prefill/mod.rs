//! The rules of a prefill rank.

mod announce;
mod checks;
mod chunk;
mod early;
mod end;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use common::check::CheckMode;
use common::ids::{Endpoint, Generation, Room};
use common::plan::PlannerOptions;
use common::room::DeferredNotice;
use common::schema::RankLayout;
use common::topology::ParallelConfig;
use common::wire::{ControlMessage, EngineDesc, KvPoll, Status};
use serde::Serialize;

use crate::api::{RoomView, TransferView};
use crate::error::ApiError;
use crate::rank::core::event::{Counted, Effect, Event, Life, OpenCommand, PeerLink};
use crate::rank::core::flight::Flight;
use crate::rank::core::prefill::early::EarlyRooms;
use crate::rank::core::prefill_room::{ItemBytes, PrefillRoom};
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::tombstones::{Epitaph, Tombstones};
use crate::rank::core::{Census, Limits, Reaction, Timeouts, draining, unknown_room, wrong_role};

pub(super) use checks::Comparison;

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
    /// Its control socket and engine, for Ferry decode ranks.
    pub contact: (Endpoint, EngineDesc),
    /// Whether its bytes are to be compared by decode ranks, and how many at least.
    pub checks_opt: Option<CheckMode>,
}

/// A registered decode rank.
#[derive(Clone, Debug)]
struct Peer {
    endpoint: Endpoint,
    release: &'static str,
    /// Why no room of this peer can work, else whom to write to.
    link: Result<Arc<PeerLink>, String>,
    /// Its process, if it is a Ferry rank.
    life_opt: Option<Life>,
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

/// All rooms and peers of one prefill rank.
#[derive(Debug)]
pub struct PrefillCore {
    identity: PrefillIdentity,
    item_bytes: ItemBytes,
    timeouts: Timeouts,
    limits: Limits,
    peers: HashMap<String, Peer>,
    /// Decode ranks whose REGISTER could not be understood, and why.
    refused: HashMap<Endpoint, String>,
    rooms: BTreeMap<Room, PrefillRoom>,
    early: EarlyRooms,
    tombstones: Tombstones,
    /// The newest of a decode rank's generations of a room that is over here: aborted, or ended.
    /// What is announced of it comes too late.
    over: Tombstones<(Room, Endpoint), u64>,
    last_generation: u64,
    last_life: u64,
    flight: Flight,
    /// Why no room is opened any more.
    draining_opt: Option<String>,
}

impl PrefillCore {
    /// A rank without rooms.
    pub fn new(identity: PrefillIdentity, timeouts: Timeouts, limits: Limits) -> Self {
        Self {
            item_bytes: ItemBytes::of(&identity.layout),
            identity,
            timeouts,
            limits,
            peers: HashMap::new(),
            refused: HashMap::new(),
            rooms: BTreeMap::new(),
            early: EarlyRooms::default(),
            tombstones: Tombstones::new(limits.tombstones, timeouts.tombstone),
            over: Tombstones::new(limits.tombstones, timeouts.tombstone),
            last_generation: 0,
            last_life: 0,
            flight: Flight::default(),
            draining_opt: None,
        }
    }

    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.identity.clone(), self.timeouts, self.limits);
        std::mem::replace(self, empty)
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) -> Reaction {
        let mut reaction = self.handle_event(event, now);
        self.begin_waiting(now, &mut reaction.effects);
        reaction
    }

    fn handle_event(&mut self, event: Event, now: Instant) -> Reaction {
        match event {
            Event::Message(message, generation_opt) => {
                Reaction::done(self.message(message, generation_opt, now))
            }
            Event::Unreadable { sender, reason } => {
                Reaction::done(self.unreadable(sender, &reason, now))
            }
            Event::Open(command) => Reaction::of(self.open(&command, now)),
            Event::Chunk { room, chunk } => self.chunk(room, &chunk, now),
            Event::PrefillComplete { room } => Reaction::of(self.prefill_complete(room)),
            Event::Abort { room, reason } => Reaction::of(self.abort(room, &reason, now)),
            Event::Clear { room } => Reaction::of(self.clear(room, now)),
            Event::Component(report) => Reaction::done(self.report(report, now)),
            Event::PeerLost { endpoint, reason } => {
                Reaction::done(self.peer_lost(&endpoint, &reason, now))
            }
            Event::PeerExited {
                endpoint,
                life,
                reason,
            } => Reaction::done(self.peer_exited(&endpoint, life, &reason, now)),
            Event::SendFailed { .. } => Reaction::default(),
            Event::Drain { reason } => Reaction::done(self.drain(reason, now)),
            Event::Tick => Reaction::done(self.tick(now)),
            Event::Shutdown { reason } => Reaction::done(self.shutdown(&reason, now)),
            Event::Restarted { reason } => Reaction::done(self.restarted(&reason, now)),
            Event::Lost {
                room,
                endpoint,
                generation_opt,
            } => Reaction::done(self.lost(room, endpoint, generation_opt, now)),
            Event::Announce { .. } => Reaction::refused(wrong_role("announce", "decode")),
            Event::Resolved { .. } | Event::TakenBack { .. } | Event::Compared { .. } => {
                Reaction::default()
            }
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
            release_safe: state.is_release_safe(),
            verification: state.verification(self.identity.checks_opt),
        })
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining_opt.is_some()
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

    /// The decode ranks that open rooms feed.
    pub(super) fn watched(&self) -> HashSet<Endpoint> {
        let open = self
            .rooms
            .values()
            .filter(|state| !state.poll.is_terminal());
        let targets = open.flat_map(|state| &state.targets);
        targets.map(|target| target.info.endpoint.clone()).collect()
    }

    pub(super) fn pending_work(&self) -> usize {
        self.rooms.values().map(|state| state.pending).sum()
    }

    pub(super) fn in_flight(&self) -> (u64, usize) {
        (self.flight.bytes(), self.flight.waiting())
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

    fn message(
        &mut self,
        message: ControlMessage,
        generation_opt: Option<Generation>,
        now: Instant,
    ) -> Vec<Effect> {
        match message {
            ControlMessage::Register(register) => self.register(&register, now),
            ControlMessage::TransferInfo(info) => self.transfer_info(info, generation_opt, now),
            ControlMessage::Abort(abort) => self.peer_abort(&abort, now),
            ControlMessage::Checked(checked) => self.checked(checked, generation_opt, now),
            ControlMessage::Bootstrap(bootstrap) => {
                self.deferred_bootstrap(bootstrap, generation_opt, now)
            }
            // A decode's messages come to prefill ranks only; the others are nobody's.
            other => vec![late(other.kind())],
        }
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
        if let Some(reason) = &self.draining_opt
            && holds(Rule::DrainTakesNoRooms)
        {
            return Err(draining(room, reason));
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
        let epitaph_opt = self.tombstones.lift(&room);
        state.was_poisoned = epitaph_opt == Some(Epitaph::Poisoned);
        self.rooms.insert(room, state);
        let mut effects = vec![Effect::Changed { room }];
        let was_given_up = epitaph_opt == Some(Epitaph::GivenUp);
        let Some(early) = self.early.take(room) else {
            if was_given_up {
                self.fail(room, GIVEN_UP_EARLY, None, now, &mut effects);
            }
            return Ok(effects);
        };
        // Failed first, so that no actor starts for it.
        if let Some((_, reason)) = &early.refused_opt {
            self.fail(room, reason, None, now, &mut effects);
        } else if !early.given_up.is_empty() {
            self.fail(room, GIVEN_UP_EARLY, None, now, &mut effects);
        }
        if let Some((bootstrap, generation_opt)) = early.bootstrap_opt {
            effects.extend(self.deferred_bootstrap(bootstrap, generation_opt, now));
        }
        for (info, generation_opt) in early.infos {
            self.add_info(info, generation_opt, now, &mut effects);
        }
        Ok(effects)
    }

    fn prefill_complete(&mut self, room: Room) -> Result<Vec<Effect>, ApiError> {
        let rank = self.identity.unique_rank;
        let state = self.open_room(room)?;
        let generation = state.generation;
        let notice_opt = state.deferred.complete(generation);
        Ok(notice_opt
            .map(|notice| deferred_status(state, &notice, rank))
            .into_iter()
            .collect())
    }

    fn open_room(&mut self, room: Room) -> Result<&mut PrefillRoom, ApiError> {
        self.rooms
            .get_mut(&room)
            .filter(|state| !state.is_cleared)
            .ok_or_else(|| unknown_room(room))
    }
}

#[cfg(test)]
impl PrefillCore {
    pub(super) fn waiting_work(&self) -> usize {
        self.flight.waiting_work()
    }

    pub(super) fn last_generation(&self) -> u64 {
        self.last_generation
    }

    /// The decode rank's own generation of a room, as it announced it.
    pub(super) fn announced_generation(&self, room: Room, who: &Endpoint) -> Option<Generation> {
        self.rooms.get(&room)?.generation_of(who)
    }

    /// The decode ranks that the room feeds, and their own generations of it.
    pub(super) fn fed_by(&self, room: Room) -> Vec<(Endpoint, Option<Generation>)> {
        let targets = self.rooms.get(&room).map(|state| &state.targets);
        let targets = targets.into_iter().flatten();
        let fed = targets.map(|target| (target.info.endpoint.clone(), target.generation_opt));
        fed.collect()
    }

    /// The state of a room, for the table of states and events.
    pub(super) fn state_name(&self, room: Room) -> &'static str {
        match self.rooms.get(&room) {
            Some(state) if state.is_cleared => "draining",
            Some(state) => match state.poll {
                KvPoll::Failed => "failed",
                KvPoll::Bootstrapping => "bootstrapping",
                KvPoll::WaitingForInput => "waiting",
                KvPoll::Transferring if state.waiting > 0 && !state.has_begun() => "held_up",
                KvPoll::Transferring => "transferring",
                KvPoll::Success => "success",
            },
            None if self.early.contains(room) => "early",
            None => match self.tombstones.get(&room) {
                None | Some(Epitaph::Unsettled) => "unknown",
                Some(Epitaph::Cleared) => "cleared",
                Some(Epitaph::GivenUp) => "given_up",
                Some(Epitaph::Poisoned) => "poisoned",
            },
        }
    }
}

fn deferred_status(state: &PrefillRoom, notice: &DeferredNotice, rank: i64) -> Effect {
    let generation_opt = state.generation_of(&notice.endpoint);
    deferred_status_of(state, notice, generation_opt, rank)
}

fn deferred_status_of(
    state: &PrefillRoom,
    notice: &DeferredNotice,
    generation_opt: Option<Generation>,
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
            room: state.room,
            poll,
            prefill_rank: rank,
            reason,
        }),
        generation_opt,
        about_opt: Some((state.room, state.generation)),
    }
}

fn late(kind: &'static str) -> Effect {
    Effect::Count(Counted::Late { kind })
}

/// Announced rooms were dropped before the engine opened them.
fn orphaned(rooms: usize) -> Option<Effect> {
    (rooms > 0).then_some(Effect::Count(Counted::Orphaned { rooms }))
}
