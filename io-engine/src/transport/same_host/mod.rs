//! Proof that a peer is on this host, and the table of its regions.
//!
//! "Same host" is never believed, because a pid and addresses can be forged and a boot id is
//! shared by containers. A session connects to the peer's Unix socket (an abstract name from its
//! descriptor): the kernel then says which process made that socket, in this process's own pid
//! namespace, and which user it runs as. A pidfd taken while the socket is open pins the process.
//! The peer tells where a secret lies in its memory; reading it there proves that this process is
//! allowed to reach into that one, before the transport is chosen. The regions, with their
//! addresses, come over the socket, so that a descriptor from elsewhere moves nothing.
//!
//! ```text
//! each message: u32 length (little-endian) | msgpack {name: [fields]}
//! writer  Hello [magic, instance of the engine that is meant]
//! owner   Welcome [magic, instance, address of the secret, secret]
//! writer  Table [number]             asks for the regions
//! owner   Table [number, [[id, key, address, bytes], ...]]
//! owner   Forget [[id, ...]]         was deregistered
//! writer  Released [[id, ...]]       no write into it is under way, none will begin
//! ```
//! The owner keeps every region that it told of mapped until the writer has released it or is
//! gone: the end of the connection says so, because a process's descriptors are closed after its
//! last thread has left its last system call, and a writer that lives closes its end only when
//! its writes are over. An owner that ends closes its sending direction only, and waits for that.

mod link;
mod owner;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::region::TAG_MAGIC;

pub(crate) use link::{Admitted, Link};
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

#[derive(Serialize, Deserialize)]
enum ToOwner {
    Hello(String, ByteBuf),
    Table(u64),
    Released(Vec<u32>),
}

#[derive(Serialize, Deserialize)]
enum ToWriter {
    Welcome(String, ByteBuf, u64, ByteBuf),
    Table(u64, Vec<TableRow>),
    Forget(Vec<u32>),
}

/// A region: number, key, address, bytes.
#[derive(Serialize, Deserialize)]
struct TableRow(u32, ByteBuf, u64, u64);

fn send(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let body = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut framed = length.to_le_bytes().to_vec();
    framed.extend(body);
    stream.write_all(&framed)
}

fn receive<T: for<'de> Deserialize<'de>>(mut stream: &UnixStream, max: usize) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
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
