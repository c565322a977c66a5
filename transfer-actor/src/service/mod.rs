//! `transfer-actor serve`: the rank actors of a host, for engines written in anything.
//!
//! An engine attaches over one Unix socket with its pools' descriptors (`attach.rs`), and drives
//! its rooms over HTTP on another (`http.rs`). The rank lives as long as the attach connection.

mod attach;
mod http;
mod layout;
mod sockets;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use actix_web::dev::ServerHandle;
use anyhow::{Context, Result};
use io_engine::{RdmaOptions, TransportKind, rdma_devices};
use prometheus::Registry;
use tokio::sync::watch;

use crate::config::ServeConfig;
use crate::error::ApiError;
use crate::metrics::TransferMetrics;
use crate::rank::RankHandle;
use crate::shutdown::Shutdown;

#[cfg(test)]
pub(crate) use http::Ill;
pub use layout::{LayoutError, engine_key, place_layout, register_buffers};

/// What peers are told whose rooms come too late.
const DRAINING: &str = "the transfer service drains, it takes no new rooms";

/// What the parts of the service share.
pub(crate) struct Service {
    pub config: ServeConfig,
    pub registry: Registry,
    pub metrics: Arc<TransferMetrics>,
    ranks: Mutex<BTreeMap<u32, RankHandle>>,
    claims: Mutex<BTreeSet<String>>,
    next_rank: AtomicU32,
    is_draining: AtomicBool,
    is_ending: AtomicBool,
    /// Told when somebody asks over HTTP for the end: how long open rooms may take.
    pub drain_asked: watch::Sender<Option<Duration>>,
    /// Whether the attach socket is served.
    pub is_accepting: AtomicBool,
}

impl Service {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, RankHandle>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, rank: RankHandle) -> u32 {
        let number = self.next_rank.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, rank);
        number
    }

    pub(crate) fn remove(&self, number: u32) {
        self.lock().remove(&number);
    }

    pub(crate) fn ranks(&self) -> Vec<(u32, RankHandle)> {
        self.lock()
            .iter()
            .map(|(number, rank)| (*number, rank.clone()))
            .collect()
    }

    pub(crate) fn rank(&self, number: u32) -> Result<RankHandle, ApiError> {
        self.lock().get(&number).cloned().ok_or_else(|| {
            let message = format!("there is no rank {number}; GET /v1/ranks lists them");
            ApiError::new(404, "unknown_rank", message)
        })
    }

    /// Takes a rank's place among its engine's ranks, which only one engine can have at a time.
    /// `None` when another has it.
    pub(crate) fn claim(self: &Arc<Self>, place: String) -> Option<Claim> {
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        claims.insert(place.clone()).then(|| Claim {
            service: Arc::clone(self),
            place,
        })
    }

    /// Whether the service takes new ranks and rooms.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_draining() && !self.is_ending()
    }

    /// Whether open rooms may finish, and no new ones are taken.
    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }
}

/// A place that [`Service::claim`] gave; it is free again when this is dropped.
pub(crate) struct Claim {
    service: Arc<Service>,
    place: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let claims = &self.service.claims;
        let mut claims = claims.lock().unwrap_or_else(PoisonError::into_inner);
        claims.remove(&self.place);
    }
}

/// Runs until a signal: binds every socket, says so, serves, and ends cleanly.
///
/// # Errors
/// When a socket cannot be bound (it is named), or the server breaks.
pub async fn serve(config: ServeConfig) -> Result<()> {
    // Each engine reads them; a bad one is to be known at the start.
    RdmaOptions::from_environment().map_err(anyhow::Error::msg)?;
    if config.transports.contains(&TransportKind::Rdma) {
        match rdma_devices() {
            Ok(devices) => tracing::info!(devices = devices.join(","), "rdma can be had"),
            Err(error) => tracing::info!(%error, "no rank will have the transport rdma"),
        }
    }
    let registry = Registry::new();
    let metrics = Arc::new(TransferMetrics::new(&registry).context("registering metrics")?);
    let (attach_listener, _attach_path) = sockets::bind(&config.attach_socket)?;
    let (api_listener, _api_path) = sockets::bind(&config.api_socket)?;
    let metrics_listener = std::net::TcpListener::bind(config.metrics_listen)
        .with_context(|| format!("binding the metrics port {}", config.metrics_listen))?;
    let metrics_address = metrics_listener.local_addr()?;
    let service = Arc::new(Service {
        config,
        registry,
        metrics,
        ranks: Mutex::default(),
        claims: Mutex::default(),
        next_rank: AtomicU32::new(0),
        is_draining: AtomicBool::new(false),
        is_ending: AtomicBool::new(false),
        drain_asked: watch::Sender::new(None),
        is_accepting: AtomicBool::new(true),
    });
    let api = http::api_server(Arc::clone(&service), api_listener)?;
    let metrics = http::metrics_server(Arc::clone(&service), metrics_listener)?;
    let handles = [api.handle(), metrics.handle()];
    let accepting = AcceptingEnds(Arc::clone(&service));
    let accepted = attach::accept(Arc::clone(&service), attach_listener);
    let attaching = tokio::spawn(async move {
        let _ends = accepting;
        accepted.await;
    });
    let mut shutdown = Shutdown::listen().context("listening for signals")?;
    tracing::info!(
        attach = %service.config.attach_socket.display(),
        api = %service.config.api_socket.display(),
        metrics = %metrics_address,
        "ready"
    );
    // For whoever started this process; nobody may be reading.
    let _ = writeln!(std::io::stdout(), "ready {metrics_address}");
    let servers = async { tokio::try_join!(api, metrics) };
    tokio::pin!(servers);
    let mut drain_asked = service.drain_asked.subscribe();
    let default_timeout = Duration::from_secs(service.config.drain_timeout);
    let asked = async {
        tokio::select! {
            signal = shutdown.requested() => (signal, default_timeout),
            asked = drain_asked.wait_for(Option::is_some) => {
                let timeout_opt = asked.ok().and_then(|timeout_opt| *timeout_opt);
                ("POST /v1/drain", timeout_opt.unwrap_or(default_timeout))
            }
        }
    };
    let asked = tokio::select! {
        ended = &mut servers => Err(ended),
        asked = asked => Ok(asked),
    };
    let ended = match asked {
        Err(ended) => ended.map(|_| ()).context("the http server ended"),
        Ok((asked_by, timeout)) => {
            tracing::info!(asked_by, ?timeout, "ending; a signal ends at once");
            // The servers act on their handles only while they are polled.
            let ending = async { tokio::join!(end(&service, timeout, &handles), &mut servers).1 };
            tokio::select! {
                ended = ending => ended.map(|_| ()).context("the http server ended"),
                signal = shutdown.requested() => {
                    tracing::warn!(signal, "ending at once");
                    Ok(())
                }
            }
        }
    };
    attaching.abort();
    ended
}

/// However the task ends that accepts engines, health says so.
struct AcceptingEnds(Arc<Service>);

impl Drop for AcceptingEnds {
    fn drop(&mut self) {
        self.0.is_accepting.store(false, Ordering::Release);
    }
}

/// No new ranks and rooms; open rooms may finish until time is up. Those that have not fail, and
/// their peers are told; then the servers stop.
async fn end(service: &Service, timeout: Duration, servers: &[ServerHandle]) {
    service.is_draining.store(true, Ordering::Release);
    let ranks = service.ranks();
    let drains = ranks
        .iter()
        .filter(|_| !timeout.is_zero())
        .map(|(_, rank)| rank.drain(DRAINING, timeout));
    let unfinished: usize = futures::future::join_all(drains).await.into_iter().sum();
    if unfinished > 0 {
        tracing::warn!(
            rooms = unfinished,
            ?timeout,
            "rooms that had not ended fail"
        );
    }
    service.is_ending.store(true, Ordering::Release);
    // An engine that was about to attach may have been taken meanwhile.
    let ranks = service.ranks();
    let stops = ranks
        .iter()
        .map(|(_, rank)| rank.stop("the transfer service is shutting down"));
    futures::future::join_all(stops).await;
    // Long polls have been answered by now: their rooms are gone.
    futures::future::join_all(servers.iter().map(|server| server.stop(true))).await;
}
