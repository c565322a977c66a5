//! The rules of a rank's rooms, pure: events and a clock in, effects out.
//!
//! Nothing here knows sockets, threads, actors or the io engine, so a test can drive whole
//! lifetimes of rooms without waiting. [`PrefillCore`] and [`DecodeCore`] hold the rules of the
//! two roles (`spec/control-plane.md`, "A room's life").

mod decode;
mod event;
mod flight;
mod prefill;
mod prefill_room;
#[cfg(test)]
mod replaced_prefill_tests;
mod rules;
#[cfg(test)]
mod tests;
mod tombstones;

use std::collections::HashSet;
use std::time::{Duration, Instant};

#[cfg(test)]
use common::ids::Generation;
use common::ids::{Endpoint, Room};

use crate::api::{RoomStatus, RoomView};
use crate::error::ApiError;

pub use decode::{DecodeCore, DecodeIdentity};
pub use event::*;
pub use prefill::{PeerSummary, PrefillCore, PrefillIdentity};
pub use tombstones::{Epitaph, Tombstones};

/// How long a room may stay in each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Opened, and the other half has not come.
    pub bootstrap: Duration,
    /// Announced, and the engine or the prefill has not begun or finished.
    pub waiting: Duration,
    /// Bytes are moving, and nothing is reported.
    pub transfer: Duration,
    /// Ended, and the engine has not cleared it.
    pub retention: Duration,
    /// A tombstone.
    pub tombstone: Duration,
    /// Between two looks at whether the prefill ranks of open rooms are still there (decode).
    pub heartbeat: Duration,
    /// How many looks in a row may find nobody before a prefill rank counts as gone.
    pub heartbeat_misses: u32,
    /// Between two reports to the bootstrap servers, at most; zero: none are sent.
    pub report: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            bootstrap: Duration::from_secs(300),
            waiting: Duration::from_secs(300),
            transfer: Duration::from_secs(300),
            retention: Duration::from_secs(600),
            tombstone: Duration::from_secs(600),
            heartbeat: Duration::from_secs(5),
            heartbeat_misses: 2,
            report: Duration::from_secs(5),
        }
    }
}

/// How much a rank holds at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rooms that the engine has opened and not cleared.
    pub rooms: usize,
    /// Rooms that a peer has announced and the engine has not opened.
    pub early_rooms: usize,
    /// What those rooms' messages may take together, in bytes.
    pub early_bytes: usize,
    /// What the checksums that are being compared, or wait for it, may take together, in bytes.
    pub check_bytes: usize,
    /// Registered peers.
    pub peers: usize,
    /// Tombstones.
    pub tombstones: usize,
    /// Rooms that are open with one peer: a decode rank, or a prefill engine.
    pub rooms_per_peer: usize,
    /// Bytes that a prefill rank has on their way, as far as their pages, slots and rows tell.
    pub in_flight_bytes: u64,
    /// The same, to one decode rank.
    pub in_flight_bytes_per_peer: u64,
    /// Chunks that wait for bytes on their way to arrive, counted for each decode rank that they
    /// go to.
    pub queued_chunks: usize,
    /// The same, for one decode rank.
    pub queued_chunks_per_peer: usize,
    /// What becomes of a chunk beyond the bytes.
    pub when_full: WhenFull,
}

/// What becomes of a chunk for which there is no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum WhenFull {
    /// It waits until bytes have arrived.
    #[default]
    Wait,
    /// It is refused; the engine may hand it over again.
    Refuse,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rooms: 65_536,
            early_rooms: 65_536,
            early_bytes: 256 * 1024 * 1024,
            check_bytes: 256 * 1024 * 1024,
            peers: 16_384,
            tombstones: 65_536,
            rooms_per_peer: 65_536,
            in_flight_bytes: 64 << 30,
            in_flight_bytes_per_peer: 16 << 30,
            queued_chunks: 65_536,
            queued_chunks_per_peer: 8192,
            when_full: WhenFull::Wait,
        }
    }
}

/// The core of either role.
#[derive(Debug)]
pub enum RankCore {
    /// Sends state.
    Prefill(Box<PrefillCore>),
    /// Receives state.
    Decode(Box<DecodeCore>),
}

impl RankCore {
    /// Applies one event. Effects are to be done in their order.
    ///
    /// # Errors
    /// Only for engine commands that cannot be done; such a command changed nothing, except that a
    /// chunk with wrong indices fails its room. Everything else never errs.
    pub fn handle(&mut self, event: Event, now: Instant) -> Reaction {
        match self {
            Self::Prefill(core) => core.handle(event, now),
            Self::Decode(core) => core.handle(event, now),
        }
    }

    /// Moves everything out, and leaves a rank without rooms and peers.
    pub fn take(&mut self) -> Self {
        match self {
            Self::Prefill(core) => Self::Prefill(Box::new(core.take())),
            Self::Decode(core) => Self::Decode(Box::new(core.take())),
        }
    }

    /// A room as its engine sees it.
    pub fn view(&self, room: Room) -> Option<RoomView> {
        match self {
            Self::Prefill(core) => core.view(room),
            Self::Decode(core) => core.view(room),
        }
    }

    /// The generation of the room that is opened next.
    #[cfg(test)]
    fn next_generation(&self) -> Generation {
        let last = match self {
            Self::Prefill(core) => core.last_generation(),
            Self::Decode(core) => core.last_generation(),
        };
        Generation(last + 1)
    }

    /// Peers whose end concerns this room.
    #[cfg(test)]
    fn watched_of(&self, room: Room) -> Vec<Endpoint> {
        match self {
            Self::Prefill(_) => Vec::new(),
            Self::Decode(core) => core.watched_of(room),
        }
    }

    /// Pieces of work that have not been reported.
    pub fn pending_work(&self) -> usize {
        match self {
            Self::Prefill(core) => core.pending_work(),
            Self::Decode(_) => 0,
        }
    }

    /// Whether the rank takes no new rooms.
    pub(crate) fn is_draining(&self) -> bool {
        match self {
            Self::Prefill(core) => core.is_draining(),
            Self::Decode(core) => core.is_draining(),
        }
    }

    /// Pieces of work that have not begun, for want of space.
    #[cfg(test)]
    fn waiting_work(&self) -> usize {
        match self {
            Self::Prefill(core) => core.waiting_work(),
            Self::Decode(_) => 0,
        }
    }

    /// Bytes on their way, and chunks that wait for them to arrive.
    pub fn in_flight(&self) -> (u64, usize) {
        match self {
            Self::Prefill(core) => core.in_flight(),
            Self::Decode(_) => (0, 0),
        }
    }

    /// Peers whose end must be noticed: the other side's ranks of open rooms.
    pub fn watched(&self) -> HashSet<Endpoint> {
        match self {
            Self::Prefill(core) => core.watched(),
            Self::Decode(core) => core.watched(),
        }
    }

    /// How many rooms are in each status, and how many are early or gone.
    pub fn census(&self) -> Census {
        match self {
            Self::Prefill(core) => core.census(),
            Self::Decode(core) => core.census(),
        }
    }
}

/// What an event led to.
#[derive(Debug, Default)]
pub struct Reaction {
    /// What is to be done, in order.
    pub effects: Vec<Effect>,
    /// Why a command was refused.
    pub error_opt: Option<ApiError>,
}

impl Reaction {
    pub(crate) fn done(effects: Vec<Effect>) -> Self {
        Self {
            effects,
            error_opt: None,
        }
    }

    pub(crate) fn refused(error: ApiError) -> Self {
        Self {
            effects: Vec::new(),
            error_opt: Some(error),
        }
    }

    pub(crate) fn of(result: Result<Vec<Effect>, ApiError>) -> Self {
        result.map_or_else(Self::refused, Self::done)
    }
}

/// Counts of rooms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Census {
    /// By number of the status: failed, bootstrapping, waiting, transferring, success.
    pub by_status: [usize; 5],
    /// Announced by a peer and not opened.
    pub early: usize,
    /// Gone and remembered.
    pub tombstones: usize,
}

impl Census {
    /// Rooms that have not ended.
    pub fn open(&self) -> usize {
        let [_failed, bootstrapping, waiting, transferring, _success] = self.by_status;
        bootstrapping + waiting + transferring
    }

    /// Rooms that have ended and that the engine has not cleared, or whose writes have not.
    pub fn ended(&self) -> usize {
        let [failed, .., success] = self.by_status;
        failed + success
    }
}

pub(crate) fn unknown_room(room: Room) -> ApiError {
    ApiError::new(
        404,
        "unknown_room",
        format!("room {room} is not open on this rank; open it first"),
    )
}

/// Why a rank that drains opens no room.
pub(crate) fn draining(room: Room, reason: &str) -> ApiError {
    ApiError::new(
        503,
        "draining",
        format!("room {room} is not opened: {reason}; use another rank"),
    )
}

/// Why no further room is opened with a peer.
pub(crate) fn too_many_with_peer(peer: &str, limit: usize) -> String {
    format!(
        "{limit} rooms are open with {peer}, the limit for one peer; wait until some have ended"
    )
}

pub(crate) fn wrong_role(what: &str, role: &str) -> ApiError {
    ApiError::new(
        400,
        "wrong_role",
        format!("{what} is for {role} ranks only"),
    )
}

impl From<common::wire::KvPoll> for RoomStatus {
    fn from(poll: common::wire::KvPoll) -> Self {
        use common::wire::KvPoll;
        match poll {
            KvPoll::Failed => Self::Failed,
            KvPoll::Bootstrapping => Self::Bootstrapping,
            KvPoll::WaitingForInput => Self::WaitingForInput,
            KvPoll::Transferring => Self::Transferring,
            KvPoll::Success => Self::Success,
        }
    }
}
