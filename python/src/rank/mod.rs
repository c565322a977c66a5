//! The rank API: an engine in Python drives a rank of this process.

mod room;
mod view;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::check::CheckMode;
use common::plan::PlannerOptions;
use common::topology::ParallelConfig;
use futures::executor::block_on;
use io_engine::{AnyMemory, Engine, EngineConfig, FaultSpec, RdmaOptions, Region, TransportKind};
use prometheus::{Registry, TextEncoder};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use transfer_actor::api::{Announce, AttachRequest, Chunk, Indices, OpenRoom, RoomView};
use transfer_actor::error::ApiError;
use transfer_actor::metrics::TransferMetrics;
use transfer_actor::rank::{Limits, RankConfig, RankHandle, Timeouts};
use transfer_actor::service::{engine_key, place_layout, register_buffers};
use zmtp::PushOptions;

use crate::mori::numbers::numbers;
use crate::pool::{Borrowed, DevicePool, Pool};
use crate::runtime;

/// How long the end of a rank waits for writes into its memory to drain.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// One registry and one set of names for all ranks of the process.
pub(crate) fn metrics() -> PyResult<&'static (Registry, Arc<TransferMetrics>)> {
    static METRICS: OnceLock<(Registry, Arc<TransferMetrics>)> = OnceLock::new();
    if let Some(metrics) = METRICS.get() {
        return Ok(metrics);
    }
    let registry = Registry::new();
    let failed = |error: prometheus::Error| PyRuntimeError::new_err(error.to_string());
    let metrics = TransferMetrics::new(&registry).map_err(failed)?;
    Ok(METRICS.get_or_init(|| (registry, Arc::new(metrics))))
}

/// The metrics of all ranks of this process, in Prometheus's text format.
#[pyfunction]
pub(crate) fn metrics_text() -> PyResult<String> {
    let (registry, _) = metrics()?;
    let mut text = String::new();
    TextEncoder::new()
        .encode_utf8(&registry.gather(), &mut text)
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    Ok(text)
}

/// A `RankError` with the stable code.
fn raised(py: Python<'_>, error: &ApiError) -> PyErr {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let class = CLASS.get_or_try_init(py, || {
        py.import("ferry.rank")?
            .getattr("RankError")
            .map(Bound::unbind)
    });
    let instance = class.and_then(|class| class.bind(py).call1((error.code, &error.message)));
    instance.map_or_else(|failed| failed, PyErr::from_value)
}

fn memory_of(pool: &Bound<'_, PyAny>) -> PyResult<AnyMemory> {
    if let Ok(pool) = pool.cast::<DevicePool>() {
        return Ok(AnyMemory::Device(pool.get().0.clone()));
    }
    match pool.cast::<Pool>() {
        Ok(pool) => Ok(AnyMemory::Pool(pool.get().0.clone())),
        Err(_) => Ok(pool.cast::<Borrowed>()?.get().0.clone()),
    }
}

fn bad_rank(message: String) -> ApiError {
    ApiError::new(400, "bad_rank", message)
}

fn indices(values: &Bound<'_, PyAny>) -> PyResult<Indices> {
    let wide = numbers(values)?.into_iter();
    let narrow = wide.map(|number| {
        i32::try_from(number)
            .map_err(|_| PyValueError::new_err(format!("index {number} does not fit 31 bits")))
    });
    Ok(Indices(narrow.collect::<PyResult<_>>()?))
}

fn indices_of_states(states: Vec<Option<Bound<'_, PyAny>>>) -> PyResult<Vec<Option<Indices>>> {
    let states = states.iter();
    states
        .map(|state| state.as_ref().map(indices).transpose())
        .collect()
}

/// How a rank runs, beside what it is.
struct Options {
    host: String,
    transports: Vec<TransportKind>,
    cma_trust_descriptors: bool,
    fault_opt: Option<FaultSpec>,
    timeouts: Timeouts,
    verify_opt: Option<CheckMode>,
}

/// A rank of this process. It ends with `stop`, or when nobody holds it any more.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct Rank {
    rooms: room::Rooms,
    handle: RankHandle,
    engine: Engine,
    regions: Vec<Region>,
}

struct Parts {
    engine: Engine,
    regions: Vec<Region>,
    handle: RankHandle,
}

async fn start(
    request: AttachRequest,
    pools: Vec<AnyMemory>,
    options: Options,
    metrics: Arc<TransferMetrics>,
) -> Result<Parts, ApiError> {
    let layout = place_layout(&request.layout, &request.pools)
        .map_err(|error| bad_rank(error.to_string()))?;
    let resolved = tokio::net::lookup_host((options.host.as_str(), 0)).await;
    let address = resolved.ok().and_then(|mut addresses| addresses.next());
    let bind = address.ok_or_else(|| {
        bad_rank(format!(
            "host {:?} is no address of this machine",
            options.host
        ))
    })?;
    let key = engine_key(&request, &options.host);
    let mut config = EngineConfig::new(key, options.host.clone());
    config.tcp_bind = bind;
    config.transports = options.transports;
    config.cma_trust_descriptors = options.cma_trust_descriptors;
    config.fault_opt = options.fault_opt;
    config.rdma = RdmaOptions::from_environment().map_err(bad_rank)?;
    let engine = Engine::start(config).map_err(|error| bad_rank(error.to_string()))?;
    let (buffers, regions) =
        register_buffers(&engine, &request.layout, layout, &pools).map_err(bad_rank)?;
    let config = RankConfig {
        role: request.role,
        parallel: ParallelConfig::from(&request.parallel),
        engine: request.engine,
        bootstrap_opt: request.bootstrap,
        advertise_host: options.host,
        control_bind: bind.ip(),
        control_ports_opt: None,
        timeouts: options.timeouts,
        limits: Limits::default(),
        planner: PlannerOptions::default(),
        push: PushOptions::default(),
        verify_opt: options.verify_opt,
    };
    let handle = RankHandle::start(config, engine.clone(), buffers, metrics).await?;
    Ok(Parts {
        engine,
        regions,
        handle,
    })
}

#[pymethods]
impl Rank {
    /// Starts a rank. `description` is the JSON of an attach request; `pools` are in its order.
    #[new]
    #[pyo3(signature = (description, pools, *, host, transports, cma_trust_descriptors,
                        bootstrap_timeout_s, waiting_timeout_s, transfer_timeout_s,
                        heartbeat_interval_s, heartbeat_misses, verify))]
    #[allow(clippy::too_many_arguments, reason = "all but two are named")]
    fn new(
        py: Python<'_>,
        description: &str,
        pools: Vec<Bound<'_, PyAny>>,
        host: String,
        transports: Vec<String>,
        cma_trust_descriptors: bool,
        bootstrap_timeout_s: f64,
        waiting_timeout_s: f64,
        transfer_timeout_s: f64,
        heartbeat_interval_s: f64,
        heartbeat_misses: u32,
        verify: &str,
    ) -> PyResult<Self> {
        let request: AttachRequest = serde_json::from_str(description)
            .map_err(|error| raised(py, &bad_rank(format!("the rank's description: {error}"))))?;
        let kinds = transports.iter().map(|name| name.parse());
        let kinds = kinds.collect::<Result<Vec<TransportKind>, _>>();
        let options = Options {
            host,
            transports: kinds.map_err(|error| raised(py, &bad_rank(error)))?,
            cma_trust_descriptors,
            fault_opt: crate::mori::fault()?,
            timeouts: Timeouts {
                bootstrap: seconds(bootstrap_timeout_s)?,
                waiting: seconds(waiting_timeout_s)?,
                transfer: seconds(transfer_timeout_s)?,
                heartbeat: seconds(heartbeat_interval_s)?,
                heartbeat_misses,
                ..Timeouts::default()
            },
            verify_opt: match verify {
                "off" => None,
                name => Some(CheckMode::from_name(name).ok_or_else(|| {
                    let message = format!("verify {name:?}: there are off, sampled and full");
                    raised(py, &bad_rank(message))
                })?),
            },
        };
        let pools = pools.iter().map(memory_of).collect::<PyResult<_>>()?;
        let metrics = Arc::clone(&metrics()?.1);
        let started = runtime::run(py, move || start(request, pools, options, metrics))?;
        let Parts {
            engine,
            regions,
            handle,
        } = started.map_err(|error| raised(py, &error))?;
        Ok(Self {
            rooms: room::Rooms::start(&handle),
            handle,
            engine,
            regions,
        })
    }

    /// Key of its io engine.
    #[getter]
    fn engine_key(&self) -> &str {
        self.handle.engine_key()
    }

    /// Its control socket, `host:port`.
    #[getter]
    fn control(&self) -> &str {
        self.handle.control()
    }

    /// Whether it runs.
    #[getter]
    fn is_alive(&self) -> bool {
        self.handle.is_alive()
    }

    /// Opens a room.
    #[pyo3(signature = (room, bootstrap, prefill_dp_rank, aux_index))]
    fn open(
        &self,
        py: Python<'_>,
        room: u64,
        bootstrap: Option<String>,
        prefill_dp_rank: Option<u32>,
        aux_index: Option<u32>,
    ) -> PyResult<view::RoomView> {
        let open = OpenRoom {
            room,
            bootstrap,
            prefill_dp_rank,
            aux_index,
        };
        self.ask(py, |handle| block_on(handle.open(open)))
    }

    /// Opens a room and follows it: no call of what is returned waits for the rank.
    #[pyo3(signature = (room, bootstrap = None, prefill_dp_rank = None))]
    fn follow(
        &self,
        room: u64,
        bootstrap: Option<String>,
        prefill_dp_rank: Option<u32>,
    ) -> room::Room {
        let open = OpenRoom {
            room,
            bootstrap,
            prefill_dp_rank,
            aux_index: None,
        };
        self.rooms.open(open)
    }

    /// Says where a room's state must land.
    fn announce(
        &self,
        py: Python<'_>,
        room: u64,
        kv_indices: &Bound<'_, PyAny>,
        aux_index: Option<u32>,
        state_indices: Vec<Option<Bound<'_, PyAny>>>,
        decode_prefix_len: Option<u64>,
    ) -> PyResult<view::RoomView> {
        let announce = Announce {
            kv_indices: indices(kv_indices)?,
            aux_index,
            state_indices: indices_of_states(state_indices)?,
            decode_prefix_len,
        };
        self.ask(py, |handle| block_on(handle.announce(room, announce)))
    }

    /// Hands over the next pages of a room.
    fn send_chunk(
        &self,
        py: Python<'_>,
        room: u64,
        kv_indices: &Bound<'_, PyAny>,
        state_indices: Vec<Option<Bound<'_, PyAny>>>,
        num_kv_tokens: Option<u64>,
        last: bool,
    ) -> PyResult<view::RoomView> {
        let chunk = Chunk {
            kv_indices: indices(kv_indices)?,
            state_indices: indices_of_states(state_indices)?,
            num_kv_tokens,
            aux_index: None,
            last,
        };
        self.ask(py, |handle| block_on(handle.send_chunk(room, chunk)))
    }

    /// Says that the prefill of a room is complete.
    fn prefill_complete(&self, py: Python<'_>, room: u64) -> PyResult<view::RoomView> {
        self.ask(py, |handle| block_on(handle.prefill_complete(room)))
    }

    /// The room once its status is at least this one or it has ended, or when the time is over.
    fn wait(
        &self,
        py: Python<'_>,
        room: u64,
        status: Option<u8>,
        timeout_s: f64,
    ) -> PyResult<view::RoomView> {
        let wanted_opt = status.map(view::status_of).transpose()?;
        let deadline = Instant::now() + seconds(timeout_s)?;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = left.min(runtime::SIGNAL_INTERVAL);
            let seen = self.ask(py, |handle| block_on(handle.wait(room, wanted_opt, slice)))?;
            if left == slice || seen.is_at_least(wanted_opt) {
                return Ok(seen);
            }
            py.check_signals()?;
        }
    }

    /// Gives a room up.
    fn abort(&self, py: Python<'_>, room: u64, reason: Option<String>) -> PyResult<view::RoomView> {
        self.ask(py, |handle| block_on(handle.abort(room, reason)))
    }

    /// Forgets a room.
    fn clear(&self, py: Python<'_>, room: u64) -> PyResult<()> {
        py.detach(|| block_on(self.handle.clear(room)))
            .map_err(|error| raised(py, &error))
    }

    /// The rank as it is now, as JSON.
    fn observe(&self, py: Python<'_>) -> PyResult<String> {
        let snapshot = py
            .detach(|| block_on(self.handle.observe()))
            .map_err(|error| raised(py, &error))?;
        serde_json::to_string(&snapshot).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Ends the rank: open rooms fail with this reason and their peers are told, writes drain.
    fn stop(&self, py: Python<'_>, reason: &str) {
        py.detach(|| {
            block_on(self.handle.stop(reason));
            let late = self.regions.iter();
            let late = late.filter(|region| !self.engine.deregister(region, DEREGISTER_TIMEOUT));
            let late = late.count();
            if late > 0 {
                tracing::warn!(
                    late,
                    "a rank has ended; peers may still write to its memory"
                );
            }
            self.engine.shutdown();
        });
    }
}

impl Rank {
    fn ask(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&RankHandle) -> Result<RoomView, ApiError> + Send,
    ) -> PyResult<view::RoomView> {
        let answer = py.detach(|| question(&self.handle));
        answer
            .map(view::RoomView)
            .map_err(|error| raised(py, &error))
    }
}

fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| *duration <= LONGEST)
        .ok_or_else(|| PyValueError::new_err(format!("{seconds} is no time in seconds")))
}

/// Longer waits overflow clocks.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);

/// Adds the classes to the extension module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(metrics_text, module)?)?;
    module.add_class::<Rank>()?;
    module.add_class::<room::Room>()?;
    module.add_class::<view::RoomView>()?;
    module.add_class::<view::TransferView>()
}
