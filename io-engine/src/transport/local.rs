//! Within one process: `memcpy` between two engines' regions, on the copying engine's workers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crate::engine::EngineInner;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, Region, RegionGuard, RemoteRegion};
use crate::session::{Job, WritePair};
use crate::status::Status;
use crate::transport::copy::{self, CopyWork, copy_mapped};
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
            return Err(TransportError::closed_session());
        }
        let peer = self.peer.upgrade().filter(|peer| !peer.is_shut_down());
        peer.ok_or_else(|| {
            TransportError::quiesced(TransportErrorKind::PeerDead, "the peer's engine is gone")
        })
    }
}

/// The peer's side of one batch: its guards keep the regions registered until the batch ends.
struct LocalTarget {
    guards: Vec<RegionGuard>,
    is_closed: Arc<AtomicBool>,
}

impl CopyWork for LocalTarget {
    fn copy(&self, job: &Job, piece: &Piece) -> Result<(), TransportError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(TransportError::closed_session());
        }
        let region = |pair| {
            let guard_opt = self.guards.get(pair).map(RegionGuard::region);
            guard_opt.ok_or_else(TransportError::closed_session)
        };
        copy_mapped(
            job,
            piece,
            |pair, offset, len| region(pair)?.address(offset, len),
            |pair, offset, len| region(pair)?.place(offset, len),
        )
    }
}

/// Enters every pair's region, or none: a descriptor that promises more than is registered is
/// refused before a byte moves.
fn enter_all(engine: &EngineInner, job: &Job) -> Result<Vec<RegionGuard>, TransportError> {
    let enter = |pair: &WritePair| {
        let region = find_region(engine, &pair.remote)?;
        region.place(0, pair.remote_end(job.direction))?;
        region.enter()
    };
    job.pairs.iter().map(enter).collect()
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

    fn can_move(&self, _local: Location, _remote: &RemoteRegion) -> bool {
        true
    }

    fn submit(&self, job: Job, status: Arc<Status>) {
        match self.live_peer().and_then(|peer| enter_all(&peer, &job)) {
            Ok(guards) => {
                let target = LocalTarget {
                    guards,
                    is_closed: Arc::clone(&self.is_closed),
                };
                copy::submit(&self.engine, target, job, status);
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
