//! Memory that a device reads and writes by itself.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{ibv_access_flags, ibv_mr};

use super::protection_domain::ProtectionDomain;
use crate::device::nic::{DmaBuf, NicChunk, PEER_ACCESS};
use crate::error::{TransportError, TransportErrorKind};
use crate::region::Region;

const _: () = assert!(
    PEER_ACCESS
        == ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
            | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
);
const PRIVATE: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;

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
    Region(Region),
    Own(Box<[UnsafeCell<u8>]>),
}

// SAFETY: a memory region is a registration of memory that is only reached through raw copies and
// by the device; libibverbs's calls on it are thread-safe.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; see also [`MemoryRegion::own_bytes`].
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a region in host memory.
    ///
    /// # Errors
    /// With what to change, when a limit was reached.
    pub fn of_host_region(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
    ) -> Result<Self, TransportError> {
        Self::of_host_slice(domain, region, 0, region.len().get())
    }

    /// Registers a part of a region in host memory.
    ///
    /// # Errors
    /// As [`MemoryRegion::of_host_region`], and when the part leaves the region.
    pub(crate) fn of_host_slice(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
        offset: u64,
        length: u64,
    ) -> Result<Self, TransportError> {
        check_length(domain, region, length)?;
        let address = region.address(offset, length)?;
        let kept = Kept::Region(region.clone());
        // SAFETY: the address was checked against the region, which is kept until the
        // registration has ended.
        unsafe { Self::register(domain, (address, length), None, PEER_ACCESS, kept) }
    }

    /// Registers a piece of a region in device memory, as an exported range or by its address.
    ///
    /// # Errors
    /// As [`MemoryRegion::of_host_region`], and the network device's own.
    pub(crate) fn of_device_chunk(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
        chunk: NicChunk,
        dma_buf_opt: Option<DmaBuf<'_>>,
        access: u32,
    ) -> Result<Self, TransportError> {
        check_length(domain, region, chunk.len)?;
        // Only the network device goes there.
        let address = std::ptr::without_provenance_mut(chunk.address as usize);
        let kept = Kept::Region(region.clone());
        // SAFETY: whoever made the chunk checked it against the region, which is kept until the
        // registration has ended.
        unsafe { Self::register(domain, (address, chunk.len), dma_buf_opt, access, kept) }
    }

    /// A small buffer of its own that only this side's queue pairs use.
    ///
    /// # Errors
    /// As [`MemoryRegion::of_host_region`].
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

    /// Whether it is a device's memory, which the processor must not touch.
    pub fn is_on_device(&self) -> bool {
        match &self.memory {
            Kept::Region(region) => region.is_on_device(),
            Kept::Own(_) => false,
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

fn check_length(
    domain: &Arc<ProtectionDomain>,
    region: &Region,
    length: u64,
) -> Result<(), TransportError> {
    let most = domain.device().limits().max_region_bytes;
    if length <= most {
        return Ok(());
    }
    Err(TransportError::quiesced(
        TransportErrorKind::Memory,
        format!(
            "region {} ({}) has {length} bytes; {} registers at most {most}: register it in parts",
            region.id(),
            region.label(),
            domain.device().name(),
        ),
    ))
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
