//! The system calls, each behind a safe function or one whose contract is stated.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::time::Duration;

/// Ranges of one vectored call, and of one piece of a batch, at most: the kernel's limit.
pub(crate) const MAX_VECTORS: usize = 1024;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// An anonymous file in memory that can be sealed.
pub(crate) fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: `name` is a valid C string for the length of the call; the kernel keeps a copy.
    let fd = check(unsafe {
        libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    })?;
    // SAFETY: the kernel just returned this descriptor to us, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An anonymous file of huge pages that can be sealed, with the space for `len` bytes taken; `None`
/// when `len` is less than such a page, or the host has not enough of them free.
pub(crate) fn huge_memfd(name: &CStr, len: u64) -> Option<OwnedFd> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let page = meminfo_value(&meminfo, "Hugepagesize:")?.checked_mul(1024)?;
    let free = meminfo_value(&meminfo, "HugePages_Free:")?.checked_mul(page)?;
    let whole = len.checked_next_multiple_of(page)?;
    if len < page || free < whole {
        return None;
    }
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
    // SAFETY: `name` is a valid C string for the length of the call; the kernel keeps a copy.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), flags) }).ok()?;
    // SAFETY: the kernel just returned this descriptor to us, and nobody else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Another process may have taken the pages meanwhile; then ordinary ones do.
    take_space(fd.as_fd(), whole).ok().map(|()| fd)
}

fn meminfo_value(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The unit in which a file's memory is mapped, in bytes.
pub(crate) fn block_len(fd: BorrowedFd<'_>) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(File::from(fd.try_clone_to_owned()?).metadata()?.blksize())
}

/// Gives a file its size and its space, so that a later access cannot fail for want of memory.
/// The kernel's internal memory file system has no limit: it would take pages until the
/// out-of-memory killer comes, so what is missing is compared with what is available first.
pub(crate) fn allocate_space(fd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    const BLOCK_BYTES: u64 = 512;
    let taken = File::from(fd.try_clone_to_owned()?).metadata()?.blocks() * BLOCK_BYTES;
    let missing = len.saturating_sub(taken);
    let available = available_memory()?;
    if missing > available {
        return Err(io::Error::new(
            io::ErrorKind::OutOfMemory,
            format!("{missing} bytes are needed and this host has {available} bytes available"),
        ));
    }
    take_space(fd, len)
}

fn take_space(fd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    let len = i64::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: takes no pointers; the descriptor is borrowed for the length of the call.
    match unsafe { libc::posix_fallocate(fd.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_memory() -> io::Result<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    meminfo_value(&meminfo, "MemAvailable:")
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| io::Error::other("/proc/meminfo does not say what memory is available"))
}

/// The seals of a memfd.
pub(crate) fn seals(fd: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: takes no pointers; the descriptor is borrowed for the length of the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })
}

/// Adds seals to a memfd.
pub(crate) fn add_seals(fd: BorrowedFd<'_>, seals: i32) -> io::Result<()> {
    // SAFETY: takes no pointers; the descriptor is borrowed for the length of the call.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(|_| ())
}

/// The size of a file.
pub(crate) fn file_len(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(File::from(fd.try_clone_to_owned()?).metadata()?.len())
}

/// A shared mapping of a whole file, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory owned by this value; it is only touched through raw copies,
// which have no thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent raw copies are as (un)ordered as those of other processes that map
// the same pages, and no reference to the bytes is ever made.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of a file, readable and writable. `len` must not be 0.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // SAFETY: a null hint and a length; the kernel picks the place, so no existing mapping is
        // touched, and the descriptor is borrowed for the length of the call.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { address, len })
    }

    /// The address of a byte; `None` unless `offset + len` lies inside.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        if end > self.len as u64 {
            return None;
        }
        let offset = usize::try_from(offset).ok()?;
        // SAFETY: `offset <= end <= self.len`, so the result is inside the mapping or one past its
        // end; the mapping lives as long as `self`.
        Some(unsafe { self.address.as_ptr().add(offset) })
    }
}

impl Mapping {
    /// Fills the page table of a part, for writing (Linux 5.14).
    pub(crate) fn populate(&self, offset: u64, len: u64) -> io::Result<()> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let address = self.range(offset, len).ok_or_else(outside)?;
        // SAFETY: the range lies inside the mapping, which `self` keeps; the advice changes no
        // byte of it.
        check(unsafe { libc::madvise(address.cast(), len as usize, libc::MADV_POPULATE_WRITE) })
            .map(|_| ())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the address and length are those of a mapping that `new` made and nobody else
        // unmaps; users hold the owner for as long as they use an address of it.
        let result = unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
        if result != 0 {
            tracing::error!(error = %io::Error::last_os_error(), "a mapping could not be unmapped");
        }
    }
}

/// A range of this process's memory that somebody else manages.
#[derive(Debug)]
pub(crate) struct ForeignRange {
    address: NonNull<u8>,
    len: u64,
}

// SAFETY: it is only an address and a length; the bytes are touched by raw copies alone, which have
// no thread affinity, and whoever made the owner promised that they are there.
unsafe impl Send for ForeignRange {}
// SAFETY: as above.
unsafe impl Sync for ForeignRange {}

impl ForeignRange {
    /// `None` for no bytes, for address 0, and for a range that does not fit the address space.
    pub(crate) fn new(address: u64, len: u64) -> Option<Self> {
        let end = address.checked_add(len)?;
        usize::try_from(end).ok().filter(|_| len > 0)?;
        let address = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
        Some(Self {
            address: NonNull::new(address)?,
            len,
        })
    }

    /// Bytes of the range.
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.address.as_ptr().expose_provenance() as u64
    }

    /// The address of a byte; `None` unless `offset + len` lies inside.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len);
        let offset = usize::try_from(offset).ok().filter(|_| end.is_some())?;
        Some(self.address.as_ptr().wrapping_add(offset))
    }
}

/// Whether every byte of a range is mapped for reading and writing in this process now.
pub(crate) fn is_mapped_writable(address: u64, len: u64) -> io::Result<bool> {
    let Some(end) = address.checked_add(len) else {
        return Ok(false);
    };
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut reached = address;
    // The lines are in the order of addresses.
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(rights)) = (fields.next(), fields.next()) else {
            continue;
        };
        let Some((first, behind)) = range.split_once('-') else {
            continue;
        };
        let bounds = (
            u64::from_str_radix(first, 16),
            u64::from_str_radix(behind, 16),
        );
        let (Ok(first), Ok(behind)) = bounds else {
            continue;
        };
        if reached < end && (first..behind).contains(&reached) && rights.starts_with("rw") {
            reached = behind;
        }
    }
    Ok(len > 0 && reached >= end)
}

/// Copies between two ranges that may belong to other processes too. What another process, or
/// another copy of this one, writes meanwhile arrives torn: the result is some bytes, and it is
/// for the protocol above to let nobody use them.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes for the length of the call, and the
/// two ranges must not overlap.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's contract is exactly this function's.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// One range of a vectored call.
pub(crate) type IoVec = libc::iovec;

/// A range of this process's or, for `write_to_process`, of another process's memory.
pub(crate) fn io_vec(address: u64, len: u64) -> IoVec {
    IoVec {
        iov_base: address as usize as *mut libc::c_void,
        iov_len: len as usize,
    }
}

/// Takes moved bytes from the fronts of the ranges; returns the ranges that are left.
pub(crate) fn advance(vectors: &mut [IoVec], mut moved: usize) -> &mut [IoVec] {
    let mut done = 0;
    for vector in vectors.iter_mut() {
        let step = moved.min(vector.iov_len);
        vector.iov_base = vector.iov_base.wrapping_byte_add(step);
        vector.iov_len -= step;
        moved -= step;
        if vector.iov_len > 0 {
            break;
        }
        done += 1;
    }
    vectors.get_mut(done..).unwrap_or_default()
}

/// Writes local ranges into another process's memory; returns the bytes moved, which may be fewer.
///
/// # Safety
/// The local ranges must be readable for the length of the call. The remote ranges are checked by
/// the kernel against the other process's mappings; where that process is this one, they must be
/// memory to which no reference exists.
pub(crate) unsafe fn write_to_process(
    pid: i32,
    local: &[IoVec],
    remote: &[IoVec],
) -> io::Result<usize> {
    // SAFETY: both arrays are valid for their lengths; the caller guarantees the ranges.
    check_len(unsafe {
        libc::process_vm_writev(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    })
}

/// Reads another process's memory into local ranges; returns the bytes moved, which may be fewer.
///
/// # Safety
/// The local ranges must be writable for the length of the call, and no reference to them may
/// exist. The remote ranges are checked by the kernel against the other process's mappings.
pub(crate) unsafe fn read_ranges_from_process(
    pid: i32,
    local: &[IoVec],
    remote: &[IoVec],
) -> io::Result<usize> {
    // SAFETY: both arrays are valid for their lengths; the caller guarantees the ranges.
    check_len(unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    })
}

/// Reads another process's memory into a buffer; returns the bytes moved, which may be fewer.
pub(crate) fn read_from_process(pid: i32, address: u64, out: &mut [u8]) -> io::Result<usize> {
    let local = io_vec(out.as_mut_ptr() as u64, out.len() as u64);
    let remote = io_vec(address, out.len() as u64);
    // SAFETY: the only memory of this process that is written is `out`, which is borrowed
    // exclusively; the remote range is checked by the kernel.
    check_len(unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) })
}

/// Sends local ranges; returns the bytes sent, which may be fewer.
///
/// # Safety
/// The ranges must be readable for the length of the call.
pub(crate) unsafe fn send_vectored(fd: BorrowedFd<'_>, ranges: &[IoVec]) -> io::Result<usize> {
    // SAFETY: an all-zero `msghdr` is a valid empty message; the fields set below are valid for
    // the length of the call, and the caller guarantees the ranges. The kernel does not write
    // through the array although its type says `*mut`.
    check_len(unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = ranges.as_ptr().cast_mut();
        message.msg_iovlen = ranges.len();
        libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
    })
}

/// Receives into ranges of this process; returns the bytes received, 0 at the end of the stream.
///
/// # Safety
/// The ranges must be writable for the length of the call, and no reference to them may exist.
pub(crate) unsafe fn receive_vectored(fd: BorrowedFd<'_>, ranges: &[IoVec]) -> io::Result<usize> {
    // SAFETY: the array is valid for its length; the caller guarantees the ranges.
    check_len(unsafe { libc::readv(fd.as_raw_fd(), ranges.as_ptr(), ranges.len() as libc::c_int) })
}

/// Whether a stream's other end is still there: true unless its end or an error is pending.
pub(crate) fn is_connected(fd: BorrowedFd<'_>) -> bool {
    let mut byte = 0u8;
    // SAFETY: the buffer is one byte and lives for the length of the call.
    let result = unsafe {
        libc::recv(
            fd.as_raw_fd(),
            std::ptr::from_mut(&mut byte).cast(),
            1,
            libc::MSG_PEEK | libc::MSG_DONTWAIT,
        )
    };
    result > 0 || (result < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock)
}

/// Who is at the other end of a Unix socket, as the kernel knows it.
pub(crate) fn peer_credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the buffer has the length that is given and both live for the length of the call.
    check(unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut credentials).cast(),
            &mut len,
        )
    })?;
    Ok(credentials)
}

/// This process's effective user.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// A descriptor that becomes readable when the process exits.
pub(crate) fn pidfd(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(result).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let fd = check(fd)?;
    // SAFETY: the kernel just returned this descriptor to us, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process behind a pidfd has exited.
pub(crate) fn has_exited(pidfd: BorrowedFd<'_>) -> bool {
    matches!(wait_readable([pidfd], Some(Duration::ZERO)), Ok([true]))
}

/// What to wait for at a descriptor; a failure ends every wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Something to read, or the end.
    Readable,
    /// The other end of a stream sends nothing any more.
    Ended,
}

/// Waits until a descriptor can be read or has failed; for ever without a timeout. Which are
/// ready; none when the time is over or a signal came.
pub(crate) fn wait_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout_opt: Option<Duration>,
) -> io::Result<[bool; N]> {
    wait_for(fds.map(|fd| (fd, Interest::Readable)), timeout_opt)
}

/// As [`wait_readable`], with an interest for each descriptor.
pub(crate) fn wait_for<const N: usize>(
    fds: [(BorrowedFd<'_>, Interest); N],
    timeout_opt: Option<Duration>,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|(fd, interest)| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: match interest {
            Interest::Readable => libc::POLLIN,
            Interest::Ended => libc::POLLRDHUP,
        },
        revents: 0,
    });
    // Rounded up, so that a wait for a deadline does not return just before it again and again.
    let milliseconds = timeout_opt.map_or(-1, |timeout| {
        i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
    });
    // SAFETY: the entries are valid and as many as is said; the descriptors are borrowed for the
    // length of the call.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, milliseconds) };
    match check(ready) {
        Ok(_) => Ok(polled.map(|entry| entry.revents != 0)),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
        Err(error) => Err(error),
    }
}

/// A counter that a thread can wait for together with sockets.
pub(crate) fn event() -> io::Result<File> {
    // SAFETY: takes two integers.
    let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // SAFETY: the kernel just returned this descriptor to us, and nobody else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_bytes_are_taken_from_the_front() {
        let ranges = [(100, 10), (200, 0), (300, 5)];
        let left = |moved| {
            let mut vectors = ranges.map(|(address, len)| io_vec(address, len));
            let rest = advance(&mut vectors, moved);
            rest.iter()
                .map(|vector| (vector.iov_base as u64, vector.iov_len))
                .collect::<Vec<_>>()
        };
        assert_eq!(left(0), [(100, 10), (200, 0), (300, 5)]);
        assert_eq!(left(9), [(109, 1), (200, 0), (300, 5)]);
        assert_eq!(left(10), [(300, 5)]);
        assert_eq!(left(14), [(304, 1)]);
        assert_eq!(left(15), []);
    }
}
