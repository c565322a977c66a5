//! `STATUS` and the five values of a room's state.

use crate::ids::Room;
use crate::wire::error::{WireError, shown};
use crate::wire::frame::{self, Frame};

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

impl KvPoll {
    /// Every value, in the order of its number.
    pub const ALL: [Self; 5] = [
        Self::Failed,
        Self::Bootstrapping,
        Self::WaitingForInput,
        Self::Transferring,
        Self::Success,
    ];

    /// The value of this number; `None` for a number that no release sends.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|poll| *poll as u64 == number)
    }

    /// Whether a room in this state stays in it.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }

    /// The metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Bootstrapping => "bootstrapping",
            Self::WaitingForInput => "waiting_for_input",
            Self::Transferring => "transferring",
            Self::Success => "success",
        }
    }
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

impl Status {
    /// Frames without which there is no STATUS, the guard included.
    pub(crate) const MIN_FRAMES: usize = 4;
    /// Frames that a STATUS can have.
    pub(crate) const KNOWN_FRAMES: usize = 5;

    pub(crate) fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_guard, room, poll, prefill_rank, rest @ ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "status",
                need: Self::MIN_FRAMES,
                have: frames.len(),
            });
        };
        let poll = frame::parse_u64(poll, "status")
            .ok()
            .and_then(KvPoll::from_number)
            .ok_or_else(|| WireError::Number {
                what: "status",
                seen: shown(poll),
                expected: "a status from 0 to 4",
            })?;
        let reason = match rest.first() {
            Some(reason) if !reason.is_empty() => Some(frame::parse_utf8(reason, "reason")?),
            _ => None,
        };
        Ok(Self {
            room: frame::parse_room(room)?,
            poll,
            prefill_rank: frame::parse_i64(prefill_rank, "prefill rank")?,
            reason,
        })
    }

    pub(crate) fn encode(&self) -> Vec<Frame> {
        vec![
            frame::GUARD.to_vec(),
            frame::ascii(self.room),
            frame::ascii(self.poll as u8),
            frame::ascii(self.prefill_rank),
            self.reason
                .as_deref()
                .unwrap_or_default()
                .as_bytes()
                .to_vec(),
        ]
    }
}
