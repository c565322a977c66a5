//! Within one process: `memcpy` between two engines' regions, on the copying engine's workers.

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
}

impl Local {
    pub(crate) fn new(engine: &Arc<EngineInner>, peer: &Arc<EngineInner>) -> Self {
        Self {
            engine: Arc::downgrade(engine),
            peer: Arc::downgrade(peer),
        }
    }
}

/// The destination of one batch: its guards keep the regions registered until the batch ends.
struct LocalTarget {
    guards: Vec<WriteGuard>,
}

impl CopyWork for LocalTarget {
    fn copy(&self, pairs: &[WritePair], piece: &Piece) -> Result<(), TransportError> {
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

/// The registration that a descriptor names.
pub(crate) fn find_region(
    engine: &EngineInner,
    remote: &RemoteRegion,
) -> Result<Region, TransportError> {
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
        let (Some(engine), Some(peer)) = (self.engine.upgrade(), self.peer.upgrade()) else {
            return status.fail(TransportError::quiesced(
                TransportErrorKind::PeerDead,
                "the peer's engine is gone",
            ));
        };
        let guards: Result<Vec<_>, _> = pairs
            .iter()
            .map(|pair| find_region(&peer, &pair.remote).and_then(|region| region.begin_write()))
            .collect();
        match guards {
            Ok(guards) => engine.submit_copy(Arc::new(LocalTarget { guards }), pairs, status),
            Err(error) => status.fail(error),
        }
    }

    fn is_alive(&self) -> bool {
        self.peer.strong_count() > 0
    }

    fn close(&self) {}
}
