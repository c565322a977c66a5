//! Proof that a peer is on this host, and the table of its regions.
//!
//! "Same host" is never believed, because a pid and addresses can be forged and a boot id is
//! shared by containers. A session connects to the peer's Unix socket (an abstract name from its
//! descriptor): the kernel then says which process made that socket, in this process's own pid
//! namespace, and which user it runs as. A pidfd taken while the socket is open pins the process.
//! The regions come over the socket, so that a descriptor from elsewhere moves nothing. There are
//! two ways to reach them:
//! * by process (`cma`): regions are told with their addresses. The peer also tells where a secret
//!   lies in its memory; reading it there proves that this process is allowed to reach into that
//!   one, before the transport is chosen.
//! * by mapping (`shm`): regions are told with their place in a pool, and the pools' descriptors
//!   come beside the message. No shared pid namespace and no permission to trace is needed.
//!
//! ```text
//! each message: u32 length (little-endian) | msgpack {name: [fields]}
//! writer  Hello [magic, instance of the engine that is meant, way]
//! owner   Welcome [magic, instance, address of the secret, secret]
//! writer  Table [number]             asks for the regions that it was not told of
//! owner   Pools [[pool, bytes], ...] as many descriptors beside it; by mapping only
//! owner   DevicePool [pool, bytes, runtime, device, bytes before it, [bytes of a part, ...], last, refusal]
//!                                    as many descriptors beside it; again until the last
//! owner   Table [number, [[id, key, bytes, pool, address or offset in the pool], ...]]
//! owner   Forget [[id, ...]]         was deregistered
//! writer  Released [[id, ...]]       nothing of it is being read or written, nor will be
//! ```
//! "Writer" is the side that opened the session; it reads, too. The owner keeps every region that it told of mapped until the writer has released it or is
//! gone: the end of the connection says so, because a process's descriptors are closed after its
//! last thread has left its last system call, and a writer that lives closes its end only when
//! its writes are over. An owner that ends closes its sending direction only, and waits for that.

mod link;
mod owner;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::region::TAG_MAGIC;

pub(crate) use link::{Admitted, Link, prove};
pub(crate) use owner::{Connection, bind, serve};

/// A table of 100,000 regions is about 5 MB; nothing near this limit is real.
const MAX_TO_WRITER_BYTES: usize = 16 << 20;
/// Releases come in lists, as long as the regions that were forgotten at once.
const MAX_TO_OWNER_BYTES: usize = 1 << 20;

/// Random bytes at a fixed place of this process's memory.
pub(crate) struct Secret(Box<[u8; 16]>);

impl Secret {
    pub(crate) fn new(bytes: [u8; 16]) -> Self {
        Self(Box::new(bytes))
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.0).expose_provenance() as u64
    }

    fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// How the writer reaches the owner's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// By address, through the kernel.
    Process,
    /// By mapping its pools.
    Mapping,
}

#[derive(Serialize, Deserialize)]
enum ToOwner {
    Hello(String, ByteBuf, Way),
    Table(u64),
    Released(Vec<u32>),
}

#[derive(Serialize, Deserialize)]
enum ToWriter {
    Welcome(String, ByteBuf, u64, ByteBuf),
    Pools(Vec<(u64, u64)>),
    DevicePool(DevicePoolRow),
    Table(u64, Vec<TableRow>),
    Forget(Vec<u32>),
}

/// A device's memory, in the allocations that it lies in.
#[derive(Serialize, Deserialize)]
struct DevicePoolRow {
    pool: u64,
    bytes: u64,
    runtime: String,
    /// What tells its device from every other.
    device: ByteBuf,
    /// How far behind the beginning of the first allocation it begins.
    lead: u64,
    /// Bytes of the allocations whose descriptors are beside this.
    parts: Vec<u64>,
    is_last: bool,
    /// Why there are none; empty when there are.
    refusal: String,
}

/// A region.
#[derive(Serialize, Deserialize)]
struct TableRow {
    id: u32,
    key: ByteBuf,
    bytes: u64,
    /// By mapping: its pool; 0 otherwise.
    pool: u64,
    /// Its address, or its offset in the pool.
    place: u64,
}

/// Descriptors beside one message at most; the kernel takes 253.
const MAX_DESCRIPTORS: usize = 128;

fn framed(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut framed = length.to_le_bytes().to_vec();
    framed.extend(body);
    Ok(framed)
}

fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    stream.write_all(&framed(message)?)
}

/// Sends a message with descriptors beside its first byte.
fn send_with(
    mut stream: &UnixStream,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let framed = framed(message)?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let sent = rustix::net::sendmsg(
        stream,
        &[IoSlice::new(&framed)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    stream.write_all(framed.get(sent..).unwrap_or_default())
}

/// Receives a message and the descriptors beside it.
fn receive_with<T: for<'de> Deserialize<'de>>(
    mut stream: &UnixStream,
    max: usize,
) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut length = [0; 4];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut length)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors = descriptors.flatten().collect();
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(length.get_mut(received.bytes..).unwrap_or_default())?;
    Ok((receive_body(stream, length, max)?, descriptors))
}

fn receive<T: for<'de> Deserialize<'de>>(mut stream: &UnixStream, max: usize) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    receive_body(stream, length, max)
}

fn receive_body<T: for<'de> Deserialize<'de>>(
    mut stream: &UnixStream,
    length: [u8; 4],
    max: usize,
) -> io::Result<T> {
    let length = u32::from_le_bytes(length) as usize;
    if length > max {
        return Err(io::Error::other(format!(
            "a message of {length} bytes, at most {max} are possible"
        )));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    rmp_serde::from_slice(&body).map_err(io::Error::other)
}

fn is_meant(magic: &str, told: &[u8], instance: &[u8; 16]) -> bool {
    magic == TAG_MAGIC && told == instance
}

/// Reads bytes as either side's message.
#[cfg(fuzzing)]
pub fn read_any_message(bytes: &[u8]) {
    let _ = rmp_serde::from_slice::<ToOwner>(bytes);
    let _ = rmp_serde::from_slice::<ToWriter>(bytes);
}
