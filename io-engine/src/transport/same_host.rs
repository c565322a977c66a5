//! Proof that a peer is on this host, and the table of its regions.
//!
//! "Same host" is never believed, because a pid and addresses can be forged and a boot id is
//! shared by containers. A session connects to the peer's Unix socket (an abstract name from its
//! descriptor): the kernel then says which process made that socket, in this process's own pid
//! namespace, and which user it runs as. A pidfd taken while the socket is open pins the process.
//! The regions, with their addresses, come over that socket, so that a descriptor from elsewhere
//! moves nothing.
//!
//! ```text
//! client: u32 length | msgpack ["FRY1", instance of the engine that is meant]
//! server: u32 length | msgpack ["FRY1", instance, [[id, key, address, bytes], ...]]
//! ```
//! Each further request of the same form gets the table anew. The server keeps the memory of every
//! region that it told of mapped until the connection ends.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::EngineInner;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Region, RegionKey, RemoteRegion, TAG_MAGIC};
use crate::sys;

/// A table of 100,000 regions is about 5 MB; nothing near this limit is real.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// A request is some 30 bytes.
const MAX_REQUEST_BYTES: usize = 256;

#[derive(Serialize, Deserialize)]
struct Request(String, serde_bytes::ByteBuf);

#[derive(Serialize, Deserialize)]
struct Reply(String, serde_bytes::ByteBuf, Vec<TableRow>);

#[derive(Clone, Serialize, Deserialize)]
struct TableRow(u32, serde_bytes::ByteBuf, u64, u64);

fn send(stream: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    let body = rmp_serde::to_vec(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&body)
}

fn receive<T: for<'de> Deserialize<'de>>(stream: &mut UnixStream, max: usize) -> io::Result<T> {
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

/// Binds the abstract socket of an engine.
pub(crate) fn bind(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Answers peers until the engine is gone. Runs on a thread of its own; each connection gets one.
pub(crate) fn serve(listener: &UnixListener, engine: &Weak<EngineInner>) {
    for stream in listener.incoming() {
        let Some(alive) = engine.upgrade().filter(|engine| !engine.is_shut_down()) else {
            return;
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                // Out of descriptors, for example: the peers' connects wait in the backlog.
                tracing::warn!(%error, "a same-host connection could not be accepted");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        drop(alive);
        let engine = Weak::clone(engine);
        let spawned = std::thread::Builder::new()
            .name("ferry-table".to_owned())
            .spawn(move || serve_connection(stream, &engine));
        if let Err(error) = spawned {
            tracing::warn!(%error, "a same-host connection got no thread");
        }
    }
}

fn serve_connection(mut stream: UnixStream, engine: &Weak<EngineInner>) {
    let credentials = match sys::peer_credentials(&stream) {
        Ok(credentials) => credentials,
        Err(error) => return tracing::warn!(%error, "a same-host peer has no credentials"),
    };
    if credentials.uid != sys::effective_uid() {
        return tracing::warn!(
            uid = credentials.uid,
            "a same-host peer of another user was refused"
        );
    }
    // Told regions stay mapped for as long as the peer may write to them.
    let mut told: HashMap<u32, Region> = HashMap::new();
    loop {
        let request: Request = match receive(&mut stream, MAX_REQUEST_BYTES) {
            Ok(request) => request,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return,
            Err(error) => return tracing::warn!(%error, "a same-host peer sent no request"),
        };
        let Some(engine) = engine.upgrade() else {
            return;
        };
        if request.0 != TAG_MAGIC || request.1.as_slice() != engine.instance() {
            return tracing::warn!("a same-host peer asked for another engine");
        }
        let mut rows = Vec::new();
        for region in engine.regions() {
            let Ok(address) = region.address(0, 0) else {
                continue;
            };
            let key = serde_bytes::ByteBuf::from(region.key().0);
            rows.push(TableRow(
                region.id(),
                key,
                address as u64,
                region.len().get(),
            ));
            told.insert(region.id(), region);
        }
        let reply = Reply(
            TAG_MAGIC.to_owned(),
            serde_bytes::ByteBuf::from(engine.instance()),
            rows,
        );
        drop(engine);
        if let Err(error) = send(&mut stream, &reply) {
            return tracing::debug!(%error, "a same-host peer left before its answer");
        }
    }
}

/// A region of a peer whose process is proved.
#[derive(Clone, Copy, Debug)]
struct Told {
    key: RegionKey,
    address: u64,
    len: u64,
}

/// A proven peer: its process and its regions.
pub(crate) struct ProvenPeer {
    pid: i32,
    pidfd: OwnedFd,
    instance: [u8; 16],
    stream: Mutex<UnixStream>,
    table: Mutex<HashMap<u32, Told>>,
}

impl ProvenPeer {
    /// Connects to a peer's socket and takes the proof.
    pub(crate) fn connect(
        name: &str,
        instance: [u8; 16],
        timeout: Duration,
    ) -> Result<Self, TransportError> {
        let failed = |what: &str| {
            let what = format!("same-host proof over @{name}: {what}");
            move |error: io::Error| TransportError::io(what, &error)
        };
        let address = SocketAddr::from_abstract_name(name).map_err(failed("name"))?;
        let stream = UnixStream::connect_addr(&address).map_err(failed("connect"))?;
        stream
            .set_read_timeout(Some(timeout))
            .map_err(failed("timeout"))?;
        stream
            .set_write_timeout(Some(timeout))
            .map_err(failed("timeout"))?;
        let credentials = sys::peer_credentials(&stream).map_err(failed("credentials"))?;
        if credentials.pid <= 0 {
            return Err(TransportError::quiesced(
                TransportErrorKind::Unreachable,
                format!("same-host proof over @{name}: the peer is in another pid namespace"),
            ));
        }
        if credentials.uid != sys::effective_uid() {
            return Err(TransportError::quiesced(
                TransportErrorKind::PermissionDenied,
                format!(
                    "same-host proof over @{name}: the peer runs as user {}, this process as {}; \
                     run both as one user, or use tcp",
                    credentials.uid,
                    sys::effective_uid()
                ),
            ));
        }
        let pidfd = sys::pidfd(credentials.pid).map_err(failed("pidfd_open"))?;
        let peer = Self {
            pid: credentials.pid,
            pidfd,
            instance,
            stream: Mutex::new(stream),
            table: Mutex::default(),
        };
        // The answer shows that the process behind the socket lived after the pidfd was taken.
        peer.refresh()?;
        Ok(peer)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn has_exited(&self) -> bool {
        sys::has_exited(self.pidfd.as_fd())
    }

    /// Where a region is in the peer, if it is registered there with this key and this long.
    pub(crate) fn address_of(&self, remote: &RemoteRegion) -> Result<u64, TransportError> {
        if let Some(told) = self.lookup(remote.id) {
            return Self::check(told, remote);
        }
        self.refresh()?;
        match self.lookup(remote.id) {
            Some(told) => Self::check(told, remote),
            None => Err(TransportError::quiesced(
                TransportErrorKind::NotRegistered,
                format!("the peer has no region {}", remote.id),
            )),
        }
    }

    /// Ends the connection; the peer then lets go of what it told.
    pub(crate) fn close(&self) {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = stream.shutdown(std::net::Shutdown::Both) {
            tracing::debug!(%error, "a same-host connection was closed already");
        }
    }

    fn check(told: Told, remote: &RemoteRegion) -> Result<u64, TransportError> {
        let matches = remote
            .key_opt
            .as_ref()
            .is_some_and(|key| told.key.matches(key));
        if !matches {
            return Err(TransportError::quiesced(
                TransportErrorKind::BadKey,
                format!("wrong key for region {}", remote.id),
            ));
        }
        if remote.len > told.len {
            return Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "region {} has {} bytes at the peer, its descriptor says {}",
                    remote.id, told.len, remote.len
                ),
            ));
        }
        Ok(told.address)
    }

    fn lookup(&self, id: u32) -> Option<Told> {
        self.table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&id)
            .copied()
    }

    fn refresh(&self) -> Result<(), TransportError> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let request = Request(
            TAG_MAGIC.to_owned(),
            serde_bytes::ByteBuf::from(self.instance),
        );
        let reply: Reply = send(&mut stream, &request)
            .and_then(|()| receive(&mut stream, MAX_MESSAGE_BYTES))
            .map_err(|error| TransportError::io("asking the peer for its regions", &error))?;
        if reply.0 != TAG_MAGIC || reply.1.as_slice() != self.instance {
            return Err(TransportError::quiesced(
                TransportErrorKind::Protocol,
                "the socket belongs to another engine than the descriptor",
            ));
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.clear();
        for TableRow(id, key, address, len) in reply.2 {
            let key = <[u8; 16]>::try_from(key.as_slice())
                .map(RegionKey)
                .map_err(|_| {
                    TransportError::quiesced(
                        TransportErrorKind::Protocol,
                        format!("the key of region {id} has not 16 bytes"),
                    )
                })?;
            table.insert(id, Told { key, address, len });
        }
        Ok(())
    }
}

impl Drop for ProvenPeer {
    fn drop(&mut self) {
        self.close();
    }
}

/// A shared handle to a proven peer.
pub(crate) type SharedPeer = Arc<ProvenPeer>;
