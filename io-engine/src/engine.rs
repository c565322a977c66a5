//! An engine: its registered regions, its listeners, its copying workers.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::wire::EngineDesc;

use crate::error::{TransportError, TransportErrorKind};
use crate::fault::{FaultSpec, Faulty};
use crate::memory::Memory;
use crate::region::{Region, RegionKey, TAG_MAGIC};
use crate::session::{Session, WritePair};
use crate::status::Status;
use crate::transport::cma::{Cma, Peer};
use crate::transport::local::Local;
use crate::transport::queue::Taken;
use crate::transport::same_host::{self, ProvenPeer};
use crate::transport::tcp::{self, Tcp, TcpOptions};
use crate::transport::{BatchQueue, Piece, Transport, TransportKind};

/// Threads that copy for `local` and `cma`.
const DEFAULT_COPY_THREADS: usize = 2;
/// Streams of a `tcp` session.
const DEFAULT_TCP_LANES: usize = 2;
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const DEFAULT_STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// How an engine is made.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Unique name of the engine.
    pub key: String,
    /// Address that peers are told.
    pub host: String,
    /// Where the `tcp` transport listens; port 0 takes a free one.
    pub tcp_bind: SocketAddr,
    /// Transports that may be used, in the order of choice.
    pub transports: Vec<TransportKind>,
    /// Whether the pid and addresses of a peer that is no Ferry engine are believed for `cma`.
    pub cma_trust_descriptors: bool,
    /// Threads that copy for `local` and `cma`.
    pub copy_threads: usize,
    /// Streams of a `tcp` session.
    pub tcp_lanes: usize,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long a `tcp` peer may take and answer nothing.
    pub stall_timeout: Duration,
    /// A fault in one batch, for tests of whoever must notice.
    pub fault_opt: Option<FaultSpec>,
}

impl EngineConfig {
    /// The defaults.
    pub fn new(key: impl Into<String>, host: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            host: host.into(),
            tcp_bind: SocketAddr::from((IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)),
            transports: TransportKind::ALL.to_vec(),
            cma_trust_descriptors: false,
            copy_threads: DEFAULT_COPY_THREADS,
            tcp_lanes: DEFAULT_TCP_LANES,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            stall_timeout: DEFAULT_STALL_TIMEOUT,
            fault_opt: None,
        }
    }
}

/// Registered memory and the ways to and from it. Clones share it; threads and sockets end with
/// [`Engine::shutdown`] or with the last clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<EngineInner>,
    _owner: Arc<Owner>,
}

/// Ends the engine's threads when the last handle of its users is gone; sessions and threads hold
/// [`EngineInner`] weakly or for one batch.
struct Owner(Weak<EngineInner>);

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.shutdown();
        }
    }
}

/// A destination that the copying workers write to.
pub(crate) trait CopyWork: Send + Sync {
    fn copy(&self, pairs: &[WritePair], piece: &Piece) -> Result<(), TransportError>;
}

/// One batch for the copying workers.
type CopyJob = Arc<dyn CopyWork>;

pub(crate) struct EngineInner {
    config: EngineConfig,
    key: Arc<str>,
    instance: [u8; 16],
    tcp_address: SocketAddr,
    unix_name: String,
    regions: RwLock<HashMap<u32, Region>>,
    next_region: AtomicU32,
    copies: Arc<BatchQueue<CopyJob>>,
    adopted: Mutex<Vec<TcpStream>>,
    is_shut_down: AtomicBool,
    faults: Arc<AtomicU64>,
}

/// Engines of this process, by instance: the proof for `local`.
static ENGINES: LazyLock<Mutex<HashMap<[u8; 16], Weak<EngineInner>>>> =
    LazyLock::new(Mutex::default);

fn random<const N: usize>() -> Result<[u8; N], TransportError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| {
        TransportError::quiesced(TransportErrorKind::Io, format!("no random bytes: {error}"))
    })?;
    Ok(bytes)
}

impl Engine {
    /// Binds the listeners and starts the workers.
    ///
    /// # Errors
    /// When an address cannot be bound (it is named) or a thread cannot be started.
    pub fn start(config: EngineConfig) -> Result<Self, TransportError> {
        let instance: [u8; 16] = random()?;
        let name: String = instance.iter().map(|byte| format!("{byte:02x}")).collect();
        let unix_name = format!("ferry-io-{name}");
        let listener = TcpListener::bind(config.tcp_bind).map_err(|error| {
            TransportError::io(format!("binding tcp {}", config.tcp_bind), &error)
        })?;
        let tcp_address = listener
            .local_addr()
            .map_err(|error| TransportError::io("the tcp address", &error))?;
        let unix_listener = same_host::bind(&unix_name)
            .map_err(|error| TransportError::io(format!("binding @{unix_name}"), &error))?;
        let inner = Arc::new(EngineInner {
            key: config.key.as_str().into(),
            instance,
            tcp_address,
            unix_name,
            regions: RwLock::default(),
            next_region: AtomicU32::new(0),
            copies: Arc::default(),
            adopted: Mutex::default(),
            is_shut_down: AtomicBool::new(false),
            faults: Arc::default(),
            config,
        });
        ENGINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(instance, Arc::downgrade(&inner));
        let engine = Self {
            _owner: Arc::new(Owner(Arc::downgrade(&inner))),
            inner,
        };
        for _ in 0..engine.inner.config.copy_threads.max(1) {
            let queue = Arc::clone(&engine.inner.copies);
            spawn("ferry-copy", move || copy_pieces(&queue))?;
        }
        let weak = Arc::downgrade(&engine.inner);
        if engine.inner.offers(TransportKind::Tcp) {
            let weak = Weak::clone(&weak);
            spawn("ferry-listen", move || tcp::server::serve(&listener, &weak))?;
        }
        spawn("ferry-listen", move || {
            same_host::serve(&unix_listener, &weak)
        })?;
        Ok(engine)
    }

    /// What peers are told: MoRI's elements, and a tag with what this engine offers behind them.
    pub fn desc(&self) -> EngineDesc {
        let inner = &self.inner;
        let offered = inner
            .config
            .transports
            .iter()
            .map(|kind| kind.name().into())
            .collect();
        let tag = rmpv::Value::Array(vec![
            TAG_MAGIC.into(),
            rmpv::Value::Array(offered),
            inner.tcp_address.port().into(),
            inner.unix_name.as_str().into(),
            rmpv::Value::Binary(inner.instance.to_vec()),
        ]);
        let host_file = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.trim().to_owned()
        };
        EngineDesc {
            key: inner.key.to_string(),
            node_id: host_file("/proc/sys/kernel/random/boot_id"),
            hostname: host_file("/proc/sys/kernel/hostname"),
            host: inner.config.host.clone(),
            port: inner.tcp_address.port(),
            pid: i64::from(std::process::id()),
            extra: vec![tag],
        }
    }

    /// Where the `tcp` transport listens.
    pub fn tcp_address(&self) -> SocketAddr {
        self.inner.tcp_address
    }

    /// Registers a part of a pool under a new random key. `label` is what the owner calls it.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`] when the part leaves the pool.
    pub fn register(
        &self,
        memory: &Memory,
        offset: ByteOffset,
        len: ByteLen,
        label: &str,
    ) -> Result<Region, TransportError> {
        let inner = &self.inner;
        let id = inner.next_region.fetch_add(1, Ordering::Relaxed);
        let key = RegionKey(random()?);
        let region = Region::new(memory, (offset, len), id, key, label, &inner.key)?;
        let mut regions = inner
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        regions.insert(id, region.clone());
        Ok(region)
    }

    /// Forgets a region: no write into it is let in any more, and those inside are waited for.
    /// Whether all have left within the time. Its memory stays mapped while peers of this host
    /// that were told of it are connected.
    pub fn deregister(&self, region: &Region, timeout: Duration) -> bool {
        let mut regions = self
            .inner
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        regions.remove(&region.id());
        drop(regions);
        region.close(timeout)
    }

    /// Opens a session: picks the first transport in this engine's order that both sides offer and
    /// that can be proved to reach the peer. Blocks; call it from a thread that may.
    ///
    /// # Errors
    /// [`TransportErrorKind::NoCommonTransport`] when none does, with why for each.
    pub fn connect(&self, remote: &EngineDesc) -> Result<Session, TransportError> {
        let offer = Offer::of(remote)?;
        let mut reasons = Vec::new();
        for kind in &self.inner.config.transports {
            match self.inner.open(*kind, remote, offer.as_ref()) {
                Ok(transport) => {
                    tracing::info!(peer = remote.key, transport = kind.name(), "session opened");
                    return Ok(Session::new(self.inner.with_fault(transport), &remote.key));
                }
                Err(error) => reasons.push(format!("{kind}: {error}")),
            }
        }
        Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            format!(
                "no transport reaches engine {} ({})",
                remote.key,
                reasons.join("; ")
            ),
        ))
    }

    /// Ends the engine: its listeners, connections and workers. Batches in flight fail.
    pub fn shutdown(&self) {
        self.inner.shutdown();
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), TransportError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map(|_| ())
        .map_err(|error| TransportError::io("starting a thread", &error))
}

/// What a Ferry engine offers in its descriptor's tag.
struct Offer {
    transports: Vec<String>,
    tcp_port: u16,
    unix_name: String,
    instance: [u8; 16],
}

impl Offer {
    /// `None` when the peer is no Ferry engine.
    fn of(desc: &EngineDesc) -> Result<Option<Self>, TransportError> {
        let tag = desc
            .extra
            .iter()
            .filter_map(rmpv::Value::as_array)
            .find(|elements| elements.first().and_then(rmpv::Value::as_str) == Some(TAG_MAGIC));
        let Some(elements) = tag else { return Ok(None) };
        let parsed = (|| {
            let transports = elements.get(1)?.as_array()?.iter();
            Some(Self {
                transports: transports
                    .filter_map(|kind| kind.as_str().map(str::to_owned))
                    .collect(),
                tcp_port: u16::try_from(elements.get(2)?.as_u64()?).ok()?,
                unix_name: elements.get(3)?.as_str()?.to_owned(),
                instance: elements.get(4)?.as_slice()?.try_into().ok()?,
            })
        })();
        parsed.map(Some).ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::Protocol,
                format!("the capability tag of engine {} cannot be read", desc.key),
            )
        })
    }
}

impl EngineInner {
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    pub(crate) const fn instance(&self) -> &[u8; 16] {
        &self.instance
    }

    pub(crate) fn region(&self, id: u32) -> Option<Region> {
        self.regions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&id)
            .cloned()
    }

    pub(crate) fn regions(&self) -> Vec<Region> {
        self.regions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    pub(crate) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::Acquire)
    }

    /// Remembers a connection that is to end with the engine.
    pub(crate) fn adopt(&self, stream: &TcpStream) -> std::io::Result<()> {
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        adopted.retain(|stream| crate::sys::is_connected(std::os::fd::AsFd::as_fd(stream)));
        adopted.push(stream.try_clone()?);
        Ok(())
    }

    /// Hands a batch to the copying workers.
    pub(crate) fn submit_copy(&self, work: CopyJob, pairs: Vec<WritePair>, status: Arc<Status>) {
        self.copies.push(pairs, status, work);
    }

    fn offers(&self, kind: TransportKind) -> bool {
        self.config.transports.contains(&kind)
    }

    fn with_fault(&self, transport: Arc<dyn Transport>) -> Arc<dyn Transport> {
        match self.config.fault_opt.clone() {
            Some(spec) => Arc::new(Faulty::new(transport, spec, Arc::clone(&self.faults))),
            None => transport,
        }
    }

    fn open(
        self: &Arc<Self>,
        kind: TransportKind,
        remote: &EngineDesc,
        offer: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let none = |why: &str| TransportError::quiesced(TransportErrorKind::NoCommonTransport, why);
        let Some(offer) = offer else {
            return match kind {
                TransportKind::Cma if self.config.cma_trust_descriptors => {
                    self.open_trusted(remote)
                }
                TransportKind::Cma => Err(none(
                    "the peer is no ferry engine; --cma-trust-descriptors would believe its pid and addresses",
                )),
                TransportKind::Local | TransportKind::Tcp => {
                    Err(none("the peer is no ferry engine"))
                }
            };
        };
        if !offer.transports.iter().any(|name| name == kind.name()) {
            return Err(none("the peer does not offer it"));
        }
        match kind {
            TransportKind::Local => {
                let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
                let peer = engines.get(&offer.instance).and_then(Weak::upgrade);
                drop(engines);
                let peer = peer.ok_or_else(|| none("the peer is in another process"))?;
                Ok(Arc::new(Local::new(self, &peer)))
            }
            TransportKind::Cma => {
                let timeout = self.config.connect_timeout;
                let peer = ProvenPeer::connect(&offer.unix_name, offer.instance, timeout)?;
                Ok(Arc::new(Cma::new(self, Peer::Proven(Arc::new(peer)))))
            }
            TransportKind::Tcp => {
                let options = TcpOptions {
                    lanes: self.config.tcp_lanes,
                    connect_timeout: self.config.connect_timeout,
                    stall_timeout: self.config.stall_timeout,
                };
                let tcp = Tcp::connect(&remote.host, offer.tcp_port, &offer.instance, &options)?;
                Ok(Arc::new(tcp))
            }
        }
    }

    fn open_trusted(
        self: &Arc<Self>,
        remote: &EngineDesc,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let pid = i32::try_from(remote.pid)
            .ok()
            .filter(|pid| *pid > 0)
            .ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::Protocol,
                    format!("the peer's pid {} is no pid", remote.pid),
                )
            })?;
        tracing::warn!(
            peer = remote.key,
            pid,
            "the peer's pid and addresses are believed"
        );
        Ok(Arc::new(Cma::new(self, Peer::Trusted { pid })))
    }

    fn shutdown(&self) {
        if self.is_shut_down.swap(true, Ordering::AcqRel) {
            return;
        }
        ENGINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.instance);
        self.copies.close(&TransportError::quiesced(
            TransportErrorKind::Closed,
            "the engine was shut down",
        ));
        let adopted =
            std::mem::take(&mut *self.adopted.lock().unwrap_or_else(PoisonError::into_inner));
        for stream in adopted {
            // The peer may have closed it already; either way its thread ends.
            let _ = stream.shutdown(Shutdown::Both);
        }
        // The listeners' threads block in accept: a connection makes them look at the flag.
        let wake = match self.tcp_address.ip() {
            ip if ip.is_unspecified() && ip.is_ipv6() => {
                SocketAddr::from(([0u16, 0, 0, 0, 0, 0, 0, 1], self.tcp_address.port()))
            }
            ip if ip.is_unspecified() => {
                SocketAddr::from(([127, 0, 0, 1], self.tcp_address.port()))
            }
            _ => self.tcp_address,
        };
        if self.offers(TransportKind::Tcp)
            && let Err(error) = TcpStream::connect_timeout(&wake, Duration::from_secs(1))
        {
            tracing::debug!(%error, "the tcp listener could not be woken");
        }
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&self.unix_name);
        if let Err(error) = address.and_then(|address| UnixStream::connect_addr(&address)) {
            tracing::debug!(%error, "the same-host listener could not be woken");
        }
    }
}

/// A worker of `local` and `cma`; one queue serves all sessions of an engine.
fn copy_pieces(queue: &BatchQueue<CopyJob>) {
    let mut piece = Piece::default();
    while let Taken::Piece {
        pairs,
        status,
        work,
    } = queue.take(&mut piece, None)
    {
        // A panic is a fault of ours, but it must fail its batch, not hang it.
        let copied = catch_unwind(AssertUnwindSafe(|| work.copy(&pairs, &piece)));
        status.piece_done(copied.unwrap_or_else(|_| {
            Err(TransportError::unproved(
                TransportErrorKind::Io,
                "a copying worker panicked",
            ))
        }));
    }
}
