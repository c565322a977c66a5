//! Within one process: `memcpy` between two engines' regions, on the copying engine's workers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::engine::{CopyWork, EngineInner};
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Region, RemoteRegion, WriteGuard};
use crate::session::WritePair;
use crate::status::Status;
use crate::sys;
use crate::transport::{Piece, Transport, TransportKind};

/// A connection to another engine of this process (or to itself).
pub(crate) struct Local {
    engine: Weak<EngineInner>,
    peer: Weak<EngineInner>,
    is_closed: Arc<AtomicBool>,
}

impl Local {
    pub(crate) fn new(engine: &Arc<EngineInner>, peer: &Arc<EngineInner>) -> Self {
        Self {
            engine: Arc::downgrade(engine),
            peer: Arc::downgrade(peer),
            is_closed: Arc::default(),
        }
    }

    /// The peer's engine, while it and the session live.
    fn live_peer(&self) -> Result<Arc<EngineInner>, TransportError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        let peer = self.peer.upgrade().filter(|peer| !peer.is_shut_down());
        peer.ok_or_else(|| {
            TransportError::quiesced(TransportErrorKind::PeerDead, "the peer's engine is gone")
        })
    }
}

fn closed() -> TransportError {
    TransportError::quiesced(TransportErrorKind::Closed, "the session is closed")
}

/// The destination of one batch: its guards keep the regions registered until the batch ends.
struct LocalTarget {
    guards: Vec<WriteGuard>,
    is_closed: Arc<AtomicBool>,
}

impl CopyWork for LocalTarget {
    fn copy(&self, pairs: &[WritePair], piece: &Piece) -> Result<(), TransportError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        for range in &piece.ranges {
            let (Some(pair), Some(guard)) = (pairs.get(range.pair), self.guards.get(range.pair))
            else {
                continue;
            };
            let src = pair.local.address(range.src, range.len)?;
            let dst = guard.region().address(range.dst, range.len)?;
            let overlaps = src.addr().abs_diff(dst.addr()) < range.len as usize;
            if overlaps {
                return Err(TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    "source and destination of a write overlap",
                ));
            }
            // SAFETY: both ranges were just checked against their regions, whose memory `pairs`
            // and `guards` keep mapped, and they do not overlap.
            unsafe { sys::copy(src, dst, range.len as usize) };
        }
        Ok(())
    }
}

/// Enters every pair's region, or none: a descriptor that promises more than is registered is
/// refused before a byte moves.
fn enter_all(engine: &EngineInner, pairs: &[WritePair]) -> Result<Vec<WriteGuard>, TransportError> {
    let enter = |pair: &WritePair| {
        let region = find_region(engine, &pair.remote)?;
        region.address(0, pair.runs.dst_end().get())?;
        region.begin_write()
    };
    pairs.iter().map(enter).collect()
}

/// The registration that a descriptor names.
fn find_region(engine: &EngineInner, remote: &RemoteRegion) -> Result<Region, TransportError> {
    let refused = |kind, what: &str| {
        TransportError::quiesced(
            kind,
            format!("{what} {} of engine {}", remote.id, engine.key()),
        )
    };
    let region = engine
        .region(remote.id)
        .ok_or_else(|| refused(TransportErrorKind::NotRegistered, "there is no region"))?;
    match &remote.key_opt {
        Some(key) if region.key().matches(key) => Ok(region),
        _ => Err(refused(TransportErrorKind::BadKey, "wrong key for region")),
    }
}

impl Transport for Local {
    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn submit(&self, pairs: Vec<WritePair>, status: Arc<Status>) {
        let Some(engine) = self.engine.upgrade() else {
            return status.fail(closed());
        };
        let guards = self.live_peer().and_then(|peer| enter_all(&peer, &pairs));
        match guards {
            Ok(guards) => {
                let target = LocalTarget {
                    guards,
                    is_closed: Arc::clone(&self.is_closed),
                };
                engine.submit_copy(Arc::new(target), pairs, status);
            }
            Err(error) => status.fail(error),
        }
    }

    fn is_alive(&self) -> bool {
        self.live_peer().is_ok()
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.close();
    }
}
