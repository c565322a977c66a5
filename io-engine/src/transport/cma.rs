//! Between two processes of one host and owner: `process_vm_writev` and `process_vm_readv`, straight
//! from page to page.
//!
//! The kernel takes a pid, not a pidfd. A process that exits is noticed before each piece; between
//! that look and the call its number could be given away only if the process were reaped, all
//! numbers were used up once around, and the new one ran as the same user with memory at the same
//! addresses.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::engine::EngineInner;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, RemoteRegion};
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::sys::{self, IoVec, io_vec};
use crate::transport::copy::{self, CopyWork};
use crate::transport::queue::call_piece_bytes;
use crate::transport::same_host::{Admitted, Link, Way};
use crate::transport::{Piece, Transport, TransportKind};

/// A connection to another process.
pub(crate) struct Cma {
    engine: Weak<EngineInner>,
    peer: Peer,
}

/// Whose word is taken for where the peer's memory is.
enum Peer {
    /// The process and its regions are proved.
    Proven(Arc<Link>),
    /// A pid and the addresses of its descriptors, believed because the operator said so.
    Believed(Arc<BelievedPeer>),
}

struct BelievedPeer {
    pid: i32,
    pidfd: OwnedFd,
    is_closed: AtomicBool,
}

impl Cma {
    /// Connects to an engine's socket and takes the proof, which includes that its memory can be
    /// reached.
    pub(crate) fn proven(
        engine: &Arc<EngineInner>,
        socket_name: &str,
        instance: [u8; 16],
        timeout: Duration,
    ) -> Result<Self, TransportError> {
        let weak = Arc::downgrade(engine);
        let begin = Box::new(move |admitted, job, status| {
            copy::submit(&weak, Reach::Proven(admitted), job, status);
        });
        let link = Link::connect(socket_name, Way::Process, instance, timeout, begin)?;
        Ok(Self {
            engine: Arc::downgrade(engine),
            peer: Peer::Proven(link),
        })
    }

    /// Believes a pid, if it is a process of this user.
    pub(crate) fn believed(engine: &Arc<EngineInner>, pid: i32) -> Result<Self, TransportError> {
        let failed = |error: io::Error| TransportError::io(format!("process {pid}"), &error);
        let pidfd = sys::pidfd(pid).map_err(failed)?;
        let owner = std::fs::metadata(format!("/proc/{pid}"))
            .map_err(failed)?
            .uid();
        if owner != sys::effective_uid() {
            return Err(TransportError::quiesced(
                TransportErrorKind::PermissionDenied,
                format!(
                    "process {pid} belongs to user {owner}, this one to {}; run both as one user",
                    sys::effective_uid()
                ),
            ));
        }
        let peer = BelievedPeer {
            pid,
            pidfd,
            is_closed: AtomicBool::new(false),
        };
        Ok(Self {
            engine: Arc::downgrade(engine),
            peer: Peer::Believed(Arc::new(peer)),
        })
    }
}

impl BelievedPeer {
    fn failure(&self) -> Option<TransportError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Some(TransportError::closed_session());
        }
        sys::has_exited(self.pidfd.as_fd()).then(|| {
            TransportError::quiesced(
                TransportErrorKind::PeerDead,
                format!("the peer's process {} has exited", self.pid),
            )
        })
    }
}

/// How one batch reaches the peer's memory.
enum Reach {
    Proven(Admitted),
    /// With the address of each pair's remote region.
    Believed {
        peer: Arc<BelievedPeer>,
        addresses: Vec<u64>,
    },
}

impl Reach {
    fn failure(&self) -> Option<TransportError> {
        match self {
            Self::Proven(admitted) => admitted.link().failure(),
            Self::Believed { peer, .. } => peer.failure(),
        }
    }

    fn pid(&self) -> i32 {
        match self {
            Self::Proven(admitted) => admitted.link().pid(),
            Self::Believed { peer, .. } => peer.pid,
        }
    }

    fn address(&self, pair: usize) -> Option<u64> {
        match self {
            Self::Proven(admitted) => admitted.address(pair),
            Self::Believed { addresses, .. } => addresses.get(pair).copied(),
        }
    }
}

impl CopyWork for Reach {
    fn piece_bytes(&self, batch_bytes: u64) -> u64 {
        call_piece_bytes(batch_bytes)
    }

    fn copy(&self, job: &Job, piece: &Piece) -> Result<(), TransportError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let mut local: Vec<IoVec> = Vec::with_capacity(piece.ranges.len());
        let mut remote: Vec<IoVec> = Vec::with_capacity(piece.ranges.len());
        for range in &piece.ranges {
            let (Some(pair), Some(address)) = (job.pairs.get(range.pair), self.address(range.pair))
            else {
                continue;
            };
            let (local_offset, remote_offset) = match job.direction {
                Direction::Write => (range.src, range.dst),
                Direction::Read => (range.dst, range.src),
            };
            let here = pair.local.address(local_offset, range.len)?;
            let there = address.checked_add(remote_offset).ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    "an address in the peer does not fit 64 bits",
                )
            })?;
            local.push(io_vec(here as u64, range.len));
            remote.push(io_vec(there, range.len));
        }
        move_all(self.pid(), job.direction, &mut local, &mut remote)
    }
}

/// Moves everything; the kernel may stop after any range. Every error comes after its call has
/// returned, so nothing is being written any more.
fn move_all(
    pid: i32,
    direction: Direction,
    local: &mut [IoVec],
    remote: &mut [IoVec],
) -> Result<(), TransportError> {
    let what = match direction {
        Direction::Write => "process_vm_writev to",
        Direction::Read => "process_vm_readv from",
    };
    let (mut local, mut remote) = (local, remote);
    while !local.is_empty() {
        // SAFETY: the local ranges were made from checked addresses of regions that the caller's
        // job keeps mapped, and no reference to pool memory is ever made. Should the peer be this
        // process, its table of regions, or the operator's word for its descriptors, says that the
        // remote ranges are pool memory too.
        let moved = unsafe {
            match direction {
                Direction::Write => sys::write_to_process(pid, local, remote),
                Direction::Read => sys::read_ranges_from_process(pid, local, remote),
            }
        };
        let moved = match moved {
            Ok(0) => {
                return Err(TransportError::quiesced(
                    TransportErrorKind::Io,
                    format!("{what} process {pid} moved nothing"),
                ));
            }
            Ok(moved) => moved,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(explain(what, pid, &error)),
        };
        // Both lists have the same lengths, so the same ranges are left of both.
        local = sys::advance(local, moved);
        remote = sys::advance(remote, moved);
    }
    Ok(())
}

/// What an error of reaching into a process means, and what can be changed.
pub(crate) fn explain(what: &str, pid: i32, error: &io::Error) -> TransportError {
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
    TransportError::quiesced(kind, format!("{what} process {pid}: {error}{hint}"))
}

impl Transport for Cma {
    fn kind(&self) -> TransportKind {
        TransportKind::Cma
    }

    /// SGLang registers pools as device memory also where they are in host memory, so a location
    /// counts only where addresses are not simply believed.
    fn can_move(&self, local: Location, remote: &RemoteRegion) -> bool {
        let is_believed = matches!(self.peer, Peer::Believed(_)) && remote.key_opt.is_none();
        local == Location::Host && (is_believed || remote.location == Location::Host)
    }

    fn submit(&self, job: Job, status: Arc<Status>) {
        match &self.peer {
            Peer::Proven(link) => link.admit(job, status),
            Peer::Believed(peer) => {
                let addresses = job.pairs.iter().map(|pair| pair.remote.claimed_address);
                let reach = Reach::Believed {
                    peer: Arc::clone(peer),
                    addresses: addresses.collect(),
                };
                match reach.failure() {
                    Some(error) => status.fail(error),
                    None => copy::submit(&self.engine, reach, job, status),
                }
            }
        }
    }

    fn is_alive(&self) -> bool {
        match &self.peer {
            Peer::Proven(link) => link.failure().is_none(),
            Peer::Believed(peer) => peer.failure().is_none(),
        }
    }

    fn close(&self) {
        match &self.peer {
            Peer::Proven(link) => link.end(TransportError::closed_session()),
            Peer::Believed(peer) => peer.is_closed.store(true, Ordering::Release),
        }
    }
}

impl Drop for Cma {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_change() {
        let explained = |code| {
            let error = io::Error::from_raw_os_error(code);
            explain("process_vm_writev to", 4711, &error)
        };
        let refused = explained(libc::EPERM);
        assert_eq!(refused.kind(), TransportErrorKind::PermissionDenied);
        for hint in [
            "process 4711",
            "kernel.yama.ptrace_scope",
            "CAP_SYS_PTRACE",
            "tcp",
        ] {
            assert!(refused.to_string().contains(hint), "{refused}");
        }
        assert_eq!(explained(libc::ESRCH).kind(), TransportErrorKind::PeerDead);
        assert_eq!(
            explained(libc::EFAULT).kind(),
            TransportErrorKind::NotRegistered
        );
        assert!(refused.is_quiesced(), "the call has returned");
    }
}
