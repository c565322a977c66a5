//! Memory that a device reads and writes by itself.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{ibv_access_flags, ibv_mr};

use super::protection_domain::ProtectionDomain;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::Region;

/// What a peer may do, as MoRI sets it.
const SHARED: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
const PRIVATE: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;

/// Device memory, as its driver exports it.
#[derive(Clone, Copy, Debug)]
pub struct DmaBuf<'a> {
    /// The exported descriptor.
    pub fd: BorrowedFd<'a>,
    /// Where the range begins in it.
    pub offset: u64,
}

/// A registration with a device. It keeps the memory; dropping it ends the device's access, a
/// peer's too, before the memory can go.
#[derive(Debug)]
pub struct MemoryRegion {
    region: NonNull<ibv_mr>,
    address: u64,
    length: u64,
    domain: Arc<ProtectionDomain>,
    // Behind the registration, so that it is dropped after it.
    memory: Kept,
}

/// What keeps the memory where it is.
#[derive(Debug)]
enum Kept {
    Pool(Region),
    Own(Box<[UnsafeCell<u8>]>),
}

// SAFETY: a memory region is a registration of memory that is only reached through raw copies and
// by the device; libibverbs's calls on it are thread-safe.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; see also [`MemoryRegion::own_bytes`].
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a region of a pool. With `dma_buf_opt` the region is a device's memory.
    ///
    /// # Errors
    /// With what to change, when a limit was reached.
    pub fn of_region(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
        dma_buf_opt: Option<DmaBuf<'_>>,
    ) -> Result<Self, TransportError> {
        let length = region.len().get();
        let limits = domain.device().limits();
        if length > limits.max_region_bytes {
            return Err(TransportError::quiesced(
                TransportErrorKind::Memory,
                format!(
                    "region {} ({}) has {length} bytes; {} registers at most {}: register it in parts",
                    region.id(),
                    region.label(),
                    domain.device().name(),
                    limits.max_region_bytes
                ),
            ));
        }
        let address = region.address(0, length)?;
        // SAFETY: the address was checked against the region, which is kept until the
        // registration has ended.
        unsafe {
            Self::register(
                domain,
                (address, length),
                dma_buf_opt,
                SHARED,
                Kept::Pool(region.clone()),
            )
        }
    }

    /// A small buffer of its own that only this side's queue pairs use.
    ///
    /// # Errors
    /// As [`MemoryRegion::of_region`].
    pub fn of_own_bytes(
        domain: &Arc<ProtectionDomain>,
        length: usize,
    ) -> Result<Self, TransportError> {
        let bytes: Box<[UnsafeCell<u8>]> = (0..length).map(|_| UnsafeCell::new(0)).collect();
        let address = UnsafeCell::raw_get(bytes.as_ptr());
        // SAFETY: the buffer is on the heap and moves into the registration, which keeps it.
        unsafe {
            Self::register(
                domain,
                (address, length as u64),
                None,
                PRIVATE,
                Kept::Own(bytes),
            )
        }
    }

    /// # Safety
    /// `memory` keeps the range valid.
    unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        (address, length): (*mut u8, u64),
        dma_buf_opt: Option<DmaBuf<'_>>,
        access: u32,
        memory: Kept,
    ) -> Result<Self, TransportError> {
        let library = domain.device().library();
        let (bytes, access) = (length as usize, access.cast_signed());
        let virtual_address = address.expose_provenance() as u64;
        let region = match dma_buf_opt {
            // SAFETY: the caller's range, and a domain that is kept.
            None => unsafe { (library.reg_mr)(domain.as_ptr(), address.cast(), bytes, access) },
            Some(DmaBuf { fd, offset }) => {
                let register = library.register_dma_buf_opt.ok_or_else(|| {
                    TransportError::quiesced(
                        TransportErrorKind::Memory,
                        "device memory cannot be registered: libibverbs has no ibv_reg_dmabuf_mr; \
                         rdma-core 34 or later has",
                    )
                })?;
                // SAFETY: a domain that is kept and a descriptor that is borrowed for the call; the
                // driver checks the range against the exported buffer.
                unsafe {
                    register(
                        domain.as_ptr(),
                        offset,
                        bytes,
                        virtual_address,
                        fd.as_raw_fd(),
                        access,
                    )
                }
            }
        };
        let region = NonNull::new(region).ok_or_else(|| refusal(domain, length))?;
        Ok(Self {
            region,
            address: virtual_address,
            length,
            domain: Arc::clone(domain),
            memory,
        })
    }

    /// Where it begins, to the device.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of it.
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// The pool's region, unless the bytes are its own.
    pub const fn region(&self) -> Option<&Region> {
        match &self.memory {
            Kept::Pool(region) => Some(region),
            Kept::Own(_) => None,
        }
    }

    /// Its domain.
    pub const fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// What this side's work requests carry.
    pub fn local_key(&self) -> u32 {
        // SAFETY: the registration is valid until drop.
        unsafe { (*self.region.as_ptr()).lkey }
    }

    /// What a peer's work requests carry.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration is valid until drop.
        unsafe { (*self.region.as_ptr()).rkey }
    }

    /// Copies out of a buffer of its own; `None` when the range leaves it or the memory is a pool's.
    pub(super) fn own_bytes<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let Kept::Own(bytes) = &self.memory else {
            return None;
        };
        let cells = bytes.get(offset..offset.checked_add(N)?)?;
        let mut copied = [0; N];
        for (byte, cell) in copied.iter_mut().zip(cells) {
            // SAFETY: only the device writes here, between the posting of a receive and its
            // completion; callers read after the completion and before the next posting.
            *byte = unsafe { *cell.get() };
        }
        Some(copied)
    }
}

/// Says which limit it may have been.
fn refusal(domain: &Arc<ProtectionDomain>, length: u64) -> TransportError {
    let device = domain.device();
    let error = io::Error::last_os_error();
    let memlock = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let advice = match (error.kind(), memlock) {
        (io::ErrorKind::OutOfMemory, Some(limit)) => format!(
            "; locked memory is limited to {limit} bytes here: raise it (ulimit -l unlimited, \
             LimitMEMLOCK=infinity, or the container's ulimit memlock)"
        ),
        (io::ErrorKind::OutOfMemory, None) => format!(
            "; the device takes {} regions: register larger ones, or use fewer processes",
            device.limits().max_regions
        ),
        _ => String::new(),
    };
    TransportError::quiesced(
        TransportErrorKind::Memory,
        format!(
            "registering {length} bytes with {}: {error}{advice}",
            device.name()
        ),
    )
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let library = self.domain.device().library();
        // SAFETY: registered by `register` and deregistered once; posted work that names it holds
        // this value, so the device uses it no more.
        let code = unsafe { (library.dereg_mr)(self.region.as_ptr()) };
        if code != 0 {
            tracing::error!(code, "a memory region was not deregistered");
        }
    }
}
