//! A protection domain: queue pairs of one reach only memory regions of the same one.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::ibv_pd;

use super::device::Device;
use super::last_error;
use crate::error::TransportError;

/// Freed when no memory region or queue pair of it is left.
#[derive(Debug)]
pub struct ProtectionDomain {
    domain: NonNull<ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: libibverbs's calls on a protection domain are thread-safe and have no thread affinity.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A new one.
    ///
    /// # Errors
    /// When the device has no more.
    pub fn new(device: &Arc<Device>) -> Result<Self, TransportError> {
        // SAFETY: the context is open.
        let domain = unsafe { (device.library().alloc_pd)(device.context()) };
        let domain = NonNull::new(domain)
            .ok_or_else(|| last_error(format!("a protection domain of {}", device.name())))?;
        Ok(Self {
            domain,
            device: Arc::clone(device),
        })
    }

    /// Its device.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) const fn as_ptr(&self) -> *mut ibv_pd {
        self.domain.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything made from the domain held it, so nothing is left of it.
        let code = unsafe { (self.device.library().dealloc_pd)(self.as_ptr()) };
        if code != 0 {
            tracing::warn!(code, "a protection domain was not freed");
        }
    }
}
