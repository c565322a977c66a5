//! MoRI's engine over the io engine: registered memory, peers by key, batches.

use std::net::SocketAddr;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use common::wire::{EngineDesc as WireEngineDesc, MemoryLocation};
use io_engine::{
    AnyMemory, ByteLen, ByteOffset, Direction, Engine, EngineConfig, Location, RdmaOptions, Session,
};
use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::mori::desc::{EngineDesc, MemoryDesc};
use crate::mori::enums;
use crate::mori::notify::Notifier;
use crate::mori::numbers::number;
use crate::mori::outbox::Outbox;
use crate::mori::ranges::{Ranges, Runs};
use crate::mori::remote::{PeerFailureEvent, Remote};
use crate::mori::session::IOEngineSession;
use crate::mori::settings::{bind_address, fault, is_set, transports, wants_notifications};
use crate::mori::shared::{Shared, raised};
use crate::mori::status::{StatusCell, TransferStatus, code, wait_all};
use crate::mori::ways::Ways;
use crate::pool::{borrowed, foreign};

/// How long a deregistration waits for peers to let go.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(10);

/// MoRI's numbers of `BackendType`.
const XGMI: u32 = 1;
const RDMA: u32 = 2;
const FABRIC: u32 = 4;

/// Moves bytes between memory that is registered here and memory of other engines.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct IOEngine {
    shared: Arc<Shared>,
    desc: WireEngineDesc,
}

impl IOEngine {
    fn one(
        &self,
        direction: Direction,
        (local, remote): (&Bound<'_, MemoryDesc>, &Bound<'_, MemoryDesc>),
        ranges: &Ranges<'_, '_>,
        status: &TransferStatus,
        number: u64,
    ) -> PyResult<()> {
        let runs = ranges.single(direction)?;
        self.begin(local, remote, (direction, runs, number), &status.cell)
    }

    fn begin(
        &self,
        local: &Bound<'_, MemoryDesc>,
        remote: &Bound<'_, MemoryDesc>,
        transfer: (Direction, Runs, u64),
        status: &Arc<StatusCell>,
    ) -> PyResult<()> {
        match self.shared.route(&local.get().0, &remote.get().0) {
            Ok(route) => {
                let status = Arc::clone(status);
                self.shared.ask(local.py(), (route, None), transfer, status)
            }
            Err((code, message)) => {
                status.update(code, message);
                Ok(())
            }
        }
    }

    /// One transfer for each pair of memories. `status` makes or finds the status of the one at a
    /// place.
    fn many(
        &self,
        direction: Direction,
        lists: &BatchLists<'_, '_>,
        mut status: impl FnMut(usize) -> PyResult<Arc<StatusCell>>,
    ) -> PyResult<()> {
        let [locals, local_offsets, remotes, remote_offsets, sizes, ids] = lists.entries()?;
        // Everything is read before anything is begun.
        let mut transfers = Vec::with_capacity(sizes.len());
        for (place, sizes) in sizes.iter().enumerate() {
            let ranges = Ranges {
                local_offsets: &local_offsets[place],
                remote_offsets: &remote_offsets[place],
                sizes,
            };
            let runs = self.shared.read_ranges(&ranges, direction)?;
            let local = locals[place].cast::<MemoryDesc>()?;
            let remote = remotes[place].cast::<MemoryDesc>()?;
            let number = number(&ids[place])?;
            transfers.push((local, remote, (direction, runs, number), status(place)?));
        }
        for (local, remote, transfer, status) in transfers {
            self.begin(local, remote, transfer, &status)?;
        }
        Ok(())
    }

    /// As `many`, with statuses of the caller's.
    fn many_given(
        &self,
        direction: Direction,
        lists: &BatchLists<'_, '_>,
        statuses: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let cells = cells(statuses)?;
        let none = || PyValueError::new_err("the lists of a batch have more entries than statuses");
        self.many(direction, lists, |place| {
            cells.get(place).cloned().ok_or_else(none)
        })
    }
}

/// The arguments of a batch call.
struct BatchLists<'a, 'py> {
    locals: &'a Bound<'py, PyAny>,
    local_offsets: &'a Bound<'py, PyAny>,
    remotes: &'a Bound<'py, PyAny>,
    remote_offsets: &'a Bound<'py, PyAny>,
    sizes: &'a Bound<'py, PyAny>,
    ids: &'a Bound<'py, PyAny>,
}

type Entries<'py> = Vec<Bound<'py, PyAny>>;

impl<'py> BatchLists<'_, 'py> {
    /// The entries of each, equally many.
    fn entries(&self) -> PyResult<[Entries<'py>; 6]> {
        let lists = [
            entries(self.locals)?,
            entries(self.local_offsets)?,
            entries(self.remotes)?,
            entries(self.remote_offsets)?,
            entries(self.sizes)?,
            entries(self.ids)?,
        ];
        let lengths = lists.each_ref().map(Vec::len);
        match lengths.iter().all(|length| *length == lengths[0]) {
            true => Ok(lists),
            false => Err(unequal(&lengths)),
        }
    }
}

fn unequal(lengths: &[usize; 6]) -> PyErr {
    PyValueError::new_err(format!(
        "the lists of a batch must be equally long: local memories, local offsets, remote \
         memories, remote offsets, sizes and ids have {lengths:?} entries"
    ))
}

fn entries<'py>(sequence: &Bound<'py, PyAny>) -> PyResult<Entries<'py>> {
    match sequence.cast::<PyList>() {
        Ok(list) => Ok(list.iter().collect()),
        Err(_) => sequence.try_iter()?.collect(),
    }
}

fn cells(statuses: &Bound<'_, PyAny>) -> PyResult<Vec<Arc<StatusCell>>> {
    let cell = |status: Bound<'_, PyAny>| {
        let status = status.cast::<TransferStatus>()?;
        Ok(Arc::clone(&status.get().cell))
    };
    entries(statuses)?.into_iter().map(cell).collect()
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
        engine_config.rdma = RdmaOptions::from_environment().map_err(PyRuntimeError::new_err)?;
        let is_faulty = engine_config.fault_opt.is_some();
        let engine = py
            .detach(|| Engine::start(engine_config))
            .map_err(|error| raised(&error))?;
        let mut desc = engine.desc();
        if let Ok(node) = std::env::var("MORI_NODE_ID") {
            desc.node_id = node;
        } else if desc.node_id.is_empty() {
            desc.node_id.clone_from(&desc.hostname);
        }
        let metrics = Arc::clone(&crate::rank::metrics()?.1);
        let outbox = Outbox::start(engine.clone(), metrics)
            .map_err(|error| PyRuntimeError::new_err(format!("starting a thread: {error}")))?;
        Ok(Self {
            desc,
            shared: Arc::new(Shared {
                outbox,
                is_faulty,
                ways: Ways::default(),
                last_ranges: Mutex::default(),
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
        let is_new = self.shared.backends().insert(number);
        self.shared.ways.forget();
        Ok(is_new)
    }

    /// Allows no more transfers by a backend.
    fn RemoveBackend(&self, backend: &Bound<'_, PyAny>) -> PyResult<()> {
        let number = enums::backend_number(backend)?;
        self.shared.backends().remove(&number);
        if number == RDMA {
            let notifier = self.shared.notifier.lock();
            *notifier.unwrap_or_else(PoisonError::into_inner) = None;
        }
        self.shared.ways.forget();
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
            drop(remotes);
            self.shared.ways.forget();
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
        self.shared.ways.forget();
        drop(forgotten);
    }

    /// Registers `size` bytes at an address. `keeper` keeps them: it is held until the memory is
    /// deregistered and nobody uses it any more. Without one, the caller promises that the memory
    /// stays until `DeregisterMemory` has returned.
    ///
    /// Its transfers are counted under `label`.
    #[pyo3(signature = (address, size, device_id, location, keeper = None, label = "memory"))]
    fn RegisterMemory(
        &self,
        address: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        device_id: i32,
        location: &Bound<'_, PyAny>,
        keeper: Option<Py<PyAny>>,
        label: &str,
    ) -> PyResult<MemoryDesc> {
        let location = enums::location_of(location)?;
        let (address, len) = (number(address)?, ByteLen(number(size)?));
        // What is called a device's but is mapped here is host memory.
        let memory = match location == MemoryLocation::Device {
            true => borrowed(address, len, keeper),
            false => foreign(address, len, keeper).map(|memory| AnyMemory::from(&memory)),
        };
        let memory = memory.map_err(|error| raised(&error))?;
        let region = self
            .shared
            .engine
            .register(memory, ByteOffset(0), len, label)
            .map_err(|error| raised(&error))?;
        let desc = match region.location() {
            Location::Host => region.desc_as(location, device_id),
            // The driver knows the device, also where the caller does not name it.
            Location::Device { .. } => region.desc(),
        };
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
        shared.ways.forget();
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
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offset, remote_offset, size);
        self.one(Direction::Read, (local, remote), &ranges, status, id)
    }

    /// Writes one range of remote memory.
    fn Write(
        &self,
        local: &Bound<'_, MemoryDesc>,
        local_offset: &Bound<'_, PyAny>,
        remote: &Bound<'_, MemoryDesc>,
        remote_offset: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offset, remote_offset, size);
        self.one(Direction::Write, (local, remote), &ranges, status, id)
    }

    /// Reads many ranges: one transfer for each pair of memories.
    fn BatchRead(
        &self,
        locals: &Bound<'_, PyAny>,
        local_offsets: &Bound<'_, PyAny>,
        remotes: &Bound<'_, PyAny>,
        remote_offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        statuses: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let lists = batch(
            (locals, remotes),
            (local_offsets, remote_offsets),
            sizes,
            ids,
        );
        self.many_given(Direction::Read, &lists, statuses)
    }

    /// Writes many ranges: one transfer for each pair of memories.
    fn BatchWrite(
        &self,
        locals: &Bound<'_, PyAny>,
        local_offsets: &Bound<'_, PyAny>,
        remotes: &Bound<'_, PyAny>,
        remote_offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        statuses: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let lists = batch(
            (locals, remotes),
            (local_offsets, remote_offsets),
            sizes,
            ids,
        );
        self.many_given(Direction::Write, &lists, statuses)
    }

    /// As `BatchRead` and `BatchWrite`, with new statuses, which are returned; Ferry's own addition,
    /// for one call where the original's Python makes several.
    fn begin_batch<'py>(
        &self,
        is_write: bool,
        locals: &Bound<'py, PyAny>,
        local_offsets: &Bound<'py, PyAny>,
        remotes: &Bound<'py, PyAny>,
        remote_offsets: &Bound<'py, PyAny>,
        sizes: &Bound<'py, PyAny>,
        ids: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyList>> {
        let lists = batch(
            (locals, remotes),
            (local_offsets, remote_offsets),
            sizes,
            ids,
        );
        let direction = match is_write {
            true => Direction::Write,
            false => Direction::Read,
        };
        let statuses = PyList::empty(sizes.py());
        self.many(direction, &lists, |_| {
            let status = TransferStatus::new();
            let cell = Arc::clone(&status.cell);
            statuses.append(status)?;
            Ok(cell)
        })?;
        Ok(statuses)
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
        let opened: Result<Session, _> = py.detach(|| route.session(&shared.engine));
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
        statuses: &Bound<'py, PyAny>,
        timeout_ms: i64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shared = &self.shared;
        let help = |until| shared.outbox.help(until);
        let code = wait_all(py, &cells(statuses)?, timeout_ms, help)?;
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

pub(crate) fn ranges<'a, 'py>(
    local_offsets: &'a Bound<'py, PyAny>,
    remote_offsets: &'a Bound<'py, PyAny>,
    sizes: &'a Bound<'py, PyAny>,
) -> Ranges<'a, 'py> {
    Ranges {
        local_offsets,
        remote_offsets,
        sizes,
    }
}

fn batch<'a, 'py>(
    (locals, remotes): (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>),
    (local_offsets, remote_offsets): (&'a Bound<'py, PyAny>, &'a Bound<'py, PyAny>),
    sizes: &'a Bound<'py, PyAny>,
    ids: &'a Bound<'py, PyAny>,
) -> BatchLists<'a, 'py> {
    BatchLists {
        locals,
        local_offsets,
        remotes,
        remote_offsets,
        sizes,
        ids,
    }
}
