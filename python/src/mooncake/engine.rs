//! The engine: registered memory and peers' memory by address, and writes between them.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, EngineEntry};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, PeerSessions, Reach, Region,
    RemoteRegion, WriteBatch, WritePair,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use transfer_actor::api::Role;
use transfer_actor::metrics::{TransferLabels, TransferMetrics};

use crate::mooncake::directory::{self, Directory};
use crate::mori::numbers::numbers;
use crate::mori::{fault, resolved, transports};
use crate::pool::borrowed;

/// How long a deregistration waits for peers to let go.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a write may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(300);

const FAILED: i32 = -1;

type Result<T> = std::result::Result<T, String>;

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A peer's engine: the sessions to it, and its memory by address.
struct Peer {
    engine: EngineDesc,
    sessions: Arc<Mutex<PeerSessions>>,
    /// With its size.
    memories: BTreeMap<u64, (u64, RemoteRegion)>,
}

/// What an engine has once it is initialized.
struct Running {
    engine: Engine,
    directory: Directory,
    regions: Arc<Mutex<BTreeMap<u64, Region>>>,
    peers: Mutex<HashMap<String, Arc<Peer>>>,
    metrics: Arc<TransferMetrics>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mooncake's engine. Results are 0, or negative for a failure, whose reason is logged.
#[pyclass(module = "ferry.mooncake_compat.engine", frozen, subclass)]
#[derive(Default)]
pub(crate) struct MooncakeEngine(OnceLock<Running>);

#[pymethods]
impl MooncakeEngine {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Starts the engine, whose peers reach it at the host; a port behind it is not used.
    fn start(&self, py: Python<'_>, host: &str) -> PyResult<i32> {
        let metrics = Arc::clone(&crate::rank::metrics()?.1);
        let (transports, fault_opt) = (transports()?, fault()?);
        let started = py.detach(|| {
            let bind = address_of(host)?;
            let key = format!("mooncake-{host}-{:016x}", getrandom::u64().map_err(said)?);
            let mut config = EngineConfig::new(key, bind.to_string());
            config.tcp_bind = SocketAddr::new(bind, 0);
            config.transports = transports;
            config.fault_opt = fault_opt;
            let engine = Engine::start(config).map_err(said)?;
            let regions = Arc::<Mutex<BTreeMap<u64, Region>>>::default();
            let (desc, known) = (engine.desc(), Arc::clone(&regions));
            let entry = move || EngineEntry {
                engine: desc.clone(),
                memories: locked(&known).values().map(Region::desc).collect(),
            };
            let directory = Directory::serve(bind, entry).map_err(said)?;
            Ok(Running {
                engine,
                directory,
                regions,
                peers: Mutex::default(),
                metrics,
            })
        });
        let is_new = started.and_then(|running| {
            let set = self.0.set(running);
            set.map_err(|_| "it is initialized already".to_owned())
        });
        Ok(result_of("initialize", is_new))
    }

    /// Port of the directory that peers ask; 0 before it is started.
    fn get_rpc_port(&self) -> u16 {
        self.0.get().map_or(0, |running| running.directory.port())
    }

    /// Registers memory of this process, which must stay until it is unregistered.
    #[pyo3(signature = (address, length, label = "memory"))]
    fn register_memory(&self, py: Python<'_>, address: u64, length: u64, label: &str) -> i32 {
        let registered = py.detach(|| self.running()?.register(address, length, label));
        result_of("register_memory", registered)
    }

    /// Ends the registration of the memory at an address.
    fn unregister_memory(&self, py: Python<'_>, address: u64) -> i32 {
        let ended = py.detach(|| self.running()?.unregister(address));
        result_of("unregister_memory", ended)
    }

    /// Writes ranges of registered memory to addresses in a peer, and waits for the end.
    fn write(
        &self,
        py: Python<'_>,
        session: &str,
        sources: &Bound<'_, PyAny>,
        destinations: &Bound<'_, PyAny>,
        lengths: &Bound<'_, PyAny>,
    ) -> PyResult<i32> {
        let (sources, destinations) = (numbers(sources)?, numbers(destinations)?);
        let lengths = numbers(lengths)?;
        if sources.len() != lengths.len() || destinations.len() != lengths.len() {
            return Err(PyValueError::new_err(format!(
                "{} buffers, {} peer addresses and {} lengths",
                sources.len(),
                destinations.len(),
                lengths.len()
            )));
        }
        let ranges = sources.into_iter().zip(destinations).zip(lengths);
        let ranges: Vec<_> = ranges
            .map(|((source, destination), length)| (source, destination, length))
            .filter(|(_, _, length)| *length > 0)
            .collect();
        let written = py.detach(|| self.running()?.write(session, &ranges));
        Ok(result_of("a write", written))
    }

    /// Asks whether a peer is there.
    fn send_probe(&self, py: Python<'_>, session: &str) -> i32 {
        let answered = py.detach(|| directory::ask(session).map(|_| ()).map_err(said));
        result_of("send_probe", answered)
    }
}

fn result_of(what: &str, result: Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            tracing::warn!(error, "{what} failed");
            FAILED
        }
    }
}

fn address_of(host: &str) -> Result<IpAddr> {
    // Callers put a port behind the host, or none.
    let with_port = host.to_socket_addrs().ok().and_then(|mut all| all.next());
    let with_port = with_port.map(|address| address.ip());
    let address = with_port.or_else(|| resolved(host));
    address.ok_or_else(|| format!("host {host:?} has no address"))
}

/// What is known of the memory around an address: where it begins and how long it is.
fn containing<T>(
    known: &BTreeMap<u64, T>,
    len: impl Fn(&T) -> u64,
    address: u64,
    length: u64,
) -> Option<(u64, &T)> {
    let (start, found) = known.range(..=address).next_back()?;
    let end = address.checked_add(length)?;
    (end <= start.checked_add(len(found))?).then_some((*start, found))
}

impl MooncakeEngine {
    fn running(&self) -> Result<&Running> {
        self.0
            .get()
            .ok_or_else(|| "it is not initialized".to_owned())
    }
}

impl Running {
    fn register(&self, address: u64, length: u64, label: &str) -> Result<()> {
        let memory = borrowed(address, ByteLen(length), None).map_err(said)?;
        let mut regions = locked(&self.regions);
        let end = address.checked_add(length).ok_or("it leaves 64 bits")?;
        let before = regions.range(..end).next_back();
        if before.is_some_and(|(start, region)| start + region.len().get() > address) {
            return Err(format!(
                "{length} bytes at {address:#x} overlap registered memory"
            ));
        }
        let region = self
            .engine
            .register(memory, ByteOffset(0), ByteLen(length), label);
        regions.insert(address, region.map_err(said)?);
        Ok(())
    }

    fn unregister(&self, address: u64) -> Result<()> {
        let region = locked(&self.regions).get(&address).cloned();
        let region = region.ok_or_else(|| format!("{address:#x} is not registered"))?;
        if !self.engine.deregister(&region, DEREGISTER_TIMEOUT) {
            return Err(format!(
                "peers have not let go of the memory at {address:#x}; it must not be freed yet"
            ));
        }
        locked(&self.regions).remove(&address);
        Ok(())
    }

    /// The peer as it is known, or as it says that it is now.
    fn peer(&self, session: &str, is_to_be_asked: bool) -> Result<Arc<Peer>> {
        let known = locked(&self.peers).get(session).cloned();
        if let Some(known) = &known
            && !is_to_be_asked
        {
            return Ok(Arc::clone(known));
        }
        let entry = directory::ask(session).map_err(said)?;
        let memories = entry.memories.iter().map(|desc| {
            let region = RemoteRegion::from_desc(desc).map_err(said)?;
            Ok((desc.data, (desc.size, region)))
        });
        let same = known.filter(|known| known.engine.key == entry.engine.key);
        let peer = Arc::new(Peer {
            memories: memories.collect::<Result<_>>()?,
            sessions: same.map_or_else(Arc::default, |known| Arc::clone(&known.sessions)),
            engine: entry.engine,
        });
        locked(&self.peers).insert(session.to_owned(), Arc::clone(&peer));
        Ok(peer)
    }

    fn write(&self, session: &str, ranges: &[(u64, u64, u64)]) -> Result<()> {
        if ranges.is_empty() {
            return Ok(());
        }
        let peer = self.peer(session, false)?;
        let (peer, pairs) = match self.pairs(&peer, ranges) {
            Ok(pairs) => (peer, pairs),
            // It may have registered more since.
            Err(_) => {
                let peer = self.peer(session, true)?;
                let pairs = self.pairs(&peer, ranges)?;
                (peer, pairs)
            }
        };
        // One batch for each transport that may serve it.
        let mut parts: BTreeMap<u8, (Reach, Vec<WritePair>)> = BTreeMap::new();
        for pair in pairs {
            let reach = Reach::of(&pair.local, &pair.remote);
            let part = parts.entry(reach.class());
            part.or_insert_with(|| (reach, Vec::new())).1.push(pair);
        }
        for (reach, pairs) in parts.into_values() {
            self.write_pairs(session, &peer, &reach, pairs)?;
        }
        Ok(())
    }

    fn write_pairs(
        &self,
        session: &str,
        peer: &Peer,
        reach: &Reach,
        pairs: Vec<WritePair>,
    ) -> Result<()> {
        let opened = locked(&peer.sessions).open(&self.engine, &peer.engine, reach);
        let opened = opened.map_err(said)?;
        let sizes = pairs.iter().map(|pair| {
            let label = pair.local.label().to_owned();
            (label, pair.runs.bytes().get(), pair.runs.ranges())
        });
        let mut components: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (label, bytes, count) in sizes {
            let sum = components.entry(label).or_default();
            *sum = (sum.0 + bytes, sum.1 + count);
        }
        let batch = WriteBatch { pairs };
        let result = opened.transfer(Direction::Write, batch, WRITE_TIMEOUT);
        for (component, sizes) in &components {
            let labels = TransferLabels {
                component,
                transport: opened.transport().name(),
                role: Role::Prefill.name(),
            };
            self.metrics.ended(labels, *sizes, &result);
        }
        if result.is_err() && !opened.is_alive() {
            // The next write asks who is there then.
            locked(&self.peers).remove(session);
        }
        result.map(|_| ()).map_err(said)
    }

    /// One pair for each local and remote memory that the ranges lie in.
    fn pairs(&self, peer: &Peer, ranges: &[(u64, u64, u64)]) -> Result<Vec<WritePair>> {
        type Found<'a> = (Region, &'a RemoteRegion, Vec<StridedRun>);
        let mut found: HashMap<(u64, u64), Found<'_>> = HashMap::new();
        let regions = locked(&self.regions);
        for (source, destination, length) in ranges {
            let local = containing(&regions, |region| region.len().get(), *source, *length);
            let (local_start, local) = local
                .ok_or_else(|| format!("{length} bytes at {source:#x} are not registered here"))?;
            let far = containing(&peer.memories, |(size, _)| *size, *destination, *length);
            let (far_start, (_, far)) = far.ok_or_else(|| {
                format!("{length} bytes at {destination:#x} are not registered at the peer")
            })?;
            let run = StridedRun::contiguous(
                ByteOffset(source - local_start),
                ByteOffset(destination - far_start),
                ByteLen(*length),
            );
            let entry = found.entry((local_start, far_start));
            let (_, _, runs) = entry.or_insert_with(|| (local.clone(), far, Vec::new()));
            runs.push(run);
        }
        drop(regions);
        let pairs = found.into_values().map(|(local, far, runs)| {
            Ok(WritePair {
                local,
                remote: far.clone(),
                runs: RunList::new(runs).map_err(said)?,
            })
        });
        pairs.collect()
    }
}
