//! ZeroMQ's PUSH and PULL over TCP: ZMTP 3.1 with the NULL mechanism (RFC 37/ZMTP), bounded.
//!
//! What it does: a [`PullSocket`] receives multipart messages from any number of peers, a
//! [`PushPeer`] sends them to one. Both speak with libzmq and pyzmq.
//!
//! What is absent on purpose: other socket types, security mechanisms, transports beside TCP, and
//! whatever has no bound. Frames, messages, handshakes, queues and waiting times all have limits.
//!
//! Invariants:
//! * nothing is buffered beyond the [`Limits`]: a frame's size is checked before its bytes are
//!   read;
//! * a peer that breaks the protocol ends its own connection and nobody else's;
//! * a send ends within its time, with an error if the message may not have left whole;
//! * a connection whose host acknowledges nothing any more ends within its time, on both sides;
//! * messages to one peer keep their order, and none is sent half or twice.

#![forbid(unsafe_code)]

mod codec;
mod pull;
mod push;
mod silence;

pub use codec::{CodecError, Limits};
pub use pull::{PullSocket, PullStats, Received};
pub use push::{PushOptions, PushPeer, SendError};

/// The way in for fuzz targets.
#[cfg(fuzzing)]
pub mod fuzzing {
    use crate::codec;

    /// Reads what a peer may send from its greeting on.
    pub fn stream(bytes: &[u8]) {
        let (greeting, frames) = match bytes.split_first_chunk() {
            Some((greeting, frames)) => (codec::check_greeting(greeting), frames),
            None => (Ok(()), bytes),
        };
        let limits = crate::Limits::default();
        if let (Ok(()), Ok(messages)) = (greeting, codec::decode(frames, &limits)) {
            for message in messages {
                let sent = codec::encode_message(&message);
                assert_eq!(codec::decode(&sent, &limits), Ok(vec![message]));
            }
        }
        let _ = codec::decode(bytes, &limits);
        let _ = codec::parse_command(bytes);
    }
}
