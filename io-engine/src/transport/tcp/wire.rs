//! The framing of the TCP transport; both ends are Ferry engines. Integers are little-endian.
//!
//! ```text
//! hello    "FRYT" | u16 version | 16 bytes: instance of the engine that is meant
//!          | 16 bytes: instance of the engine that connects
//! welcome  "FRYT" | u16 version
//! request  u8 1: write, 2: read | u64 piece | u32 groups | u32 ranges | u64 payload bytes
//!          then for each group: u32 region | 16 bytes key | u32 ranges of it
//!          then for each range: u64 offset | u64 bytes
//!          then, of a write, the payload, range after range
//! answer   u64 piece | u8 code | u16 length | text
//!          then, of a read that was done, the payload, range after range
//! ```
//! The receiver checks the whole header (regions, keys, bounds, and that the sums agree) before it
//! reads a byte of payload into memory. It answers each piece once the payload is in place, in
//! order. A write that is refused has its payload read and thrown away, so the stream goes on.

use std::io;

use crate::region::RegionKey;
use crate::session::Direction;

/// First bytes of a connection, in both directions.
pub(crate) const MAGIC: [u8; 4] = *b"FRYT";
/// Version of this framing.
pub(crate) const VERSION: u16 = 2;
/// Bytes of a hello.
pub(crate) const HELLO_BYTES: usize = 38;
/// Bytes of a welcome.
pub(crate) const WELCOME_BYTES: usize = 6;
/// Bytes of the fixed part of a request.
pub(crate) const REQUEST_BYTES: usize = 25;
/// Bytes of one group.
pub(crate) const GROUP_BYTES: usize = 24;
/// Bytes of one range.
pub(crate) const RANGE_BYTES: usize = 16;
/// Bytes of the fixed part of an answer.
pub(crate) const ANSWER_BYTES: usize = 11;
/// Groups and ranges of one piece at most; senders stay far below.
pub(crate) const MAX_RANGES: u32 = 4096;
/// Payload of one piece at most; senders stay far below.
pub(crate) const MAX_PAYLOAD: u64 = 64 << 20;

const TYPE_WRITE: u8 = 1;
const TYPE_READ: u8 = 2;

/// What became of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerCode {
    Done,
    NotRegistered,
    BadKey,
    OutOfBounds,
    DeviceFailed,
    Unknown(u8),
}

impl AnswerCode {
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::NotRegistered => 1,
            Self::BadKey => 2,
            Self::OutOfBounds => 3,
            Self::DeviceFailed => 4,
            Self::Unknown(number) => number,
        }
    }

    pub(crate) const fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Done,
            1 => Self::NotRegistered,
            2 => Self::BadKey,
            3 => Self::OutOfBounds,
            4 => Self::DeviceFailed,
            other => Self::Unknown(other),
        }
    }
}

/// The fixed part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeader {
    pub direction: Direction,
    pub piece: u64,
    pub groups: u32,
    pub ranges: u32,
    pub payload: u64,
}

fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Reads fixed fields from the front of a slice whose length the caller has made sure of.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let (head, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or_else(|| invalid("a short field"))?;
        self.0 = rest;
        Ok(*head)
    }
}

/// Names the engine that is meant, and the one that connects.
pub(crate) fn hello(instance: &[u8; 16], own_instance: &[u8; 16]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(instance);
    bytes.extend(own_instance);
    bytes
}

/// The engine that connects.
pub(crate) fn check_hello(bytes: &[u8; HELLO_BYTES], instance: &[u8; 16]) -> io::Result<[u8; 16]> {
    let mut fields = Fields(bytes);
    if fields.take::<4>()? != MAGIC {
        return Err(invalid("no ferry hello"));
    }
    let version = u16::from_le_bytes(fields.take()?);
    if version != VERSION {
        return Err(invalid(format!(
            "framing version {version}, this engine speaks {VERSION}"
        )));
    }
    if fields.take::<16>()? != *instance {
        return Err(invalid("the hello is meant for another engine"));
    }
    fields.take()
}

pub(crate) fn welcome() -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes
}

pub(crate) fn check_welcome(bytes: &[u8; WELCOME_BYTES]) -> io::Result<()> {
    if bytes[..] != welcome()[..] {
        return Err(invalid(
            "the peer's answer is no ferry welcome of this version",
        ));
    }
    Ok(())
}

impl RequestHeader {
    pub(crate) fn put(&self, bytes: &mut Vec<u8>) {
        bytes.push(match self.direction {
            Direction::Write => TYPE_WRITE,
            Direction::Read => TYPE_READ,
        });
        bytes.extend(self.piece.to_le_bytes());
        bytes.extend(self.groups.to_le_bytes());
        bytes.extend(self.ranges.to_le_bytes());
        bytes.extend(self.payload.to_le_bytes());
    }

    /// Reads and bounds the counts, so that memory can be taken for what follows.
    pub(crate) fn parse(bytes: &[u8; REQUEST_BYTES]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        let [kind] = fields.take::<1>()?;
        let direction = match kind {
            TYPE_WRITE => Direction::Write,
            TYPE_READ => Direction::Read,
            _ => return Err(invalid(format!("message type {kind} is unknown"))),
        };
        let header = Self {
            direction,
            piece: u64::from_le_bytes(fields.take()?),
            groups: u32::from_le_bytes(fields.take()?),
            ranges: u32::from_le_bytes(fields.take()?),
            payload: u64::from_le_bytes(fields.take()?),
        };
        if header.groups > MAX_RANGES || header.ranges > MAX_RANGES || header.payload > MAX_PAYLOAD
        {
            return Err(invalid(format!("a piece beyond all limits: {header:?}")));
        }
        Ok(header)
    }
}

/// Ranges of one region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub region: u32,
    pub key: RegionKey,
    pub ranges: u32,
}

impl Group {
    pub(crate) fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.region.to_le_bytes());
        bytes.extend(self.key.0);
        bytes.extend(self.ranges.to_le_bytes());
    }

    pub(crate) fn parse(bytes: &[u8; GROUP_BYTES]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        Ok(Self {
            region: u32::from_le_bytes(fields.take()?),
            key: RegionKey(fields.take()?),
            ranges: u32::from_le_bytes(fields.take()?),
        })
    }
}

pub(crate) fn put_range(bytes: &mut Vec<u8>, offset: u64, len: u64) {
    bytes.extend(offset.to_le_bytes());
    bytes.extend(len.to_le_bytes());
}

pub(crate) fn parse_range(bytes: &[u8; RANGE_BYTES]) -> io::Result<(u64, u64)> {
    let mut fields = Fields(bytes);
    Ok((
        u64::from_le_bytes(fields.take()?),
        u64::from_le_bytes(fields.take()?),
    ))
}

pub(crate) fn answer(piece: u64, code: AnswerCode, text: &str) -> Vec<u8> {
    let text = text.get(..text.len().min(1024)).unwrap_or_default();
    let mut bytes = piece.to_le_bytes().to_vec();
    bytes.push(code.number());
    // At most 1,024, so it fits.
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes
}

/// The fixed part of an answer: piece, code, length of the text.
pub(crate) fn parse_answer(bytes: &[u8; ANSWER_BYTES]) -> io::Result<(u64, AnswerCode, usize)> {
    let mut fields = Fields(bytes);
    let piece = u64::from_le_bytes(fields.take()?);
    let [code] = fields.take::<1>()?;
    let length = u16::from_le_bytes(fields.take()?);
    Ok((piece, AnswerCode::from_number(code), usize::from(length)))
}

/// Reads bytes as everything that either side can be sent.
#[cfg(fuzzing)]
pub fn read_any(bytes: &[u8]) {
    if let Some(bytes) = bytes.first_chunk() {
        let _ = check_hello(bytes, &[0; 16]);
    }
    if let Some(bytes) = bytes.first_chunk() {
        let _ = check_welcome(bytes);
    }
    if let Some(Ok((_, _, length))) = bytes.first_chunk().map(parse_answer) {
        assert!(length <= usize::from(u16::MAX));
    }
    let Some((Ok(header), mut rest)) = bytes
        .split_first_chunk()
        .map(|(header, rest)| (RequestHeader::parse(header), rest))
    else {
        return;
    };
    let mut again = Vec::new();
    header.put(&mut again);
    assert_eq!(
        again,
        bytes[..REQUEST_BYTES],
        "what is read is what was sent"
    );
    for _ in 0..header.groups {
        let Some((group, behind)) = rest.split_first_chunk() else {
            return;
        };
        let _ = Group::parse(group);
        rest = behind;
    }
    while let Some((range, behind)) = rest.split_first_chunk() {
        let _ = parse_range(range);
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_framing_is_what_the_documentation_says() {
        let mut bytes = Vec::new();
        let header = RequestHeader {
            direction: Direction::Write,
            piece: 0x0102_0304_0506_0708,
            groups: 1,
            ranges: 2,
            payload: 0x300,
        };
        header.put(&mut bytes);
        let expected = [
            1, 8, 7, 6, 5, 4, 3, 2, 1, 1, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(RequestHeader::parse(&expected).unwrap(), header);
        let mut read = expected;
        read[0] = 2;
        let parsed = RequestHeader::parse(&read).unwrap();
        assert_eq!(parsed.direction, Direction::Read);
        assert_eq!(hello(&[9; 16], &[7; 16])[..7], *b"FRYT\x02\x00\x09");
        assert_eq!(
            answer(1, AnswerCode::BadKey, "no"),
            b"\x01\0\0\0\0\0\0\0\x02\x02\0no"
        );
    }

    #[test]
    fn headers_beyond_the_limits_are_refused() {
        let good = RequestHeader {
            direction: Direction::Write,
            piece: 0,
            groups: MAX_RANGES,
            ranges: MAX_RANGES,
            payload: MAX_PAYLOAD,
        };
        let parse = |header: RequestHeader| {
            let mut bytes = Vec::new();
            header.put(&mut bytes);
            RequestHeader::parse(bytes.first_chunk().unwrap())
        };
        assert!(parse(good).is_ok());
        for bad in [
            RequestHeader {
                groups: MAX_RANGES + 1,
                ..good
            },
            RequestHeader {
                ranges: MAX_RANGES + 1,
                ..good
            },
            RequestHeader {
                payload: MAX_PAYLOAD + 1,
                ..good
            },
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(RequestHeader::parse(&[3; REQUEST_BYTES]).is_err(), "type");
    }

    #[test]
    fn a_hello_for_another_engine_or_version_is_refused() {
        let mut bytes: [u8; HELLO_BYTES] = hello(&[9; 16], &[7; 16]).try_into().unwrap();
        assert_eq!(check_hello(&bytes, &[9; 16]).unwrap(), [7; 16]);
        assert!(check_hello(&bytes, &[8; 16]).is_err());
        bytes[4] = 1;
        assert!(check_hello(&bytes, &[9; 16]).is_err());
    }
}
