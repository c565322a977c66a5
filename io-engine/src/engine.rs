//! An engine: its registered regions, its listeners, its copying workers.

use std::borrow::Cow;
use std::collections::HashMap;
#[cfg(feature = "rdma")]
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use common::ids::{ByteLen, ByteOffset};
use common::wire::EngineDesc;

use crate::error::{TransportError, TransportErrorKind};
use crate::fault::{FaultSpec, Faulty};
use crate::foreign::AnyMemory;
use crate::grant::{Grant, Grants};
use crate::offer::{DeviceOffer, Offer};
use crate::process::EngineProcess;
use crate::rdma_options::{RailReport, RdmaOptions};
use crate::reach::Reach;
use crate::region::{Region, RegionKey};
use crate::session::Session;
use crate::status::deadline_after;
use crate::stream;
use crate::timer::Timer;
use crate::transport::cma::Cma;
use crate::transport::copy::{self, CopyQueue};
use crate::transport::local::Local;
#[cfg(feature = "rdma")]
use crate::transport::rdma::{Endpoint, PeerAddress, Rails, Rdma, SessionNames};
use crate::transport::same_host::{self, Connection, Secret};
use crate::transport::shm::Shm;
use crate::transport::tcp::{self, Tcp, TcpOptions};
use crate::transport::{Transport, TransportKind};

/// Threads that copy for `local`, `shm` and `cma`.
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
    /// Where peers' connections are taken (`tcp`, and `rdma`'s handshake); port 0 takes a free one.
    pub tcp_bind: SocketAddr,
    /// Transports that may be used, in the order of choice.
    pub transports: Vec<TransportKind>,
    /// Whether the pid and addresses of a peer that is no Ferry engine are believed for `cma`.
    pub cma_trust_descriptors: bool,
    /// Threads that copy for `local`, `shm` and `cma`.
    pub copy_threads: usize,
    /// Streams of a `tcp` session.
    pub tcp_lanes: usize,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long a `tcp` peer may take and answer nothing.
    pub stall_timeout: Duration,
    /// How the `rdma` transport is set up.
    pub rdma: RdmaOptions,
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
            rdma: RdmaOptions::default(),
            fault_opt: None,
        }
    }
}

/// Registered memory and the ways to and from it. Clones share it; threads and sockets end with
/// [`Engine::shutdown`] or with the last clone.
#[derive(Clone)]
pub struct Engine(Arc<Owner>);

/// Ends the engine's threads when the last handle of its users is gone; sessions and threads hold
/// [`EngineInner`] weakly or for one batch.
struct Owner(Arc<EngineInner>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

pub(crate) struct EngineInner {
    config: EngineConfig,
    key: Arc<str>,
    instance: [u8; 16],
    tcp_address: SocketAddr,
    unix_name: String,
    regions: RwLock<HashMap<u32, Region>>,
    grants: Arc<Grants>,
    next_region: AtomicU32,
    copies: Arc<CopyQueue>,
    timer: Arc<Timer>,
    /// Connections of `tcp` peers to this engine.
    tcp_peers: Mutex<Vec<Weak<TcpStream>>>,
    /// Those of them that bytes may come in by, with who they belong to.
    writers: Mutex<Vec<(Writer, Weak<TcpStream>)>>,
    /// Connections of same-host peers to this engine.
    same_host_peers: Mutex<Vec<Weak<Connection>>>,
    /// Sessions from this engine.
    sessions: Mutex<Vec<Weak<dyn Transport>>>,
    /// A secret in this process's memory; a peer that can read it can use `cma`.
    secret: Secret,
    is_shut_down: AtomicBool,
    /// The network devices, or why there are none.
    #[cfg(feature = "rdma")]
    rails: Result<Arc<Rails>, TransportError>,
    /// Queue pairs of peers that are no Ferry engines, oldest first.
    #[cfg(feature = "rdma")]
    foreign_endpoints: Mutex<VecDeque<Arc<Endpoint>>>,
    faults: Arc<AtomicU64>,
}

/// How a connection says which engine writes by it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// By its start, over `tcp`.
    Instance([u8; 16]),
    /// By its key, in MoRI's control messages. The queue pairs that these made are destroyed before
    /// the connection's thread lets go of it.
    #[cfg(feature = "rdma")]
    Key(String),
}

impl Writer {
    fn is_of(&self, process: &EngineProcess) -> bool {
        match self {
            Self::Instance(instance) => instance == process.instance(),
            #[cfg(feature = "rdma")]
            Self::Key(key) => key == process.engine_key(),
        }
    }
}

/// Engines of this process, by instance: the proof for `local`.
static ENGINES: LazyLock<Mutex<HashMap<[u8; 16], Weak<EngineInner>>>> =
    LazyLock::new(Mutex::default);

/// Queue pairs of peers that are no Ferry engines and so never say that they are gone.
#[cfg(feature = "rdma")]
const MOST_FOREIGN_ENDPOINTS: usize = 4096;

#[cfg(feature = "rdma")]
fn open_rails(config: &EngineConfig) -> Result<Arc<Rails>, TransportError> {
    if !config.transports.contains(&TransportKind::Rdma) {
        return Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            "this engine does not offer it",
        ));
    }
    let rails = Rails::open(&config.rdma);
    if let Err(error) = &rails {
        tracing::info!(%error, "rdma is not offered");
    }
    rails.map(Arc::new)
}

/// How often an ended connection is looked at until its thread has left.
const END_POLL: Duration = Duration::from_millis(1);

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
        let copies_itself = |kind: &TransportKind| kind.copies_mapped_memory();
        if config.transports.iter().any(copies_itself) {
            stream::choose();
        }
        let instance: [u8; 16] = random()?;
        let name: String = instance.iter().map(|byte| format!("{byte:02x}")).collect();
        let unix_name = format!("ferry-io-{name}");
        let listener = TcpListener::bind(config.tcp_bind).map_err(|error| {
            TransportError::io(format!("binding tcp {}", config.tcp_bind), &error)
        })?;
        let tcp_address = listener
            .local_addr()
            .map_err(|error| TransportError::io("the tcp address", &error))?;
        // Who offers neither tells nobody where its regions are.
        let unix_listener = match config.transports.iter().any(|kind| kind.is_same_host()) {
            true => Some(
                same_host::bind(&unix_name)
                    .map_err(|error| TransportError::io(format!("binding @{unix_name}"), &error))?,
            ),
            false => None,
        };
        let inner = Arc::new(EngineInner {
            key: config.key.as_str().into(),
            instance,
            tcp_address,
            unix_name,
            regions: RwLock::default(),
            grants: Arc::default(),
            next_region: AtomicU32::new(0),
            copies: Arc::default(),
            timer: Arc::default(),
            tcp_peers: Mutex::default(),
            writers: Mutex::default(),
            same_host_peers: Mutex::default(),
            sessions: Mutex::default(),
            secret: Secret::new(random()?),
            is_shut_down: AtomicBool::new(false),
            #[cfg(feature = "rdma")]
            rails: open_rails(&config),
            #[cfg(feature = "rdma")]
            foreign_endpoints: Mutex::default(),
            faults: Arc::default(),
            config,
        });
        ENGINES
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(instance, Arc::downgrade(&inner));
        // From here on an early return ends what was started.
        let engine = Self(Arc::new(Owner(Arc::clone(&inner))));
        for _ in 0..inner.config.copy_threads.max(1) {
            let queue = Arc::clone(&inner.copies);
            spawn("ferry-copy", move || copy::run(&queue))?;
        }
        let timer = Arc::clone(&inner.timer);
        spawn("ferry-timer", move || timer.run())?;
        let weak = Arc::downgrade(&inner);
        if inner.listens() {
            let weak = Weak::clone(&weak);
            spawn("ferry-listen", move || tcp::server::serve(&listener, &weak))?;
        }
        if let Some(listener) = unix_listener {
            spawn("ferry-listen", move || same_host::serve(&listener, &weak))?;
        }
        Ok(engine)
    }

    /// What peers are told: MoRI's elements, and a tag with what this engine offers behind them.
    pub fn desc(&self) -> EngineDesc {
        let inner = self.inner();
        let transports = inner.config.transports.iter();
        let offered = transports.filter(|kind| inner.offers(**kind));
        let offer = Offer {
            transports: offered.map(|kind| kind.name().to_owned()).collect(),
            tcp_port: inner.tcp_address.port(),
            unix_name: inner.unix_name.clone(),
            instance: inner.instance,
            device_opt: inner.device_offer(),
        };
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
            extra: vec![offer.pack()],
        }
    }

    /// Where peers' connections are taken.
    pub fn tcp_address(&self) -> SocketAddr {
        self.inner().tcp_address
    }

    /// Registers a part of a pool under a new random key. `label` is what the owner calls it.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`] when the part leaves the pool.
    pub fn register(
        &self,
        memory: impl Into<AnyMemory>,
        offset: ByteOffset,
        len: ByteLen,
        label: &str,
    ) -> Result<Region, TransportError> {
        let inner = self.inner();
        let id = inner.next_region.fetch_add(1, Ordering::Relaxed);
        let key = RegionKey(random()?);
        let owner = (&inner.key, inner.instance);
        let region = Region::new(memory.into(), (offset, len), id, key, label, owner)?;
        region.memory().populate();
        if let Some(memory) = region.memory().device()
            && inner.offers(TransportKind::Shm)
            && let Err(error) = memory.check_exportable()
        {
            tracing::warn!(
                region = id,
                label,
                %error,
                "the driver does not export this device memory: shm does not reach it, and peers take \
                 the next transport in their order"
            );
        }
        #[cfg(feature = "rdma")]
        if let Ok(rails) = &inner.rails {
            rails.note_memory(region.location());
            match (region.is_on_device(), inner.config.rdma.registers_eagerly) {
                // Tried at once, so that peers are told before they choose a transport.
                (true, _) => {
                    if let Err(error) = rails.register(&region) {
                        tracing::warn!(
                            region = id,
                            label,
                            %error,
                            "the network devices do not reach this device memory: rdma is passed \
                             over, and peers take the next transport in their order"
                        );
                        region.note_unreachable(error.to_string());
                    }
                }
                (false, true) => rails.register(&region)?,
                (false, false) => {}
            }
        }
        let mut regions = inner
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        regions.insert(id, region.clone());
        Ok(region)
    }

    /// Makes a permission to write that can be taken back, for one peer.
    ///
    /// # Errors
    /// When the system has no random bytes.
    pub fn grant(&self) -> Result<Grant, TransportError> {
        Ok(self.inner().grants.make(random()?))
    }

    /// Forgets a region: no write into it is let in any more, and those inside are waited for.
    /// Whether all have left within the time; only then may its memory be used for something
    /// else. Peers that write by `shm` or `cma` are told to let go and must say that they have; the memory
    /// stays mapped until they do, or are gone. A region of another engine is left alone.
    pub fn deregister(&self, region: &Region, timeout: Duration) -> bool {
        let deadline = deadline_after(timeout);
        let inner = self.inner();
        if region.owner_instance() != &inner.instance {
            return false;
        }
        let mut regions = inner
            .regions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        regions.remove(&region.id());
        drop(regions);
        // All are told before any is waited for.
        let peers = inner.same_host_peers();
        peers.iter().for_each(|peer| peer.forget(region.id()));
        let left = region.close(deadline);
        let released = peers
            .iter()
            .filter(|peer| !peer.wait_until_released(region.id(), deadline));
        let is_released = released.count() == 0 && left;
        // Ends the network devices' access, and with it the peers'.
        #[cfg(feature = "rdma")]
        if let Ok(rails) = &inner.rails {
            return rails.forget(region.id()) && is_released;
        }
        is_released
    }

    /// What the network devices of the `rdma` transport have done; nothing where there are none.
    pub fn rails(&self) -> Vec<RailReport> {
        #[cfg(feature = "rdma")]
        if let Ok(rails) = &self.inner().rails {
            return rails.reports();
        }
        Vec::new()
    }

    /// Whether a peer has said over `rdma` that its transfer with this number is in place; true
    /// once.
    #[cfg(feature = "rdma")]
    pub fn take_notification(&self, peer_key: &str, uid: u64) -> bool {
        let rails = self.inner().rails.as_ref();
        rails.is_ok_and(|rails| rails.notifications.take(peer_key, uid))
    }

    /// Opens a session: picks the first transport in this engine's order that both sides offer and
    /// that can be proved to reach the peer. Blocks; call it from a thread that may.
    ///
    /// # Errors
    /// [`TransportErrorKind::NoCommonTransport`] when none does, with why for each.
    pub fn connect(&self, remote: &EngineDesc) -> Result<Session, TransportError> {
        let offer = Offer::of(remote)?;
        let theirs_opt = offer.and_then(|offer| offer.device_opt);
        let own_opt = self.inner().device_offer();
        let some = |why: String| (!why.is_empty()).then_some(Cow::Owned(why));
        let reach = Reach {
            is_local_on_device: own_opt.is_some(),
            is_remote_on_device: theirs_opt.is_some(),
            local_unreachable_opt: own_opt.and_then(|own| some(own.unreachable)),
            remote_unreachable_opt: theirs_opt
                .as_ref()
                .and_then(|theirs| some(theirs.unreachable.clone())),
            unshared_opt: theirs_opt.and_then(|theirs| some(theirs.unshared)),
        };
        self.connect_for(remote, &reach, &[])
    }

    /// As [`Engine::connect`], for a session that is to reach certain memory, whatever else there
    /// is on both sides. One of the `open` ones is taken where it is over the transport that would
    /// be chosen.
    ///
    /// # Errors
    /// As [`Engine::connect`].
    pub fn connect_for(
        &self,
        remote: &EngineDesc,
        reach: &Reach,
        open: &[Session],
    ) -> Result<Session, TransportError> {
        let offer = Offer::of(remote)?;
        let mut passed_over: Vec<(TransportKind, String)> = Vec::new();
        let inner = self.inner();
        for kind in &inner.config.transports {
            if let Err(error) = reach.check(*kind) {
                passed_over.push((*kind, error.to_string()));
                continue;
            }
            let is_open = |session: &&Session| session.transport() == *kind && session.is_alive();
            if let Some(session) = open.iter().find(is_open) {
                return Ok(session.clone());
            }
            match inner.open(*kind, remote, offer.as_ref()) {
                Ok(transport) => {
                    inner.adopt_session(&transport)?;
                    tracing::info!(
                        peer = remote.key,
                        transport = kind.name(),
                        passed_over = joined(&passed_over),
                        "session opened"
                    );
                    let transport = inner.with_fault(transport);
                    let timer = Arc::clone(&inner.timer);
                    return Ok(Session::new(transport, timer, &remote.key, passed_over));
                }
                Err(error) => passed_over.push((*kind, error.to_string())),
            }
        }
        Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            format!(
                "no transport reaches engine {} ({})",
                remote.key,
                joined(&passed_over)
            ),
        ))
    }

    /// Whether nothing that this process had begun can land in this engine's regions any more. Its
    /// exit ends what it copied itself (`shm`, `cma`); what it had sent over `tcp` or `rdma` may
    /// still be on its way, so its connections are ended here, with the queue pairs that they made,
    /// and waited for. Blocks for at most `timeout`. Never true while the process lives.
    pub fn is_over(&self, process: &EngineProcess, timeout: Duration) -> bool {
        process.has_exited() && self.inner().end_writer(process, deadline_after(timeout))
    }

    /// Ends the engine: its listeners, sessions and workers. Batches in flight fail. Peers that
    /// write by `shm` or `cma` are told; what they were told of stays mapped until they have let go.
    pub fn shutdown(&self) {
        self.inner().shutdown();
    }

    fn inner(&self) -> &Arc<EngineInner> {
        &self.0.0
    }
}

fn joined(passed_over: &[(TransportKind, String)]) -> String {
    let reasons = passed_over
        .iter()
        .map(|(kind, why)| format!("{kind}: {why}"));
    reasons.collect::<Vec<_>>().join("; ")
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), TransportError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(work)
        .map(|_| ())
        .map_err(|error| TransportError::io("starting a thread", &error))
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

    pub(crate) fn grants(&self) -> &Grants {
        &self.grants
    }

    pub(crate) fn regions(&self) -> Vec<Region> {
        self.regions
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    /// What peers are told of regions in device memory; `None` when there are none.
    fn device_offer(&self) -> Option<DeviceOffer> {
        let mut regions = self.regions();
        regions.retain(Region::is_on_device);
        let mut unshared = regions
            .iter()
            .filter_map(|region| region.memory().unshared());
        let mut unreachable = regions.iter().filter_map(Region::unreachable);
        (!regions.is_empty()).then(|| DeviceOffer {
            unshared: unshared.next().unwrap_or_default(),
            unreachable: unreachable.next().unwrap_or_default().to_owned(),
        })
    }

    pub(crate) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::Acquire)
    }

    pub(crate) const fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Remembers a connection that is to end with the engine.
    pub(crate) fn adopt_control(&self, stream: &Arc<TcpStream>) -> io::Result<()> {
        self.adopt(&self.tcp_peers, Arc::downgrade(stream))
    }

    /// Remembers who writes by a connection, for as long as its thread holds it.
    pub(crate) fn note_writer(&self, stream: &Arc<TcpStream>, writer: Writer) {
        let mut writers = self.writers();
        writers.retain(|(_, stream)| stream.strong_count() > 0);
        writers.push((writer, Arc::downgrade(stream)));
    }

    fn writers(&self) -> MutexGuard<'_, Vec<(Writer, Weak<TcpStream>)>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connections of an engine, and waits until their threads have let go of the regions.
    fn end_writer(&self, process: &EngineProcess, deadline: Instant) -> bool {
        loop {
            let writers = self.writers();
            let own = writers.iter().filter(|(writer, _)| writer.is_of(process));
            let open: Vec<_> = own.filter_map(|(_, stream)| stream.upgrade()).collect();
            drop(writers);
            if open.is_empty() {
                return true;
            }
            for stream in open {
                // It may have ended already; either way its thread sees the end.
                let _ = stream.shutdown(Shutdown::Both);
            }
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(END_POLL);
        }
    }

    /// Remembers a same-host peer, which is to be told when a region or the engine ends.
    pub(crate) fn adopt_same_host(&self, connection: &Arc<Connection>) -> io::Result<()> {
        self.adopt(&self.same_host_peers, Arc::downgrade(connection))
    }

    fn adopt_session(&self, transport: &Arc<dyn Transport>) -> Result<(), TransportError> {
        self.adopt(&self.sessions, Arc::downgrade(transport))
            .map_err(|error| {
                TransportError::quiesced(TransportErrorKind::Closed, error.to_string())
            })
    }

    /// `shutdown` sets its flag before it takes the list, so that it misses nothing.
    fn adopt<T: ?Sized>(&self, list: &Mutex<Vec<Weak<T>>>, item: Weak<T>) -> io::Result<()> {
        let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_shut_down() {
            return Err(io::Error::other("the engine was shut down"));
        }
        list.retain(|item| item.strong_count() > 0);
        list.push(item);
        Ok(())
    }

    fn same_host_peers(&self) -> Vec<Arc<Connection>> {
        let peers = self
            .same_host_peers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        peers.iter().filter_map(Weak::upgrade).collect()
    }

    /// The queue of the copying workers.
    pub(crate) fn copies(&self) -> &CopyQueue {
        &self.copies
    }

    /// Whether a transport is configured and can be had here.
    pub(crate) fn offers(&self, kind: TransportKind) -> bool {
        let can_be_had = match kind {
            #[cfg(feature = "rdma")]
            TransportKind::Rdma => self.rails.is_ok(),
            #[cfg(not(feature = "rdma"))]
            TransportKind::Rdma => false,
            _ => true,
        };
        can_be_had && self.config.transports.contains(&kind)
    }

    /// Whether peers connect to this engine's port.
    fn listens(&self) -> bool {
        self.offers(TransportKind::Tcp) || self.offers(TransportKind::Rdma)
    }

    /// The network devices, or why there are none.
    #[cfg(feature = "rdma")]
    pub(crate) fn rails(&self) -> Result<&Arc<Rails>, TransportError> {
        self.rails.as_ref().map_err(Clone::clone)
    }

    /// Keeps the queue pair of a peer that will not say when it is gone.
    #[cfg(feature = "rdma")]
    pub(crate) fn keep_foreign(&self, endpoint: Arc<Endpoint>) {
        let mut endpoints = self
            .foreign_endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Those that have failed meanwhile are of no use.
        endpoints.retain(|endpoint| endpoint.queue_pair_number().is_some());
        if endpoints.len() >= MOST_FOREIGN_ENDPOINTS {
            endpoints.pop_front();
        }
        endpoints.push_back(endpoint);
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
                // MoRI's sentinel for a peer without RDMA.
                TransportKind::Rdma if remote.port == 1 => {
                    Err(none("the peer's descriptor says that it has no rdma"))
                }
                TransportKind::Rdma => self.open_rdma(remote, None),
                TransportKind::Local | TransportKind::Shm | TransportKind::Tcp => {
                    Err(none("the peer is no ferry engine"))
                }
            };
        };
        // What is wrong here is told first.
        #[cfg(feature = "rdma")]
        if kind == TransportKind::Rdma {
            self.rails()?;
        }
        if !offer.has(kind) {
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
            TransportKind::Shm => {
                let timeout = self.config.connect_timeout;
                let shm = Shm::connect(self, &offer.unix_name, offer.instance, timeout)?;
                Ok(Arc::new(shm))
            }
            TransportKind::Cma => {
                let timeout = self.config.connect_timeout;
                let cma = Cma::proven(self, &offer.unix_name, offer.instance, timeout)?;
                Ok(Arc::new(cma))
            }
            TransportKind::Rdma => self.open_rdma(remote, Some(offer)),
            TransportKind::Tcp => {
                let options = TcpOptions {
                    lanes: self.config.tcp_lanes,
                    connect_timeout: self.config.connect_timeout,
                    stall_timeout: self.config.stall_timeout,
                };
                let instances = (&offer.instance, &self.instance);
                let tcp = Tcp::connect(&remote.host, offer.tcp_port, instances, &options)?;
                Ok(Arc::new(tcp))
            }
        }
    }

    #[cfg(not(feature = "rdma"))]
    fn open_rdma(
        self: &Arc<Self>,
        _remote: &EngineDesc,
        _offer_opt: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        Err(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            "this build has no rdma",
        ))
    }

    #[cfg(feature = "rdma")]
    fn open_rdma(
        self: &Arc<Self>,
        remote: &EngineDesc,
        offer_opt: Option<&Offer>,
    ) -> Result<Arc<dyn Transport>, TransportError> {
        let rails = self.rails()?;
        let names = SessionNames {
            own_key: self.key.to_string(),
            own_instance: self.instance,
            peer_key: remote.key.clone(),
            peer_instance_opt: offer_opt.map(|offer| offer.instance),
        };
        let peer = PeerAddress {
            host: remote.host.clone(),
            port: remote.port,
            is_ferry: offer_opt.is_some(),
            timeout: self.config.rdma.control_timeout,
        };
        Ok(Arc::new(Rdma::connect(rails, names, peer)?))
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
        Ok(Arc::new(Cma::believed(self, pid)?))
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
        self.timer.end();
        for session in taken(&self.sessions) {
            session.close();
        }
        #[cfg(feature = "rdma")]
        if let Ok(rails) = &self.rails {
            // Before peers' connections are closed, whose end tells them that nothing of theirs
            // comes in any more.
            rails.end_accepted();
        }
        for stream in taken(&self.tcp_peers) {
            // The peer may have closed it already; either way its thread ends.
            let _ = stream.shutdown(Shutdown::Both);
        }
        for connection in taken(&self.same_host_peers) {
            connection.end();
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
        if self.listens()
            && let Err(error) = TcpStream::connect_timeout(&wake, Duration::from_secs(1))
        {
            tracing::debug!(%error, "the tcp listener could not be woken");
        }
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&self.unix_name);
        if self
            .config
            .transports
            .iter()
            .any(|kind| kind.is_same_host())
            && let Err(error) = address.and_then(|address| UnixStream::connect_addr(&address))
        {
            tracing::debug!(%error, "the same-host listener could not be woken");
        }
    }
}

fn taken<T: ?Sized>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    let list = std::mem::take(&mut *list.lock().unwrap_or_else(PoisonError::into_inner));
    list.iter().filter_map(Weak::upgrade).collect()
}
