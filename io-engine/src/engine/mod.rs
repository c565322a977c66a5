//! An engine: its registered regions, its listeners, its copying workers.

mod config;
mod end;
mod open;

use std::collections::HashMap;
#[cfg(feature = "rdma")]
use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::wire::EngineDesc;

pub use self::config::EngineConfig;
pub(crate) use self::end::Writer;
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::AnyMemory;
use crate::grant::{Grant, Grants};
use crate::offer::Offer;
use crate::rdma_options::RailReport;
use crate::region::{Region, RegionKey};
use crate::status::deadline_after;
use crate::stream;
use crate::timer::Timer;
use crate::transport::copy::{self, CopyQueue};
#[cfg(feature = "rdma")]
use crate::transport::rdma::{Endpoint, Rails};
use crate::transport::same_host::{self, Connection, Secret};
use crate::transport::{Transport, TransportKind, tcp};

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

    fn inner(&self) -> &Arc<EngineInner> {
        &self.0.0
    }
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

    /// Remembers a same-host peer, which is to be told when a region or the engine ends.
    pub(crate) fn adopt_same_host(&self, connection: &Arc<Connection>) -> io::Result<()> {
        self.adopt(&self.same_host_peers, Arc::downgrade(connection))
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
}
