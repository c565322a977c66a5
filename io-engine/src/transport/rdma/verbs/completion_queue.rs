//! Completion queues, and the channel that tells of their events.

use std::ffi::c_int;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{ibv_comp_channel, ibv_cq, ibv_wc, ibv_wc_status};

use super::device::{Device, set_nonblocking};
use super::{coded_error, last_error};
use crate::error::{TransportError, TransportErrorKind};

/// Tells of completions: its descriptor is readable when a queue that was armed got one.
#[derive(Debug)]
pub struct CompletionChannel {
    channel: NonNull<ibv_comp_channel>,
    device: Arc<Device>,
}

// SAFETY: libibverbs's calls on a channel are thread-safe and have no thread affinity.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A new one.
    ///
    /// # Errors
    /// When the device has no more.
    pub fn new(device: &Arc<Device>) -> Result<Self, TransportError> {
        // SAFETY: the context is open.
        let channel = unsafe { (device.library().create_comp_channel)(device.context()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| last_error(format!("a completion channel of {}", device.name())))?;
        let channel = Self {
            channel,
            device: Arc::clone(device),
        };
        set_nonblocking(channel.as_fd())
            .map_err(|error| TransportError::io("a completion channel", &error))?;
        Ok(channel)
    }

    /// The number of the queue that the next event is of; `None` when there is none now.
    pub fn next_event(&self) -> Option<u64> {
        let library = self.device.library();
        let mut queue = std::ptr::null_mut::<ibv_cq>();
        let mut number = std::ptr::null_mut();
        // SAFETY: the channel is open and does not block; both places are written on success.
        let code = unsafe {
            (library.get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut number)
        };
        if code != 0 {
            return None;
        }
        // SAFETY: a queue is destroyed only once its events are acknowledged, so it is still there.
        unsafe { (library.ack_cq_events)(queue, 1) };
        Some(number.addr() as u64)
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open, and so is its descriptor for as long as it is.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: queues hold their channel, so none is left.
        let code = unsafe { (self.device.library().destroy_comp_channel)(self.channel.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "a completion channel was not destroyed");
        }
    }
}

/// What a work request is known by in its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkId {
    /// A request of the chain with this number.
    Send {
        /// Number of the chain on its queue pair.
        chain: u64,
        /// Whether it is the last of the chain.
        is_last: bool,
    },
    /// The receive with this place.
    Receive(u32),
}

const RECEIVE: u64 = 1 << 63;

impl WorkId {
    pub(super) const fn pack(self) -> u64 {
        match self {
            Self::Send { chain, is_last } => (chain << 1) & !RECEIVE | is_last as u64,
            Self::Receive(place) => RECEIVE | place as u64,
        }
    }

    const fn unpack(number: u64) -> Self {
        if number & RECEIVE != 0 {
            Self::Receive(number as u32)
        } else {
            Self::Send {
                chain: number >> 1,
                is_last: number & 1 == 1,
            }
        }
    }
}

/// Verbs's word on a work request; a number that is not known here stays one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompletionStatus(u32);

impl CompletionStatus {
    /// It was done.
    pub const SUCCESS: Self = Self(ibv_wc_status::IBV_WC_SUCCESS);
    /// It was thrown away because its queue pair had failed before.
    pub const FLUSHED: Self = Self(ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// The peer's device refused the key, the range or the right.
    pub const REMOTE_ACCESS: Self = Self(ibv_wc_status::IBV_WC_REM_ACCESS_ERR);

    /// Whether it was done.
    pub fn is_success(self) -> bool {
        self == Self::SUCCESS
    }

    /// The name in verbs's header.
    const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            ibv_wc_status::IBV_WC_SUCCESS => "success",
            ibv_wc_status::IBV_WC_LOC_LEN_ERR => "local length error (LOC_LEN_ERR)",
            ibv_wc_status::IBV_WC_LOC_QP_OP_ERR => "local queue pair error (LOC_QP_OP_ERR)",
            ibv_wc_status::IBV_WC_LOC_PROT_ERR => "local protection error (LOC_PROT_ERR)",
            ibv_wc_status::IBV_WC_WR_FLUSH_ERR => "flushed (WR_FLUSH_ERR)",
            ibv_wc_status::IBV_WC_BAD_RESP_ERR => "bad response (BAD_RESP_ERR)",
            ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => "local access error (LOC_ACCESS_ERR)",
            ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => "remote invalid request (REM_INV_REQ_ERR)",
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR => "remote access error (REM_ACCESS_ERR)",
            ibv_wc_status::IBV_WC_REM_OP_ERR => "remote operation error (REM_OP_ERR)",
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR => "no acknowledgement (RETRY_EXC_ERR)",
            ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => "receiver not ready (RNR_RETRY_EXC_ERR)",
            ibv_wc_status::IBV_WC_REM_ABORT_ERR => "remote abort (REM_ABORT_ERR)",
            ibv_wc_status::IBV_WC_FATAL_ERR => "fatal device error (FATAL_ERR)",
            ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR => "response timeout (RESP_TIMEOUT_ERR)",
            ibv_wc_status::IBV_WC_GENERAL_ERR => "general error (GENERAL_ERR)",
            _ => return None,
        })
    }

    /// What callers may decide on.
    pub(crate) const fn error_kind(self) -> TransportErrorKind {
        match self.0 {
            // The owner gave the key, so it has taken it back since.
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR => TransportErrorKind::NotRegistered,
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => {
                TransportErrorKind::PeerDead
            }
            _ => TransportErrorKind::Io,
        }
    }
}

impl fmt::Display for CompletionStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => formatter.write_str(name),
            None => write!(formatter, "verbs status {}", self.0),
        }
    }
}

impl fmt::Debug for CompletionStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// What became of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which one.
    pub work: WorkId,
    /// What became of it.
    pub status: CompletionStatus,
    /// The provider's own code.
    pub vendor_error: u32,
    /// Bytes that were received.
    pub bytes: u32,
}

/// A queue of completions.
#[derive(Debug)]
pub struct CompletionQueue {
    queue: NonNull<ibv_cq>,
    channel: Arc<CompletionChannel>,
}

// SAFETY: libibverbs's calls on a completion queue are thread-safe and have no thread affinity.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue of at least `entries`, whose events come on `channel` under `number`.
    ///
    /// # Errors
    /// When the device has no more, or none of this size.
    pub fn new(
        channel: &Arc<CompletionChannel>,
        entries: u32,
        number: u64,
    ) -> Result<Self, TransportError> {
        let device = &channel.device;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // The number travels as the queue's context, which nobody takes for an address.
        let context = std::ptr::without_provenance_mut(number as usize);
        // SAFETY: the context and channel are open, and the queue holds them.
        let queue = unsafe {
            (device.library().create_cq)(
                device.context(),
                entries,
                context,
                channel.channel.as_ptr(),
                0,
            )
        };
        let queue = NonNull::new(queue).ok_or_else(|| {
            last_error(format!(
                "a completion queue of {entries} entries of {}",
                device.name()
            ))
        })?;
        Ok(Self {
            queue,
            channel: Arc::clone(channel),
        })
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_cq {
        self.queue.as_ptr()
    }

    /// Asks for an event at the next completion. One that came before is found by polling only.
    ///
    /// # Errors
    /// When the device fails.
    pub fn arm(&self) -> Result<(), TransportError> {
        // SAFETY: the queue is valid; the function is the one that its context carries.
        let code = unsafe {
            let operations = &(*(*self.as_ptr()).context).ops;
            operations
                .req_notify_cq
                .map_or(libc::ENOSYS, |arm| arm(self.as_ptr(), 0))
        };
        match code {
            0 => Ok(()),
            code => Err(coded_error("arming a completion queue", code)),
        }
    }

    /// Takes what has completed, at most `MOST` at once.
    ///
    /// # Errors
    /// When the device fails.
    pub fn poll(&self, out: &mut Vec<Completion>) -> Result<(), TransportError> {
        const MOST: usize = 32;
        let mut entries = [const { MaybeUninit::<ibv_wc>::uninit() }; MOST];
        // SAFETY: the queue is valid, the function is the one that its context carries, and it
        // fills at most so many entries.
        let count = unsafe {
            let operations = &(*(*self.as_ptr()).context).ops;
            operations.poll_cq.map_or(-libc::ENOSYS, |poll| {
                poll(self.as_ptr(), MOST as c_int, entries.as_mut_ptr().cast())
            })
        };
        let count = usize::try_from(count)
            .map_err(|_| coded_error("polling a completion queue", -count))?;
        out.extend(entries.iter().take(count).map(|entry| {
            // SAFETY: the first `count` entries were filled.
            let entry = unsafe { entry.assume_init_ref() };
            Completion {
                work: WorkId::unpack(entry.wr_id),
                status: CompletionStatus(entry.status),
                vendor_error: entry.vendor_err,
                bytes: entry.byte_len,
            }
        }));
        Ok(())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their completion queue, so none uses it; its events are
        // acknowledged as they are taken.
        let code = unsafe { (self.channel.device.library().destroy_cq)(self.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "a completion queue was not destroyed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_ids_survive_and_unknown_statuses_are_values() {
        for work in [
            WorkId::Receive(0),
            WorkId::Receive(u32::MAX),
            WorkId::Send {
                chain: 0,
                is_last: false,
            },
            WorkId::Send {
                chain: (1 << 61) - 1,
                is_last: true,
            },
        ] {
            assert_eq!(WorkId::unpack(work.pack()), work);
        }
        assert_eq!(CompletionStatus(99).to_string(), "verbs status 99");
        assert_eq!(CompletionStatus(99).error_kind(), TransportErrorKind::Io);
        assert_eq!(
            CompletionStatus::REMOTE_ACCESS.to_string(),
            "remote access error (REM_ACCESS_ERR)"
        );
    }
}
