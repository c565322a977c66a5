//! A reliable connection's end: chains of one-sided work, and small messages from the peer.
//!
//! What is posted stays in the queue pair's own list, with the memory regions that it names, until
//! its completion was taken or the queue pair is destroyed: only then can the memory go.

mod posting;

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{
    ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
    ibv_recv_wr, ibv_send_wr, ibv_sge,
};

pub use self::posting::PostGuard;
use super::address::{Gid, GidEntry, LinkLayer, Mtu};
use super::completion_queue::{Completion, CompletionQueue, CompletionStatus, WorkId};
use super::memory_region::MemoryRegion;
use super::protection_domain::ProtectionDomain;
use super::{coded_error, last_error};
use crate::device::nic::PEER_ACCESS;
use crate::error::TransportError;

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

fn no_attributes() -> ibv_qp_attr {
    // SAFETY: all zeros is a value of every field: numbers, and a union of bytes.
    unsafe { MaybeUninit::zeroed().assume_init() }
}
