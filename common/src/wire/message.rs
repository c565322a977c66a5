//! The seven messages, and the decoder that tells them apart.

use crate::ids::{Endpoint, Room, UniqueRank};
use crate::wire::{Register, Status, TransferInfo};

/// One control message, of either direction.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlMessage {
    /// Decode to prefill, once for each pair of ranks.
    Register(Box<Register>),
    /// Decode to prefill, once for each room and prefill rank.
    TransferInfo(TransferInfo),
    /// Prefill to decode.
    Status(Status),
    /// Decode to prefill.
    Abort(Abort),
    /// Prefill to decode.
    AbortAck(AbortAck),
    /// Prefill to decode.
    AuxData(AuxData),
    /// Decode to prefill, under the policy `prefill_complete`.
    Bootstrap(Bootstrap),
}

/// `ABORT`: the decode side gives a room up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The room that is given up.
    pub room: Room,
    /// Where the acknowledgement goes; absent in messages of older releases.
    pub reply_to: Option<Endpoint>,
    /// The decode's count of aborts for the room; only then an acknowledgement is owed.
    pub generation: Option<i64>,
}

/// `ABORT_ACK`: the prefill side writes nothing more for the room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortAck {
    /// The aborted room.
    pub room: Room,
    /// The prefill rank that stopped; signed because the wire carries any integer.
    pub prefill_rank: i64,
    /// The generation of the `ABORT` that is answered.
    pub generation: Option<i64>,
}

/// `AUX_DATA`: one auxiliary row carried in the message itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxData {
    /// The room it belongs to.
    pub room: Room,
    /// Which aux buffer of the decode rank.
    pub buffer_index: u32,
    /// Which row of that buffer.
    pub aux_index: u32,
    /// The row's bytes.
    pub data: Vec<u8>,
}

/// `BOOTSTRAP`: the decode side waits for the prefill to be complete before it allocates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// The room that is waited for.
    pub room: Room,
    /// Where the status goes.
    pub reply_to: Endpoint,
}

/// The extra trailing frame between two Ferry ranks: `FRY1`, then msgpack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FerryTrailer {
    /// The sender's generation of the room.
    pub generation: Option<u64>,
    /// Opaque checksums by component, reserved for integrity checks.
    pub checksums: Vec<u64>,
}

/// A decoded message with what stood beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Incoming {
    /// The message.
    pub message: ControlMessage,
    /// The Ferry trailer, recognised by its magic wherever it stands behind the known frames.
    pub trailer: Option<FerryTrailer>,
    /// How many unknown trailing frames were ignored.
    pub ignored_frames: usize,
}

/// The prefill's rank number across its groups:
/// `tp_rank * (pp_size * cp_size) + pp_rank * cp_size + cp_rank`; `None` on overflow.
pub fn unique_rank(
    tp_rank: u32,
    pp_rank: u32,
    pp_size: u32,
    cp_rank: u32,
    cp_size: u32,
) -> Option<UniqueRank> {
    let per_tp_rank = pp_size.checked_mul(cp_size)?;
    let from_tp = tp_rank.checked_mul(per_tp_rank)?;
    let from_pp = pp_rank.checked_mul(cp_size)?;
    from_tp.checked_add(from_pp)?.checked_add(cp_rank).map(UniqueRank)
}
