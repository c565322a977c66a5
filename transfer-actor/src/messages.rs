//! What actors of this crate send each other.

use std::time::Duration;

use actix::prelude::*;
use common::ids::{Endpoint, Generation, Room};
use common::wire::{Frame, WireError};

use crate::api::{RoomStatus, RoomView};
use crate::error::ApiError;
use crate::rank::Exit;
use crate::rank::RankSnapshot;
use crate::rank::core::{ComponentReport, Event, Life, Work};

/// An event for the core: engine commands wait for the answer, others ignore it. The answer is the
/// room's view, if the event was about one that is still known.
#[derive(Debug, Message)]
#[rtype(result = "Result<Option<RoomView>, ApiError>")]
pub struct Handle(pub Event, pub Option<Room>);

/// A peer's frames could not be decoded.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Malformed {
    /// A guess of what it was.
    pub kind: &'static str,
    /// What was wrong.
    pub error: WireError,
    /// Who sent it.
    pub peer: std::net::SocketAddr,
    /// Who is to be told that it cannot be served.
    pub sender_opt: Option<common::wire::UnreadableSender>,
}

/// A peer's frames were decoded.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Inbound {
    /// The message.
    pub message: common::wire::ControlMessage,
    /// The decode rank's generation of the room, from a trailer.
    pub generation_opt: Option<Generation>,
    /// Unknown frames behind it.
    pub ignored_frames: usize,
}

/// A peer ended its connection.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct PeerEnded(pub Endpoint);

/// A peer's process has exited, or is not to be watched any more.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(crate) struct ProcessExited {
    /// The peer's control socket.
    pub endpoint: Endpoint,
    /// Which of its processes.
    pub life: Life,
    /// How it ended; `None` when it cannot be watched.
    pub exit_opt: Option<Exit>,
}

/// Answer when a room has reached a status, or an end, or the time is over.
#[derive(Debug, Message)]
#[rtype(result = "Result<RoomView, ApiError>")]
pub struct WaitFor {
    /// The room.
    pub room: Room,
    /// The status; at once if absent.
    pub wanted_opt: Option<RoomStatus>,
    /// How long at most.
    pub timeout: Duration,
}

/// What the rank looks like now.
#[derive(Debug, Message)]
#[rtype(result = "RankSnapshot")]
pub struct Observe;

/// End the rank: open rooms fail, component actors drain.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StopRank(pub String);

/// Take no new rooms. Answered when those that were open have ended and the engine has cleared
/// them, or time is up: how many had not ended.
#[derive(Clone, Debug, Message)]
#[rtype(result = "usize")]
pub struct DrainRank {
    /// What those are told that come now.
    pub reason: String,
    /// How long it waits.
    pub deadline: std::time::Instant,
}

/// A piece of work for a component actor.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct DoWork(pub Work);

/// Begin no more writes; the reports still come.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct CancelWork;

/// Give all work up, and report its end once, in place of the reports that are due.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct RetireComponent;

/// End a component actor.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct StopComponent;

/// A component actor's report.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Report(pub ComponentReport);

/// Frames on their way out, for tests and logs.
pub type Frames = Vec<Frame>;
