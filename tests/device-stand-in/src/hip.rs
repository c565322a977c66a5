//! The names of HIP. A thread has a current device from its first call on: device 0.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::cuda::{self, AllocationProperties, exported};
use crate::{code, number, store, world};

/// What the numbers are called, and mean.
fn words(code: c_int) -> (&'static CStr, &'static CStr) {
    match code {
        0 => (c"hipSuccess", c"no error"),
        1 => (c"hipErrorInvalidValue", c"invalid argument"),
        2 => (c"hipErrorOutOfMemory", c"out of memory"),
        100 => (c"hipErrorNoDevice", c"no ROCm-capable device is detected"),
        101 => (c"hipErrorInvalidDevice", c"invalid device ordinal"),
        201 => (c"hipErrorInvalidContext", c"invalid device context"),
        600 => (c"hipErrorNotReady", c"device not ready"),
        709 => (c"hipErrorContextIsDestroyed", c"context is destroyed"),
        801 => (c"hipErrorNotSupported", c"operation not supported"),
        _ => (c"hipErrorUnknown", c"unknown error"),
    }
}

/// Gives the thread its device if it has none yet.
fn current() -> c_int {
    match world::current() {
        Some(device) => device,
        None => {
            world::set_current(Some(0));
            0
        }
    }
}

/// The name of a number.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the API's name")]
pub extern "C" fn hipGetErrorName(result: c_int) -> *const c_char {
    words(result).0.as_ptr()
}

/// The meaning of a number.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the API's name")]
pub extern "C" fn hipGetErrorString(result: c_int) -> *const c_char {
    words(result).1.as_ptr()
}

macro_rules! same_as_cuda {
    ($($name:ident = $other:ident($($argument:ident: $kind:ty),*);)*) => {
        exported! {
            $(
                /// As the other API's call.
                fn $name($($argument: $kind),*) -> c_int {
                    current();
                    // SAFETY: the caller's promise is the same.
                    unsafe { cuda::$other($($argument),*) }
                }
            )*
        }
    };
}

same_as_cuda! {
    hipInit = cuInit(flags: c_uint);
    hipGetDeviceCount = cuDeviceGetCount(count: *mut c_int);
    hipDeviceGet = cuDeviceGet(device: *mut c_int, ordinal: c_int);
    hipDeviceGetUuid = cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    hipMalloc = cuMemAlloc_v2(address: *mut u64, bytes: usize);
    hipFree = cuMemFree_v2(address: u64);
    hipMemGetAddressRange = cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    hipPointerGetAttribute = cuPointerGetAttribute(data: *mut c_void, attribute: c_int, address: u64);
    hipHostMalloc = cuMemHostAlloc(memory: *mut u64, bytes: usize, flags: c_uint);
    hipHostFree = cuMemFreeHost(memory: u64);
    hipMemGetAllocationGranularity = cuMemGetAllocationGranularity(
        bytes: *mut usize, properties: *const AllocationProperties, option: c_int);
    hipMemCreate = cuMemCreate(
        handle: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64);
    hipMemRelease = cuMemRelease(handle: u64);
    hipMemAddressReserve = cuMemAddressReserve(
        address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    hipMemAddressFree = cuMemAddressFree(address: u64, bytes: usize);
    hipMemMap = cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    hipMemUnmap = cuMemUnmap(address: u64, bytes: usize);
    hipMemSetAccess = cuMemSetAccess(
        address: u64, bytes: usize, descriptor: *const [c_int; 3], count: usize);
    hipMemRetainAllocationHandle = cuMemRetainAllocationHandle(handle: *mut u64, address: u64);
    hipMemExportToShareableHandle = cuMemExportToShareableHandle(
        descriptor: *mut c_void, handle: u64, kind: c_int, flags: u64);
    hipMemImportFromShareableHandle = cuMemImportFromShareableHandle(
        handle: *mut u64, descriptor: *mut c_void, kind: c_int);
    hipMemGetHandleForAddressRange = cuMemGetHandleForAddressRange(
        descriptor: *mut c_void, address: u64, bytes: usize, kind: c_int, flags: u64);
    hipStreamCreateWithFlags = cuStreamCreate(stream: *mut u64, flags: c_uint);
    hipStreamDestroy = cuStreamDestroy_v2(stream: u64);
    hipStreamSynchronize = cuStreamSynchronize(stream: u64);
    hipStreamWaitEvent = cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint);
    hipEventCreateWithFlags = cuEventCreate(event: *mut u64, flags: c_uint);
    hipEventDestroy = cuEventDestroy_v2(event: u64);
    hipEventRecord = cuEventRecord(event: u64, stream: u64);
    hipEventQuery = cuEventQuery(event: u64);
    hipEventSynchronize = cuEventSynchronize(event: u64);
}

exported! {
    /// The calling thread's device.
    fn hipGetDevice(device: *mut c_int) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { store(device, Ok(current())) }
    }
    /// Changes the calling thread's device.
    fn hipSetDevice(device: c_int) -> c_int {
        number(world::check_device(device).map(|device| world::set_current(Some(device))))
    }
    /// Begins a copy.
    fn hipMemcpyAsync(dst: u64, src: u64, bytes: usize, kind: c_int, stream: u64) -> c_int {
        const ANY: c_int = 4;
        if kind != ANY {
            return code::INVALID_VALUE;
        }
        current();
        number(world::copy(stream, std::iter::once((dst, src, bytes as u64))))
    }
    /// Begins a pitched copy.
    fn hipMemcpy2DAsync(
        dst: u64, dst_pitch: usize, src: u64, src_pitch: usize, width: usize, height: usize,
        _kind: c_int, stream: u64
    ) -> c_int {
        current();
        cuda::pitched(stream, (dst, src), (dst_pitch, src_pitch), (width, height))
    }
}
