//! Memory: handles backed by memfds, address space that nobody may touch, and what lies where.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use crate::control::{self, Setting};
use crate::{Answer, code};

/// Bytes in which handles are made and mapped, as on real devices.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// Address space of all devices together.
const SPACE_BYTES: u64 = 1 << 40;

/// Memory of a device, which the processor reaches only here.
pub(crate) struct Physical {
    fd: OwnedFd,
    host: usize,
    len: u64,
    pub(crate) device: i32,
    is_exportable: bool,
}

fn errno_as_out_of_memory(result: i32) -> Answer<i32> {
    match result {
        ..0 => Err(code::OUT_OF_MEMORY),
        fine => Ok(fine),
    }
}

impl Physical {
    pub(crate) fn create(device: i32, len: u64, is_exportable: bool) -> Answer<Arc<Self>> {
        // SAFETY: a C string and a flag.
        let fd = unsafe { libc::memfd_create(c"device-stand-in".as_ptr(), libc::MFD_CLOEXEC) };
        let fd = errno_as_out_of_memory(fd)?;
        // SAFETY: the kernel just gave it, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = i64::try_from(len).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: a descriptor of ours and a number.
        errno_as_out_of_memory(unsafe { libc::ftruncate(fd.as_raw_fd(), size) })?;
        Self::map(fd, device, len, is_exportable)
    }

    /// Memory that another process, or this one, exported.
    pub(crate) fn import(fd: i32, device: i32) -> Answer<Arc<Self>> {
        // SAFETY: a number; a descriptor that is none is answered by an error.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if own < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the kernel just gave it, and nobody else has it.
        let own = unsafe { OwnedFd::from_raw_fd(own) };
        // SAFETY: an all-zero `stat` is a valid one to write over.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: the structure lives for the length of the call.
        if unsafe { libc::fstat(own.as_raw_fd(), &mut status) } != 0 || status.st_size <= 0 {
            return Err(code::INVALID_VALUE);
        }
        Self::map(own, device, status.st_size.cast_unsigned(), true)
    }

    fn map(fd: OwnedFd, device: i32, len: u64, is_exportable: bool) -> Answer<Arc<Self>> {
        // SAFETY: the kernel picks the place; the descriptor is ours.
        let host = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if host == libc::MAP_FAILED {
            return Err(code::OUT_OF_MEMORY);
        }
        control::add(Setting::Live, 1);
        Ok(Arc::new(Self {
            fd,
            host: host.expose_provenance(),
            len,
            device,
            is_exportable,
        }))
    }

    /// A descriptor for another process.
    pub(crate) fn export(&self) -> Answer<i32> {
        if !self.is_exportable || control::is_set(Setting::RefuseExport) {
            return Err(code::NOT_SUPPORTED);
        }
        self.duplicate()
    }

    /// A descriptor whose position says where a range begins: what a descriptor of the range alone
    /// would call 0.
    pub(crate) fn duplicate_at(&self, offset: u64) -> Answer<i32> {
        let path = format!("/proc/self/fd/{}\0", self.fd.as_raw_fd());
        // SAFETY: a C string. Opened anew, because a duplicate would share its position.
        let opened = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
        errno_as_out_of_memory(opened)?;
        // SAFETY: the kernel just gave it, and nobody else has it.
        let opened = unsafe { OwnedFd::from_raw_fd(opened) };
        // SAFETY: a descriptor of ours.
        let at = unsafe { libc::lseek(opened.as_raw_fd(), offset as i64, libc::SEEK_SET) };
        match at == offset as i64 {
            true => Ok(opened.into_raw_fd()),
            false => Err(code::INVALID_VALUE),
        }
    }

    /// Lets the processor reach it at an address of the space, or no more.
    fn show_at(&self, address: u64, len: u64, is_shown: bool) -> Answer<()> {
        let (protection, kind, fd) = match is_shown {
            true => (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.fd.as_raw_fd(),
            ),
            false => (
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
            ),
        };
        let place = std::ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the place is inside the space, which is this library's, and nothing else is
        // there.
        let mapped = unsafe {
            libc::mmap(
                place,
                len as usize,
                protection,
                kind | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        match mapped == libc::MAP_FAILED {
            true => Err(code::OUT_OF_MEMORY),
            false => Ok(()),
        }
    }

    pub(crate) fn duplicate(&self) -> Answer<i32> {
        // SAFETY: a descriptor of ours.
        let copy = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
        errno_as_out_of_memory(copy)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and unmapped once.
        unsafe {
            libc::munmap(
                std::ptr::with_exposed_provenance_mut(self.host),
                self.len as usize,
            )
        };
        control::subtract(Setting::Live, 1);
    }
}

/// What lies at an address.
#[derive(Clone)]
struct Mapped {
    len: u64,
    physical: Arc<Physical>,
    offset: u64,
    /// Mapped by the caller, not by an allocation.
    is_virtual: bool,
    is_accessible: bool,
    /// Bytes that the processor reaches at the address.
    shown: u64,
}

/// A part of a copy, as the processor reaches it; keeps the memory.
pub(crate) struct Span {
    pub(crate) host: usize,
    pub(crate) len: u64,
    pub(crate) _kept: Option<Arc<Physical>>,
}

/// Shows memory at its address where that is asked for: how many bytes.
fn shown(physical: &Physical, address: u64, len: u64) -> Answer<u64> {
    if !control::is_set(Setting::PeerMemory) {
        return Ok(0);
    }
    physical.show_at(address, len, true)?;
    Ok(len)
}

/// All address space.
pub(crate) struct Space {
    base: u64,
    next: u64,
    reserved: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapped>,
    pinned: BTreeMap<u64, u64>,
    handles: HashMap<u64, Arc<Physical>>,
    next_handle: u64,
}

impl Space {
    pub(crate) fn new() -> Answer<Self> {
        // SAFETY: the kernel picks the place; nothing can be read or written there.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                SPACE_BYTES as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(code::OUT_OF_MEMORY);
        }
        let base = (base as u64).next_multiple_of(GRANULARITY);
        Ok(Self {
            base,
            next: base,
            reserved: BTreeMap::new(),
            mapped: BTreeMap::new(),
            pinned: BTreeMap::new(),
            handles: HashMap::new(),
            next_handle: 1,
        })
    }

    /// Addresses are never given twice, so that a stale one is noticed.
    pub(crate) fn reserve(&mut self, len: u64) -> Answer<u64> {
        let len = len
            .checked_next_multiple_of(GRANULARITY)
            .filter(|len| *len > 0);
        let len = len.ok_or(code::INVALID_VALUE)?;
        let end = self.next.checked_add(len).ok_or(code::OUT_OF_MEMORY)?;
        if end > self.base + SPACE_BYTES - GRANULARITY {
            return Err(code::OUT_OF_MEMORY);
        }
        let address = std::mem::replace(&mut self.next, end);
        self.reserved.insert(address, len);
        Ok(address)
    }

    pub(crate) fn unreserve(&mut self, address: u64) -> Answer<()> {
        let len = *self.reserved.get(&address).ok_or(code::INVALID_VALUE)?;
        if self.mapped.range(address..address + len).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        self.reserved.remove(&address);
        Ok(())
    }

    pub(crate) fn add_handle(&mut self, physical: Arc<Physical>) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.handles.insert(handle, physical);
        handle
    }

    pub(crate) fn handle(&self, handle: u64) -> Answer<Arc<Physical>> {
        self.handles
            .get(&handle)
            .cloned()
            .ok_or(code::INVALID_VALUE)
    }

    pub(crate) fn release(&mut self, handle: u64) -> Answer<()> {
        self.handles
            .remove(&handle)
            .map(|_| ())
            .ok_or(code::INVALID_VALUE)
    }

    /// The handle behind an address, which must have been mapped by a caller.
    pub(crate) fn retain(&mut self, address: u64) -> Answer<u64> {
        let (_, mapped) = self.at(address).ok_or(code::INVALID_VALUE)?;
        if !mapped.is_virtual {
            return Err(code::INVALID_VALUE);
        }
        let physical = Arc::clone(&mapped.physical);
        Ok(self.add_handle(physical))
    }

    pub(crate) fn map(&mut self, address: u64, len: u64, physical: Arc<Physical>) -> Answer<()> {
        let is_aligned =
            address.is_multiple_of(GRANULARITY) && len.is_multiple_of(GRANULARITY) && len > 0;
        let reserved = self.reserved.range(..=address).next_back();
        let is_reserved = reserved.is_some_and(|(start, size)| address + len <= start + size);
        let is_free = self.mapped.range(address..address + len).next().is_none()
            && self.at(address).is_none();
        if !is_aligned || !is_reserved || !is_free || len > physical.len {
            return Err(code::INVALID_VALUE);
        }
        let mapped = Mapped {
            shown: shown(&physical, address, len)?,
            len,
            physical,
            offset: 0,
            is_virtual: true,
            is_accessible: false,
        };
        self.mapped.insert(address, mapped);
        Ok(())
    }

    pub(crate) fn set_accessible(&mut self, address: u64, len: u64) -> Answer<()> {
        let mut reached = address;
        for (start, mapped) in self.mapped.range_mut(address..address + len) {
            if *start != reached {
                break;
            }
            mapped.is_accessible = true;
            reached += mapped.len;
        }
        match reached >= address + len {
            true => Ok(()),
            false => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn unmap(&mut self, address: u64, len: u64) -> Answer<()> {
        let within = self.mapped.range(address..address + len);
        let places: Vec<u64> = within.map(|(start, _)| *start).collect();
        if places.is_empty() {
            return Err(code::INVALID_VALUE);
        }
        places.iter().try_for_each(|place| self.hide(*place))
    }

    /// One allocation, which cannot be exported.
    pub(crate) fn allocate(&mut self, device: i32, len: u64) -> Answer<u64> {
        let address = self.reserve(len)?;
        let whole = len.next_multiple_of(GRANULARITY);
        let physical = Physical::create(device, whole, false)?;
        let mapped = Mapped {
            shown: shown(&physical, address, whole)?,
            len,
            physical,
            offset: 0,
            is_virtual: false,
            is_accessible: true,
        };
        self.mapped.insert(address, mapped);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Answer<()> {
        match self.mapped.get(&address) {
            Some(mapped) if !mapped.is_virtual => {
                self.hide(address)?;
                self.unreserve(address)
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Ends what is mapped at an address.
    fn hide(&mut self, address: u64) -> Answer<()> {
        match self.mapped.remove(&address) {
            Some(mapped) if mapped.shown > 0 => {
                mapped.physical.show_at(address, mapped.shown, false)
            }
            Some(_) | None => Ok(()),
        }
    }

    fn at(&self, address: u64) -> Option<(u64, &Mapped)> {
        let (start, mapped) = self.mapped.range(..=address).next_back()?;
        (address < start + mapped.len).then_some((*start, mapped))
    }

    /// Where the allocation around an address begins, and how long it is.
    pub(crate) fn allocation_of(&self, address: u64) -> Answer<(u64, u64)> {
        let (start, mapped) = self.at(address).ok_or(code::INVALID_VALUE)?;
        Ok((start, mapped.len))
    }

    pub(crate) fn device_of(&self, address: u64) -> Answer<i32> {
        let (_, mapped) = self.at(address).ok_or(code::INVALID_VALUE)?;
        Ok(mapped.physical.device)
    }

    /// The memory behind a range that lies in one allocation, and the offset in it.
    pub(crate) fn behind(&self, address: u64, len: u64) -> Answer<(Arc<Physical>, u64)> {
        let (start, mapped) = self.at(address).ok_or(code::INVALID_VALUE)?;
        let is_inside = address + len <= start + mapped.len.next_multiple_of(GRANULARITY);
        match is_inside {
            true => Ok((
                Arc::clone(&mapped.physical),
                mapped.offset + address - start,
            )),
            false => Err(code::INVALID_VALUE),
        }
    }

    pub(crate) fn is_device(&self, address: u64) -> bool {
        (self.base..self.base + SPACE_BYTES).contains(&address)
    }

    pub(crate) fn pin(&mut self, address: u64, len: u64) {
        self.pinned.insert(address, len);
    }

    pub(crate) fn unpin(&mut self, address: u64) -> Answer<u64> {
        self.pinned.remove(&address).ok_or(code::INVALID_VALUE)
    }

    /// A range as the processor reaches it, in parts where it lies in several handles.
    pub(crate) fn spans(&self, address: u64, len: u64) -> Answer<Vec<Span>> {
        let end = address.checked_add(len).ok_or(code::INVALID_VALUE)?;
        if !self.is_device(address) {
            let around = self.pinned.range(..=address).next_back();
            let is_pinned = around.is_some_and(|(start, size)| end <= start + size);
            if !is_pinned && !control::is_set(Setting::AllowPageable) {
                return Err(code::INVALID_VALUE);
            }
            return Ok(vec![Span {
                host: address as usize,
                len,
                _kept: None,
            }]);
        }
        let mut spans = Vec::new();
        let mut reached = address;
        while reached < end {
            let (start, mapped) = self.at(reached).ok_or(code::INVALID_VALUE)?;
            if !mapped.is_accessible {
                return Err(code::INVALID_VALUE);
            }
            let within = reached - start;
            let step = (mapped.len - within).min(end - reached);
            spans.push(Span {
                host: mapped.physical.host + (mapped.offset + within) as usize,
                len: step,
                _kept: Some(Arc::clone(&mapped.physical)),
            });
            reached += step;
        }
        Ok(spans)
    }
}
