//! Between two processes of one host and owner: `process_vm_writev`, straight from page to page.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::engine::{CopyWork, EngineInner};
use crate::error::{TransportError, TransportErrorKind};
use crate::region::RemoteRegion;
use crate::session::WritePair;
use crate::status::Status;
use crate::sys::{self, IoVec, io_vec};
use crate::transport::same_host::SharedPeer;
use crate::transport::{Piece, Transport, TransportKind};

/// Whose word is taken for where the peer's memory is.
#[derive(Clone)]
pub(crate) enum Peer {
    /// The process and its regions are proved.
    Proven(SharedPeer),
    /// A pid and the addresses of its descriptors, believed because the operator said so.
    Trusted { pid: i32 },
}

impl Peer {
    fn pid(&self) -> i32 {
        match self {
            Self::Proven(peer) => peer.pid(),
            Self::Trusted { pid } => *pid,
        }
    }

    fn has_exited(&self) -> bool {
        match self {
            Self::Proven(peer) => peer.has_exited(),
            Self::Trusted { .. } => false,
        }
    }

    fn address_of(&self, remote: &RemoteRegion) -> Result<u64, TransportError> {
        match self {
            Self::Proven(peer) => peer.address_of(remote),
            Self::Trusted { .. } => Ok(remote.claimed_address),
        }
    }
}

/// A connection to another process.
pub(crate) struct Cma {
    engine: Weak<EngineInner>,
    peer: Peer,
    closed: Mutex<bool>,
}

impl Cma {
    pub(crate) fn new(engine: &Arc<EngineInner>, peer: Peer) -> Self {
        Self {
            engine: Arc::downgrade(engine),
            peer,
            closed: Mutex::new(false),
        }
    }

    fn is_closed(&self) -> bool {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The destination of one batch: the peer, and the address of each pair's remote region. Those are
/// looked up by the first worker, all before any byte moves, because a lookup may ask the peer.
struct CmaTarget {
    peer: Peer,
    bases: OnceLock<Result<Vec<u64>, TransportError>>,
}

impl CopyWork for CmaTarget {
    fn copy(&self, pairs: &[WritePair], piece: &Piece) -> Result<(), TransportError> {
        if self.peer.has_exited() {
            return Err(TransportError::quiesced(
                TransportErrorKind::PeerDead,
                format!("the peer's process {} has exited", self.peer.pid()),
            ));
        }
        let bases = self.bases.get_or_init(|| {
            pairs
                .iter()
                .map(|pair| self.peer.address_of(&pair.remote))
                .collect()
        });
        let bases = bases.as_ref().map_err(TransportError::clone)?;
        let mut local: Vec<IoVec> = Vec::with_capacity(piece.ranges.len());
        let mut remote: Vec<IoVec> = Vec::with_capacity(piece.ranges.len());
        for range in &piece.ranges {
            let (Some(pair), Some(base)) = (pairs.get(range.pair), bases.get(range.pair)) else {
                continue;
            };
            let src = pair.local.address(range.src, range.len)?;
            let dst = base.checked_add(range.dst).ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    "an address in the peer does not fit 64 bits",
                )
            })?;
            local.push(io_vec(src as u64, range.len));
            remote.push(io_vec(dst, range.len));
        }
        write_all(self.peer.pid(), &mut local, &mut remote)
    }
}

/// Writes everything; the kernel may stop after any range. Every error comes after its call has
/// returned, so nothing is being written any more.
fn write_all(pid: i32, local: &mut [IoVec], remote: &mut [IoVec]) -> Result<(), TransportError> {
    let mut first = 0;
    while let (Some(local), Some(remote)) = (local.get_mut(first..), remote.get_mut(first..)) {
        if local.is_empty() {
            break;
        }
        // SAFETY: the local ranges were made from checked addresses of regions that the caller's
        // pairs keep mapped.
        let written = unsafe { sys::write_to_process(pid, local, remote) };
        let mut written = match written {
            Ok(0) => {
                return Err(TransportError::quiesced(
                    TransportErrorKind::Io,
                    format!("process_vm_writev to process {pid} moved nothing"),
                ));
            }
            Ok(written) => written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(explain(pid, &error)),
        };
        for (local, remote) in local.iter_mut().zip(remote.iter_mut()) {
            let step = written.min(local.iov_len);
            local.iov_base = local.iov_base.wrapping_byte_add(step);
            remote.iov_base = remote.iov_base.wrapping_byte_add(step);
            local.iov_len -= step;
            remote.iov_len -= step;
            written -= step;
            if local.iov_len > 0 {
                break;
            }
            first += 1;
        }
    }
    Ok(())
}

fn explain(pid: i32, error: &io::Error) -> TransportError {
    let (kind, hint) = match error.raw_os_error() {
        Some(libc::EPERM) => (
            TransportErrorKind::PermissionDenied,
            "; both processes must run as one user and be allowed to trace each other: set \
             kernel.yama.ptrace_scope to 0, give CAP_SYS_PTRACE, or choose the tcp transport",
        ),
        Some(libc::ESRCH) => (TransportErrorKind::PeerDead, ""),
        Some(libc::EFAULT) => (
            TransportErrorKind::NotRegistered,
            "; the memory is not mapped there any more",
        ),
        Some(libc::ENOSYS) => (
            TransportErrorKind::PermissionDenied,
            "; a seccomp filter may forbid it, choose tcp",
        ),
        _ => (TransportErrorKind::Io, ""),
    };
    TransportError::quiesced(
        kind,
        format!("process_vm_writev to process {pid}: {error}{hint}"),
    )
}

impl Transport for Cma {
    fn kind(&self) -> TransportKind {
        TransportKind::Cma
    }

    fn submit(&self, pairs: Vec<WritePair>, status: Arc<Status>) {
        let closed = TransportError::quiesced(TransportErrorKind::Closed, "the session is closed");
        let Some(engine) = self.engine.upgrade().filter(|_| !self.is_closed()) else {
            return status.fail(closed);
        };
        let target = CmaTarget {
            peer: self.peer.clone(),
            bases: OnceLock::new(),
        };
        engine.submit_copy(Arc::new(target), pairs, status);
    }

    fn is_alive(&self) -> bool {
        !self.is_closed() && !self.peer.has_exited()
    }

    fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
        if let Peer::Proven(peer) = &self.peer {
            peer.close();
        }
    }
}
