//! Memory that is shared by file descriptor.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::ids::{ByteLen, ByteOffset};

use crate::error::{TransportError, TransportErrorKind};
use crate::region::Location;
use crate::sys::{self, Mapping};

/// Seals that keep a mapping from ever faulting: the file can neither shrink nor grow.
const NEEDED_SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Seals that keep a pool from being of any use.
const REFUSED_SEALS: i32 = libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE;

/// A pool of bytes backed by a memfd and mapped into this process. Clones share the mapping, which
/// stays for as long as any clone, region or batch in flight holds it.
#[derive(Clone, Debug)]
pub struct Memory(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    fd: OwnedFd,
    len: u64,
    id: u64,
    is_populating: AtomicBool,
}

/// Bytes whose page table is filled at once.
const POPULATE_BYTES: u64 = 16 << 20;
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A number that no other pool of this process has.
pub(crate) fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

fn failed(what: &str, error: &io::Error) -> TransportError {
    TransportError::quiesced(TransportErrorKind::Memory, format!("{what}: {error}"))
}

impl Memory {
    /// Makes a new pool of `len` bytes of zeros: sized once, its space taken at once, sealed. It is
    /// made of huge pages where the host has enough of them reserved and free. `name` is shown by the kernel in `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`TransportErrorKind::Memory`] when the host has no such memory.
    pub fn allocate(name: &str, len: ByteLen) -> Result<Self, TransportError> {
        let c_name: Vec<u8> = name.bytes().filter(|byte| *byte != 0).take(200).collect();
        let c_name = CString::new(c_name).unwrap_or_default();
        if let Some(fd) = sys::huge_memfd(&c_name, len.get()) {
            return Self::from_fd(fd, len);
        }
        let fd = sys::memfd(&c_name).map_err(|error| failed("memfd_create", &error))?;
        sys::allocate_space(fd.as_fd(), len.get())
            .map_err(|error| failed(&format!("allocating {len} bytes for pool {name}"), &error))?;
        Self::from_fd(fd, len)
    }

    /// Maps a pool that another process made. The file must be a memfd of at least `len` bytes
    /// that is sealed against shrinking and growing, or that lets itself be sealed.
    ///
    /// # Errors
    /// [`TransportErrorKind::Memory`] that says what is wrong with the file.
    pub fn from_fd(fd: OwnedFd, len: ByteLen) -> Result<Self, TransportError> {
        let refused =
            |message: String| TransportError::quiesced(TransportErrorKind::Memory, message);
        let size = sys::file_len(fd.as_fd()).map_err(|error| failed("size of a pool", &error))?;
        if len.get() == 0 || size < len.get() {
            return Err(refused(format!(
                "a pool of {len} bytes cannot be in a file of {size} bytes"
            )));
        }
        let seals = sys::seals(fd.as_fd()).map_err(|error| {
            failed(
                "a pool must be a memfd made with MFD_ALLOW_SEALING; reading its seals",
                &error,
            )
        })?;
        if seals & REFUSED_SEALS != 0 {
            return Err(refused(
                "a pool must not be sealed against writing: peers write into it".to_owned(),
            ));
        }
        if seals & NEEDED_SEALS != NEEDED_SEALS {
            sys::add_seals(fd.as_fd(), NEEDED_SEALS).map_err(|error| {
                failed(
                    "a pool must be sealed with F_SEAL_SHRINK and F_SEAL_GROW; sealing it",
                    &error,
                )
            })?;
        }
        // A hole in the file would be a fault at the first access when memory is short.
        sys::allocate_space(fd.as_fd(), len.get())
            .map_err(|error| failed(&format!("taking {len} bytes for a pool"), &error))?;
        // Huge pages are mapped and unmapped whole.
        let block = sys::block_len(fd.as_fd()).map_err(|error| failed("size of a page", &error))?;
        let mapped_len = len.get().checked_next_multiple_of(block.max(1));
        let mapped_len = mapped_len.and_then(|len| usize::try_from(len).ok());
        let mapped_len = mapped_len.ok_or_else(|| {
            refused(format!(
                "a pool of {len} bytes does not fit the address space"
            ))
        })?;
        let mapping = Mapping::new(fd.as_fd(), mapped_len)
            .map_err(|error| failed(&format!("mapping {len} bytes"), &error))?;
        Ok(Self(Arc::new(Shared {
            mapping,
            fd,
            len: len.get(),
            id: next_id(),
            is_populating: AtomicBool::new(false),
        })))
    }

    /// Where the pool is.
    pub const fn location(&self) -> Location {
        Location::Host
    }

    /// Tells this pool from every other of the process.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether somebody else holds the pool too.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Fills the page table of the mapping, on a thread of its own, so that the first writes do
    /// not fault for each page. Done once; ends early when nobody else holds the pool any more.
    pub(crate) fn populate(&self) {
        if self.0.is_populating.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = self.clone();
        let populating = std::thread::Builder::new()
            .name("ferry-populate".to_owned())
            .spawn(move || {
                let mut offset = 0;
                while offset < pool.0.len && pool.is_shared() {
                    let step = POPULATE_BYTES.min(pool.0.len - offset);
                    if pool.0.mapping.populate(offset, step).is_err() {
                        // An older kernel; the pages fault in one by one.
                        break;
                    }
                    offset += step;
                }
            });
        if let Err(error) = populating {
            tracing::debug!(%error, "a pool is not populated ahead of its use");
        }
    }

    /// Bytes of the pool.
    pub fn len(&self) -> ByteLen {
        ByteLen(self.0.len)
    }

    /// Whether the pool has no bytes; it always has some.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Where its first byte is in this process; something is there for as long as a clone lives.
    pub fn base_address(&self) -> u64 {
        self.address(0, 0).map_or(0, |address| address as u64)
    }

    /// Copies bytes out of the pool.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`].
    pub fn read(&self, offset: ByteOffset, out: &mut [u8]) -> Result<(), TransportError> {
        let src = self.address(offset.get(), out.len() as u64)?;
        // SAFETY: `address` checked that the source lies inside the mapping, which `self` keeps;
        // `out` is a distinct buffer of exactly this length.
        unsafe { sys::copy(src, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies bytes into the pool.
    ///
    /// # Errors
    /// [`TransportErrorKind::OutOfBounds`].
    pub fn write(&self, offset: ByteOffset, bytes: &[u8]) -> Result<(), TransportError> {
        let dst = self.address(offset.get(), bytes.len() as u64)?;
        // SAFETY: `address` checked that the destination lies inside the mapping, which `self`
        // keeps; no reference to mapped bytes is ever made, so `bytes` cannot overlap it.
        unsafe { sys::copy(bytes.as_ptr(), dst, bytes.len()) };
        Ok(())
    }

    /// The address of a range, which must lie inside. Valid while `self` or a clone lives.
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<*mut u8, TransportError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.0.len);
        let inside = end.and_then(|_| self.0.mapping.range(offset, len));
        inside.ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "{len} bytes at offset {offset} leave a pool of {} bytes",
                    self.0.len
                ),
            )
        })
    }
}

impl AsFd for Memory {
    /// The memfd, to hand to another process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_shared_by_its_descriptor() {
        let one = Memory::allocate("test", ByteLen(8192)).unwrap();
        let fd = one.as_fd().try_clone_to_owned().unwrap();
        let two = Memory::from_fd(fd, ByteLen(8192)).unwrap();
        one.write(ByteOffset(4095), b"across").unwrap();
        let mut seen = [0; 6];
        two.read(ByteOffset(4095), &mut seen).unwrap();
        assert_eq!(&seen, b"across");
    }

    #[test]
    fn bounds_hold_and_pools_cannot_shrink() {
        let memory = Memory::allocate("test", ByteLen(100)).unwrap();
        assert!(memory.write(ByteOffset(95), &[0; 6]).is_err());
        assert!(memory.read(ByteOffset(u64::MAX), &mut [0; 2]).is_err());
        let file = std::fs::File::from(memory.as_fd().try_clone_to_owned().unwrap());
        assert!(file.set_len(10).is_err(), "sealed against shrinking");
        assert!(file.set_len(1 << 20).is_err(), "sealed against growing");
    }

    #[test]
    fn what_is_no_pool_is_refused() {
        let plain = OwnedFd::from(tempfile::tempfile().unwrap());
        let error = Memory::from_fd(plain, ByteLen(1)).unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::Memory);
        let small = Memory::allocate("test", ByteLen(100)).unwrap();
        let fd = small.as_fd().try_clone_to_owned().unwrap();
        assert!(Memory::from_fd(fd, ByteLen(101)).is_err());
        assert!(Memory::allocate("huge", ByteLen(1 << 60)).is_err());
    }
}
