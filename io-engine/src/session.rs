//! A connection between two engines, and what is submitted to it.

use std::sync::Arc;

use common::plan::RunList;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, Region, RemoteRegion};
use crate::status::{Status, TransferHandle};
use crate::transport::{Transport, TransportKind};

/// Runs between one local and one remote region.
#[derive(Clone, Debug)]
pub struct WritePair {
    /// Where the bytes are.
    pub local: Region,
    /// Where they go.
    pub remote: RemoteRegion,
    /// Which bytes; expanded lazily while they are written.
    pub runs: RunList,
}

/// What one call writes; the order of its ranges is free.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    /// The pairs.
    pub pairs: Vec<WritePair>,
}

/// An open connection to a peer's engine over one transport. Clones share it; it is closed by
/// [`Session::close`], with its engine, or with the last clone.
#[derive(Clone)]
pub struct Session {
    transport: Arc<dyn Transport>,
    peer_key: Arc<str>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Session")
            .field("peer", &self.peer_key)
            .field("transport", &self.transport.kind())
            .finish()
    }
}

impl Session {
    pub(crate) fn new(transport: Arc<dyn Transport>, peer_key: &str) -> Self {
        Self {
            transport,
            peer_key: peer_key.into(),
        }
    }

    /// How bytes move. Chosen when the session was opened; it never changes.
    pub fn transport(&self) -> TransportKind {
        self.transport.kind()
    }

    /// Key of the peer's engine.
    pub fn peer_key(&self) -> &str {
        &self.peer_key
    }

    /// Whether the peer is still there, as far as can be told without sending.
    pub fn is_alive(&self) -> bool {
        self.transport.is_alive()
    }

    /// Begins to write. Every range is compared with both regions first; if one leaves its
    /// region, nothing is written and the handle ends with that error.
    pub fn write(&self, batch: WriteBatch) -> TransferHandle {
        let totals = batch
            .pairs
            .iter()
            .try_fold((0u64, 0u64), |(bytes, ranges), pair| {
                let bytes = bytes.checked_add(pair.runs.bytes().get())?;
                Some((bytes, ranges.checked_add(pair.runs.ranges())?))
            });
        let (bytes, ranges) = totals.unwrap_or_default();
        let status = Status::new(bytes, ranges);
        match batch.pairs.iter().try_for_each(check_pair) {
            Err(error) => status.fail(error),
            Ok(()) if totals.is_none() => status.fail(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                "the bytes of a batch do not fit 64 bits",
            )),
            Ok(()) if ranges == 0 => status.exhausted(),
            Ok(()) => self.transport.submit(batch.pairs, Arc::clone(&status)),
        }
        TransferHandle(status)
    }

    /// Closes the connection. Batches in flight fail; each says whether its writes have stopped.
    pub fn close(&self) {
        self.transport.close();
    }
}

fn check_pair(pair: &WritePair) -> Result<(), TransportError> {
    let out_of_bounds = |side: &str, end: u64, id: u32, label: &str, len: u64| {
        Err(TransportError::quiesced(
            TransportErrorKind::OutOfBounds,
            format!("a write ends at {end} in {side} region {id} ({label}) of {len} bytes"),
        ))
    };
    let label = pair.local.label();
    let (src_end, dst_end) = (pair.runs.src_end().get(), pair.runs.dst_end().get());
    if src_end > pair.local.len().get() {
        return out_of_bounds(
            "local",
            src_end,
            pair.local.id(),
            label,
            pair.local.len().get(),
        );
    }
    if dst_end > pair.remote.len {
        return out_of_bounds("remote", dst_end, pair.remote.id, label, pair.remote.len);
    }
    // SGLang registers pools as device memory also where they are in host memory; what a stock
    // peer says is decided on by the transport, which knows whether addresses are believed.
    match (
        pair.local.location(),
        pair.remote.location,
        pair.remote.key_opt,
    ) {
        (Location::Host, Location::Device { device }, Some(_)) => Err(TransportError::quiesced(
            TransportErrorKind::NotRegistered,
            format!(
                "remote region {} is in device {device}; device memory cannot be written yet",
                pair.remote.id
            ),
        )),
        _ => Ok(()),
    }
}
