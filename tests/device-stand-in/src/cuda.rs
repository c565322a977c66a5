//! The names of CUDA's driver API.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::control::{self, Setting};
use crate::memory::GRANULARITY;
use crate::{code, number, store, world};

/// A context's handle is its device's number behind this.
const CONTEXT: u64 = 0xC0DE_0000;

/// What a handle is to be made of.
#[repr(C)]
pub struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location_kind: c_int,
    location: c_int,
    windows: *mut c_void,
    flags: [u8; 8],
}

/// Many copies' attributes.
#[repr(C)]
pub struct CopyAttributes {
    order: c_int,
    source_hint: [c_int; 2],
    destination_hint: [c_int; 2],
    flags: c_uint,
}

/// One side of a pitched copy.
#[repr(C)]
pub struct PitchedSide {
    x: usize,
    y: usize,
    kind: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// A pitched copy.
#[repr(C)]
pub struct PitchedCopy {
    source: PitchedSide,
    destination: PitchedSide,
    width: usize,
    height: usize,
}

impl PitchedSide {
    fn address(&self) -> Option<u64> {
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        let start = match self.kind {
            HOST => self.host,
            DEVICE => self.device,
            _ => return None,
        };
        let before = self.y.checked_mul(self.pitch)?.checked_add(self.x)?;
        start.checked_add(before as u64)
    }
}

impl AllocationProperties {
    fn is_pinned_on_a_device(&self) -> bool {
        self.kind == 1 && self.location_kind == 1 && self.windows.is_null() && self.flags[1] <= 1
    }
}

/// What the numbers are called, and mean.
fn words(code: c_int) -> Option<(&'static CStr, &'static CStr)> {
    Some(match code {
        0 => (c"CUDA_SUCCESS", c"no error"),
        1 => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        2 => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        100 => (
            c"CUDA_ERROR_NO_DEVICE",
            c"no CUDA-capable device is detected",
        ),
        101 => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        201 => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
        600 => (c"CUDA_ERROR_NOT_READY", c"device not ready"),
        709 => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        801 => (c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
        _ => return None,
    })
}

macro_rules! exported {
    ($($(#[doc = $doc:literal])* fn $name:ident($($argument:ident: $kind:ty),*) -> c_int $body:block)*) => {
        $(
            $(#[doc = $doc])*
            ///
            /// # Safety
            /// Pointers are null or point to what the API's documentation says.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the API's name")]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> c_int $body
        )*
    };
}
pub(crate) use exported;

exported! {
    /// Begins.
    fn cuInit(flags: c_uint) -> c_int {
        match (flags, world::devices()) {
            (0, 1..) => code::SUCCESS,
            (0, _) => code::NO_DEVICE,
            _ => code::INVALID_VALUE,
        }
    }
    /// The name of a number.
    fn cuGetErrorName(result: c_int, name: *mut *const c_char) -> c_int {
        let found = words(result).map(|(name, _)| name.as_ptr()).ok_or(code::INVALID_VALUE);
        // SAFETY: the caller's promise.
        unsafe { store(name, found) }
    }
    /// The meaning of a number.
    fn cuGetErrorString(result: c_int, text: *mut *const c_char) -> c_int {
        let found = words(result).map(|(_, text)| text.as_ptr()).ok_or(code::INVALID_VALUE);
        // SAFETY: the caller's promise.
        unsafe { store(text, found) }
    }
    /// How many devices there are.
    fn cuDeviceGetCount(count: *mut c_int) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(count, Ok(world::devices())) }
    }
    /// A device's handle.
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(device, world::check_device(ordinal)) }
    }
    /// What tells a device from every other.
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(uuid, world::check_device(device).map(|device| [0xD0 + device as u8; 16])) }
    }
    /// An attribute of a device; only who sees a network device's writes.
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
        const RDMA_WRITES_ORDERING: c_int = 118;
        const OWNER: c_int = 100;
        let answer = match (attribute, control::is_set(Setting::UnorderedWrites)) {
            (RDMA_WRITES_ORDERING, true) => Ok(0),
            (RDMA_WRITES_ORDERING, false) => Ok(OWNER),
            _ => Err(code::INVALID_VALUE),
        };
        let answer = world::check_device(device).and(answer);
        // SAFETY: the caller's promise.
        unsafe { store(value, answer) }
    }
    /// A device's own context.
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> c_int {
        let retained = world::check_device(device).map(|device| CONTEXT + device as u64);
        // SAFETY: the caller's promise.
        unsafe { store(context, retained) }
    }
    /// The calling thread's context.
    fn cuCtxGetCurrent(context: *mut u64) -> c_int {
        let current = world::current().map_or(0, |device| CONTEXT + device as u64);
        // SAFETY: the caller's promise.
        unsafe { store(context, Ok(current)) }
    }
    /// Changes the calling thread's context.
    fn cuCtxSetCurrent(context: u64) -> c_int {
        let device = context.checked_sub(CONTEXT).and_then(|device| i32::try_from(device).ok());
        match device.map(world::check_device) {
            Some(Ok(device)) => world::set_current(Some(device)),
            None if context == 0 => world::set_current(None),
            _ => return code::INVALID_CONTEXT,
        }
        code::SUCCESS
    }
    /// An allocation that cannot be exported.
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(address, world::allocate(bytes as u64)) }
    }
    /// Frees an allocation.
    fn cuMemFree_v2(address: u64) -> c_int {
        number(world::free(address))
    }
    /// The allocation around an address.
    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) -> c_int {
        match world::allocation_of(address) {
            Ok((start, len)) => {
                // SAFETY: the caller's promise; either may be null here.
                unsafe {
                    store(base, Ok(start));
                    store(bytes, Ok(len as usize));
                }
                code::SUCCESS
            }
            Err(code) => code,
        }
    }
    /// An attribute of an address; only the device's ordinal.
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64) -> c_int {
        const DEVICE_ORDINAL: c_int = 9;
        if attribute != DEVICE_ORDINAL {
            return code::INVALID_VALUE;
        }
        // SAFETY: the caller's promise: this attribute is an int.
        unsafe { store(data.cast::<c_int>(), world::device_of(address)) }
    }
    /// Pinned host memory.
    fn cuMemHostAlloc(memory: *mut u64, bytes: usize, _flags: c_uint) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(memory, world::pin(bytes as u64)) }
    }
    /// Frees pinned host memory.
    fn cuMemFreeHost(memory: u64) -> c_int {
        number(world::unpin(memory))
    }
    /// In which unit handles are made.
    fn cuMemGetAllocationGranularity(
        bytes: *mut usize, properties: *const AllocationProperties, _option: c_int
    ) -> c_int {
        // SAFETY: the caller's promise.
        let is_known = unsafe { properties.as_ref() }.is_some_and(|one| one.is_pinned_on_a_device());
        let answer = if is_known { Ok(GRANULARITY as usize) } else { Err(code::INVALID_VALUE) };
        // SAFETY: the caller's promise.
        unsafe { store(bytes, answer) }
    }
    /// Makes a handle.
    fn cuMemCreate(
        handle: *mut u64, bytes: usize, properties: *const AllocationProperties, _flags: u64
    ) -> c_int {
        // SAFETY: the caller's promise.
        let properties = unsafe { properties.as_ref() };
        let Some(one) = properties.filter(|one| one.is_pinned_on_a_device()) else {
            return code::INVALID_VALUE;
        };
        let created = world::create_handle(one.location, bytes as u64, one.handle_types & 1 != 0);
        // SAFETY: the caller's promise.
        unsafe { store(handle, created) }
    }
    /// Lets a handle go.
    fn cuMemRelease(handle: u64) -> c_int {
        number(world::release_handle(handle))
    }
    /// Takes address space.
    fn cuMemAddressReserve(
        address: *mut u64, bytes: usize, _alignment: usize, _hint: u64, _flags: u64
    ) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(address, world::reserve(bytes as u64)) }
    }
    /// Gives address space back.
    fn cuMemAddressFree(address: u64, _bytes: usize) -> c_int {
        number(world::unreserve(address))
    }
    /// Maps a handle.
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) -> c_int {
        number(world::map(address, bytes as u64, offset as u64, handle))
    }
    /// Ends mappings.
    fn cuMemUnmap(address: u64, bytes: usize) -> c_int {
        number(world::unmap(address, bytes as u64))
    }
    /// Lets devices read and write what is mapped.
    fn cuMemSetAccess(address: u64, bytes: usize, descriptor: *const [c_int; 3], count: usize) -> c_int {
        const READ_AND_WRITE: c_int = 3;
        // SAFETY: the caller's promise.
        match unsafe { descriptor.as_ref() } {
            Some([1, _, READ_AND_WRITE]) if count == 1 => {
                number(world::set_accessible(address, bytes as u64))
            }
            _ => code::INVALID_VALUE,
        }
    }
    /// The handle behind an address.
    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(handle, world::retain_handle(address)) }
    }
    /// A handle as a descriptor.
    fn cuMemExportToShareableHandle(
        descriptor: *mut c_void, handle: u64, kind: c_int, _flags: u64
    ) -> c_int {
        if kind != 1 {
            return code::INVALID_VALUE;
        }
        // SAFETY: the caller's promise: of this kind it is an int.
        unsafe { store(descriptor.cast::<c_int>(), world::export_handle(handle)) }
    }
    /// A handle of a descriptor.
    fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: *mut c_void, kind: c_int) -> c_int {
        let descriptor = i32::try_from(descriptor.addr());
        let imported = match (kind, descriptor) {
            (1, Ok(descriptor)) => world::import_handle(descriptor),
            _ => Err(code::INVALID_VALUE),
        };
        // SAFETY: the caller's promise.
        unsafe { store(handle, imported) }
    }
    /// A range as a dma-buf.
    fn cuMemGetHandleForAddressRange(
        descriptor: *mut c_void, address: u64, bytes: usize, kind: c_int, _flags: u64
    ) -> c_int {
        if kind != 1 {
            return code::INVALID_VALUE;
        }
        // SAFETY: the caller's promise: of this kind it is an int.
        unsafe { store(descriptor.cast::<c_int>(), world::dma_buf(address, bytes as u64)) }
    }
    /// Makes a stream.
    fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(stream, world::create_stream()) }
    }
    /// Ends a stream.
    fn cuStreamDestroy_v2(stream: u64) -> c_int {
        number(world::destroy_stream(stream))
    }
    /// Waits for a stream.
    fn cuStreamSynchronize(stream: u64) -> c_int {
        number(world::synchronize(stream))
    }
    /// Lets a stream wait.
    fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
        number(world::wait_for(stream, event))
    }
    /// Makes an event.
    fn cuEventCreate(event: *mut u64, _flags: c_uint) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(event, world::create_event()) }
    }
    /// Ends an event.
    fn cuEventDestroy_v2(event: u64) -> c_int {
        number(world::destroy_event(event))
    }
    /// Puts an event into a stream.
    fn cuEventRecord(event: u64, stream: u64) -> c_int {
        number(world::record(event, stream))
    }
    /// Whether an event has passed.
    fn cuEventQuery(event: u64) -> c_int {
        number(world::query(event))
    }
    /// Waits for an event.
    fn cuEventSynchronize(event: u64) -> c_int {
        number(world::wait(event))
    }
    /// Begins a copy.
    fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: u64) -> c_int {
        number(world::copy(stream, std::iter::once((dst, src, bytes as u64))))
    }
    /// Begins many copies.
    fn cuMemcpyBatchAsync(
        dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attributes: *const CopyAttributes, _indices: *const usize, attribute_count: usize,
        _failed: *mut usize, stream: u64
    ) -> c_int {
        if control::is_set(Setting::RefuseBatches) {
            return code::NOT_SUPPORTED;
        }
        // SAFETY: the caller's promise.
        let order = unsafe { attributes.as_ref() }.map(|one| one.order);
        let pointers_are_set = !dsts.is_null() && !srcs.is_null() && !sizes.is_null();
        if count == 0 || attribute_count != 1 || !matches!(order, Some(1..=3)) || !pointers_are_set {
            return code::INVALID_VALUE;
        }
        control::add(Setting::Batches, 1);
        // SAFETY: the caller's promise: each has `count` elements.
        let (dsts, srcs, sizes) = unsafe {
            (
                std::slice::from_raw_parts(dsts, count),
                std::slice::from_raw_parts(srcs, count),
                std::slice::from_raw_parts(sizes, count),
            )
        };
        let ranges = dsts.iter().zip(srcs).zip(sizes);
        number(world::copy(stream, ranges.map(|((dst, src), size)| (*dst, *src, *size as u64))))
    }
    /// Begins a pitched copy.
    fn cuMemcpy2DAsync_v2(copy: *const PitchedCopy, stream: u64) -> c_int {
        // SAFETY: the caller's promise.
        let Some(copy) = (unsafe { copy.as_ref() }) else {
            return code::INVALID_VALUE;
        };
        let (Some(src), Some(dst)) = (copy.source.address(), copy.destination.address()) else {
            return code::INVALID_VALUE;
        };
        let pitches = (copy.destination.pitch, copy.source.pitch);
        pitched(stream, (dst, src), pitches, (copy.width, copy.height))
    }
}

/// Begins a pitched copy: rows of `width` bytes.
pub(crate) fn pitched(
    stream: u64,
    (dst, src): (u64, u64),
    (dst_pitch, src_pitch): (usize, usize),
    (width, height): (usize, usize),
) -> c_int {
    if width == 0 || height == 0 || (height > 1 && (dst_pitch < width || src_pitch < width)) {
        return code::INVALID_VALUE;
    }
    control::add(Setting::Pitched, 1);
    let row = |row: usize| {
        let (dst_offset, src_offset) = (row * dst_pitch, row * src_pitch);
        (
            dst + dst_offset as u64,
            src + src_offset as u64,
            width as u64,
        )
    };
    number(world::copy(stream, (0..height).map(row)))
}
