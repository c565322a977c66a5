//! How bytes move.
//!
//! What an implementation must keep:
//! * `submit` never blocks and never fails by itself: every outcome goes into the status;
//! * it takes pieces of a batch only through [`BatchQueue`], which shares workers fairly between
//!   batches and stops at a cancellation;
//! * it reports every piece that it took, and reports success only when the bytes are in the
//!   memory of the side that is written;
//! * it says of a failure whether writes are proved to have stopped;
//! * once dead it stays dead: later batches fail at once.

pub(crate) mod cma;
pub(crate) mod copy;
pub(crate) mod local;
pub(crate) mod queue;
#[cfg(feature = "rdma")]
pub mod rdma;
pub(crate) mod same_host;
pub(crate) mod shm;
pub(crate) mod tcp;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, RemoteRegion};
use crate::session::Job;
use crate::status::Status;
use crate::timer;

pub(crate) use queue::{BatchQueue, Piece};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Within one process: memory is copied.
    Local,
    /// Between two processes of one host and owner: the peer's pool is mapped here, and memory is
    /// copied.
    Shm,
    /// Between two processes of one host and owner: `process_vm_writev` and `process_vm_readv`.
    Cma,
    /// Between two hosts with RDMA devices: one-sided writes and reads by the network devices. Only
    /// in builds with the feature `rdma`.
    Rdma,
    /// Between any two hosts: TCP streams.
    Tcp,
}

impl TransportKind {
    /// Every kind of this build, fastest first: the default order of choice.
    #[cfg(not(feature = "rdma"))]
    pub const ALL: [Self; 4] = [Self::Local, Self::Shm, Self::Cma, Self::Tcp];
    /// Every kind of this build, fastest first: the default order of choice.
    #[cfg(feature = "rdma")]
    pub const ALL: [Self; 5] = [Self::Local, Self::Shm, Self::Cma, Self::Rdma, Self::Tcp];

    /// The metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }

    /// Whether this process's own code moves the bytes.
    pub(crate) const fn copies_mapped_memory(self) -> bool {
        matches!(self, Self::Local | Self::Shm)
    }

    /// Whether peers must be told of regions over a Unix socket.
    pub(crate) const fn is_same_host(self) -> bool {
        matches!(self, Self::Shm | Self::Cma)
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| match text == Self::Rdma.name() {
                true => "this build has no rdma: build it with the feature rdma".to_owned(),
                false => format!(
                    "{text:?} is no transport; there are {}",
                    Self::ALL.map(Self::name).join(", ")
                ),
            })
    }
}

/// One open connection of one kind.
pub(crate) trait Transport: Send + Sync {
    /// Its kind.
    fn kind(&self) -> TransportKind;
    /// Whether it reaches memory in these places.
    fn can_move(&self, local: Location, remote: &RemoteRegion) -> bool {
        local == Location::Host && remote.location == Location::Host
    }
    /// Begins to move a job's bytes; its pairs were checked against the descriptors.
    fn submit(&self, job: Job, status: Arc<Status>);
    /// Whether the peer is still there, without sending.
    fn is_alive(&self) -> bool;
    /// Tells the peer that its memory was written, under a number of this side's.
    fn notify(&self, _number: u64, status: Arc<Status>) {
        let message = format!("transport {} carries no notifications", self.kind());
        status.fail(TransportError::quiesced(
            TransportErrorKind::NoCommonTransport,
            message,
        ));
    }
    /// How long it may take, once a batch's time is over, until what was begun of it has provably
    /// ended.
    fn grace(&self) -> Duration {
        timer::GRACE
    }
    /// Ends the connection; batches in flight fail.
    fn close(&self);
}
