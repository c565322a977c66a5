//! How an engine is made.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::fault::FaultSpec;
use crate::rdma_options::RdmaOptions;
use crate::transport::TransportKind;

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
