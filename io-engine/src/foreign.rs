//! Memory that somebody else in this process manages, and what a region can be made of.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use common::ids::{ByteLen, ByteOffset};

use crate::error::{TransportError, TransportErrorKind};
use crate::memory::Memory;
use crate::region::Location;
use crate::sys::{self, ForeignRange};

/// Bytes of this process that were not allocated here: an array of a scripting language, a pool of
/// another library. Peers reach them by `local`, `cma` and `tcp`, but not by `shm`, because there
/// is no descriptor to hand over. Clones share it.
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

impl ForeignMemory {
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
    pub(crate) const fn location(&self) -> Location {
        match self {
            Self::Pool(memory) => memory.location(),
            Self::Foreign(_) => Location::Host,
        }
    }

    /// The pool, where it is one.
    pub(crate) const fn pool(&self) -> Option<&Memory> {
        match self {
            Self::Pool(memory) => Some(memory),
            Self::Foreign(_) => None,
        }
    }

    /// Prepares the memory for its use, as far as that is for this crate to do.
    pub(crate) fn populate(&self) {
        if let Self::Pool(memory) = self {
            memory.populate();
        }
    }

    /// The address of a range, which must lie inside. Valid while `self` or a clone lives.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<*mut u8, TransportError> {
        match self {
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
        let src = self.address(offset.get(), out.len() as u64)?;
        // SAFETY: `address` checked that the source lies inside memory that `self` keeps; `out` is
        // a distinct buffer of exactly this length, because nobody has references to the memory.
        unsafe { sys::copy(src, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
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
