//! Between two processes of one host and owner, for pools that are memfds: the peer's pool is
//! mapped here, and a write is a copy. No system call and no work of the peer's is on the path.
//!
//! A mapping cannot be taken back from a process that lives, so a region is only free when this
//! side has said that it let go, or is gone (`same_host`). The pool's file is sealed against
//! shrinking and its space is taken, so that no copy faults, whatever became of its owner.
//!
//! Device memory that its driver exports is mapped by the driver in the same way, from descriptors
//! that come over the same socket; what one process has mapped stays when the other dies.

use std::sync::Arc;
use std::time::Duration;

use crate::engine::EngineInner;
use crate::error::TransportError;
use crate::foreign::AnyMemory;
use crate::region::{Location, RemoteRegion};
use crate::session::Job;
use crate::status::Status;
use crate::transport::copy::{self, CopyWork, copy_mapped};
use crate::transport::same_host::{Admitted, Link, Way};
use crate::transport::{Piece, Transport, TransportKind};

/// A connection to another process's pools.
pub(crate) struct Shm {
    link: Arc<Link>,
}

impl Shm {
    /// Connects to an engine's socket and takes the proof of who it is.
    pub(crate) fn connect(
        engine: &Arc<EngineInner>,
        socket_name: &str,
        instance: [u8; 16],
        timeout: Duration,
    ) -> Result<Self, TransportError> {
        let weak = Arc::downgrade(engine);
        let begin = Box::new(move |admitted, job, status| {
            copy::submit(&weak, Mapped(admitted), job, status);
        });
        let link = Link::connect(socket_name, Way::Mapping, instance, timeout, begin)?;
        Ok(Self { link })
    }
}

/// The peer's side of one batch; keeps its regions mapped and unreleased.
struct Mapped(Admitted);

impl CopyWork for Mapped {
    fn copy(&self, job: &Job, piece: &Piece) -> Result<(), TransportError> {
        if let Some(error) = self.0.link().noticed_failure() {
            return Err(error);
        }
        copy_mapped(
            job,
            piece,
            |pair, offset, len| self.0.reach((pair, offset, len), AnyMemory::address),
            |pair, offset, len| self.0.reach((pair, offset, len), AnyMemory::place),
        )
    }
}

impl Transport for Shm {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn can_move(&self, _local: Location, remote: &RemoteRegion) -> bool {
        remote.unshared_opt.is_none()
    }

    fn submit(&self, job: Job, status: Arc<Status>) {
        self.link.admit(job, status);
    }

    fn is_alive(&self) -> bool {
        self.link.failure().is_none()
    }

    fn close(&self) {
        self.link.end(TransportError::closed_session());
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.close();
    }
}
