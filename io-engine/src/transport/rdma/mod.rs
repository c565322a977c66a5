//! Between two hosts with RDMA devices: one-sided writes and reads over reliable connections, and
//! MoRI's handshake (`spec/mori-io.md`, section 3), so that a MoRI engine can be the peer.
//!
//! ```text
//! session   several queue pairs to one engine; a thread that talks to it
//! endpoint  one queue pair at work, also on the side that is written
//! requests  ranges to work requests
//! registration  a region as a network device knows it
//! poller    a completion thread
//! rail      a network device
//! affinity  which of them are near to an engine's memory
//! control, server   the handshake, on the side that asks and on the other
//! verbs     the objects of libibverbs, safely; the only part with unsafe code
//! ```
//! A completion error fails the batches on its queue pair, which is made again; the session lives
//! on. A queue pair that was stopped and drained writes nothing any more: so failures carry the
//! proof. A region that is deregistered cannot be written into by anybody.

mod affinity;
mod control;
mod endpoint;
mod notifications;
mod poller;
mod rail;
mod registration;
mod requests;
pub(crate) mod server;
mod session;
pub mod verbs;

use std::sync::Arc;
use std::time::Duration;

use crate::error::TransportError;
use crate::region::{Location, RemoteRegion};
use crate::session::Job;
use crate::status::Status;
use crate::transport::{Transport, TransportKind};

pub(crate) use control::PeerAddress;
pub(crate) use endpoint::Endpoint;
pub(crate) use rail::Rails;
pub(crate) use session::{Session, SessionNames};

/// Within this time a queue pair that is stuck is found and stopped, its work has come back or it is
/// destroyed, and the peer has said that its end is, too.
const ENDED_WITHIN: Duration = Duration::from_secs(2);

/// A connection to an engine with an RDMA device.
pub(crate) struct Rdma {
    session: Arc<Session>,
}

impl Rdma {
    /// Connects; blocks at most the control timeout for each queue pair.
    pub(crate) fn connect(
        rails: &Arc<Rails>,
        names: SessionNames,
        peer: PeerAddress,
    ) -> Result<Self, TransportError> {
        let session = Session::connect(rails, names, peer)?;
        Ok(Self { session })
    }
}

impl Transport for Rdma {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    /// What cannot be registered says so when it is registered; a peer of another make answers for
    /// its memory itself.
    fn can_move(&self, _local: Location, remote: &RemoteRegion) -> bool {
        remote.unreachable_opt.is_none()
    }

    fn submit(&self, job: Job, status: Arc<Status>) {
        self.session.submit(job, status);
    }

    fn is_alive(&self) -> bool {
        self.session.is_alive()
    }

    fn notify(&self, number: u64, status: Arc<Status>) {
        self.session.notify(number, &status);
    }

    fn grace(&self) -> Duration {
        ENDED_WITHIN
    }

    fn close(&self) {
        self.session.end(&TransportError::closed_session());
    }
}

impl Drop for Rdma {
    fn drop(&mut self) {
        self.close();
    }
}
