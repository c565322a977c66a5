//! Posting: chains of one-sided work, and small messages.

use std::mem::MaybeUninit;
use std::sync::Arc;

use rdma_sys::{ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};

use super::super::coded_error;
use super::super::completion_queue::WorkId;
use super::super::memory_region::MemoryRegion;
use super::{MESSAGE_BYTES, Posted, QueuePair, READ_BACK_BYTES, RemoteRange, Verb};
use crate::error::{TransportError, TransportErrorKind};

const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;

impl QueuePair {
    /// Begins a chain. It is posted as a whole by [`PostGuard::post`]; a guard that is dropped
    /// before posts nothing.
    pub fn begin(&mut self, verb: Verb) -> PostGuard<'_, '_> {
        self.requests.clear();
        self.ranges.clear();
        PostGuard {
            pair: self,
            verb,
            regions: Vec::new(),
            is_on_device: false,
        }
    }

    /// Sends a message of 16 bytes to the peer, inline, as a chain of its own.
    ///
    /// # Errors
    /// When the send queue is full or the device refuses.
    pub fn send_message(&mut self, message: &[u8; MESSAGE_BYTES]) -> Result<u64, TransportError> {
        if self.free_sends == 0 || (self.depths.inline_bytes as usize) < MESSAGE_BYTES {
            return Err(TransportError::quiesced(
                TransportErrorKind::Io,
                "a notification does not fit the send queue",
            ));
        }
        let mut range = ibv_sge {
            addr: message.as_ptr().expose_provenance() as u64,
            length: MESSAGE_BYTES as u32,
            lkey: 0,
        };
        let chain = self.next_chain;
        let mut request = empty_request();
        request.wr_id = WorkId::Send {
            chain,
            is_last: true,
        }
        .pack();
        request.sg_list = &raw mut range;
        request.num_sge = 1;
        request.opcode = ibv_wr_opcode::IBV_WR_SEND;
        request.send_flags = SIGNALED | INLINE;
        // SAFETY: inline data is copied before the call returns, so `message` and `range` need
        // live no longer.
        unsafe { self.post_requests(&raw mut request) }?;
        self.note_posted(1, Vec::new());
        Ok(chain)
    }

    fn note_posted(&mut self, work_requests: u32, regions: Vec<Arc<MemoryRegion>>) {
        self.posted.push_back(Posted {
            chain: self.next_chain,
            work_requests,
            failure_opt: None,
            _regions: regions,
        });
        self.next_chain += 1;
        self.free_sends -= work_requests;
    }

    /// # Safety
    /// The list and what it points to are valid for the call; memory that it names by local keys
    /// stays registered until the completions were seen.
    unsafe fn post_requests(&mut self, first: *mut ibv_send_wr) -> Result<(), TransportError> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is valid and carries its function; the rest is the caller's.
        let code = unsafe {
            let operations = &(*(*self.pair.as_ptr()).context).ops;
            operations.post_send.map_or(libc::ENOSYS, |post| {
                post(self.pair.as_ptr(), first, &raw mut bad)
            })
        };
        if code == 0 {
            return Ok(());
        }
        let error = coded_error(
            format!(
                "posting to queue pair {} of {}",
                self.number(),
                self.domain.device().name()
            ),
            code,
        );
        // Requests before the bad one were taken, and nobody will hear of them.
        match std::ptr::eq(bad, first) {
            true => Err(error),
            false => Err(error.without_proof()),
        }
    }
}

fn empty_request() -> ibv_send_wr {
    // SAFETY: all zeros is a value of every field: numbers, null pointers, unions of those.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// A chain that is being built. It borrows the queue pair, so that there is one at a time, and
/// every region that it names, so that none can go before the chain is posted and holds it.
pub struct PostGuard<'pair, 'region> {
    pair: &'pair mut QueuePair,
    verb: Verb,
    regions: Vec<&'region Arc<MemoryRegion>>,
    /// Whether a local range is in a device's memory.
    is_on_device: bool,
}

impl<'region> PostGuard<'_, 'region> {
    /// Work requests so far.
    pub fn len(&self) -> usize {
        self.pair.requests.len()
    }

    /// Whether there is no work in it.
    pub fn is_empty(&self) -> bool {
        self.pair.requests.is_empty()
    }

    /// Adds a work request of one local range to or from a remote one. False: the send queue has
    /// no room for it, and nothing was added.
    ///
    /// # Errors
    /// When the range leaves its region, or the region is of another domain.
    pub fn push(
        &mut self,
        local: &'region Arc<MemoryRegion>,
        offset: u64,
        bytes: u32,
        remote: RemoteRange,
    ) -> Result<bool, TransportError> {
        let range = self.checked(local, offset, bytes)?;
        if self.pair.requests.len() >= self.pair.free_sends as usize {
            return Ok(false);
        }
        let mut request = empty_request();
        request.opcode = match self.verb {
            Verb::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            Verb::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
        };
        request.num_sge = 1;
        request.wr.rdma.remote_addr = remote.address;
        request.wr.rdma.rkey = remote.key;
        self.pair.requests.push(request);
        self.pair.ranges.push(range);
        self.note(local);
        Ok(true)
    }

    /// Adds a local range to the last work request, whose remote range grows by as many bytes.
    /// False: it has as many as fit, and nothing was added.
    ///
    /// # Errors
    /// As [`PostGuard::push`].
    pub fn extend(
        &mut self,
        local: &'region Arc<MemoryRegion>,
        offset: u64,
        bytes: u32,
    ) -> Result<bool, TransportError> {
        let range = self.checked(local, offset, bytes)?;
        let most = self.pair.depths.ranges;
        let (Some(request), Some(last)) =
            (self.pair.requests.last_mut(), self.pair.ranges.last_mut())
        else {
            return Ok(false);
        };
        let is_adjacent =
            last.lkey == range.lkey && last.addr + u64::from(last.length) == range.addr;
        if is_adjacent && last.length.checked_add(bytes).is_some() {
            last.length += bytes;
            return Ok(true);
        }
        if request.num_sge.cast_unsigned() >= most {
            return Ok(false);
        }
        request.num_sge += 1;
        self.pair.ranges.push(range);
        self.note(local);
        Ok(true)
    }

    fn checked(
        &self,
        local: &MemoryRegion,
        offset: u64,
        bytes: u32,
    ) -> Result<ibv_sge, TransportError> {
        let end = offset.checked_add(u64::from(bytes));
        let is_inside = end.is_some_and(|end| end <= local.length());
        if !is_inside || !Arc::ptr_eq(local.domain(), self.pair.domain()) {
            return Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "{bytes} bytes at {offset} leave a memory region of {} bytes of {}",
                    local.length(),
                    self.pair.domain().device().name()
                ),
            ));
        }
        Ok(ibv_sge {
            addr: local.address() + offset,
            length: bytes,
            lkey: local.local_key(),
        })
    }

    fn note(&mut self, local: &'region Arc<MemoryRegion>) {
        // Ranges of one region come together, so the last one is nearly always it.
        let is_noted = self
            .regions
            .last()
            .is_some_and(|last| Arc::ptr_eq(last, local));
        if !is_noted {
            self.is_on_device |= local.is_on_device();
            self.regions.push(local);
        }
    }

    /// Adds a read of one byte that the peer's network device answers after all writes before it,
    /// and only once they are where it reads from. False: the send queue has no room for it.
    pub fn push_read_back(&mut self, remote: RemoteRange) -> bool {
        if self.pair.requests.len() >= self.pair.free_sends as usize {
            return false;
        }
        let mut request = empty_request();
        request.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        request.num_sge = 1;
        request.wr.rdma.remote_addr = remote.address;
        request.wr.rdma.rkey = remote.key;
        self.pair.requests.push(request);
        let messages = self.pair.receives.length() - READ_BACK_BYTES as u64;
        self.pair.ranges.push(ibv_sge {
            addr: self.pair.receives.address() + messages,
            length: 1,
            lkey: self.pair.receives.local_key(),
        });
        true
    }

    /// Posts the chain; only its last work request is signalled. Its number.
    ///
    /// # Errors
    /// When the device refuses it.
    pub fn post(self) -> Result<u64, TransportError> {
        let pair = self.pair;
        let chain = pair.next_chain;
        let count = pair.requests.len();
        if count == 0 {
            return Err(TransportError::quiesced(
                TransportErrorKind::Protocol,
                "a chain without work",
            ));
        }
        let inline_bytes = u64::from(pair.depths.inline_bytes);
        let mut ranges = pair.ranges.as_mut_slice();
        for (place, request) in pair.requests.iter_mut().enumerate() {
            let is_last = place + 1 == count;
            let (own, rest) = ranges.split_at_mut(request.num_sge.cast_unsigned() as usize);
            ranges = rest;
            let bytes: u64 = own.iter().map(|range| u64::from(range.length)).sum();
            request.wr_id = WorkId::Send { chain, is_last }.pack();
            request.sg_list = own.as_mut_ptr();
            if is_last {
                request.send_flags |= SIGNALED;
            }
            // The processor copies what is sent inline, and must not touch a device's memory.
            let is_write = request.opcode == ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            if is_write && bytes <= inline_bytes && !self.is_on_device {
                request.send_flags |= INLINE;
            }
        }
        let first = pair.requests.as_mut_ptr();
        for place in 1..count {
            // SAFETY: both places lie inside the buffer, which does not move before the call.
            unsafe { (*first.add(place - 1)).next = first.add(place) };
        }
        let regions = self.regions.into_iter().map(Arc::clone).collect();
        // SAFETY: the requests and ranges lie in the queue pair's own buffers, which do not move
        // during the call; the ranges were checked against their regions, which one of the two
        // lists holds until the completions were seen or the queue pair is destroyed.
        match unsafe { pair.post_requests(first) } {
            Ok(()) => {
                pair.note_posted(count as u32, regions);
                Ok(chain)
            }
            Err(error) => {
                if !error.is_quiesced() {
                    pair.lost.extend(regions);
                }
                Err(error)
            }
        }
    }
}
