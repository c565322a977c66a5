//! Memory of a device: our own, somebody else's, or another process's that was exported to us.

use std::any::Any;
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use common::ids::{ByteLen, ByteOffset};

use super::Device;
use super::library::{Access, AllocationProperties, DEVICE_ORDINAL, DMA_BUF, FILE_DESCRIPTOR};
use super::mover;
use super::staging::Stage;
use crate::error::{TransportError, TransportErrorKind};
use crate::memory;
use crate::region::{DeviceRuntime, Location};

/// Bytes of a device's memory. Peers reach them by `local`, `shm` (where the driver exports them),
/// `rdma` (where the network device is let in) and `tcp`. Clones share it. The processor cannot read
/// it: see [`DeviceMemory::read`].
#[derive(Clone)]
pub struct DeviceMemory(Arc<Held>);

struct Held {
    device: Device,
    stage: Arc<Stage>,
    address: u64,
    len: u64,
    id: u64,
    /// Whether the driver exports it.
    exportable: OnceLock<Result<(), TransportError>>,
    /// What it was imported from, where it is to be handed on: drivers do not export what they
    /// imported.
    handed_on_opt: Option<Exported>,
    /// Keeps the bytes; dropped after the last region and batch that use them.
    _keeper: Box<dyn Any + Send + Sync>,
}

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

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "DeviceMemory({:?}, {:#x}, {} bytes)",
            self.0.device, self.0.address, self.0.len
        )
    }
}

fn refused(message: String) -> TransportError {
    TransportError::quiesced(TransportErrorKind::Memory, message)
}

/// Handles that are mapped one behind the other.
struct Mapped {
    device: Device,
    address: u64,
    reserved: u64,
    parts: Vec<u64>,
}

impl Mapped {
    fn reserve(device: Device, len: u64) -> Result<Self, TransportError> {
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
    fn push(&mut self, handle: u64, len: u64) -> Result<(), TransportError> {
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
fn granularity(device: Device) -> Result<u64, TransportError> {
    let properties = AllocationProperties::exportable(device.number() as c_int);
    let mut bytes = 0;
    // SAFETY: the structure lives for the length of the call, which writes one number.
    let code = unsafe { (device.calls().granularity)(&mut bytes, &properties, 0) };
    device.check("asking for the unit of allocations", code)?;
    Ok((bytes as u64).max(1))
}

fn create_handle(device: Device, len: u64) -> Result<u64, TransportError> {
    let properties = AllocationProperties::exportable(device.number() as c_int);
    let mut handle = 0;
    // SAFETY: the structure lives for the length of the call, which writes one handle.
    let code = unsafe { (device.calls().create)(&mut handle, len as usize, &properties, 0) };
    device.check(&format!("allocating {len} bytes of device memory"), code)?;
    Ok(handle)
}

impl DeviceMemory {
    /// Allocates memory of a device that other processes can map. It is not zeroed.
    ///
    /// # Errors
    /// [`TransportErrorKind::Device`] when there is no driver or device, or not so much memory.
    pub fn allocate(
        runtime: DeviceRuntime,
        number: u32,
        len: ByteLen,
    ) -> Result<Self, TransportError> {
        Self::allocate_in_parts(runtime, number, len, ByteLen(u64::MAX))
    }

    /// As [`DeviceMemory::allocate`], made of handles of at most so many bytes each (rounded up to
    /// the device's unit), as allocators do that grow their pools.
    ///
    /// # Errors
    /// As there.
    pub fn allocate_in_parts(
        runtime: DeviceRuntime,
        number: u32,
        len: ByteLen,
        part: ByteLen,
    ) -> Result<Self, TransportError> {
        let device = Device::new(runtime, number)?;
        let entered = device.enter()?;
        let unit = granularity(device)?;
        let whole = len
            .get()
            .checked_next_multiple_of(unit)
            .filter(|whole| *whole > 0);
        let whole = whole.ok_or_else(|| refused(format!("{len} bytes of device memory")))?;
        let part = part
            .get()
            .max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(whole);
        let mut mapped = Mapped::reserve(device, whole)?;
        let mut left = whole;
        while left > 0 {
            let step = left.min(part);
            let handle = create_handle(device, step)?;
            mapped.push(handle, step)?;
            left -= step;
        }
        drop(entered);
        let address = mapped.address;
        Ok(Self::hold(device, address, len.get(), mapped))
    }

    /// Takes `len` bytes at a device's address into use. Whatever `keeper` keeps is kept for as long
    /// as a region or a batch in flight needs them.
    ///
    /// # Errors
    /// [`TransportErrorKind::Device`] when there is no driver, or it does not know the address;
    /// [`TransportErrorKind::Memory`] when the bytes are not all allocated.
    ///
    /// # Safety
    /// The bytes must stay allocated until `keeper` is dropped, or until
    /// [`crate::Engine::deregister`] has said true for every region over them. Peers write there at
    /// any time.
    pub unsafe fn new(
        runtime: DeviceRuntime,
        address: u64,
        len: ByteLen,
        keeper: impl Any + Send + Sync,
    ) -> Result<Self, TransportError> {
        // Any device of the runtime can ask for the address's own.
        let asked = Device::new(runtime, 0)?;
        let mut number: c_int = 0;
        let entered = asked.enter()?;
        // SAFETY: of this attribute the call writes one int, which lives for its length.
        let code = unsafe {
            let number = std::ptr::from_mut(&mut number).cast();
            (asked.calls().pointer_attribute)(number, DEVICE_ORDINAL, address)
        };
        asked.check(
            &format!("asking for the device of address {address:#x}"),
            code,
        )?;
        drop(entered);
        let device = Device::new(runtime, u32::try_from(number).unwrap_or(u32::MAX))?;
        let memory = Self::hold(device, address, len.get(), keeper);
        memory.allocations()?;
        Ok(memory)
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

    /// Maps memory that another process exported. It can be handed on, and stays when that process
    /// ends.
    ///
    /// # Errors
    /// [`TransportErrorKind::Device`] when there is no driver or it refuses;
    /// [`TransportErrorKind::Memory`] when the numbers do not agree, or the device is none of this
    /// process's.
    pub fn from_handles(handles: DeviceHandles) -> Result<Self, TransportError> {
        let device = device_by_uuid(handles.runtime, &handles.device)?;
        let parts = handles
            .parts
            .into_iter()
            .map(|(descriptor, len)| ExportedPart {
                descriptor,
                len: len.get(),
            });
        let exported = Exported {
            parts: parts.collect(),
            lead: handles.lead.get(),
        };
        let parts = exported.parts.iter();
        let parts: Vec<_> = parts
            .map(|part| (part.descriptor.as_fd(), part.len))
            .collect();
        let mapped = Self::map(device, &parts, exported.lead, handles.bytes.get())?;
        let address = mapped.address + exported.lead;
        let held = Held {
            handed_on_opt: Some(exported),
            ..Self::held(device, address, handles.bytes.get(), mapped)
        };
        Ok(Self(Arc::new(held)))
    }

    /// Maps memory that another process exported. `len` bytes begin `lead` bytes behind the
    /// beginning of the first part.
    pub(crate) fn import(
        device: Device,
        parts: &[(BorrowedFd<'_>, u64)],
        lead: u64,
        len: u64,
    ) -> Result<Self, TransportError> {
        let mapped = Self::map(device, parts, lead, len)?;
        Ok(Self::hold(device, mapped.address + lead, len, mapped))
    }

    fn map(
        device: Device,
        parts: &[(BorrowedFd<'_>, u64)],
        lead: u64,
        len: u64,
    ) -> Result<Mapped, TransportError> {
        let whole = parts
            .iter()
            .try_fold(0u64, |sum, (_, len)| sum.checked_add(*len));
        let is_inside = lead
            .checked_add(len)
            .is_some_and(|end| whole.is_some_and(|whole| end <= whole));
        let (Some(whole), true, true) = (whole, is_inside, len > 0) else {
            return Err(refused(format!(
                "{len} bytes at {lead} leave the allocations that were exported"
            )));
        };
        let entered = device.enter()?;
        let mut mapped = Mapped::reserve(device, whole)?;
        for (descriptor, len) in parts {
            let handle = device.import(descriptor.as_raw_fd())?;
            mapped.push(handle, *len)?;
        }
        drop(entered);
        Ok(mapped)
    }

    fn hold(device: Device, address: u64, len: u64, keeper: impl Any + Send + Sync) -> Self {
        Self(Arc::new(Self::held(device, address, len, keeper)))
    }

    fn held(device: Device, address: u64, len: u64, keeper: impl Any + Send + Sync) -> Held {
        Held {
            device,
            stage: Stage::of(device),
            address,
            len,
            id: memory::next_id(),
            exportable: OnceLock::new(),
            handed_on_opt: None,
            _keeper: Box::new(keeper),
        }
    }

    /// Where it is.
    pub fn location(&self) -> Location {
        Location::Device {
            runtime: self.0.device.kind(),
            number: self.0.device.number(),
        }
    }

    /// Where it begins, to its device. The processor must not touch it.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// How many bytes there are.
    pub fn len(&self) -> ByteLen {
        ByteLen(self.0.len)
    }

    /// Whether there are none; there always are some.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Copies bytes out, and waits for it.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`], or the driver's.
    pub fn read(&self, offset: ByteOffset, out: &mut [u8]) -> Result<(), TransportError> {
        mover::read(self, offset.get(), out)
    }

    /// Copies bytes in, and waits for it.
    ///
    /// # Errors
    /// As [`DeviceMemory::read`].
    pub fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
        mover::write(self, offset.get(), bytes)
    }

    /// Whether what a network device writes here is only sure to be seen after a read, as far as
    /// the driver says.
    #[cfg(feature = "rdma")]
    pub(crate) fn needs_read_back(&self) -> bool {
        let device = self.0.device;
        device.runtime.needs_read_back(device.number())
    }

    /// Waits for an event of the driver.
    #[cfg(feature = "rdma")]
    pub(crate) fn wait_for(&self, event: u64) -> Result<(), TransportError> {
        let device = self.0.device;
        let _entered = device.enter()?;
        // SAFETY: whoever gave the event said that it lives.
        let code = unsafe { (device.calls().wait)(event) };
        device.check("waiting for an event", code)
    }

    /// Tells it from every other pool of the process.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn device(&self) -> Device {
        self.0.device
    }

    pub(crate) fn stage(&self) -> &Arc<Stage> {
        &self.0.stage
    }

    /// The device's address of a range, which must lie inside.
    pub(crate) fn device_address(&self, offset: u64, len: u64) -> Result<u64, TransportError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.0.len);
        let address = end.and_then(|_| self.0.address.checked_add(offset));
        address.ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "{len} bytes at offset {offset} leave device memory of {} bytes",
                    self.0.len
                ),
            )
        })
    }

    /// What tells its device from every other, in this host's processes alike.
    pub(crate) fn device_uuid(&self) -> Result<[u8; 16], TransportError> {
        uuid(self.0.device)
    }

    /// Whether another process can map it. Tried once.
    ///
    /// # Errors
    /// Why the driver does not export it.
    pub(crate) fn check_exportable(&self) -> Result<(), TransportError> {
        let tried = self.0.exportable.get_or_init(|| self.export().map(|_| ()));
        tried.clone()
    }

    /// The allocations that it lies in, in order: where each begins and how long it is.
    fn allocations(&self) -> Result<Vec<(u64, u64)>, TransportError> {
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

/// What tells a device from every other.
fn uuid(device: Device) -> Result<[u8; 16], TransportError> {
    let (mut handle, mut uuid) = (0, [0; 16]);
    let ordinal = device.number() as c_int;
    // SAFETY: the call writes one int, which lives for its length.
    let code = unsafe { (device.calls().device)(&mut handle, ordinal) };
    device.check("asking for a device", code)?;
    // SAFETY: the call writes 16 bytes, which live for its length.
    let code = unsafe { (device.calls().device_uuid)(&mut uuid, handle) };
    device.check("asking for a device's name", code)?;
    Ok(uuid)
}

/// The device of this process with another process's name for it.
pub(crate) fn device_by_uuid(
    runtime: DeviceRuntime,
    wanted: &[u8; 16],
) -> Result<Device, TransportError> {
    for number in 0..super::device_count(runtime)? {
        let device = Device::new(runtime, number)?;
        if uuid(device)? == *wanted {
            return Ok(device);
        }
    }
    Err(refused(
        "the peer's device cannot be seen by this process (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES)"
            .to_owned(),
    ))
}
