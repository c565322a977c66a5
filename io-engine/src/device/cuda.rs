//! CUDA's driver API.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::library::{Calls, FILE_DESCRIPTOR, Library};
use super::{CopyRange, Rows, Runtime, driver_error};
use crate::error::TransportError;
use crate::region::DeviceRuntime;

/// Names the library to open.
const VARIABLE: &str = "FERRY_CUDA_LIBRARY";
const NAMES: [&CStr; 2] = [c"libcuda.so.1", c"libcuda.so"];

const NOT_SUPPORTED: c_int = 801;

/// The attribute that says who sees a network device's writes without more.
#[cfg(feature = "rdma")]
const RDMA_WRITES_ORDERING: c_int = 118;
/// Its value from which on the device itself does.
#[cfg(feature = "rdma")]
const SEEN_BY_OWNER: c_int = 100;

type Words = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
type CopyAsync = unsafe extern "C" fn(u64, u64, usize, u64) -> c_int;
type CopyBatch = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const BatchAttributes,
    *const usize,
    usize,
    *mut usize,
    u64,
) -> c_int;

/// `CUmemcpyAttributes`.
#[repr(C)]
struct BatchAttributes {
    /// 1: sources are read in the order of the stream.
    order: c_int,
    source_hint: [c_int; 2],
    destination_hint: [c_int; 2],
    flags: c_uint,
}

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Default)]
struct PitchedSide {
    x: usize,
    y: usize,
    /// 1: host, 2: device.
    kind: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
struct Pitched {
    source: PitchedSide,
    destination: PitchedSide,
    width: usize,
    height: usize,
}

/// The driver.
pub(super) struct Cuda {
    calls: Calls,
    error_name: Words,
    error_text: Words,
    retain_context: unsafe extern "C" fn(*mut u64, c_int) -> c_int,
    get_current: unsafe extern "C" fn(*mut u64) -> c_int,
    set_current: unsafe extern "C" fn(u64) -> c_int,
    copy_async: CopyAsync,
    copy_rows: unsafe extern "C" fn(*const Pitched, u64) -> c_int,
    /// Since CUDA 12.8.
    copy_batch_opt: Option<CopyBatch>,
    batches_are_refused: AtomicBool,
    #[cfg(feature = "rdma")]
    device_attribute_opt: Option<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int>,
    /// Each device's own context, retained for good.
    contexts: Mutex<HashMap<u32, u64>>,
}

impl Cuda {
    pub(super) fn open(chosen_opt: Option<&PathBuf>) -> Result<Self, String> {
        let library = Library::open(chosen_opt, VARIABLE, &NAMES)?;
        // SAFETY: the names are those of CUDA's driver, or the operator says that it is one; each
        // call has the signature of its type in `cuda.h`, under the name that the header gives it.
        let cuda = unsafe {
            Self {
                calls: Calls::resolve(&library, true)?,
                error_name: library.call(c"cuGetErrorName")?,
                error_text: library.call(c"cuGetErrorString")?,
                retain_context: library.call(c"cuDevicePrimaryCtxRetain")?,
                get_current: library.call(c"cuCtxGetCurrent")?,
                set_current: library.call(c"cuCtxSetCurrent")?,
                copy_async: library.call(c"cuMemcpyAsync")?,
                copy_rows: library.call(c"cuMemcpy2DAsync_v2")?,
                copy_batch_opt: library.call(c"cuMemcpyBatchAsync").ok(),
                #[cfg(feature = "rdma")]
                device_attribute_opt: library.call(c"cuDeviceGetAttribute").ok(),
                batches_are_refused: AtomicBool::new(false),
                contexts: Mutex::default(),
            }
        };
        // SAFETY: takes a number; it may be called again and again.
        match unsafe { (cuda.calls.init)(0) } {
            0 => Ok(cuda),
            code => Err(driver_error(&cuda, "cuInit", code).to_string()),
        }
    }

    fn word(&self, of: Words, code: c_int) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the call writes a pointer to a text of the library's.
        let answer = unsafe { of(code, &mut text) };
        if answer != 0 || text.is_null() {
            return "unknown".to_owned();
        }
        // SAFETY: a C string that lives as long as the library, which is never closed.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }

    /// Many copies by one call; false where the driver has none.
    ///
    /// # Safety
    /// As [`Runtime::copy`].
    unsafe fn copy_at_once(
        &self,
        stream: u64,
        ranges: &[CopyRange],
    ) -> Result<bool, (&'static str, c_int)> {
        let Some(copy_batch) = self.copy_batch_opt else {
            return Ok(false);
        };
        if ranges.len() < 2 || self.batches_are_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let dsts: Vec<u64> = ranges.iter().map(|range| range.dst).collect();
        let srcs: Vec<u64> = ranges.iter().map(|range| range.src).collect();
        let sizes: Vec<usize> = ranges.iter().map(|range| range.len as usize).collect();
        let attributes = BatchAttributes {
            order: 1,
            source_hint: [0; 2],
            destination_hint: [0; 2],
            flags: 0,
        };
        let first = 0;
        let mut failed = usize::MAX;
        // SAFETY: the lists have as many elements as is said and live for the length of the call,
        // which copies them; the ranges are the caller's.
        let code = unsafe {
            copy_batch(
                dsts.as_ptr(),
                srcs.as_ptr(),
                sizes.as_ptr(),
                ranges.len(),
                &attributes,
                &first,
                1,
                &mut failed,
                stream,
            )
        };
        match code {
            0 => Ok(true),
            NOT_SUPPORTED => {
                if !self.batches_are_refused.swap(true, Ordering::Relaxed) {
                    tracing::info!("this driver has no call for many copies; each takes its own");
                }
                Ok(false)
            }
            code => Err(("cuMemcpyBatchAsync", code)),
        }
    }
}

impl Runtime for Cuda {
    fn kind(&self) -> DeviceRuntime {
        DeviceRuntime::Cuda
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn words(&self, code: c_int) -> (String, String) {
        (
            self.word(self.error_name, code),
            self.word(self.error_text, code),
        )
    }

    fn context_of(&self, device: u32) -> Result<u64, TransportError> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&device) {
            return Ok(*context);
        }
        let failed =
            |call: &str, code| Err(driver_error(self, &format!("{call} (cuda:{device})"), code));
        let (mut handle, mut context) = (0, 0);
        let ordinal = c_int::try_from(device).unwrap_or(c_int::MAX);
        // SAFETY: the call writes one int, which lives for its length.
        match unsafe { (self.calls.device)(&mut handle, ordinal) } {
            0 => {}
            code => return failed("cuDeviceGet", code),
        }
        // SAFETY: the call writes one pointer, which lives for its length.
        match unsafe { (self.retain_context)(&mut context, handle) } {
            0 => {}
            code => return failed("cuDevicePrimaryCtxRetain", code),
        }
        contexts.insert(device, context);
        Ok(context)
    }

    fn current(&self) -> Result<u64, c_int> {
        let mut context = 0;
        // SAFETY: the call writes one pointer, which lives for its length.
        match unsafe { (self.get_current)(&mut context) } {
            0 => Ok(context),
            code => Err(code),
        }
    }

    fn set_current(&self, context: u64) -> Result<(), c_int> {
        // SAFETY: a context that is retained for good, or was current, or none.
        match unsafe { (self.set_current)(context) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    #[cfg(feature = "rdma")]
    fn needs_read_back(&self, device: u32) -> bool {
        let Some(attribute) = self.device_attribute_opt else {
            return true;
        };
        let (mut handle, mut ordering) = (0, 0);
        let ordinal = c_int::try_from(device).unwrap_or(c_int::MAX);
        // SAFETY: both calls write one int, which lives for their length.
        let codes = unsafe {
            [
                (self.calls.device)(&mut handle, ordinal),
                attribute(&mut ordering, RDMA_WRITES_ORDERING, handle),
            ]
        };
        codes != [0, 0] || ordering < SEEN_BY_OWNER
    }

    fn import(&self, descriptor: c_int) -> Result<u64, (&'static str, c_int)> {
        let mut handle = 0;
        let by_value = std::ptr::without_provenance_mut(descriptor.unsigned_abs() as usize);
        // SAFETY: of a descriptor the call takes the number itself; it writes one handle.
        match unsafe { (self.calls.import)(&mut handle, by_value, FILE_DESCRIPTOR) } {
            0 => Ok(handle),
            code => Err(("cuMemImportFromShareableHandle", code)),
        }
    }

    unsafe fn copy(&self, stream: u64, ranges: &[CopyRange]) -> Result<(), (&'static str, c_int)> {
        // SAFETY: the caller's promise.
        if unsafe { self.copy_at_once(stream, ranges)? } {
            return Ok(());
        }
        for range in ranges {
            // SAFETY: the caller's promise.
            let code =
                unsafe { (self.copy_async)(range.dst, range.src, range.len as usize, stream) };
            if code != 0 {
                return Err(("cuMemcpyAsync", code));
            }
        }
        Ok(())
    }

    unsafe fn copy_rows(&self, stream: u64, rows: &Rows) -> Result<(), (&'static str, c_int)> {
        let side = |address, is_host: bool, pitch: u64| PitchedSide {
            kind: if is_host { 1 } else { 2 },
            host: if is_host { address } else { 0 },
            device: if is_host { 0 } else { address },
            pitch: pitch as usize,
            ..PitchedSide::default()
        };
        let copy = Pitched {
            source: side(rows.src, rows.src_is_host, rows.src_pitch),
            destination: side(rows.dst, rows.dst_is_host, rows.dst_pitch),
            width: rows.width as usize,
            height: rows.height as usize,
        };
        // SAFETY: the structure lives for the length of the call; the ranges are the caller's.
        match unsafe { (self.copy_rows)(&copy, stream) } {
            0 => Ok(()),
            code => Err(("cuMemcpy2DAsync", code)),
        }
    }
}
