//! From ranges to work requests: sorted by where they lie in the peer's memory, and merged where
//! they are adjacent there.

use std::sync::Arc;

use common::wire::rdma_control::{MemoryKeys, MemoryPart};

use crate::error::{TransportError, TransportErrorKind};
use crate::region::Location;
use crate::transport::rdma::registration::Registration;
use crate::transport::rdma::verbs::{QueuePair, RemoteRange, Verb};

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
    pub(crate) local: Arc<Registration>,
    pub(crate) remote: RemoteKeys,
    /// Where the peer's region is.
    pub(crate) place: Location,
}

/// A region of the peer's, as it told.
#[derive(Clone, Debug)]
pub(crate) struct RemoteKeys {
    pub(crate) keys: MemoryKeys,
    /// Its pieces, if there are several: where each ends, and its key.
    parts: Arc<[(u64, u32)]>,
    /// Whether what is written there is only sure to be seen after a read.
    reads_back: bool,
}

impl RemoteKeys {
    /// `None` when the pieces do not make up the region.
    pub(crate) fn new(keys: MemoryKeys, parts: &[MemoryPart], reads_back: bool) -> Option<Self> {
        let mut reached = 0u64;
        let mut ends = Vec::with_capacity(parts.len());
        for part in parts {
            reached = reached.checked_add(part.bytes).filter(|_| part.bytes > 0)?;
            ends.push((reached, part.remote_key));
        }
        let is_whole = parts.is_empty() || reached == keys.length;
        is_whole.then(|| Self {
            keys,
            parts: ends.into(),
            reads_back,
        })
    }

    /// The key for a range, which must not cross a seam.
    fn key(&self, offset: u64, end: u64) -> Option<u32> {
        if self.parts.is_empty() {
            return Some(self.keys.remote_key);
        }
        let place = self.parts.partition_point(|(until, _)| *until <= offset);
        let (until, key) = self.parts.get(place)?;
        (end <= *until).then_some(*key)
    }

    /// Where each piece but the last one ends.
    fn seams(&self) -> impl Iterator<Item = u64> {
        let inner = self.parts.len().saturating_sub(1);
        self.parts.iter().take(inner).map(|(until, _)| *until)
    }
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
        let remote = &self.keys(request)?.remote;
        let keys = &remote.keys;
        let end = request.remote.checked_add(request.bytes);
        let end = end.filter(|end| *end <= keys.length);
        let key = end.and_then(|end| remote.key(request.remote, end));
        let address = keys.address.checked_add(request.remote);
        match (key, address) {
            (Some(key), Some(address)) => Ok(RemoteRange { address, key }),
            _ => Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "{} bytes at {} leave the peer's region of {} bytes",
                    request.bytes, request.remote, keys.length
                ),
            )),
        }
    }

    /// Cuts ranges where registrations end, on either side.
    pub(crate) fn cut(&self, requests: &mut Vec<Request>) {
        for (pair, keys) in self.pairs.iter().enumerate() {
            let Some(keys) = keys else { continue };
            let sides = [
                (keys.local.seams().collect::<Vec<_>>(), true),
                (keys.remote.seams().collect(), false),
            ];
            for (seams, is_local) in sides {
                seams
                    .into_iter()
                    .for_each(|seam| cut_at(requests, pair, seam, is_local));
            }
        }
    }

    /// Work requests that must be free before a part of it can be posted.
    pub(crate) fn least_sends(&self) -> u32 {
        1 + u32::from(self.reads_back())
    }

    fn reads_back(&self) -> bool {
        let mut pairs = self.pairs.iter().flatten();
        self.verb == Verb::Write && pairs.any(|keys| keys.remote.reads_back)
    }

    /// Sorts ranges by where they lie in the peer's memory.
    pub(crate) fn sort(&self, requests: &mut [Request]) {
        let key = |request: &Request| {
            let keys_opt = self.pairs.get(request.pair).and_then(Option::as_ref);
            (
                keys_opt.map(|keys| (keys.remote.keys.remote_key, keys.remote.keys.address)),
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
        let free = pair.free_sends() as usize;
        let mut reads = ReadBacks::default();
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
            let (local, offset) = keys.local.at(request.local, request.bytes)?;
            let reads_back = self.verb == Verb::Write && keys.remote.reads_back;
            let device_opt = reads_back.then_some(keys.place);
            // The reads after the writes have their places.
            let has_room = chain.len() + reads.count_with(device_opt) < free;
            if continues && chain.extend(local, offset, length)? {
                open_opt = open_opt.map(|(open, before)| (open, before + request.bytes));
            } else if has_room && chain.push(local, offset, length, remote)? {
                open_opt = Some((remote, request.bytes));
            } else {
                break;
            }
            if let Some(device) = device_opt {
                reads.note(device, remote);
            }
            taken += 1;
            bytes += request.bytes;
        }
        for (_, last) in reads.0 {
            chain.push_read_back(last);
        }
        Ok((chain.post()?, taken, bytes))
    }
}

/// The last write into each device where writes are only sure to be seen after a read. A read from
/// another device, or from host memory, would say nothing of them.
#[derive(Default)]
struct ReadBacks(Vec<(Location, RemoteRange)>);

impl ReadBacks {
    /// How many reads it takes, with a write into one more place.
    fn count_with(&self, device_opt: Option<Location>) -> usize {
        let is_new = device_opt.is_some_and(|device| self.0.iter().all(|(of, _)| *of != device));
        self.0.len() + usize::from(is_new)
    }

    fn note(&mut self, device: Location, last: RemoteRange) {
        match self.0.iter_mut().find(|(of, _)| *of == device) {
            Some(noted) => noted.1 = last,
            None => self.0.push((device, last)),
        }
    }
}

/// Cuts the ranges of a pair at an offset of its local or its remote region.
fn cut_at(requests: &mut Vec<Request>, pair: usize, seam: u64, is_local: bool) {
    for place in 0..requests.len() {
        let Some(request) = requests.get_mut(place) else {
            return;
        };
        let start = if is_local {
            request.local
        } else {
            request.remote
        };
        let before = seam.saturating_sub(start);
        if request.pair != pair || before == 0 || before >= request.bytes {
            continue;
        }
        let behind = Request {
            pair,
            local: request.local + before,
            remote: request.remote + before,
            bytes: request.bytes - before,
        };
        request.bytes = before;
        requests.push(behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::DeviceRuntime;

    fn part(bytes: u64, remote_key: u32) -> MemoryPart {
        MemoryPart { bytes, remote_key }
    }

    fn keys(length: u64) -> MemoryKeys {
        MemoryKeys {
            address: 0x1000,
            local_key: 0,
            remote_key: 1,
            length,
        }
    }

    #[test]
    fn each_piece_of_a_region_has_its_key() {
        let parts = [part(100, 1), part(50, 2), part(10, 3)];
        let remote = RemoteKeys::new(keys(160), &parts, false).unwrap();
        assert_eq!(remote.seams().collect::<Vec<_>>(), [100, 150]);
        for (offset, end, key) in [
            (0, 100, Some(1)),
            (99, 100, Some(1)),
            (100, 150, Some(2)),
            (150, 160, Some(3)),
            (99, 101, None),
            (159, 161, None),
            (160, 160, None),
        ] {
            assert_eq!(remote.key(offset, end), key, "{offset}..{end}");
        }
        let whole = RemoteKeys::new(keys(160), &[], false).unwrap();
        assert_eq!((whole.key(0, 160), whole.seams().count()), (Some(1), 0));
    }

    #[test]
    fn each_device_that_was_written_is_read_once_and_host_memory_never() {
        let device = |number| Location::Device {
            runtime: DeviceRuntime::Cuda,
            number,
        };
        let range = |address| RemoteRange { address, key: 1 };
        let mut reads = ReadBacks::default();
        assert_eq!(reads.count_with(None), 0);
        for (device_opt, address, count) in [
            (Some(device(0)), 10, 1),
            (None, 20, 1),
            (Some(device(1)), 30, 2),
            (Some(device(0)), 40, 2),
            (None, 50, 2),
        ] {
            assert_eq!(reads.count_with(device_opt), count);
            if let Some(device) = device_opt {
                reads.note(device, range(address));
            }
        }
        let addresses: Vec<_> = reads.0.iter().map(|(_, last)| last.address).collect();
        assert_eq!(addresses, [40, 30]);
    }

    #[test]
    fn pieces_that_do_not_make_up_a_region_are_nonsense() {
        for parts in [
            &[part(100, 1)][..],
            &[part(160, 1), part(1, 2)],
            &[part(0, 1), part(160, 2)],
            &[part(u64::MAX, 1), part(161, 2)],
        ] {
            assert!(
                RemoteKeys::new(keys(160), parts, false).is_none(),
                "{parts:?}"
            );
        }
    }

    #[test]
    fn ranges_are_cut_at_seams_of_their_own_side() {
        let request = |pair, local, remote, bytes| Request {
            pair,
            local,
            remote,
            bytes,
        };
        let mut requests = vec![request(0, 10, 90, 30), request(1, 95, 95, 10)];
        // Of the first pair alone; the second cut goes through what the first one left.
        cut_at(&mut requests, 0, 100, false);
        cut_at(&mut requests, 0, 35, true);
        cut_at(&mut requests, 0, 40, true);
        requests.sort_by_key(|request| (request.pair, request.local));
        let cut = [
            request(0, 10, 90, 10),
            request(0, 20, 100, 15),
            request(0, 35, 115, 5),
            request(1, 95, 95, 10),
        ];
        assert_eq!(requests, cut);
    }
}
