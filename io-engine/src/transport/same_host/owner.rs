//! The side whose memory is written: tells its regions, and waits until they are let go.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

use crate::device::DeviceMemory;
use crate::engine::EngineInner;
use crate::error::TransportError;
use crate::foreign::AnyMemory;
use crate::memory::Memory;
use crate::region::{Region, TAG_MAGIC};
use crate::sys;
use crate::transport::same_host::{
    DevicePoolRow, MAX_DESCRIPTORS, MAX_TO_OWNER_BYTES, TableRow, ToOwner, ToWriter, Way, is_meant,
    receive, send, send_with,
};

/// How long a peer may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that has not read its messages for this long is told no more.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

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
        drop(alive);
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                // Out of descriptors, for example: the peers' connects wait in the backlog.
                tracing::warn!(%error, "a same-host connection could not be accepted");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let engine = Weak::clone(engine);
        let spawned = std::thread::Builder::new()
            .name("ferry-table".to_owned())
            .spawn(move || serve_connection(stream, &engine));
        if let Err(error) = spawned {
            tracing::warn!(%error, "a same-host connection got no thread");
        }
    }
}

fn serve_connection(stream: UnixStream, engine: &Weak<EngineInner>) {
    let connection = match welcome(stream, engine) {
        Ok(connection) => connection,
        Err(error) => return tracing::warn!(%error, "a same-host peer was refused"),
    };
    if let Err(error) = connection.answer_until_end(engine)
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        tracing::warn!(%error, "a same-host connection failed");
    }
    connection.wait_for_end();
}

fn welcome(stream: UnixStream, engine: &Weak<EngineInner>) -> io::Result<Arc<Connection>> {
    let credentials = sys::peer_credentials(&stream)?;
    if credentials.uid != sys::effective_uid() {
        let message = format!("it runs as user {}", credentials.uid);
        return Err(io::Error::other(message));
    }
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    stream.set_write_timeout(Some(SEND_TIMEOUT))?;
    let ToOwner::Hello(magic, instance, way) = receive(&stream, MAX_TO_OWNER_BYTES)? else {
        return Err(io::Error::other("it did not begin with a hello"));
    };
    let gone = || io::Error::other("the engine is gone");
    let engine = engine.upgrade().ok_or_else(gone)?;
    if !is_meant(&magic, &instance, engine.instance()) {
        return Err(io::Error::other("it asked for another engine"));
    }
    stream.set_read_timeout(None)?;
    let connection = Arc::new(Connection {
        stream,
        way,
        sending: Mutex::new(()),
        told: Mutex::default(),
        released: Condvar::new(),
    });
    engine.adopt_same_host(&connection)?;
    let secret = engine.secret();
    connection.send(&ToWriter::Welcome(
        TAG_MAGIC.to_owned(),
        ByteBuf::from(*engine.instance()),
        secret.address(),
        ByteBuf::from(*secret.bytes()),
    ))?;
    Ok(connection)
}

/// A peer that may read and write this process's regions.
pub(crate) struct Connection {
    stream: UnixStream,
    way: Way,
    /// Held while a message is sent, and from the look at the regions to the sending of their
    /// table, so that a region is never forgotten before it was told.
    sending: Mutex<()>,
    told: Mutex<Told>,
    released: Condvar,
}

/// What the peer may write to; held, so that it stays mapped.
#[derive(Default)]
struct Told {
    regions: HashMap<u32, Region>,
    is_over: bool,
}

impl Connection {
    /// Tells the peer that a region was deregistered, if it was told of it. The engine must not
    /// list the region any more.
    pub(crate) fn forget(&self, id: u32) {
        if !self.told().regions.contains_key(&id) {
            return;
        }
        if let Err(error) = self.send(&ToWriter::Forget(vec![id])) {
            // The peer sees the end, and lets everything go.
            tracing::warn!(%error, "a same-host peer could not be told of a deregistration");
            self.end();
        }
    }

    /// Waits until the peer writes no more into a region; whether that is so.
    pub(crate) fn wait_until_released(&self, id: u32, deadline: Instant) -> bool {
        let mut told = self.told();
        while told.regions.contains_key(&id) && !told.is_over {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.released.wait_timeout(told, left);
            told = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Says that nothing more will come. The peer ends its writes and then the connection.
    pub(crate) fn end(&self) {
        if let Err(error) = self.stream.shutdown(Shutdown::Write) {
            tracing::debug!(%error, "a same-host connection had ended already");
        }
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, message: &ToWriter) -> io::Result<()> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        send(&self.stream, message)
    }

    fn answer_until_end(&self, engine: &Weak<EngineInner>) -> io::Result<()> {
        loop {
            match receive(&self.stream, MAX_TO_OWNER_BYTES)? {
                ToOwner::Hello(..) => return Err(io::Error::other("a second hello")),
                ToOwner::Table(number) => self.tell(number, engine)?,
                ToOwner::Released(ids) => {
                    let mut told = self.told();
                    let released: Vec<_> = ids.iter().map(|id| told.regions.remove(id)).collect();
                    drop(told);
                    self.released.notify_all();
                    // The memory may be unmapped here, not under the lock.
                    drop(released);
                }
            }
        }
    }

    /// Tells the regions that the peer was not told of, after the pools that they are in.
    fn tell(&self, number: u64, engine: &Weak<EngineInner>) -> io::Result<()> {
        let Some(engine) = engine.upgrade() else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut told = self.told();
        let mut rows = Vec::new();
        let mut pools: BTreeMap<u64, Memory> = BTreeMap::new();
        let mut device_pools: BTreeMap<u64, DeviceMemory> = BTreeMap::new();
        for region in engine.regions() {
            if told.regions.contains_key(&region.id()) {
                continue;
            }
            let (pool, place) = match (self.way, region.memory()) {
                (Way::Process, _) => match region.address(0, 0) {
                    Ok(address) => (0, address as u64),
                    Err(_) => continue,
                },
                (Way::Mapping, AnyMemory::Pool(pool)) => {
                    pools.insert(pool.id(), pool.clone());
                    (pool.id(), region.offset())
                }
                (Way::Mapping, AnyMemory::Device(memory)) => {
                    device_pools.insert(memory.id(), memory.clone());
                    (memory.id(), region.offset())
                }
                // There is nothing to map.
                (Way::Mapping, AnyMemory::Foreign(_)) => continue,
            };
            rows.push(TableRow {
                id: region.id(),
                key: ByteBuf::from(region.key().0),
                bytes: region.len().get(),
                pool,
                place,
            });
            told.regions.insert(region.id(), region);
        }
        drop(told);
        drop(engine);
        let pools: Vec<(u64, Memory)> = pools.into_iter().collect();
        for pools in pools.chunks(MAX_DESCRIPTORS) {
            let names = pools.iter().map(|(id, pool)| (*id, pool.len().get()));
            let descriptors: Vec<_> = pools.iter().map(|(_, pool)| pool.as_fd()).collect();
            let message = ToWriter::Pools(names.collect());
            send_with(&self.stream, &message, &descriptors)?;
        }
        for (id, memory) in device_pools {
            self.tell_device_pool(id, &memory)
                .map_err(io::Error::other)?;
        }
        send(&self.stream, &ToWriter::Table(number, rows))
    }

    /// Hands a device's memory over, allocation by allocation.
    fn tell_device_pool(&self, id: u64, memory: &DeviceMemory) -> Result<(), TransportError> {
        let failed =
            |error: io::Error| TransportError::io("handing device memory to a peer", &error);
        let row = |parts, is_last, refusal| DevicePoolRow {
            pool: id,
            bytes: memory.len().get(),
            runtime: memory.device().kind().name().to_owned(),
            device: ByteBuf::new(),
            lead: 0,
            parts,
            is_last,
            refusal,
        };
        let exported = memory
            .export()
            .and_then(|exported| Ok((exported, memory.device_uuid()?)));
        let (exported, uuid) = match exported {
            Ok(exported) => exported,
            // The peer's batches into it fail with this; others go on.
            Err(error) => {
                let message = ToWriter::DevicePool(row(Vec::new(), true, error.to_string()));
                return send(&self.stream, &message).map_err(failed);
            }
        };
        let mut rest = exported.parts.as_slice();
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(MAX_DESCRIPTORS));
            let parts = now.iter().map(|part| part.len).collect();
            let message = ToWriter::DevicePool(DevicePoolRow {
                device: ByteBuf::from(uuid),
                lead: exported.lead,
                ..row(parts, later.is_empty(), String::new())
            });
            let descriptors: Vec<_> = now.iter().map(|part| part.descriptor.as_fd()).collect();
            send_with(&self.stream, &message, &descriptors).map_err(failed)?;
            rest = later;
        }
        Ok(())
    }

    /// Waits until the peer has closed its end: only then are its writes over.
    fn wait_for_end(&self) {
        self.end();
        let mut ignored = [0; 1024];
        loop {
            match (&self.stream).read(&mut ignored) {
                Ok(0) => break,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => break,
                Ok(_) | Err(_) => {}
            }
        }
        let mut told = self.told();
        told.is_over = true;
        let regions = std::mem::take(&mut told.regions);
        drop(told);
        self.released.notify_all();
        drop(regions);
    }
}
