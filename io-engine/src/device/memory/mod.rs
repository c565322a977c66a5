//! Memory of a device: our own, somebody else's, or another process's that was exported to us.

mod export;
mod mapped;

use std::any::Any;
use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use common::ids::{ByteLen, ByteOffset};

pub use self::export::DeviceHandles;
pub(crate) use self::export::{Exported, ExportedPart};
use self::mapped::{Mapped, create_handle, granularity};
use super::library::DEVICE_ORDINAL;
use super::staging::Stage;
use super::{Device, mover};
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
