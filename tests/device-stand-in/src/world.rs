//! The state that both APIs share, and what their calls do with it.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::control::{self, Setting};
use crate::memory::{Physical, Space};
use crate::stream::{Copy, Event, Stream};
use crate::{Answer, code};

struct World {
    space: Space,
    streams: HashMap<u64, Arc<Stream>>,
    events: HashMap<u64, Arc<Event>>,
    next: u64,
}

static WORLD: LazyLock<Answer<Mutex<World>>> = LazyLock::new(|| {
    Ok(Mutex::new(World {
        space: Space::new()?,
        streams: HashMap::new(),
        events: HashMap::new(),
        next: 0x1000,
    }))
});

thread_local! {
    /// The device of the thread's current context; CUDA's threads begin with none.
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

fn world() -> Answer<MutexGuard<'static, World>> {
    let world = WORLD.as_ref().map_err(|code| *code)?;
    Ok(world.lock().unwrap_or_else(PoisonError::into_inner))
}

pub(crate) fn devices() -> i32 {
    i32::try_from(control::get(Setting::Devices)).unwrap_or(i32::MAX)
}

pub(crate) fn check_device(device: i32) -> Answer<i32> {
    match (0..devices()).contains(&device) {
        true => Ok(device),
        false => Err(code::INVALID_DEVICE),
    }
}

pub(crate) fn current() -> Option<i32> {
    CURRENT.get()
}

pub(crate) fn set_current(device: Option<i32>) {
    CURRENT.set(device);
}

/// What a call that needs a current context begins with: its device.
fn begin() -> Answer<i32> {
    let device = current().ok_or(code::INVALID_CONTEXT)?;
    if control::is_set(Setting::Reset) {
        return Err(code::CONTEXT_IS_DESTROYED);
    }
    if control::is_set(Setting::LoseCurrentDevice) {
        set_current(Some(devices() - 1));
    }
    Ok(device)
}

pub(crate) fn allocate(len: u64) -> Answer<u64> {
    let device = begin()?;
    world()?.space.allocate(device, len)
}

pub(crate) fn free(address: u64) -> Answer<()> {
    world()?.space.free(address)
}

pub(crate) fn allocation_of(address: u64) -> Answer<(u64, u64)> {
    begin()?;
    world()?.space.allocation_of(address)
}

pub(crate) fn device_of(address: u64) -> Answer<i32> {
    world()?.space.device_of(address)
}

pub(crate) fn pin(len: u64) -> Answer<u64> {
    begin()?;
    let taken = control::get(Setting::PinnedNow);
    if taken.saturating_add(len) > control::get(Setting::PinnedBytes) {
        return Err(code::OUT_OF_MEMORY);
    }
    // SAFETY: the kernel picks the place.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(code::OUT_OF_MEMORY);
    }
    control::add(Setting::PinnedNow, len);
    let address = memory.expose_provenance() as u64;
    world()?.space.pin(address, len);
    Ok(address)
}

pub(crate) fn unpin(address: u64) -> Answer<()> {
    let len = world()?.space.unpin(address)?;
    control::subtract(Setting::PinnedNow, len);
    let memory = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: mapped by `pin` with this length, and taken from its list just now.
    unsafe { libc::munmap(memory, len as usize) };
    Ok(())
}

pub(crate) fn create_handle(device: i32, len: u64, is_exportable: bool) -> Answer<u64> {
    check_device(device)?;
    if control::is_set(Setting::Reset) {
        return Err(code::CONTEXT_IS_DESTROYED);
    }
    if len == 0 || !len.is_multiple_of(crate::memory::GRANULARITY) {
        return Err(code::INVALID_VALUE);
    }
    let physical = Physical::create(device, len, is_exportable)?;
    Ok(world()?.space.add_handle(physical))
}

pub(crate) fn import_handle(fd: i32) -> Answer<u64> {
    // A descriptor does not say its device; where it is mapped decides nothing here.
    let physical = Physical::import(fd, current().unwrap_or(0))?;
    Ok(world()?.space.add_handle(physical))
}

pub(crate) fn export_handle(handle: u64) -> Answer<i32> {
    let physical = world()?.space.handle(handle)?;
    physical.export()
}

pub(crate) fn release_handle(handle: u64) -> Answer<()> {
    world()?.space.release(handle)
}

pub(crate) fn retain_handle(address: u64) -> Answer<u64> {
    world()?.space.retain(address)
}

pub(crate) fn reserve(len: u64) -> Answer<u64> {
    world()?.space.reserve(len)
}

pub(crate) fn unreserve(address: u64) -> Answer<()> {
    world()?.space.unreserve(address)
}

pub(crate) fn map(address: u64, len: u64, offset: u64, handle: u64) -> Answer<()> {
    if offset != 0 {
        return Err(code::INVALID_VALUE);
    }
    let mut world = world()?;
    let physical = world.space.handle(handle)?;
    world.space.map(address, len, physical)
}

pub(crate) fn set_accessible(address: u64, len: u64) -> Answer<()> {
    world()?.space.set_accessible(address, len)
}

pub(crate) fn unmap(address: u64, len: u64) -> Answer<()> {
    world()?.space.unmap(address, len)
}

/// A range of one allocation as a dma-buf; pages only, as with a driver.
pub(crate) fn dma_buf(address: u64, len: u64) -> Answer<i32> {
    begin()?;
    if control::is_set(Setting::RefuseDmaBuf) {
        return Err(code::NOT_SUPPORTED);
    }
    if !address.is_multiple_of(4096) || len == 0 || !len.is_multiple_of(4096) {
        return Err(code::INVALID_VALUE);
    }
    let (physical, offset) = world()?.space.behind(address, len)?;
    physical.duplicate_at(offset)
}

pub(crate) fn create_stream() -> Answer<u64> {
    begin()?;
    let stream = Stream::start()?;
    let mut world = world()?;
    world.next += 1;
    let name = world.next;
    world.streams.insert(name, stream);
    Ok(name)
}

pub(crate) fn destroy_stream(name: u64) -> Answer<()> {
    let stream = world()?.streams.remove(&name).ok_or(code::INVALID_VALUE)?;
    stream.end();
    Ok(())
}

fn stream(name: u64) -> Answer<Arc<Stream>> {
    world()?
        .streams
        .get(&name)
        .cloned()
        .ok_or(code::INVALID_VALUE)
}

pub(crate) fn synchronize(name: u64) -> Answer<()> {
    begin()?;
    stream(name)?.synchronize()
}

pub(crate) fn create_event() -> Answer<u64> {
    begin()?;
    let mut world = world()?;
    world.next += 1;
    let name = world.next;
    world.events.insert(name, Arc::default());
    Ok(name)
}

pub(crate) fn destroy_event(name: u64) -> Answer<()> {
    world()?
        .events
        .remove(&name)
        .map(|_| ())
        .ok_or(code::INVALID_VALUE)
}

fn event(name: u64) -> Answer<Arc<Event>> {
    world()?
        .events
        .get(&name)
        .cloned()
        .ok_or(code::INVALID_VALUE)
}

pub(crate) fn record(event_name: u64, stream_name: u64) -> Answer<()> {
    begin()?;
    stream(stream_name)?.record(&event(event_name)?);
    Ok(())
}

pub(crate) fn wait_for(stream_name: u64, event_name: u64) -> Answer<()> {
    begin()?;
    stream(stream_name)?.wait_for(&event(event_name)?);
    Ok(())
}

pub(crate) fn query(event_name: u64) -> Answer<()> {
    event(event_name)?.query()
}

pub(crate) fn wait(event_name: u64) -> Answer<()> {
    event(event_name)?.wait()
}

/// Begins copies, each of destination, source and bytes.
pub(crate) fn copy(stream_name: u64, ranges: impl Iterator<Item = (u64, u64, u64)>) -> Answer<()> {
    begin()?;
    control::add(Setting::Calls, 1);
    let stream = stream(stream_name)?;
    let world = world()?;
    let mut copies = Vec::new();
    for (dst, src, len) in ranges {
        let number = control::add(Setting::Copies, 1);
        let reset_at = control::get(Setting::ResetAtCopy);
        if reset_at != 0 && number >= reset_at {
            control::add(Setting::Reset, 1);
            return Err(code::CONTEXT_IS_DESTROYED);
        }
        copies.push(Copy {
            dst: world.space.spans(dst, len)?,
            src: world.space.spans(src, len)?,
        });
    }
    drop(world);
    stream.copy(copies);
    Ok(())
}
