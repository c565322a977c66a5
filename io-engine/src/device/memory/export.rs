//! Device memory for other processes and for network devices.

use std::ffi::c_int;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use common::ids::{ByteLen, ByteOffset};

use super::super::library::{DMA_BUF, FILE_DESCRIPTOR};
use super::{DeviceMemory, refused};
use crate::error::TransportError;
use crate::region::DeviceRuntime;

/// Device memory as it travels to another process: its allocations' descriptors, and what is to be
/// said beside them.
#[derive(Debug)]
pub struct DeviceHandles {
    /// Whose driver manages it.
    pub runtime: DeviceRuntime,
    /// What tells its device from every other.
    pub device: [u8; 16],
    /// How far behind the beginning of the first allocation it begins.
    pub lead: ByteOffset,
    /// How many bytes there are.
    pub bytes: ByteLen,
    /// The allocations, in order: a descriptor, and the bytes of each.
    pub parts: Vec<(OwnedFd, ByteLen)>,
}

/// Memory as another process can map it: the allocations that it lies in, in order.
#[derive(Debug)]
pub(crate) struct Exported {
    pub parts: Vec<ExportedPart>,
    /// How far behind the beginning of the first one the memory begins.
    pub lead: u64,
}

/// One allocation.
#[derive(Debug)]
pub(crate) struct ExportedPart {
    pub descriptor: OwnedFd,
    pub len: u64,
}

impl DeviceMemory {
    /// Whether another process can map it. Tried once.
    ///
    /// # Errors
    /// Why the driver does not export it.
    pub(crate) fn check_exportable(&self) -> Result<(), TransportError> {
        let tried = self.0.exportable.get_or_init(|| self.export().map(|_| ()));
        tried.clone()
    }

    /// The allocations that it lies in, in order: where each begins and how long it is.
    pub(super) fn allocations(&self) -> Result<Vec<(u64, u64)>, TransportError> {
        let device = self.0.device;
        let _entered = device.enter()?;
        let end = self
            .0
            .address
            .checked_add(self.0.len)
            .filter(|_| self.0.len > 0);
        let end = end.ok_or_else(|| refused(format!("{} bytes of device memory", self.0.len)))?;
        let mut found = Vec::new();
        let mut reached = self.0.address;
        while reached < end {
            let (mut base, mut len) = (0, 0);
            // SAFETY: the call writes an address and a length, which live for its length.
            let code = unsafe { (device.calls().allocation_of)(&mut base, &mut len, reached) };
            device.check(&format!("asking for the allocation at {reached:#x}"), code)?;
            let behind = base
                .checked_add(len as u64)
                .filter(|behind| *behind > reached);
            let behind = behind
                .ok_or_else(|| refused(format!("device memory at {reached:#x} has no end")))?;
            found.push((base, len as u64));
            reached = behind;
        }
        Ok(found)
    }

    /// The parts of a range that lie in one allocation each, in order.
    #[cfg(any(feature = "rdma", test))]
    pub(crate) fn chunks(
        &self,
        offset: ByteOffset,
        len: ByteLen,
    ) -> Result<Vec<(ByteOffset, ByteLen)>, TransportError> {
        let start = self.device_address(offset.get(), len.get())?;
        let end = start + len.get();
        let parts = self.allocations()?.into_iter().filter_map(|(base, len)| {
            let (from, to) = (base.max(start), base.saturating_add(len).min(end));
            (from < to).then(|| (ByteOffset(from - self.0.address), ByteLen(to - from)))
        });
        Ok(parts.collect())
    }

    /// The memory for another process.
    ///
    /// # Errors
    /// The driver's, when it does not export it.
    pub(crate) fn export(&self) -> Result<Exported, TransportError> {
        if let Some(imported) = &self.0.handed_on_opt {
            let copy = |part: &ExportedPart| {
                Ok(ExportedPart {
                    descriptor: part.descriptor.try_clone()?,
                    len: part.len,
                })
            };
            let parts = imported.parts.iter().map(copy);
            let parts = parts.collect::<io::Result<_>>();
            return Ok(Exported {
                parts: parts.map_err(|error| TransportError::io("handing memory on", &error))?,
                lead: imported.lead,
            });
        }
        let device = self.0.device;
        let calls = device.calls();
        let allocations = self.allocations()?;
        let _entered = device.enter()?;
        let mut parts = Vec::with_capacity(allocations.len());
        for (base, len) in &allocations {
            let mut handle = 0;
            // SAFETY: the call writes one handle, which lives for its length.
            let code = unsafe { (calls.retain)(&mut handle, *base) };
            device.check("taking the handle of device memory", code)?;
            let mut descriptor: c_int = -1;
            // SAFETY: of this form the call writes one int, which lives for its length.
            let code = unsafe {
                let descriptor = std::ptr::from_mut(&mut descriptor).cast();
                (calls.export)(descriptor, handle, FILE_DESCRIPTOR, 0)
            };
            let exported = device.check("exporting device memory", code);
            // SAFETY: retained above, and let go once.
            unsafe { (calls.release)(handle) };
            exported?;
            // SAFETY: the driver just made this descriptor for us.
            let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
            parts.push(ExportedPart {
                descriptor,
                len: *len,
            });
        }
        let first = allocations
            .first()
            .map_or(self.0.address, |(base, _)| *base);
        Ok(Exported {
            parts,
            lead: self.0.address - first,
        })
    }

    /// The memory for another process, which takes it by [`DeviceMemory::from_handles`].
    ///
    /// # Errors
    /// The driver's, when it does not export it.
    pub fn handles(&self) -> Result<DeviceHandles, TransportError> {
        let exported = self.export()?;
        let part = |part: ExportedPart| (part.descriptor, ByteLen(part.len));
        Ok(DeviceHandles {
            runtime: self.0.device.kind(),
            device: self.device_uuid()?,
            lead: ByteOffset(exported.lead),
            bytes: self.len(),
            parts: exported.parts.into_iter().map(part).collect(),
        })
    }

    /// A range as a dma-buf for a network device, with the offset of the range in it: drivers export
    /// whole pages only. A range that lies in several allocations is refused.
    ///
    /// # Errors
    /// The driver's.
    pub fn dma_buf(
        &self,
        offset: ByteOffset,
        len: ByteLen,
    ) -> Result<(OwnedFd, ByteOffset), TransportError> {
        const PAGE: u64 = 4096;
        let address = self.device_address(offset.get(), len.get())?;
        let device = self.0.device;
        let range_handle = device.calls().range_handle_opt.ok_or_else(|| {
            refused(format!(
                "the driver of {device:?} is too old to export dma-bufs"
            ))
        })?;
        let _entered = device.enter()?;
        let start = address / PAGE * PAGE;
        let end = (address + len.get()).next_multiple_of(PAGE);
        let mut descriptor: c_int = -1;
        // SAFETY: of this form the call writes one int, which lives for its length.
        let code = unsafe {
            let descriptor = std::ptr::from_mut(&mut descriptor).cast();
            range_handle(descriptor, start, (end - start) as usize, DMA_BUF, 0)
        };
        device.check("exporting device memory as a dma-buf", code)?;
        // SAFETY: the driver just made this descriptor for us.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok((descriptor, ByteOffset(address - start)))
    }
}
