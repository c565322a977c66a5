//! How bytes move.
//!
//! What an implementation must keep:
//! * `submit` never blocks and never fails by itself: every outcome goes into the status;
//! * it takes pieces of a batch only through [`BatchQueue`], which shares workers fairly between
//!   batches and stops at a cancellation;
//! * it reports every piece that it took, and reports success only when the bytes are in the
//!   remote memory;
//! * it says of a failure whether writes are proved to have stopped;
//! * once dead it stays dead: later batches fail at once.

pub(crate) mod cma;
pub(crate) mod local;
pub(crate) mod queue;
pub(crate) mod same_host;
pub(crate) mod tcp;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::session::WritePair;
use crate::status::Status;

pub(crate) use queue::{BatchQueue, Piece};

/// A way to move bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// Within one process: memory is copied.
    Local,
    /// Between two processes of one host and owner: `process_vm_writev`.
    Cma,
    /// Between any two hosts: TCP streams.
    Tcp,
}

impl TransportKind {
    /// Every kind, fastest first: the default order of choice.
    pub const ALL: [Self; 3] = [Self::Local, Self::Cma, Self::Tcp];

    /// The metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
        }
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
            .ok_or_else(|| format!("{text:?} is no transport; there are local, cma and tcp"))
    }
}

/// One open connection of one kind.
pub(crate) trait Transport: Send + Sync {
    /// Its kind.
    fn kind(&self) -> TransportKind;
    /// Begins to write pairs that were checked against the descriptors.
    fn submit(&self, pairs: Vec<WritePair>, status: Arc<Status>);
    /// Whether the peer is still there, without sending.
    fn is_alive(&self) -> bool;
    /// Ends the connection; batches in flight fail.
    fn close(&self);
}
