//! The bytes of ZMTP, without I/O.
//!
//! ```text
//! greeting  ff 8*00 7f | 03 version-minor | mechanism, 20 bytes | as-server 00 | 31*00
//! frame     flags | size: u8, or u64 big-endian with flag LONG | body
//! command   a frame with flag COMMAND: name length u8, name, data
//! READY     for each property: name length u8, name, value length u32 big-endian, value
//! PING      time to live u16, context of at most 16 bytes; answered by PONG with the context
//! ```

use std::time::Duration;

/// Bytes of a greeting.
pub(crate) const GREETING_BYTES: usize = 64;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;
/// A READY has a few short properties, a PING some 20 bytes.
const MAX_COMMAND_BYTES: u64 = 4096;

/// What a socket holds at most.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of one frame.
    pub max_frame_bytes: u64,
    /// Bytes of one message over all frames.
    pub max_message_bytes: u64,
    /// Frames of one message.
    pub max_frames: usize,
    /// Time for a peer to finish its handshake.
    pub handshake_timeout: Duration,
    /// Time for a peer to finish a message that it has begun.
    pub message_timeout: Duration,
    /// A peer whose host acknowledges nothing for so long is gone.
    pub silence_timeout: Duration,
    /// Messages that were received and not taken yet.
    pub queued_messages: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_frame_bytes: 64 << 20,
            max_message_bytes: 128 << 20,
            max_frames: 4096,
            handshake_timeout: Duration::from_secs(10),
            message_timeout: Duration::from_secs(60),
            silence_timeout: Duration::from_secs(10),
            queued_messages: 1024,
        }
    }
}

/// How a peer breaks the protocol or a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The first bytes are no greeting of ZMTP 3.
    #[error("no zmtp 3 greeting")]
    Greeting,
    /// The peer wants another security mechanism.
    #[error("mechanism {0:?}, only NULL is spoken")]
    Mechanism(String),
    /// The peer is no socket that fits.
    #[error("socket type {seen:?}, expected {expected}")]
    SocketType {
        /// What the peer said.
        seen: String,
        /// What fits.
        expected: &'static str,
    },
    /// A frame's flags are not of the protocol.
    #[error("flags {0:#04x}")]
    Flags(u8),
    /// A command cannot be read.
    #[error("malformed command")]
    Command,
    /// Something is larger than allowed.
    #[error("{what} of {size}, at most {limit} are allowed")]
    TooLarge {
        /// Frame, message, frames or command.
        what: &'static str,
        /// Its size.
        size: u64,
        /// The limit.
        limit: u64,
    },
}

impl CodecError {
    /// A short fixed word.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Greeting => "greeting",
            Self::Mechanism(_) => "mechanism",
            Self::SocketType { .. } => "socket_type",
            Self::Flags(_) => "flags",
            Self::Command => "command",
            Self::TooLarge { .. } => "too_large",
        }
    }
}

/// Our greeting.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12..32].copy_from_slice(MECHANISM);
    bytes
}

/// Checks a peer's greeting. The minor version does not matter: what 3.1 adds is optional.
pub(crate) fn check_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<(), CodecError> {
    if bytes[0] != 0xff || bytes[9] != 0x7f || bytes[10] < 3 {
        return Err(CodecError::Greeting);
    }
    let mechanism = &bytes[12..32];
    if mechanism != MECHANISM {
        let name = mechanism
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        return Err(CodecError::Mechanism(
            String::from_utf8_lossy(name).into_owned(),
        ));
    }
    Ok(())
}

/// The size and kind of a frame, read from its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub is_command: bool,
    pub has_more: bool,
    pub size: u64,
}

/// Bytes of a frame's header, as the flags tell.
pub(crate) fn header_bytes(flags: u8) -> Result<usize, CodecError> {
    let known = flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) == 0;
    let command_with_more = flags & FLAG_COMMAND != 0 && flags & FLAG_MORE != 0;
    if !known || command_with_more {
        return Err(CodecError::Flags(flags));
    }
    Ok(if flags & FLAG_LONG == 0 { 2 } else { 9 })
}

/// Reads a header of [`header_bytes`] bytes.
pub(crate) fn parse_header(bytes: &[u8]) -> Result<FrameHeader, CodecError> {
    let (flags, size) = bytes.split_first().ok_or(CodecError::Flags(0))?;
    let size = match size {
        [size] => u64::from(*size),
        size => u64::from_be_bytes(size.try_into().map_err(|_| CodecError::Flags(*flags))?),
    };
    let header = FrameHeader {
        is_command: flags & FLAG_COMMAND != 0,
        has_more: flags & FLAG_MORE != 0,
        size,
    };
    if header.is_command && size > MAX_COMMAND_BYTES {
        return Err(CodecError::TooLarge {
            what: "command",
            size,
            limit: MAX_COMMAND_BYTES,
        });
    }
    Ok(header)
}

/// Appends a frame's header.
fn put_header(bytes: &mut Vec<u8>, flags: u8, size: usize) {
    match u8::try_from(size) {
        Ok(size) => bytes.extend([flags, size]),
        Err(_) => {
            bytes.push(flags | FLAG_LONG);
            bytes.extend((size as u64).to_be_bytes());
        }
    }
}

/// A message as it is sent: all its frames in one buffer.
pub(crate) fn encode_message(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (position, frame) in frames.iter().enumerate() {
        let flags = if position + 1 < frames.len() {
            FLAG_MORE
        } else {
            0
        };
        put_header(&mut bytes, flags, frame.len());
        bytes.extend_from_slice(frame);
    }
    bytes
}

fn encode_command(name: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_header(&mut bytes, FLAG_COMMAND, 1 + name.len() + data.len());
    // Names are short literals of this file.
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// Our READY.
pub(crate) fn ready(socket_type: &str) -> Vec<u8> {
    let mut data = Vec::new();
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        data.push(name.len() as u8);
        data.extend_from_slice(name.as_bytes());
        data.extend((value.len() as u32).to_be_bytes());
        data.extend_from_slice(value.as_bytes());
    }
    encode_command("READY", &data)
}

/// A command from the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Its socket type.
    Ready { socket_type: String },
    /// Wants this answered by a PONG.
    Ping { context: Vec<u8> },
    /// The peer refuses us.
    Error { reason: String },
    /// Anything else, to be ignored.
    Other,
}

/// Reads the body of a command frame.
pub(crate) fn parse_command(body: &[u8]) -> Result<Command, CodecError> {
    let (name, data) = short_text(body).ok_or(CodecError::Command)?;
    match name {
        b"READY" => {
            let mut rest = data;
            let mut socket_type = String::new();
            while !rest.is_empty() {
                let (name, behind) = short_text(rest).ok_or(CodecError::Command)?;
                let (length, behind) =
                    behind.split_first_chunk::<4>().ok_or(CodecError::Command)?;
                let length = u32::from_be_bytes(*length) as usize;
                let (value, behind) = behind.split_at_checked(length).ok_or(CodecError::Command)?;
                if name.eq_ignore_ascii_case(b"Socket-Type") {
                    socket_type = String::from_utf8_lossy(value).into_owned();
                }
                rest = behind;
            }
            Ok(Command::Ready { socket_type })
        }
        b"PING" => {
            let context = data.get(2..).ok_or(CodecError::Command)?;
            Ok(Command::Ping {
                context: context.to_vec(),
            })
        }
        b"ERROR" => {
            let (reason, _) = short_text(data).ok_or(CodecError::Command)?;
            Ok(Command::Error {
                reason: String::from_utf8_lossy(reason).into_owned(),
            })
        }
        _ => Ok(Command::Other),
    }
}

/// The answer to a PING.
pub(crate) fn pong(context: &[u8]) -> Vec<u8> {
    encode_command("PONG", context)
}

/// Text behind its length in one byte, and what follows.
fn short_text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*length))
}

/// Collects the frames of one message within the limits.
#[derive(Debug, Default)]
pub(crate) struct MessageBuilder {
    frames: Vec<Vec<u8>>,
    bytes: u64,
}

impl MessageBuilder {
    /// Checks that a frame may come, before its bytes are read.
    pub(crate) fn admit(&self, header: &FrameHeader, limits: &Limits) -> Result<usize, CodecError> {
        let too_large = |what, size, limit| Err(CodecError::TooLarge { what, size, limit });
        let whole = self.bytes.saturating_add(header.size);
        if header.size > limits.max_frame_bytes {
            return too_large("frame", header.size, limits.max_frame_bytes);
        }
        if whole > limits.max_message_bytes {
            return too_large("message", whole, limits.max_message_bytes);
        }
        if self.frames.len() >= limits.max_frames {
            return too_large(
                "number of frames",
                self.frames.len() as u64 + 1,
                limits.max_frames as u64,
            );
        }
        usize::try_from(header.size).or_else(|_| too_large("frame", header.size, usize::MAX as u64))
    }

    /// Adds an admitted frame; the whole message once its last frame is there.
    pub(crate) fn push(&mut self, frame: Vec<u8>, has_more: bool) -> Option<Vec<Vec<u8>>> {
        self.bytes += frame.len() as u64;
        self.frames.push(frame);
        if has_more {
            return None;
        }
        self.bytes = 0;
        Some(std::mem::take(&mut self.frames))
    }

    /// Whether a message has begun.
    pub(crate) fn is_partial(&self) -> bool {
        !self.frames.is_empty()
    }
}

/// Takes a stream apart as the sockets do, from a buffer.
#[cfg(any(test, fuzzing))]
pub(crate) fn decode(mut bytes: &[u8], limits: &Limits) -> Result<Vec<Vec<Vec<u8>>>, CodecError> {
    let mut builder = MessageBuilder::default();
    let mut messages = Vec::new();
    while let Some(flags) = bytes.first() {
        let Some((header, rest)) = bytes.split_at_checked(header_bytes(*flags)?) else {
            break;
        };
        let header = parse_header(header)?;
        if header.is_command {
            let Some((body, rest)) = rest.split_at_checked(header.size as usize) else {
                break;
            };
            parse_command(body)?;
            bytes = rest;
            continue;
        }
        let size = builder.admit(&header, limits)?;
        let Some((body, rest)) = rest.split_at_checked(size) else {
            break;
        };
        messages.extend(builder.push(body.to_vec(), header.has_more));
        bytes = rest;
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_greeting_is_libzmqs() {
        let bytes = greeting();
        assert_eq!(bytes[..12], [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
        assert_eq!(check_greeting(&bytes), Ok(()));
        let mut older = bytes;
        older[10] = 1;
        assert_eq!(check_greeting(&older), Err(CodecError::Greeting));
        let mut plain = bytes;
        plain[12..32].copy_from_slice(b"PLAIN\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(
            check_greeting(&plain),
            Err(CodecError::Mechanism("PLAIN".to_owned()))
        );
    }

    #[test]
    fn ready_is_read_back() {
        let bytes = ready("PUSH");
        assert_eq!(bytes[..8], [4, 39, 5, b'R', b'E', b'A', b'D', b'Y']);
        let command = parse_command(&bytes[2..]);
        assert_eq!(
            command,
            Ok(Command::Ready {
                socket_type: "PUSH".to_owned()
            })
        );
    }

    #[test]
    fn a_frame_beyond_the_limit_is_refused_by_its_header() {
        let limits = Limits {
            max_frame_bytes: 100,
            ..Limits::default()
        };
        let mut bytes = vec![FLAG_LONG];
        bytes.extend(u64::MAX.to_be_bytes());
        assert!(matches!(
            decode(&bytes, &limits),
            Err(CodecError::TooLarge { what: "frame", .. })
        ));
        let many = Limits {
            max_frames: 2,
            ..Limits::default()
        };
        let bytes = encode_message(&[vec![], vec![], vec![]]);
        assert!(matches!(
            decode(&bytes, &many),
            Err(CodecError::TooLarge { .. })
        ));
        let small = Limits {
            max_message_bytes: 5,
            ..Limits::default()
        };
        let bytes = encode_message(&[vec![0; 3], vec![0; 3]]);
        assert!(matches!(
            decode(&bytes, &small),
            Err(CodecError::TooLarge {
                what: "message",
                ..
            })
        ));
    }

    proptest! {
        #[test]
        fn messages_come_back(messages in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 1..6), 0..6)) {
            let bytes: Vec<u8> = messages.iter().flat_map(|frames| encode_message(frames)).collect();
            prop_assert_eq!(decode(&bytes, &Limits::default()), Ok(messages));
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(&bytes, &Limits::default());
            let _ = parse_command(&bytes);
        }
    }
}
