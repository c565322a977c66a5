//! What actors of this crate send each other.

use std::time::Duration;

use actix::prelude::*;
use common::ids::{Generation, Room};
use common::wire::{Frame, WireError};

use crate::api::{RoomStatus, RoomView};
use crate::error::ApiError;
use crate::rank::RankSnapshot;
use crate::rank::core::{ComponentReport, Event, Work};

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

/// A piece of work for a component actor.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct DoWork(pub Work);

/// Begin no more writes; the reports still come.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct CancelWork;

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
