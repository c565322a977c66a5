//! A reliable connection's end: chains of one-sided work, and small messages from the peer.
//!
//! What is posted stays in the queue pair's own list, with the memory regions that it names, until
//! its completion was taken or the queue pair is destroyed: only then can the memory go.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};

use super::address::{Gid, GidEntry, LinkLayer, Mtu};
use super::completion_queue::{Completion, CompletionQueue, CompletionStatus, WorkId};
use super::memory_region::MemoryRegion;
use super::protection_domain::ProtectionDomain;
use super::{coded_error, last_error};
use crate::device::nic::PEER_ACCESS;
use crate::error::{TransportError, TransportErrorKind};

/// Bytes of a peer's message.
pub(super) const MESSAGE_BYTES: usize = 16;

/// Bytes that a read after writes comes into; nobody looks at them.
const READ_BACK_BYTES: usize = 8;

/// Verbs's number of a delay of 0.64 ms.
const RECEIVER_NOT_READY_DELAY: u8 = 12;
/// Routers between two RoCEv2 hosts at most.
const HOP_LIMIT: u8 = 16;

/// How large a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depths {
    /// Work requests that may be posted and not completed.
    pub sends: u32,
    /// Messages that may arrive before one is taken.
    pub receives: u32,
    /// Local ranges of one work request.
    pub ranges: u32,
    /// Bytes that are sent out of the work request itself.
    pub inline_bytes: u32,
}

/// When a peer that does not answer is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Verbs's number: 4.096 us doubled so many times.
    pub timeout: u8,
    /// Tries after the first; 7 is for ever on some devices.
    pub retries: u8,
    /// Tries while the peer has no receive posted; 7 is for ever.
    pub receiver_not_ready_retries: u8,
}

/// How the other end is reached.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// This end's port, from 1.
    pub port: u8,
    /// What the port is connected to.
    pub layer: LinkLayer,
    /// This end's address.
    pub own: GidEntry,
    /// Number of the other queue pair.
    pub peer_number: u32,
    /// The other end's address.
    pub peer_gid: Gid,
    /// The other end's address on InfiniBand.
    pub peer_lid: u16,
    /// First packet number of the other end.
    pub peer_packet_number: u32,
    /// Largest packet.
    pub mtu: Mtu,
    /// Which packets are like, to switches.
    pub traffic_class: u8,
    /// As above, on InfiniBand.
    pub service_level: u8,
    /// When to give up.
    pub retry: RetryPolicy,
}

/// What a chain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Local ranges to a remote one.
    Write,
    /// A remote range to local ones.
    Read,
}

/// A range of the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// First virtual address.
    pub address: u64,
    /// Its region's key.
    pub key: u32,
}

/// A chain that will be heard of no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Its number.
    pub chain: u64,
    /// The first failure of its work requests, or success.
    pub status: CompletionStatus,
    /// The provider's own code of that failure.
    pub vendor_error: u32,
}

/// A posted chain.
#[derive(Debug)]
struct Posted {
    chain: u64,
    work_requests: u32,
    failure_opt: Option<(CompletionStatus, u32)>,
    _regions: Vec<Arc<MemoryRegion>>,
}

/// One end of a reliable connection.
pub struct QueuePair {
    pair: NonNull<ibv_qp>,
    depths: Depths,
    free_sends: u32,
    next_chain: u64,
    // Reused from chain to chain.
    requests: Vec<ibv_send_wr>,
    ranges: Vec<ibv_sge>,
    polled: Vec<Completion>,
    // What follows is dropped after the queue pair was destroyed, in this order.
    posted: VecDeque<Posted>,
    /// Of chains that the device took a part of only; it is not heard of again.
    lost: Vec<Arc<MemoryRegion>>,
    /// Behind the places of messages is one for reads after writes.
    receives: MemoryRegion,
    completions: CompletionQueue,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: libibverbs's calls on a queue pair have no thread affinity. The buffers hold addresses
// that are used only by the call that they were made for.
unsafe impl Send for QueuePair {}
// SAFETY: everything that changes it takes it exclusively.
unsafe impl Sync for QueuePair {}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("QueuePair")
            .field("number", &self.number())
            .field("posted", &self.posted.len())
            .finish_non_exhaustive()
    }
}

impl QueuePair {
    /// A new queue pair, ready to be connected, with all its receives posted.
    ///
    /// # Errors
    /// When the device has none of this size.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        completions: CompletionQueue,
        depths: Depths,
        port: u8,
    ) -> Result<Self, TransportError> {
        let device = domain.device();
        let receive_bytes = depths.receives.max(1) as usize * MESSAGE_BYTES;
        let receives = MemoryRegion::of_own_bytes(domain, receive_bytes + READ_BACK_BYTES)?;
        let mut attributes = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: completions.as_ptr(),
            recv_cq: completions.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: depths.sends,
                max_recv_wr: depths.receives,
                max_send_sge: depths.ranges,
                max_recv_sge: 1,
                max_inline_data: depths.inline_bytes,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the completion queue are valid, and the new value holds both.
        let pair = unsafe { (device.library().create_qp)(domain.as_ptr(), &raw mut attributes) };
        let pair = NonNull::new(pair).ok_or_else(|| {
            last_error(format!(
                "a queue pair of {} ({} work requests of {} ranges, {} receives)",
                device.name(),
                depths.sends,
                depths.ranges,
                depths.receives
            ))
        })?;
        let mut made = Self {
            pair,
            // What was asked for: a provider that gives more does not count the same everywhere.
            depths,
            free_sends: depths.sends,
            next_chain: 0,
            requests: Vec::new(),
            ranges: Vec::new(),
            polled: Vec::new(),
            posted: VecDeque::new(),
            lost: Vec::new(),
            receives,
            completions,
            domain: Arc::clone(domain),
        };
        made.initialise(port)?;
        (0..depths.receives).try_for_each(|place| made.post_receive(place))?;
        made.completions.arm()?;
        Ok(made)
    }

    /// Its number, which the peer needs.
    pub fn number(&self) -> u32 {
        // SAFETY: valid until drop.
        unsafe { (*self.pair.as_ptr()).qp_num }
    }

    /// Its domain.
    pub const fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// How large it is.
    pub const fn depths(&self) -> &Depths {
        &self.depths
    }

    /// Work requests that may be posted now.
    pub const fn free_sends(&self) -> u32 {
        self.free_sends
    }

    /// Whether nothing is posted: the device reads and writes no memory over it.
    pub fn is_drained(&self) -> bool {
        self.posted.is_empty() && self.lost.is_empty()
    }

    fn modify(
        &mut self,
        what: &str,
        mut attributes: ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), TransportError> {
        let device = self.domain.device();
        // SAFETY: the queue pair is valid; the mask says which fields are read.
        let code = unsafe {
            (device.library().modify_qp)(
                self.pair.as_ptr(),
                &raw mut attributes,
                mask.0.cast_signed(),
            )
        };
        match code {
            0 => Ok(()),
            code => Err(coded_error(
                format!("{what} queue pair {} of {}", self.number(), device.name()),
                code,
            )),
        }
    }

    fn initialise(&mut self, port: u8) -> Result<(), TransportError> {
        let mut attributes = no_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attributes.pkey_index = 0;
        attributes.port_num = port;
        attributes.qp_access_flags = PEER_ACCESS;
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.modify("initialising", attributes, mask)
    }

    /// Joins it with the peer's.
    ///
    /// # Errors
    /// When the device refuses; the text says what was tried.
    pub fn connect(&mut self, link: &Link) -> Result<(), TransportError> {
        let limits = *self.domain.device().limits();
        let mut attributes = no_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = u32::from(link.mtu.code());
        attributes.dest_qp_num = link.peer_number;
        attributes.rq_psn = link.peer_packet_number;
        attributes.max_dest_rd_atomic = limits.max_reads_answered;
        attributes.min_rnr_timer = RECEIVER_NOT_READY_DELAY;
        attributes.ah_attr.port_num = link.port;
        attributes.ah_attr.sl = link.service_level;
        if link.layer == LinkLayer::InfiniBand {
            attributes.ah_attr.dlid = link.peer_lid;
        } else {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid.raw = link.peer_gid.0;
            attributes.ah_attr.grh.sgid_index = link.own.index;
            attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
            attributes.ah_attr.grh.traffic_class = link.traffic_class;
        }
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        let what = format!(
            "connecting (GID {} at index {} to {}, MTU {})",
            link.own.gid,
            link.own.index,
            link.peer_gid,
            link.mtu.bytes()
        );
        self.modify(&what, attributes, mask)?;

        let mut attributes = no_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attributes.sq_psn = 0;
        attributes.timeout = link.retry.timeout;
        attributes.retry_cnt = link.retry.retries;
        attributes.rnr_retry = link.retry.receiver_not_ready_retries;
        attributes.max_rd_atomic = limits.max_reads_asked;
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("readying", attributes, mask)
    }

    /// Stops it: nothing more is sent or accepted, and everything posted is flushed. Once
    /// [`QueuePair::is_drained`], the device uses no memory for it any more.
    ///
    /// # Errors
    /// When the device fails; destroying the queue pair stops it, too.
    pub fn stop(&mut self) -> Result<(), TransportError> {
        let mut attributes = no_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify("stopping", attributes, ibv_qp_attr_mask::IBV_QP_STATE)
    }

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

    fn post_receive(&mut self, place: u32) -> Result<(), TransportError> {
        let mut range = ibv_sge {
            addr: self.receives.address() + u64::from(place) * MESSAGE_BYTES as u64,
            length: MESSAGE_BYTES as u32,
            lkey: self.receives.local_key(),
        };
        let mut request = ibv_recv_wr {
            wr_id: WorkId::Receive(place).pack(),
            next: std::ptr::null_mut(),
            sg_list: &raw mut range,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is valid and carries its function; the request is read during the
        // call; the range lies in `receives`, which outlives the queue pair.
        let code = unsafe {
            let operations = &(*(*self.pair.as_ptr()).context).ops;
            operations.post_recv.map_or(libc::ENOSYS, |post| {
                post(self.pair.as_ptr(), &raw mut request, &raw mut bad)
            })
        };
        match code {
            0 => Ok(()),
            code => Err(coded_error("posting a receive", code)),
        }
    }

    /// Takes completions: chains that will be heard of no more, in order, and the peer's messages.
    /// True: there may be more.
    ///
    /// # Errors
    /// When the device fails.
    pub fn poll(
        &mut self,
        finished: &mut Vec<Finished>,
        messages: &mut Vec<[u8; MESSAGE_BYTES]>,
    ) -> Result<bool, TransportError> {
        let mut polled = std::mem::take(&mut self.polled);
        polled.clear();
        self.completions.poll(&mut polled)?;
        let is_more = !polled.is_empty();
        for completion in &polled {
            match completion.work {
                WorkId::Receive(place) => self.received(place, completion, messages),
                WorkId::Send { chain, is_last } => {
                    self.completed(chain, is_last, completion, finished);
                }
            }
        }
        self.polled = polled;
        Ok(is_more)
    }

    /// As [`CompletionQueue::arm`].
    ///
    /// # Errors
    /// As there.
    pub fn arm(&self) -> Result<(), TransportError> {
        self.completions.arm()
    }

    fn completed(
        &mut self,
        chain: u64,
        is_last: bool,
        completion: &Completion,
        finished: &mut Vec<Finished>,
    ) {
        // Chains complete in order, so it is the first one unless the device is at fault.
        let Some(first) = self.posted.front_mut().filter(|first| first.chain == chain) else {
            tracing::error!(chain, "a completion of a chain that is not the next one");
            return;
        };
        if !completion.status.is_success() {
            let failure = (completion.status, completion.vendor_error);
            first.failure_opt.get_or_insert(failure);
        }
        if !is_last {
            return;
        }
        let (status, vendor_error) = first.failure_opt.unwrap_or((CompletionStatus::SUCCESS, 0));
        self.free_sends += first.work_requests;
        self.posted.pop_front();
        finished.push(Finished {
            chain,
            status,
            vendor_error,
        });
    }

    fn received(
        &mut self,
        place: u32,
        completion: &Completion,
        messages: &mut Vec<[u8; MESSAGE_BYTES]>,
    ) {
        if !completion.status.is_success() {
            // Flushed: the queue pair has ended.
            return;
        }
        if completion.bytes as usize == MESSAGE_BYTES {
            messages.extend(self.receives.own_bytes(place as usize * MESSAGE_BYTES));
        }
        if let Err(error) = self.post_receive(place) {
            tracing::warn!(%error, "a receive was not posted again");
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by `create_qp` and destroyed once. From here on the device uses nothing of
        // what was posted, and only then are the regions let go.
        let code = unsafe { (self.domain.device().library().destroy_qp)(self.pair.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "a queue pair was not destroyed");
        }
    }
}

const SIGNALED: u32 = ibv_send_flags::IBV_SEND_SIGNALED.0;
const INLINE: u32 = ibv_send_flags::IBV_SEND_INLINE.0;

fn no_attributes() -> ibv_qp_attr {
    // SAFETY: all zeros is a value of every field: numbers, and a union of bytes.
    unsafe { MaybeUninit::zeroed().assume_init() }
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
