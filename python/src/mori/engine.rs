//! MoRI's engine over the io engine: registered memory, peers by key, batches.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use common::wire::{EngineDesc as WireEngineDesc, MemoryDesc as WireMemoryDesc};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, FaultSpec, ForeignMemory, Region,
    RemoteRegion, Session, TransportError, TransportKind,
};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::mori::desc::{EngineDesc, MemoryDesc};
use crate::mori::enums;
use crate::mori::notify::Notifier;
use crate::mori::numbers::{number, numbers};
use crate::mori::remote::{PeerFailure, PeerFailures, Remote};
use crate::mori::session::IOEngineSession;
use crate::mori::status::{StatusCell, TransferStatus, code, wait_all};
use crate::mori::transfer::{Ranges, Route, begin};

/// How long a deregistration waits for peers to let go.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// What regions are called; callers do not say what they register.
const LABEL: &str = "memory";
/// The least that the original takes for `chunk_bytes`.
const MIN_CHUNK_BYTES: u64 = 4096;

/// MoRI's numbers of `BackendType`.
const XGMI: u32 = 1;
const RDMA: u32 = 2;
const FABRIC: u32 = 4;

const NO_BACKEND: &str = "No available backend found, create backend first";

pub(crate) fn raised(error: &TransportError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// What an engine has, for the module's objects to share.
pub(crate) struct Shared {
    engine: Engine,
    key: String,
    bind: IpAddr,
    next_transfer: AtomicU32,
    backends: Mutex<BTreeSet<u32>>,
    notifier: Mutex<Option<Arc<Notifier>>>,
    remotes: RwLock<HashMap<String, Arc<Remote>>>,
    regions: RwLock<HashMap<u32, Region>>,
    failures: Arc<PeerFailures>,
}

impl Shared {
    fn backends(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As in the original the numbers have 32 bits and begin again.
    pub(crate) fn allocate_transfer_number(&self) -> u64 {
        u64::from(self.next_transfer.fetch_add(1, Ordering::Relaxed))
    }

    /// The way from a local to a remote memory; an error has MoRI's code and text.
    fn route(&self, local: &WireMemoryDesc, far: &WireMemoryDesc) -> Result<Route, (u32, String)> {
        let remotes = self.remotes.read().unwrap_or_else(PoisonError::into_inner);
        let remote_opt = remotes.get(&far.engine_key).cloned();
        drop(remotes);
        let remote_opt = remote_opt.filter(|_| !self.backends().is_empty());
        let remote = remote_opt.ok_or_else(|| (code::ERR_BAD_STATE, NO_BACKEND.to_owned()))?;
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region_opt = regions.get(&local.id).cloned();
        drop(regions);
        let region_opt = region_opt.filter(|_| local.engine_key == self.key);
        let local = region_opt.ok_or_else(|| {
            let text = format!(
                "memory {} of engine {} is not registered with engine {}",
                local.id, local.engine_key, self.key
            );
            (code::ERR_NOT_FOUND, text)
        })?;
        let far = RemoteRegion::from_desc(far)
            .map_err(|error| (code::ERR_INVALID_ARGS, error.to_string()))?;
        let notifier = self.notifier.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Route {
            local,
            far,
            remote,
            notifier_opt: notifier.clone(),
        })
    }

    /// Begins a transfer. That the peer cannot be reached is raised; everything else goes into the
    /// status.
    fn transfer(
        &self,
        (local, far): (&WireMemoryDesc, &WireMemoryDesc),
        direction: Direction,
        ranges: &Ranges,
        number: u64,
        status: &Arc<StatusCell>,
    ) -> Result<(), TransportError> {
        match self.route(local, far) {
            Ok(route) => {
                let session = route.remote.session(&self.engine)?;
                begin(&session, &route, direction, ranges, number, status);
            }
            Err((code, message)) => status.update(code, &message),
        }
        Ok(())
    }
}

/// Moves bytes between memory that is registered here and memory of other engines.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct IOEngine {
    shared: Arc<Shared>,
    desc: WireEngineDesc,
}

/// The transfers of one batch call, as they came.
struct Batch {
    locals: Vec<Arc<WireMemoryDesc>>,
    fars: Vec<Arc<WireMemoryDesc>>,
    ranges: Vec<Ranges>,
    statuses: Vec<Arc<StatusCell>>,
    numbers: Vec<u64>,
}

impl IOEngine {
    fn run(&self, py: Python<'_>, direction: Direction, batch: &Batch) -> PyResult<()> {
        let started = py.detach(|| {
            let memories = batch.locals.iter().zip(&batch.fars);
            let transfers = memories.zip(&batch.ranges);
            let reports = batch.statuses.iter().zip(&batch.numbers);
            for (((local, far), ranges), (status, number)) in transfers.zip(reports) {
                self.shared
                    .transfer((local, far), direction, ranges, *number, status)?;
            }
            Ok(())
        });
        started.map_err(|error: TransportError| raised(&error))
    }
}

fn descs(descs: &[Bound<'_, MemoryDesc>]) -> Vec<Arc<WireMemoryDesc>> {
    let descs = descs.iter();
    descs.map(|desc| Arc::clone(&desc.get().0)).collect()
}

fn cells(statuses: &[Bound<'_, TransferStatus>]) -> Vec<Arc<StatusCell>> {
    let cells = statuses.iter().map(|status| Arc::clone(&status.get().cell));
    cells.collect()
}

#[pymethods]
#[allow(non_snake_case, reason = "the names of the original")]
#[allow(clippy::too_many_arguments, reason = "the arguments of the original")]
impl IOEngine {
    /// Starts an engine that listens at the configuration's host and port.
    #[new]
    fn new(py: Python<'_>, key: String, config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let host: String = config.getattr("host")?.extract()?;
        let port: u16 = config.getattr("port")?.extract()?;
        let bind = bind_address(&host)?;
        let mut engine_config = EngineConfig::new(key.clone(), host);
        engine_config.tcp_bind = SocketAddr::new(bind, port);
        engine_config.transports = transports()?;
        engine_config.cma_trust_descriptors = is_set("FERRY_CMA_TRUST_DESCRIPTORS");
        engine_config.fault_opt = fault()?;
        let engine = py
            .detach(|| Engine::start(engine_config))
            .map_err(|error| raised(&error))?;
        let mut desc = engine.desc();
        if let Ok(node) = std::env::var("MORI_NODE_ID") {
            desc.node_id = node;
        } else if desc.node_id.is_empty() {
            desc.node_id.clone_from(&desc.hostname);
        }
        Ok(Self {
            desc,
            shared: Arc::new(Shared {
                engine,
                key,
                bind,
                next_transfer: AtomicU32::new(0),
                backends: Mutex::default(),
                notifier: Mutex::default(),
                remotes: RwLock::default(),
                regions: RwLock::default(),
                failures: Arc::default(),
            }),
        })
    }

    /// What peers need to know of this engine.
    fn GetEngineDesc(&self) -> EngineDesc {
        let mut desc = self.desc.clone();
        let notifier = self.shared.notifier.lock();
        if let Some(notifier) = notifier.unwrap_or_else(PoisonError::into_inner).as_ref() {
            desc.extra.push(notifier.tag());
        }
        EngineDesc(desc)
    }

    /// Allows transfers. Which transport moves the bytes is found out with each peer; RDMA, XGMI
    /// and FABRIC are names that callers know. False when there was one of this type already.
    fn CreateBackend(
        &self,
        backend: &Bound<'_, PyAny>,
        config: &Bound<'_, PyAny>,
    ) -> PyResult<bool> {
        let number = enums::backend_number(backend)?;
        if ![XGMI, RDMA, FABRIC].contains(&number) {
            return Err(PyNotImplementedError::new_err(format!(
                "there is no backend of type {backend}; create one of type RDMA"
            )));
        }
        if self.shared.backends().contains(&number) {
            return Ok(false);
        }
        if number == RDMA && wants_notifications(config)? {
            let notifier = Notifier::start(&self.shared.key, self.shared.bind)?;
            let mut place = self
                .shared
                .notifier
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *place = Some(Arc::new(notifier));
        }
        Ok(self.shared.backends().insert(number))
    }

    /// Allows no more transfers by a backend.
    fn RemoveBackend(&self, backend: &Bound<'_, PyAny>) -> PyResult<()> {
        let number = enums::backend_number(backend)?;
        self.shared.backends().remove(&number);
        if number == RDMA {
            let notifier = self.shared.notifier.lock();
            *notifier.unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(())
    }

    /// Makes a peer known. A changed descriptor of a known key is that of its successor.
    fn RegisterRemoteEngine(&self, desc: &EngineDesc) {
        let mut remotes = self
            .shared
            .remotes
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if remotes
            .get(&desc.0.key)
            .is_none_or(|known| known.desc != desc.0)
        {
            let remote = Remote::new(desc.0.clone(), Arc::clone(&self.shared.failures));
            remotes.insert(desc.0.key.clone(), Arc::new(remote));
        }
    }

    /// Forgets a peer; its transfers fail from now on, open sessions stay.
    fn DeregisterRemoteEngine(&self, desc: &EngineDesc) {
        let mut remotes = self
            .shared
            .remotes
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let forgotten = remotes.remove(&desc.0.key);
        drop(remotes);
        drop(forgotten);
    }

    /// Registers `size` bytes at an address. `keeper` keeps them: it is held until the memory is
    /// deregistered and nobody uses it any more. Without one, the caller promises that the memory
    /// stays until `DeregisterMemory` has returned.
    #[pyo3(signature = (address, size, device_id, location, keeper = None))]
    fn RegisterMemory(
        &self,
        address: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        device_id: i32,
        location: &Bound<'_, PyAny>,
        keeper: Option<Py<PyAny>>,
    ) -> PyResult<MemoryDesc> {
        let location = enums::location_of(location)?;
        let (address, len) = (number(address)?, ByteLen(number(size)?));
        let keeper: Box<dyn Any + Send + Sync> = Box::new(keeper);
        // SAFETY: the keeper owns the bytes and is dropped after the last user of the region; where
        // there is none, the caller has taken that upon itself, as the documentation says.
        let memory =
            unsafe { ForeignMemory::new(address, len, keeper) }.map_err(|error| raised(&error))?;
        let region = self
            .shared
            .engine
            .register(&memory, ByteOffset(0), len, LABEL)
            .map_err(|error| raised(&error))?;
        let desc = region.desc_as(location, device_id);
        let mut regions = self
            .shared
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        regions.insert(region.id(), region);
        Ok(MemoryDesc(Arc::new(desc)))
    }

    /// Ends a registration: nobody writes there after this has returned. Memory that is not
    /// registered is left alone.
    fn DeregisterMemory(&self, py: Python<'_>, desc: &MemoryDesc) -> PyResult<()> {
        let (id, is_own) = (desc.0.id, desc.0.engine_key == self.shared.key);
        let regions = self.shared.regions.read();
        let regions = regions.unwrap_or_else(PoisonError::into_inner);
        let region_opt = regions.get(&id).filter(|_| is_own).cloned();
        drop(regions);
        let Some(region) = region_opt else {
            return Ok(());
        };
        let shared = &self.shared;
        if !py.detach(|| shared.engine.deregister(&region, DEREGISTER_TIMEOUT)) {
            return Err(PyRuntimeError::new_err(format!(
                "peers have not let go of memory {id} within {} s; it must not be freed yet, \
                 deregister it again",
                DEREGISTER_TIMEOUT.as_secs()
            )));
        }
        let regions = shared.regions.write();
        let removed = regions.unwrap_or_else(PoisonError::into_inner).remove(&id);
        drop(removed);
        Ok(())
    }

    /// A number for a transfer, from 0.
    fn AllocateTransferUniqueId(&self) -> u64 {
        self.shared.allocate_transfer_number()
    }

    /// Reads one range of remote memory.
    fn Read(
        &self,
        local: &Bound<'_, MemoryDesc>,
        local_offset: &Bound<'_, PyAny>,
        remote: &Bound<'_, MemoryDesc>,
        remote_offset: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        status: &Bound<'_, TransferStatus>,
        id: u64,
    ) -> PyResult<()> {
        let batch = single(local, local_offset, remote, remote_offset, size, status, id)?;
        self.run(local.py(), Direction::Read, &batch)
    }

    /// Writes one range of remote memory.
    fn Write(
        &self,
        local: &Bound<'_, MemoryDesc>,
        local_offset: &Bound<'_, PyAny>,
        remote: &Bound<'_, MemoryDesc>,
        remote_offset: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        status: &Bound<'_, TransferStatus>,
        id: u64,
    ) -> PyResult<()> {
        let batch = single(local, local_offset, remote, remote_offset, size, status, id)?;
        self.run(local.py(), Direction::Write, &batch)
    }

    /// Reads many ranges: one transfer for each pair of memories.
    fn BatchRead(
        &self,
        py: Python<'_>,
        locals: Vec<Bound<'_, MemoryDesc>>,
        local_offsets: Vec<Bound<'_, PyAny>>,
        remotes: Vec<Bound<'_, MemoryDesc>>,
        remote_offsets: Vec<Bound<'_, PyAny>>,
        sizes: Vec<Bound<'_, PyAny>>,
        statuses: Vec<Bound<'_, TransferStatus>>,
        ids: Vec<u64>,
    ) -> PyResult<()> {
        let offsets = (&local_offsets[..], &remote_offsets[..]);
        let batch = batch((&locals, &remotes), offsets, &sizes, &statuses, ids)?;
        self.run(py, Direction::Read, &batch)
    }

    /// Writes many ranges: one transfer for each pair of memories.
    fn BatchWrite(
        &self,
        py: Python<'_>,
        locals: Vec<Bound<'_, MemoryDesc>>,
        local_offsets: Vec<Bound<'_, PyAny>>,
        remotes: Vec<Bound<'_, MemoryDesc>>,
        remote_offsets: Vec<Bound<'_, PyAny>>,
        sizes: Vec<Bound<'_, PyAny>>,
        statuses: Vec<Bound<'_, TransferStatus>>,
        ids: Vec<u64>,
    ) -> PyResult<()> {
        let offsets = (&local_offsets[..], &remote_offsets[..]);
        let batch = batch((&locals, &remotes), offsets, &sizes, &statuses, ids)?;
        self.run(py, Direction::Write, &batch)
    }

    /// Prepares transfers between two memories; `None` when there is no way.
    fn CreateSession(
        &self,
        py: Python<'_>,
        local: &MemoryDesc,
        remote: &MemoryDesc,
    ) -> PyResult<Option<IOEngineSession>> {
        let route = match self.shared.route(&local.0, &remote.0) {
            Ok(route) => route,
            Err((code::ERR_BAD_STATE, _)) => return Ok(None),
            Err((_, message)) => return Err(PyRuntimeError::new_err(message)),
        };
        let shared = &self.shared;
        let opened: Result<Session, _> = py.detach(|| route.remote.session(&shared.engine));
        let session = opened.map_err(|error| raised(&error))?;
        Ok(Some(IOEngineSession {
            shared: Arc::clone(&self.shared),
            session,
            route,
        }))
    }

    /// Whether a peer's transfer has ended in this engine's memory, as the peer told it. The status
    /// succeeds then.
    fn PopInboundTransferStatus(
        &self,
        remote_key: String,
        id: u64,
        status: &TransferStatus,
    ) -> bool {
        let notifier = self.shared.notifier.lock();
        let notifier_opt = notifier.unwrap_or_else(PoisonError::into_inner).clone();
        let has_ended = notifier_opt.is_some_and(|notifier| notifier.has_ended(remote_key, id));
        if has_ended {
            status.cell.update(code::SUCCESS, "success");
        }
        has_ended
    }

    /// Waits for many transfers; see `wait_all`.
    #[pyo3(signature = (statuses, timeout_ms = -1))]
    fn WaitAll<'py>(
        &self,
        py: Python<'py>,
        statuses: Vec<Bound<'py, TransferStatus>>,
        timeout_ms: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let code = wait_all(py, &cells(&statuses), timeout_ms)?;
        enums::status_code(py, code)
    }

    /// The next peer that was found to be unreachable, if there is one.
    fn PopPeerFailure(&self, py: Python<'_>) -> Option<PeerFailureEvent> {
        let remotes = self.shared.remotes.read();
        let remotes: Vec<_> = remotes
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect();
        py.detach(|| remotes.iter().for_each(|remote| remote.check()));
        self.shared.failures.pop().map(PeerFailureEvent)
    }

    fn __repr__(&self) -> String {
        let desc = &self.desc;
        format!("<IOEngine {:?} at {}:{}>", desc.key, desc.host, desc.port)
    }
}

/// A peer that cannot be reached any more.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct PeerFailureEvent(PeerFailure);

#[pymethods]
impl PeerFailureEvent {
    /// Key of the peer's engine.
    #[getter]
    fn remote_engine_key(&self) -> &str {
        &self.0.remote_key
    }

    /// Why.
    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enums::reason(py, self.0.reason)
    }

    /// 0: there are no queue pairs.
    #[getter]
    fn qp_num(&self) -> u32 {
        0
    }

    /// 0: there is no port of a network card.
    #[getter]
    fn port_num(&self) -> u32 {
        0
    }

    /// The transport that failed; empty when none could be opened.
    #[getter]
    fn device_name(&self) -> &str {
        self.0.transport
    }

    /// What happened.
    #[getter]
    fn detail(&self) -> &str {
        &self.0.detail
    }
}

fn single(
    local: &Bound<'_, MemoryDesc>,
    local_offset: &Bound<'_, PyAny>,
    remote: &Bound<'_, MemoryDesc>,
    remote_offset: &Bound<'_, PyAny>,
    size: &Bound<'_, PyAny>,
    status: &Bound<'_, TransferStatus>,
    id: u64,
) -> PyResult<Batch> {
    Ok(Batch {
        locals: vec![Arc::clone(&local.get().0)],
        fars: vec![Arc::clone(&remote.get().0)],
        ranges: vec![Ranges {
            local_offsets: vec![number(local_offset)?],
            remote_offsets: vec![number(remote_offset)?],
            sizes: vec![number(size)?],
        }],
        statuses: vec![Arc::clone(&status.get().cell)],
        numbers: vec![id],
    })
}

fn batch(
    (locals, remotes): (&[Bound<'_, MemoryDesc>], &[Bound<'_, MemoryDesc>]),
    (local_offsets, remote_offsets): (&[Bound<'_, PyAny>], &[Bound<'_, PyAny>]),
    sizes: &[Bound<'_, PyAny>],
    statuses: &[Bound<'_, TransferStatus>],
    ids: Vec<u64>,
) -> PyResult<Batch> {
    let lengths = [
        locals.len(),
        local_offsets.len(),
        remotes.len(),
        remote_offsets.len(),
        statuses.len(),
        ids.len(),
    ];
    if lengths.iter().any(|length| *length != sizes.len()) {
        return Err(PyValueError::new_err(format!(
            "the lists of a batch must be equally long: local memories, local offsets, remote \
             memories, remote offsets, statuses and ids have {lengths:?} entries, sizes {}",
            sizes.len()
        )));
    }
    let lists = local_offsets.iter().zip(remote_offsets).zip(sizes);
    let ranges = lists.map(|((local, remote), sizes)| {
        Ok(Ranges {
            local_offsets: numbers(local)?,
            remote_offsets: numbers(remote)?,
            sizes: numbers(sizes)?,
        })
    });
    Ok(Batch {
        ranges: ranges.collect::<PyResult<_>>()?,
        locals: descs(locals),
        fars: descs(remotes),
        statuses: cells(statuses),
        numbers: ids,
    })
}

/// The address that a host stands for; every address of the machine when it is empty.
fn bind_address(host: &str) -> PyResult<IpAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if bare.is_empty() {
        return Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    }
    let resolved = (bare, 0).to_socket_addrs();
    let address = resolved.ok().and_then(|mut addresses| addresses.next());
    address.map(|address| address.ip()).ok_or_else(|| {
        PyRuntimeError::new_err(format!("host {host:?} is no address of this machine"))
    })
}

/// What `FERRY_TRANSPORTS` names, without `shm`: registered memory is the callers' own here, and
/// has no descriptor that another process could map.
fn transports() -> PyResult<Vec<TransportKind>> {
    let named = std::env::var("FERRY_TRANSPORTS").unwrap_or_default();
    let names = named.split(',').filter(|name| !name.is_empty());
    let kinds = names
        .map(str::parse)
        .collect::<Result<Vec<TransportKind>, _>>();
    let mut kinds =
        kinds.map_err(|error| PyRuntimeError::new_err(format!("FERRY_TRANSPORTS: {error}")))?;
    if kinds.is_empty() {
        kinds.extend(TransportKind::ALL);
    }
    kinds.retain(|kind| *kind != TransportKind::Shm);
    Ok(kinds)
}

/// A fault in one transfer, `KIND:memory[:NTH]`, to test whoever must notice.
fn fault() -> PyResult<Option<FaultSpec>> {
    let named = std::env::var("FERRY_INJECT_FAULT").unwrap_or_default();
    if named.is_empty() {
        return Ok(None);
    }
    let fault = named.parse().map(Some);
    fault.map_err(|error| PyRuntimeError::new_err(format!("FERRY_INJECT_FAULT: {error}")))
}

fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| ["1", "true"].contains(&value.as_str()))
}

/// Whether an RDMA configuration asks for notifications; refuses what the original refuses.
fn wants_notifications(config: &Bound<'_, PyAny>) -> PyResult<bool> {
    let read = |name: &str| -> PyResult<Bound<'_, PyAny>> {
        config.getattr(name).map_err(|_| {
            PyTypeError::new_err(format!("{config} is no RdmaBackendConfig: no {name}"))
        })
    };
    let wanted = match std::env::var("MORI_IO_ENABLE_NOTIFICATION") {
        Ok(value) => ["1", "true"].contains(&value.as_str()),
        Err(_) => read("enable_notification")?.is_truthy()?,
    };
    if wanted && number(&read("notif_per_qp")?)? == 0 {
        return Err(PyRuntimeError::new_err(
            "notif_per_qp must not be 0 when notifications are enabled",
        ));
    }
    let chunks = read("enable_transfer_chunking")?.is_truthy()?;
    let chunk_bytes = number(&read("chunk_bytes")?)?;
    if chunks && chunk_bytes < MIN_CHUNK_BYTES {
        return Err(PyRuntimeError::new_err(format!(
            "chunk_bytes must be at least {MIN_CHUNK_BYTES}, it is {chunk_bytes}"
        )));
    }
    Ok(wanted)
}
