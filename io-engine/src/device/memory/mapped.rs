//! Handles of device memory, and their place in the address space.

use std::ffi::c_int;

use super::super::Device;
use super::super::library::{Access, AllocationProperties};
use crate::error::TransportError;

/// Handles that are mapped one behind the other.
pub(super) struct Mapped {
    device: Device,
    pub(super) address: u64,
    reserved: u64,
    parts: Vec<u64>,
}

impl Mapped {
    pub(super) fn reserve(device: Device, len: u64) -> Result<Self, TransportError> {
        let mut address = 0;
        // SAFETY: the call writes one address, which lives for its length.
        let code = unsafe { (device.calls().reserve)(&mut address, len as usize, 0, 0, 0) };
        device.check("reserving a device's address space", code)?;
        Ok(Self {
            device,
            address,
            reserved: len,
            parts: Vec::new(),
        })
    }

    /// Maps a handle behind those before it, and lets it go: the mapping keeps its memory.
    pub(super) fn push(&mut self, handle: u64, len: u64) -> Result<(), TransportError> {
        let calls = self.device.calls();
        let place = self.address + self.parts.iter().sum::<u64>();
        // SAFETY: the place is inside the reservation, behind what is mapped; the handle is one of
        // the caller's, with at least so many bytes.
        let code = unsafe { (calls.map)(place, len as usize, 0, handle, 0) };
        let mapped = self.device.check("mapping device memory", code);
        // SAFETY: the caller's handle, which is not used again.
        let code = unsafe { (calls.release)(handle) };
        mapped?;
        self.parts.push(len);
        self.device.check("releasing a handle", code)?;
        let access = Access::read_and_write(self.device.number() as c_int);
        // SAFETY: what was mapped just now, and a structure that lives for the length of the call.
        let code = unsafe { (calls.set_access)(place, len as usize, &access, 1) };
        self.device.check("making device memory accessible", code)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let calls = self.device.calls();
        let mut place = self.address;
        let mut last = Ok(());
        for len in &self.parts {
            // SAFETY: mapped by `push` with this length, and unmapped once; nothing that uses it is
            // under way, because what is keeps this value.
            let code = unsafe { (calls.unmap)(place, *len as usize) };
            last = last.and(self.device.check("unmapping device memory", code));
            place += len;
        }
        // SAFETY: reserved by `reserve` with this length; nothing is mapped there any more.
        let code = unsafe { (calls.unreserve)(self.address, self.reserved as usize) };
        if let Err(error) = last.and(self.device.check("freeing address space", code)) {
            tracing::warn!(%error, "device memory was not freed");
        }
    }
}

/// The unit in which a device makes handles.
pub(super) fn granularity(device: Device) -> Result<u64, TransportError> {
    let properties = AllocationProperties::exportable(device.number() as c_int);
    let mut bytes = 0;
    // SAFETY: the structure lives for the length of the call, which writes one number.
    let code = unsafe { (device.calls().granularity)(&mut bytes, &properties, 0) };
    device.check("asking for the unit of allocations", code)?;
    Ok((bytes as u64).max(1))
}

pub(super) fn create_handle(device: Device, len: u64) -> Result<u64, TransportError> {
    let properties = AllocationProperties::exportable(device.number() as c_int);
    let mut handle = 0;
    // SAFETY: the structure lives for the length of the call, which writes one handle.
    let code = unsafe { (device.calls().create)(&mut handle, len as usize, &properties, 0) };
    device.check(&format!("allocating {len} bytes of device memory"), code)?;
    Ok(handle)
}
