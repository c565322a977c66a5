//! `STATUS` and the five values of a room's state.

use crate::ids::Room;

/// SGLang's `KvPoll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum KvPoll {
    /// Terminal: the room failed.
    Failed = 0,
    /// The two sides are still finding each other.
    Bootstrapping = 1,
    /// Both sides are ready; the engine has not sent yet.
    WaitingForInput = 2,
    /// Bytes are moving.
    Transferring = 3,
    /// Terminal: every byte is in the decode's memory.
    Success = 4,
}

/// The decoded frames of one STATUS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The room.
    pub room: Room,
    /// The new state.
    pub poll: KvPoll,
    /// The prefill rank that reports; signed because the wire carries any integer.
    pub prefill_rank: i64,
    /// Why, when it failed; `None` when the frame is empty or absent.
    pub reason: Option<String>,
}
