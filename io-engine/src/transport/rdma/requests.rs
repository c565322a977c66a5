//! From ranges to work requests: sorted by where they lie in the peer's memory, and merged where
//! they are adjacent there.

use std::sync::Arc;

use common::wire::rdma_control::MemoryKeys;

use crate::error::{TransportError, TransportErrorKind};
use crate::transport::rdma::verbs::{MemoryRegion, QueuePair, RemoteRange, Verb};

/// Bytes of one work request at most; verbs's lengths have 32 bits, and devices allow 2^30 or more.
const MOST_BYTES: u64 = 1 << 30;

/// A range of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Position of its pair in the batch.
    pub(crate) pair: usize,
    /// Offset in the local region.
    pub(crate) local: u64,
    /// Offset in the peer's region.
    pub(crate) remote: u64,
    /// Bytes.
    pub(crate) bytes: u64,
}

/// Both regions of a pair, as the devices of a queue pair know them.
#[derive(Clone, Debug)]
pub(crate) struct PairKeys {
    pub(crate) local: Arc<MemoryRegion>,
    pub(crate) remote: MemoryKeys,
}

/// The pairs of a piece, by position in the batch; `None` for those without ranges in it.
#[derive(Clone, Debug)]
pub(crate) struct Lane {
    pub(crate) verb: Verb,
    pub(crate) pairs: Vec<Option<PairKeys>>,
}

impl Lane {
    fn keys(&self, request: &Request) -> Result<&PairKeys, TransportError> {
        let keys = self.pairs.get(request.pair).and_then(Option::as_ref);
        keys.ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::NotRegistered,
                "a region is not known on this network device (yet)",
            )
        })
    }

    /// The peer's address of a range, inside its region.
    fn remote(&self, request: &Request) -> Result<RemoteRange, TransportError> {
        let keys = self.keys(request)?.remote;
        let end = request.remote.checked_add(request.bytes);
        let address = keys.address.checked_add(request.remote);
        match (end, address) {
            (Some(end), Some(address)) if end <= keys.length => Ok(RemoteRange {
                address,
                key: keys.remote_key,
            }),
            _ => Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "{} bytes at {} leave the peer's region of {} bytes",
                    request.bytes, request.remote, keys.length
                ),
            )),
        }
    }

    /// Sorts ranges by where they lie in the peer's memory.
    pub(crate) fn sort(&self, requests: &mut [Request]) {
        let key = |request: &Request| {
            let keys_opt = self.pairs.get(request.pair).and_then(Option::as_ref);
            (
                keys_opt.map(|keys| (keys.remote.remote_key, keys.remote.address)),
                request.remote,
            )
        };
        if !requests.is_sorted_by_key(key) {
            requests.sort_by_key(key);
        }
    }

    /// Posts as many ranges from the front as the send queue has room for, as one chain: its
    /// number, how many ranges, and their bytes.
    pub(crate) fn post(
        &self,
        pair: &mut QueuePair,
        requests: &[Request],
    ) -> Result<(u64, usize, u64), TransportError> {
        let mut chain = pair.begin(self.verb);
        let (mut taken, mut bytes) = (0, 0);
        let mut open_opt: Option<(RemoteRange, u64)> = None;
        for request in requests {
            let (keys, remote) = (self.keys(request)?, self.remote(request)?);
            let length = u32::try_from(request.bytes).map_err(|_| {
                TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    format!("a range of {} bytes", request.bytes),
                )
            })?;
            let continues = open_opt.is_some_and(|(open, open_bytes)| {
                open.key == remote.key
                    && open.address + open_bytes == remote.address
                    && open_bytes + request.bytes <= MOST_BYTES
            });
            if continues && chain.extend(&keys.local, request.local, length)? {
                open_opt = open_opt.map(|(open, before)| (open, before + request.bytes));
            } else if chain.push(&keys.local, request.local, length, remote)? {
                open_opt = Some((remote, request.bytes));
            } else {
                break;
            }
            taken += 1;
            bytes += request.bytes;
        }
        Ok((chain.post()?, taken, bytes))
    }
}
