//! Memory that somebody else in this process manages, and what a region can be made of.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use common::ids::{ByteLen, ByteOffset};

use crate::device::DeviceMemory;
use crate::error::{TransportError, TransportErrorKind};
use crate::memory::Memory;
use crate::region::Location;
use crate::sys::{self, ForeignRange};

/// Why no other process can map a [`ForeignMemory`].
pub(crate) const CALLERS_OWN: &str = "it has no descriptor";

/// Bytes of this process without a descriptor to hand over: an array of a scripting language, a
/// pool of another library, private memory. Peers reach them by `local`, `cma` and `tcp`, but not
/// by `shm`. Clones share it.
#[derive(Clone)]
pub struct ForeignMemory(Arc<Foreign>);

struct Foreign {
    range: ForeignRange,
    /// Keeps the bytes; dropped after the last region and batch that use them.
    _keeper: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_tuple("ForeignMemory")
            .field(&self.0.range)
            .finish()
    }
}

/// What private memory is made of, so that it begins with a page.
#[derive(Clone)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "reached by address")] [u8; 4096]);

impl ForeignMemory {
    /// Makes private memory of this process, zeros, of whole pages of 4 KiB. All of it is touched.
    ///
    /// # Errors
    /// [`TransportErrorKind::Memory`] when there is not so much, or `len` is 0 or no multiple of
    /// 4 KiB.
    pub fn allocate(len: ByteLen) -> Result<Self, TransportError> {
        let refused = || {
            TransportError::quiesced(
                TransportErrorKind::Memory,
                format!("{len} bytes of private memory are not to be had (whole pages of 4 KiB)"),
            )
        };
        let count = usize::try_from(len.get()).map_err(|_| refused())?;
        if count == 0 || count % size_of::<Page>() != 0 {
            return Err(refused());
        }
        let mut pages = Vec::new();
        let count = count / size_of::<Page>();
        pages.try_reserve_exact(count).map_err(|_| refused())?;
        pages.resize(count, Page([0; 4096]));
        let address = pages.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the keeper owns the bytes, and nobody has a reference to them.
        unsafe { Self::new(address, len, pages) }
    }

    /// Takes `len` bytes at `address` into use. Whatever `keeper` keeps is kept for as long as a
    /// region or a batch in flight needs the bytes.
    ///
    /// # Errors
    /// [`TransportErrorKind::Memory`] when there are no bytes, or this process has not all of them
    /// mapped for reading and writing.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable, until `keeper` is dropped, or until
    /// [`crate::Engine::deregister`] has said true for every region over them. Other threads and
    /// processes write there at any time, so whoever else reads them must stand torn values, and
    /// no Rust reference to them may be used meanwhile.
    pub unsafe fn new(
        address: u64,
        len: ByteLen,
        keeper: impl Any + Send + Sync,
    ) -> Result<Self, TransportError> {
        let refused =
            |message: String| TransportError::quiesced(TransportErrorKind::Memory, message);
        let mapped = sys::is_mapped_writable(address, len.get())
            .map_err(|error| TransportError::io("reading /proc/self/maps", &error))?;
        let range = ForeignRange::new(address, len.get()).filter(|_| mapped);
        let range = range.ok_or_else(|| {
            refused(format!(
                "{len} bytes at {address:#x} are not memory that this process can read and write"
            ))
        })?;
        Ok(Self(Arc::new(Foreign {
            range,
            _keeper: Box::new(keeper),
        })))
    }

    /// Where they begin in this process.
    pub fn address(&self) -> u64 {
        self.0.range.address()
    }

    /// How many bytes there are.
    pub fn len(&self) -> ByteLen {
        ByteLen(self.0.range.len())
    }

    /// Whether there are none; there always are some.
    pub fn is_empty(&self) -> bool {
        self.0.range.len() == 0
    }
}

/// What a region can be made of.
#[derive(Clone, Debug)]
pub enum AnyMemory {
    /// A pool that can be shared by its descriptor.
    Pool(Memory),
    /// Bytes of somebody else in this process.
    Foreign(ForeignMemory),
    /// Bytes of a device.
    Device(DeviceMemory),
}

/// Where a range is. Valid while its memory lives.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// At an address of this process.
    Host(*mut u8),
    /// At an address of a device, which the processor must not touch.
    Device(DeviceMemory, u64),
}

impl Place {
    /// The address as a number, to tell a peer.
    pub(crate) fn number(&self) -> u64 {
        match self {
            Self::Host(address) => address.expose_provenance() as u64,
            Self::Device(_, address) => *address,
        }
    }
}

impl From<&DeviceMemory> for AnyMemory {
    fn from(memory: &DeviceMemory) -> Self {
        Self::Device(memory.clone())
    }
}

impl From<&Memory> for AnyMemory {
    fn from(memory: &Memory) -> Self {
        Self::Pool(memory.clone())
    }
}

impl From<&ForeignMemory> for AnyMemory {
    fn from(memory: &ForeignMemory) -> Self {
        Self::Foreign(memory.clone())
    }
}

impl AnyMemory {
    /// Where it is.
    pub(crate) fn location(&self) -> Location {
        match self {
            Self::Pool(memory) => memory.location(),
            Self::Foreign(_) => Location::Host,
            Self::Device(memory) => memory.location(),
        }
    }

    /// The device's memory, where it is that.
    pub(crate) const fn device(&self) -> Option<&DeviceMemory> {
        match self {
            Self::Device(memory) => Some(memory),
            Self::Pool(_) | Self::Foreign(_) => None,
        }
    }

    /// Why no other process can map it; `None` when it can.
    pub(crate) fn unshared(&self) -> Option<String> {
        match self {
            Self::Pool(_) => None,
            Self::Foreign(_) => Some(CALLERS_OWN.to_owned()),
            Self::Device(memory) => memory
                .check_exportable()
                .err()
                .map(|error| error.to_string()),
        }
    }

    /// Where a range is, which must lie inside.
    pub(crate) fn place(&self, offset: u64, len: u64) -> Result<Place, TransportError> {
        match self {
            Self::Device(memory) => {
                let address = memory.device_address(offset, len)?;
                Ok(Place::Device(memory.clone(), address))
            }
            Self::Pool(_) | Self::Foreign(_) => self.address(offset, len).map(Place::Host),
        }
    }

    /// Whether anything but this value holds a pool or a device's memory.
    pub(crate) fn is_shared(&self) -> bool {
        match self {
            Self::Pool(memory) => memory.is_shared(),
            Self::Foreign(_) => false,
            Self::Device(memory) => memory.is_shared(),
        }
    }

    /// Prepares the memory for its use, as far as that is for this crate to do.
    pub(crate) fn populate(&self) {
        if let Self::Pool(memory) = self {
            memory.populate();
        }
    }

    /// The address of a range in this process, which must lie inside; a device's memory has none.
    /// Valid while `self` or a clone lives.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<*mut u8, TransportError> {
        match self {
            Self::Device(_) => Err(TransportError::quiesced(
                TransportErrorKind::NoCommonTransport,
                "a device's memory has no address in this process",
            )),
            Self::Pool(memory) => memory.address(offset, len),
            Self::Foreign(memory) => memory.0.range.range(offset, len).ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::OutOfBounds,
                    format!(
                        "{len} bytes at offset {offset} leave memory of {} bytes",
                        memory.len()
                    ),
                )
            }),
        }
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: ByteOffset, out: &mut [u8]) -> Result<(), TransportError> {
        if let Self::Device(memory) = self {
            return memory.read(offset, out);
        }
        let src = self.address(offset.get(), out.len() as u64)?;
        // SAFETY: `address` checked that the source lies inside memory that `self` keeps; `out` is
        // a distinct buffer of exactly this length, because nobody has references to the memory.
        unsafe { sys::copy(src, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
        if let Self::Device(memory) = self {
            return memory.write(offset, bytes);
        }
        let dst = self.address(offset.get(), bytes.len() as u64)?;
        // SAFETY: `address` checked that the destination lies inside memory that `self` keeps; no
        // reference to it is used by anybody, so `bytes` cannot overlap it.
        unsafe { sys::copy(bytes.as_ptr(), dst, bytes.len()) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_of_this_process_is_taken() {
        let mut bytes = vec![7u8; 100].into_boxed_slice();
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the box lives to the end of the test and is only read through `memory` below.
        let memory = unsafe { ForeignMemory::new(address, ByteLen(100), ()) }.unwrap();
        let memory = AnyMemory::from(&memory);
        memory.write(ByteOffset(98), &[1, 2]).unwrap();
        let mut seen = [0; 3];
        memory.read(ByteOffset(97), &mut seen).unwrap();
        assert_eq!(seen, [7, 1, 2]);
        assert!(memory.write(ByteOffset(99), &[0; 2]).is_err());
        for (address, len) in [
            (0, 8),
            (address, 0),
            (address, 1 << 46),
            (u64::MAX - 3, 8),
            (0x10, 16),
        ] {
            // SAFETY: none of these can be used, because they are refused.
            let refused = unsafe { ForeignMemory::new(address, ByteLen(len), ()) };
            assert_eq!(
                refused.unwrap_err().kind(),
                TransportErrorKind::Memory,
                "{len} bytes at {address:#x}"
            );
        }
        static READ_ONLY: [u8; 4096] = [1; 4096];
        let constant = READ_ONLY.as_ptr().expose_provenance() as u64;
        // SAFETY: it cannot be used, because it is refused.
        assert!(unsafe { ForeignMemory::new(constant, ByteLen(64), ()) }.is_err());
    }

    #[test]
    fn private_memory_is_of_whole_pages_and_zero() {
        let memory = ForeignMemory::allocate(ByteLen(3 << 12)).unwrap();
        assert_eq!((memory.address() % 4096, memory.len().get()), (0, 3 << 12));
        let memory = AnyMemory::from(&memory);
        memory.write(ByteOffset(4096), &[9; 4096]).unwrap();
        let mut seen = [1; 3 << 12];
        memory.read(ByteOffset(0), &mut seen).unwrap();
        assert!(
            seen.iter()
                .enumerate()
                .all(|(at, byte)| { *byte == if (4096..8192).contains(&at) { 9 } else { 0 } })
        );
        for len in [0, 1, 4097, 1 << 60] {
            let refused = ForeignMemory::allocate(ByteLen(len)).unwrap_err();
            assert_eq!(refused.kind(), TransportErrorKind::Memory, "{len}");
        }
    }

    #[test]
    fn the_keeper_is_kept_by_every_clone() {
        let mut bytes = vec![0u8; 16].into_boxed_slice();
        let address = bytes.as_mut_ptr().expose_provenance() as u64;
        let keeper = Arc::new(bytes);
        let memory =
            // SAFETY: the keeper owns the box.
            unsafe { ForeignMemory::new(address, ByteLen(16), Arc::clone(&keeper)) }.unwrap();
        let copy = AnyMemory::from(&memory);
        drop(memory);
        assert_eq!(Arc::strong_count(&keeper), 2);
        drop(copy);
        assert_eq!(Arc::strong_count(&keeper), 1);
    }
}
