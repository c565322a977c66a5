//! The seven messages, three between Ferry ranks only, and the decoder that tells them apart.

use serde::{Deserialize, Serialize};

use crate::check::CheckMode;
use crate::ids::{Endpoint, Room, UniqueRank};
use crate::wire::checks::{self, Checked, Checks};
use crate::wire::error::{WireError, shown};
use crate::wire::frame::{self, Frame};
use crate::wire::{EngineDesc, Register, Release, Status, TransferInfo};

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
    /// Prefill to decode, and only to one whose REGISTER says that it is a Ferry rank.
    Hello(Box<Hello>),
    /// Prefill to decode, and only to one whose REGISTER asks for it.
    Checks(Box<Checks>),
    /// Decode to prefill, once for each of them.
    Checked(Checked),
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

/// `FERRY_HELLO`: a Ferry prefill rank answers the REGISTER of a Ferry decode rank. From then on
/// the decode sends trailers, and knows which process writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// The prefill rank's control socket.
    pub endpoint: Endpoint,
    /// The prefill rank's io engine.
    pub engine: EngineDesc,
    /// Number of the REGISTER that it answers.
    pub register: u64,
    /// How it lets its bytes be compared, if the REGISTER asks for that.
    pub checks: Option<CheckMode>,
}

/// The extra trailing frame between two Ferry ranks: `FRY1`, then msgpack
/// `[generation or nil, [checksum, ...], grant or nil]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FerryTrailer {
    /// The sender's generation of the room.
    pub generation: Option<u64>,
    /// One checksum for each component, in the order of the registration; may be empty.
    #[serde(default)]
    pub checksums: Vec<u64>,
    /// Beside a TRANSFER_INFO: whom it is for, and under what to write.
    #[serde(default)]
    pub grant: Option<super::Grant>,
}

/// A decoded message with what stood beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Incoming {
    /// The message.
    pub message: ControlMessage,
    /// The Ferry trailer, recognised by its magic wherever it stands behind the needed frames.
    pub trailer: Option<FerryTrailer>,
    /// How many unknown trailing frames were ignored.
    pub ignored_frames: usize,
}

/// What the first frames say a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Register,
    TransferInfo,
    Status,
    Abort,
    AbortAck,
    AuxData,
    Bootstrap,
    Hello,
    Checks,
    Checked,
}

impl Kind {
    /// SGLang tells the guarded messages apart by the second frame and by which side receives
    /// them; a STATUS is the only one with at most six frames.
    fn of(frames: &[&[u8]]) -> Option<Self> {
        let first = *frames.first()?;
        match first {
            frame::ABORT => Some(Self::Abort),
            frame::ABORT_ACK => Some(Self::AbortAck),
            frame::AUX_DATA => Some(Self::AuxData),
            frame::BOOTSTRAP => Some(Self::Bootstrap),
            frame::HELLO => Some(Self::Hello),
            frame::CHECKS => Some(Self::Checks),
            frame::CHECKED => Some(Self::Checked),
            frame::GUARD if frames.get(1) == Some(&frame::NO_ROOM) => Some(Self::Register),
            frame::GUARD if frames.len() <= MOST_STATUS_FRAMES => Some(Self::Status),
            frame::GUARD => Some(Self::TransferInfo),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Register => "register",
            Self::TransferInfo => "transfer_info",
            Self::Status => "status",
            Self::Abort => "abort",
            Self::AbortAck => "abort_ack",
            Self::AuxData => "aux_data",
            Self::Bootstrap => "bootstrap",
            Self::Hello => "hello",
            Self::Checks => "checks",
            Self::Checked => "checked",
        }
    }

    /// From which frame on a trailer can stand, and how many frames are known at most.
    const fn frames(self) -> (usize, usize) {
        match self {
            Self::Register => (Register::MIN_FRAMES, Register::KNOWN_FRAMES),
            Self::TransferInfo => (TransferInfo::MIN_FRAMES, TransferInfo::KNOWN_FRAMES),
            // The reason is free text, so a trailer is looked for behind it only.
            Self::Status => (Status::KNOWN_FRAMES, Status::KNOWN_FRAMES),
            Self::Abort => (2, 5),
            Self::AbortAck => (3, 4),
            Self::AuxData => (6, 6),
            Self::Bootstrap => (4, 4),
            Self::Hello => (5, 6),
            Self::Checks => (Checks::MIN_FRAMES, Checks::MIN_FRAMES),
            Self::Checked => (Checked::MIN_FRAMES, Checked::MIN_FRAMES),
        }
    }
}

/// Guard, room, status, rank, reason, and up to two trailing frames (a request epoch of later
/// releases, a trailer of ours): fewer than any TRANSFER_INFO has.
const MOST_STATUS_FRAMES: usize = 7;

/// A best guess of a message's kind from its first frames, for counting malformed ones.
pub fn guess_kind<T: AsRef<[u8]>>(frames: &[T]) -> &'static str {
    let frames: Vec<&[u8]> = frames.iter().map(AsRef::as_ref).collect();
    Kind::of(&frames).map_or("unknown", Kind::name)
}

/// Who sent a REGISTER or TRANSFER_INFO that could not be decoded, as far as its first frames tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableSender {
    /// The decode rank's control socket.
    pub endpoint: Endpoint,
    /// The room of a TRANSFER_INFO; a REGISTER has none.
    pub room_opt: Option<Room>,
}

/// Reads who is to be told that a message cannot be understood. Nothing else of it is to be used.
pub fn unreadable_sender<T: AsRef<[u8]>>(frames: &[T]) -> Option<UnreadableSender> {
    let frames: Vec<&[u8]> = frames.iter().map(AsRef::as_ref).collect();
    let kind = Kind::of(&frames)?;
    let [_guard, room, host, port, ..] = frames.as_slice() else {
        return None;
    };
    let room_opt = match kind {
        Kind::Register => None,
        Kind::TransferInfo => Some(frame::parse_room(room).ok()?),
        _ => return None,
    };
    let endpoint = frame::parse_endpoint(host, port).ok()?;
    Some(UnreadableSender { endpoint, room_opt })
}

/// Decodes one multipart message.
///
/// # Errors
/// A [`WireError`] that names the field and what was seen; nothing of the message is to be used.
pub fn decode_message<T: AsRef<[u8]>>(frames: &[T]) -> Result<Incoming, WireError> {
    let mut frames: Vec<&[u8]> = frames.iter().map(AsRef::as_ref).collect();
    let kind = Kind::of(&frames).ok_or_else(|| WireError::UnknownMessage {
        seen: frames
            .first()
            .map_or_else(|| "no frame".to_owned(), |first| shown(first)),
    })?;
    let (trailer_from, known) = kind.frames();
    let trailer = take_trailer(&mut frames, trailer_from);
    let message = match kind {
        Kind::Register => ControlMessage::Register(Box::new(Register::decode(&frames)?)),
        Kind::TransferInfo => ControlMessage::TransferInfo(TransferInfo::decode(&frames)?),
        Kind::Status => ControlMessage::Status(Status::decode(&frames)?),
        Kind::Abort => ControlMessage::Abort(Abort::decode(&frames)?),
        Kind::AbortAck => ControlMessage::AbortAck(AbortAck::decode(&frames)?),
        Kind::AuxData => ControlMessage::AuxData(AuxData::decode(&frames)?),
        Kind::Bootstrap => ControlMessage::Bootstrap(Bootstrap::decode(&frames)?),
        Kind::Hello => ControlMessage::Hello(Box::new(Hello::decode(&frames)?)),
        Kind::Checks => ControlMessage::Checks(Box::new(Checks::decode(&frames)?)),
        Kind::Checked => ControlMessage::Checked(Checked::decode(&frames)?),
    };
    Ok(Incoming {
        message,
        trailer,
        ignored_frames: frames.len().saturating_sub(known),
    })
}

/// Removes the first frame from `from` on that is a trailer.
fn take_trailer(frames: &mut Vec<&[u8]>, from: usize) -> Option<FerryTrailer> {
    let behind = frames.get(from..)?;
    let (position, trailer) = behind.iter().enumerate().find_map(|(position, bytes)| {
        let packed = bytes.strip_prefix(frame::FERRY_MAGIC)?;
        Some((position, rmp_serde::from_slice(packed).ok()?))
    })?;
    frames.remove(from + position);
    Some(trailer)
}

impl ControlMessage {
    /// The metric label.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Register(_) => Kind::Register.name(),
            Self::TransferInfo(_) => Kind::TransferInfo.name(),
            Self::Status(_) => Kind::Status.name(),
            Self::Abort(_) => Kind::Abort.name(),
            Self::AbortAck(_) => Kind::AbortAck.name(),
            Self::AuxData(_) => Kind::AuxData.name(),
            Self::Bootstrap(_) => Kind::Bootstrap.name(),
            Self::Hello(_) => Kind::Hello.name(),
            Self::Checks(_) => Kind::Checks.name(),
            Self::Checked(_) => Kind::Checked.name(),
        }
    }

    /// The room that the message is about; a REGISTER and a HELLO are about none.
    pub fn room(&self) -> Option<Room> {
        match self {
            Self::Register(_) | Self::Hello(_) => None,
            Self::TransferInfo(message) => Some(message.room),
            Self::Status(message) => Some(message.room),
            Self::Abort(message) => Some(message.room),
            Self::AbortAck(message) => Some(message.room),
            Self::AuxData(message) => Some(message.room),
            Self::Bootstrap(message) => Some(message.room),
            Self::Checks(message) => Some(message.room),
            Self::Checked(message) => Some(message.room),
        }
    }

    /// The number of a Ferry rank's REGISTER, which its HELLO repeats.
    pub fn register_number(&self) -> Option<u64> {
        match self {
            Self::Register(register) => register.engine.rank_tag(),
            _ => None,
        }
    }

    /// The frames, in the form of one release.
    ///
    /// # Errors
    /// [`WireError::NotInRelease`] when that release cannot carry the message.
    pub fn encode(&self, release: Release) -> Result<Vec<Frame>, WireError> {
        match self {
            Self::Register(message) => message.encode(release),
            Self::TransferInfo(message) => message.encode(release),
            Self::Status(message) => Ok(message.encode()),
            Self::Abort(message) => Ok(message.encode(release)),
            Self::AbortAck(message) => Ok(message.encode(release)),
            Self::AuxData(message) => message.encode(),
            Self::Bootstrap(message) => Ok(message.encode()),
            Self::Hello(message) => message.encode(),
            Self::Checks(message) => message.encode(),
            Self::Checked(message) => Ok(message.encode()),
        }
    }

    /// The frames for another Ferry rank: the same, and the trailer behind them.
    ///
    /// # Errors
    /// As [`ControlMessage::encode`].
    pub fn encode_with_trailer(
        &self,
        release: Release,
        trailer: &FerryTrailer,
    ) -> Result<Vec<Frame>, WireError> {
        let mut frames = self.encode(release)?;
        let mut last = frame::FERRY_MAGIC.to_vec();
        let packed = rmp_serde::to_vec(trailer).map_err(|error| WireError::Msgpack {
            what: "trailer",
            detail: error.to_string(),
        })?;
        last.extend(packed);
        frames.push(last);
        Ok(frames)
    }
}

impl Abort {
    /// An address or a generation that cannot be read is left out, as SGLang does: the room is
    /// given up all the same.
    fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_abort, room, rest @ ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "abort",
                need: 2,
                have: frames.len(),
            });
        };
        let room = frame::parse_room(room)?;
        let reply_to = match rest {
            [host, port, ..] => frame::parse_endpoint(host, port).ok(),
            _ => None,
        };
        let generation = match (&reply_to, rest.get(2)) {
            (Some(_), Some(generation)) => frame::parse_i64(generation, "generation").ok(),
            _ => None,
        };
        Ok(Self {
            room,
            reply_to,
            generation,
        })
    }

    fn encode(&self, release: Release) -> Vec<Frame> {
        let form = release.form();
        let mut frames = vec![frame::ABORT.to_vec(), frame::ascii(self.room)];
        let Some(reply_to) = self.reply_to.as_ref().filter(|_| form.abort_endpoint) else {
            return frames;
        };
        frames.push(reply_to.host.clone().into_bytes());
        frames.push(frame::ascii(reply_to.port));
        frames.extend(
            self.generation
                .filter(|_| form.abort_generation)
                .map(frame::ascii),
        );
        frames
    }
}

impl AbortAck {
    fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_ack, room, prefill_rank, rest @ ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "abort_ack",
                need: 3,
                have: frames.len(),
            });
        };
        let generation = rest
            .first()
            .map(|bytes| frame::parse_i64(bytes, "generation"));
        Ok(Self {
            room: frame::parse_room(room)?,
            prefill_rank: frame::parse_i64(prefill_rank, "prefill rank")?,
            generation: generation.transpose()?,
        })
    }

    fn encode(&self, release: Release) -> Vec<Frame> {
        let mut frames = vec![
            frame::ABORT_ACK.to_vec(),
            frame::ascii(self.room),
            frame::ascii(self.prefill_rank),
        ];
        let with_generation = release.form().abort_generation;
        frames.extend(
            self.generation
                .filter(|_| with_generation)
                .map(frame::ascii),
        );
        frames
    }
}

impl AuxData {
    fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_aux, room, buffer_index, aux_index, length, data, ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "aux_data",
                need: 6,
                have: frames.len(),
            });
        };
        let length: &[u8; 4] = (*length).try_into().map_err(|_| WireError::Number {
            what: "aux data length",
            seen: shown(length),
            expected: "four bytes, big-endian",
        })?;
        let need = u32::from_be_bytes(*length) as usize;
        if let Some(extra) = data.len().checked_sub(need).filter(|extra| *extra > 0) {
            return Err(WireError::TrailingBytes {
                what: "aux data",
                offset: need,
                extra,
            });
        }
        if need > data.len() {
            return Err(WireError::Truncated {
                what: "aux data",
                offset: 0,
                need,
                have: data.len(),
            });
        }
        Ok(Self {
            room: frame::parse_room(room)?,
            buffer_index: frame::parse_u32(buffer_index, "aux buffer index")?,
            aux_index: frame::parse_u32(aux_index, "aux index")?,
            data: data.to_vec(),
        })
    }

    fn encode(&self) -> Result<Vec<Frame>, WireError> {
        let length = u32::try_from(self.data.len()).map_err(|_| WireError::Number {
            what: "aux data length",
            seen: self.data.len().to_string(),
            expected: "a length that fits 32 bits",
        })?;
        Ok(vec![
            frame::AUX_DATA.to_vec(),
            frame::ascii(self.room),
            frame::ascii(self.buffer_index),
            frame::ascii(self.aux_index),
            length.to_be_bytes().to_vec(),
            self.data.clone(),
        ])
    }
}

impl Bootstrap {
    fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_bootstrap, room, host, port, ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "bootstrap",
                need: 4,
                have: frames.len(),
            });
        };
        Ok(Self {
            room: frame::parse_room(room)?,
            reply_to: frame::parse_endpoint(host, port)?,
        })
    }

    fn encode(&self) -> Vec<Frame> {
        vec![
            frame::BOOTSTRAP.to_vec(),
            frame::ascii(self.room),
            self.reply_to.host.clone().into_bytes(),
            frame::ascii(self.reply_to.port),
        ]
    }
}

impl Hello {
    fn decode(frames: &[&[u8]]) -> Result<Self, WireError> {
        let [_hello, host, port, engine, register, rest @ ..] = frames else {
            return Err(WireError::TooFewFrames {
                message: "hello",
                need: 5,
                have: frames.len(),
            });
        };
        Ok(Self {
            endpoint: frame::parse_endpoint(host, port)?,
            engine: EngineDesc::unpack(engine)?,
            register: frame::parse_u64(register, "register number")?,
            // A mode of later releases is none that we could ask for.
            checks: rest.first().and_then(|mode| checks::parse_mode(mode).ok()),
        })
    }

    fn encode(&self) -> Result<Vec<Frame>, WireError> {
        let mut frames = vec![
            frame::HELLO.to_vec(),
            self.endpoint.host.clone().into_bytes(),
            frame::ascii(self.endpoint.port),
            self.engine.pack()?,
            frame::ascii(self.register),
        ];
        frames.extend(self.checks.map(|mode| mode.name().as_bytes().to_vec()));
        Ok(frames)
    }
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
    from_tp
        .checked_add(from_pp)?
        .checked_add(cp_rank)
        .map(UniqueRank)
}
