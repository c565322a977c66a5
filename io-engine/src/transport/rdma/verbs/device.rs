//! An opened network device, its limits, ports and events.

use std::ffi::{CStr, c_int};
use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rdma_sys::{
    ibv_async_event, ibv_context, ibv_device, ibv_device_attr, ibv_event_type, ibv_port_attr,
    ibv_port_state, verbs_context,
};

use super::address::{LinkLayer, Mtu};
use super::library::{Library, library};
use super::{coded_error, last_error};
use crate::error::{TransportError, TransportErrorKind};

/// Names of the devices that libibverbs finds.
///
/// # Errors
/// When there is no libibverbs, or it cannot list devices.
pub fn device_names() -> Result<Vec<String>, TransportError> {
    let list = DeviceList::get(library()?)?;
    Ok(list.names().map(|(name, _)| name).collect())
}

/// libibverbs's list of devices, freed on drop.
struct DeviceList {
    library: &'static Library,
    list: *mut *mut ibv_device,
    count: usize,
}

impl DeviceList {
    fn get(library: &'static Library) -> Result<Self, TransportError> {
        let mut count: c_int = 0;
        // SAFETY: writes the count; the list that it returns is freed once, on drop.
        let list = unsafe { (library.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(last_error("listing rdma devices"));
        }
        Ok(Self {
            library,
            list,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn names(&self) -> impl Iterator<Item = (String, *mut ibv_device)> {
        (0..self.count).map(|place| {
            // SAFETY: the list has `count` entries, and is freed only on drop.
            let device = unsafe { *self.list.add(place) };
            // SAFETY: an entry of the list is a device, whose name is a C string inside it.
            let name = unsafe { CStr::from_ptr((self.library.get_device_name)(device)) };
            (name.to_string_lossy().into_owned(), device)
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from `get_device_list` and is freed here only; opened devices
        // outlive it, as the library documents.
        unsafe { (self.library.free_device_list)(self.list) };
    }
}

/// What a device can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Work requests of a queue.
    pub max_work_requests: u32,
    /// Local ranges of one work request.
    pub max_ranges: u32,
    /// Entries of a completion queue.
    pub max_completions: u32,
    /// Bytes of one memory region.
    pub max_region_bytes: u64,
    /// Memory regions.
    pub max_regions: u32,
    /// Reads that a queue pair answers at once.
    pub max_reads_answered: u8,
    /// Reads that a queue pair asks for at once.
    pub max_reads_asked: u8,
}

/// What a port says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// Whether packets can go.
    pub is_active: bool,
    /// Ethernet or InfiniBand.
    pub link_layer: LinkLayer,
    /// Largest packet now.
    pub active_mtu: Mtu,
    /// Address on InfiniBand.
    pub lid: u16,
    /// Bytes of one work request.
    pub max_message_bytes: u32,
}

/// Something happened to the device or one of its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The port with this number lost its link.
    PortDown(u32),
    /// The port with this number has its link (again).
    PortUp(u32),
    /// The device is of no use any more.
    DeviceFatal,
    /// The queue pair with this number is of no use any more.
    QueuePairFatal(u32),
    /// A completion queue overflowed.
    CompletionQueueError,
    /// The table of GIDs changed.
    GidChange,
    /// Any other, by verbs's number; nothing needs to be done.
    Other(u32),
}

/// An opened device. Closed when nothing made from it is left.
#[derive(Debug)]
pub struct Device {
    context: NonNull<ibv_context>,
    library: &'static Library,
    name: String,
    limits: DeviceLimits,
}

// SAFETY: libibverbs's calls on a context are thread-safe, and it has no thread affinity.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Library {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("libibverbs")
    }
}

impl Device {
    /// Opens the device with this name.
    ///
    /// # Errors
    /// When there is none, or it cannot be opened.
    pub fn open(name: &str) -> Result<Self, TransportError> {
        let library = library()?;
        let list = DeviceList::get(library)?;
        let found = list.names().find(|(each, _)| each == name);
        let (_, entry) = found.ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::Unreachable,
                format!("there is no rdma device {name}"),
            )
        })?;
        // SAFETY: an entry of the list, which is freed after this call.
        let context = unsafe { (library.open_device)(entry) };
        let context = NonNull::new(context)
            .ok_or_else(|| last_error(format!("opening rdma device {name}")))?;
        let mut device = Self {
            context,
            library,
            name: name.to_owned(),
            limits: DeviceLimits::default(),
        };
        device.limits = device.query_limits()?;
        set_nonblocking(device.async_fd())
            .map_err(|error| TransportError::io("events of an rdma device", &error))?;
        Ok(device)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it can do.
    pub const fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    pub(super) const fn library(&self) -> &'static Library {
        self.library
    }

    pub(super) const fn context(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    fn query_limits(&self) -> Result<DeviceLimits, TransportError> {
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and the call fills a structure of exactly this type.
        let code = unsafe { (self.library.query_device)(self.context(), attributes.as_mut_ptr()) };
        if code != 0 {
            return Err(coded_error(format!("limits of {}", self.name), code));
        }
        // SAFETY: zeroed before, and all zeros is a value of every field; then filled.
        let attributes = unsafe { attributes.assume_init() };
        let positive = |number: c_int| u32::try_from(number).unwrap_or(0);
        let small = |number: c_int| u8::try_from(number.clamp(0, 255)).unwrap_or(0);
        Ok(DeviceLimits {
            max_work_requests: positive(attributes.max_qp_wr),
            max_ranges: positive(attributes.max_sge),
            max_completions: positive(attributes.max_cqe),
            max_region_bytes: attributes.max_mr_size,
            max_regions: positive(attributes.max_mr),
            max_reads_answered: small(attributes.max_qp_rd_atom),
            max_reads_asked: small(attributes.max_qp_init_rd_atom),
        })
    }

    /// What a port says of itself now.
    ///
    /// # Errors
    /// When there is no such port.
    pub fn port(&self, number: u8) -> Result<PortState, TransportError> {
        let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the structure is zeroed and of the type that the function fills.
        let code = unsafe { self.query_port(number, attributes.as_mut_ptr()) };
        if code != 0 {
            return Err(coded_error(format!("port {number} of {}", self.name), code));
        }
        // SAFETY: zeroed before, and all zeros is a value of every field; then filled.
        let attributes = unsafe { attributes.assume_init() };
        Ok(PortState {
            is_active: attributes.state == ibv_port_state::IBV_PORT_ACTIVE,
            link_layer: LinkLayer::from_number(attributes.link_layer),
            active_mtu: Mtu::from_code(attributes.active_mtu),
            lid: attributes.lid,
            max_message_bytes: attributes.max_msg_sz,
        })
    }

    /// What the header's inline `___ibv_query_port` does: the extended call where the provider has
    /// it, else the old symbol, which fills the old part of a structure that is zero elsewhere.
    /// (rdma-sys 0.3.0's own version compares a 64-bit mark with a 32-bit one and so always takes
    /// the old one.)
    ///
    /// # Safety
    /// `attributes` is zeroed.
    unsafe fn query_port(&self, number: u8, attributes: *mut ibv_port_attr) -> c_int {
        const EXTENDED: usize = usize::MAX;
        let context = self.context();
        // SAFETY: the context is open. When its mark says so, it is the last field of a
        // `verbs_context`, whose `sz` says how many of the fields before it the library has.
        let extended_opt = unsafe {
            if (*context).abi_compat.addr() == EXTENDED {
                let outer = context
                    .cast::<u8>()
                    .sub(offset_of!(verbs_context, context))
                    .cast::<verbs_context>();
                let needed = size_of::<verbs_context>() - offset_of!(verbs_context, query_port);
                (*outer).query_port.filter(|_| (*outer).sz >= needed)
            } else {
                None
            }
        };
        match extended_opt {
            // SAFETY: an open context, and a structure of the stated size.
            Some(query) => unsafe {
                query(context, number, attributes, size_of::<ibv_port_attr>())
            },
            // SAFETY: the old structure is the beginning of the new one.
            None => unsafe { (self.library.query_port)(context, number, attributes.cast()) },
        }
    }

    fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open, and its descriptor is open for as long as it is.
        unsafe { BorrowedFd::borrow_raw((*self.context()).async_fd) }
    }

    /// The next event; `None` when there is none now.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: the context is open; its descriptor does not block, so this returns at once.
        let code = unsafe { (self.library.get_async_event)(self.context(), event.as_mut_ptr()) };
        if code != 0 {
            return None;
        }
        let pointer = event.as_mut_ptr();
        // A number that the enumeration lacks would be undefined behaviour as its value, so it is
        // read as what it is in C.
        // SAFETY: the call filled the event; the place is that of a 32-bit number.
        let number = unsafe {
            pointer
                .cast::<u8>()
                .add(offset_of!(ibv_async_event, event_type))
                .cast::<u32>()
                .read()
        };
        // SAFETY: which part of the union is set follows from the number; a queue pair stays valid
        // until its event is acknowledged.
        let kind = unsafe {
            match number {
                PORT_ERROR => AsyncEvent::PortDown((*pointer).element.port_num.cast_unsigned()),
                PORT_ACTIVE => AsyncEvent::PortUp((*pointer).element.port_num.cast_unsigned()),
                DEVICE_FATAL => AsyncEvent::DeviceFatal,
                QP_FATAL | QP_REQUEST_ERROR | QP_ACCESS_ERROR => {
                    AsyncEvent::QueuePairFatal((*(*pointer).element.qp).qp_num)
                }
                CQ_ERROR => AsyncEvent::CompletionQueueError,
                GID_CHANGE => AsyncEvent::GidChange,
                other => AsyncEvent::Other(other),
            }
        };
        // SAFETY: the event came from `get_async_event` and is acknowledged once.
        unsafe { (self.library.ack_async_event)(pointer) };
        Some(kind)
    }
}

const PORT_ERROR: u32 = ibv_event_type::IBV_EVENT_PORT_ERR as u32;
const PORT_ACTIVE: u32 = ibv_event_type::IBV_EVENT_PORT_ACTIVE as u32;
const DEVICE_FATAL: u32 = ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32;
const QP_FATAL: u32 = ibv_event_type::IBV_EVENT_QP_FATAL as u32;
const QP_REQUEST_ERROR: u32 = ibv_event_type::IBV_EVENT_QP_REQ_ERR as u32;
const QP_ACCESS_ERROR: u32 = ibv_event_type::IBV_EVENT_QP_ACCESS_ERR as u32;
const CQ_ERROR: u32 = ibv_event_type::IBV_EVENT_CQ_ERR as u32;
const GID_CHANGE: u32 = ibv_event_type::IBV_EVENT_GID_CHANGE as u32;

impl AsFd for Device {
    /// Readable when there is an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: everything made from the context held this device, so nothing is left of it.
        let code = unsafe { (self.library.close_device)(self.context()) };
        if code != 0 {
            tracing::warn!(device = self.name, code, "an rdma device was not closed");
        }
    }
}

/// Makes waiting for an event something that `poll` does.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::ioctl_fionbio(fd, true)?;
    Ok(())
}
