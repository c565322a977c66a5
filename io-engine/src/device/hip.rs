//! HIP, AMD's runtime.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

use super::library::{Calls, FILE_DESCRIPTOR, Library};
use super::{CopyRange, Rows, Runtime, driver_error};
use crate::error::TransportError;
use crate::region::DeviceRuntime;

/// Names the library to open.
const VARIABLE: &str = "FERRY_HIP_LIBRARY";
const NAMES: [&CStr; 4] = [
    c"libamdhip64.so.7",
    c"libamdhip64.so.6",
    c"libamdhip64.so.5",
    c"libamdhip64.so",
];

/// Whichever side is where.
const ANY_DIRECTION: c_int = 4;

type Word = unsafe extern "C" fn(c_int) -> *const c_char;
type CopyAsync = unsafe extern "C" fn(u64, u64, usize, c_int, u64) -> c_int;
type CopyRows = unsafe extern "C" fn(u64, usize, u64, usize, usize, usize, c_int, u64) -> c_int;

/// The runtime.
pub(super) struct Hip {
    calls: Calls,
    error_name: Word,
    error_text: Word,
    get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
    set_device: unsafe extern "C" fn(c_int) -> c_int,
    copy_async: CopyAsync,
    copy_rows: CopyRows,
}

impl Hip {
    pub(super) fn open(chosen_opt: Option<&PathBuf>) -> Result<Self, String> {
        let library = Library::open(chosen_opt, VARIABLE, &NAMES)?;
        // SAFETY: the names are those of HIP, or the operator says that it is one; each call has
        // the signature of its type in `hip_runtime_api.h`.
        let hip = unsafe {
            Self {
                calls: Calls::resolve(&library, false)?,
                error_name: library.call(c"hipGetErrorName")?,
                error_text: library.call(c"hipGetErrorString")?,
                get_device: library.call(c"hipGetDevice")?,
                set_device: library.call(c"hipSetDevice")?,
                copy_async: library.call(c"hipMemcpyAsync")?,
                copy_rows: library.call(c"hipMemcpy2DAsync")?,
            }
        };
        // SAFETY: takes a number; it may be called again and again.
        match unsafe { (hip.calls.init)(0) } {
            0 => Ok(hip),
            code => Err(driver_error(&hip, "hipInit", code).to_string()),
        }
    }
}

/// # Safety
/// `text` is null or a C string that lives.
unsafe fn word(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

impl Runtime for Hip {
    fn kind(&self) -> DeviceRuntime {
        DeviceRuntime::Hip
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn words(&self, code: c_int) -> (String, String) {
        // SAFETY: both take a number and return texts of the library's, which is never closed.
        unsafe { (word((self.error_name)(code)), word((self.error_text)(code))) }
    }

    /// A device's number is all that is made current.
    fn context_of(&self, device: u32) -> Result<u64, TransportError> {
        let mut handle = 0;
        let ordinal = c_int::try_from(device).unwrap_or(c_int::MAX);
        // SAFETY: the call writes one int, which lives for its length.
        match unsafe { (self.calls.device)(&mut handle, ordinal) } {
            0 => Ok(u64::from(device)),
            code => Err(driver_error(
                self,
                &format!("hipDeviceGet (hip:{device})"),
                code,
            )),
        }
    }

    fn current(&self) -> Result<u64, c_int> {
        let mut device = 0;
        // SAFETY: the call writes one int, which lives for its length.
        match unsafe { (self.get_device)(&mut device) } {
            0 => Ok(u64::from(device.unsigned_abs())),
            code => Err(code),
        }
    }

    fn set_current(&self, context: u64) -> Result<(), c_int> {
        let device = c_int::try_from(context).unwrap_or(c_int::MAX);
        // SAFETY: takes a number.
        match unsafe { (self.set_device)(device) } {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// HIP has no attribute for it.
    #[cfg(feature = "rdma")]
    fn needs_read_back(&self, _device: u32) -> bool {
        true
    }

    /// ROCm took a pointer to the descriptor until some 7.x and takes its number, like CUDA, since.
    /// The pointer is tried first: as a number it is no descriptor, but the number taken for a
    /// pointer would be a fault.
    fn import(&self, descriptor: c_int) -> Result<u64, (&'static str, c_int)> {
        let (mut handle, mut number) = (0, descriptor);
        let by_address = std::ptr::from_mut(&mut number).cast::<c_void>();
        // SAFETY: the int lives for the length of the call, which writes one handle.
        if unsafe { (self.calls.import)(&mut handle, by_address, FILE_DESCRIPTOR) } == 0 {
            return Ok(handle);
        }
        let by_value = std::ptr::without_provenance_mut(descriptor.unsigned_abs() as usize);
        // SAFETY: what refused a pointer takes the number itself; the call writes one handle.
        match unsafe { (self.calls.import)(&mut handle, by_value, FILE_DESCRIPTOR) } {
            0 => Ok(handle),
            code => Err(("hipMemImportFromShareableHandle", code)),
        }
    }

    unsafe fn copy(&self, stream: u64, ranges: &[CopyRange]) -> Result<(), (&'static str, c_int)> {
        for range in ranges {
            let (dst, src, len) = (range.dst, range.src, range.len as usize);
            // SAFETY: the caller's promise.
            let code = unsafe { (self.copy_async)(dst, src, len, ANY_DIRECTION, stream) };
            if code != 0 {
                return Err(("hipMemcpyAsync", code));
            }
        }
        Ok(())
    }

    unsafe fn copy_rows(&self, stream: u64, rows: &Rows) -> Result<(), (&'static str, c_int)> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.copy_rows)(
                rows.dst,
                rows.dst_pitch as usize,
                rows.src,
                rows.src_pitch as usize,
                rows.width as usize,
                rows.height as usize,
                ANY_DIRECTION,
                stream,
            )
        };
        match code {
            0 => Ok(()),
            code => Err(("hipMemcpy2DAsync", code)),
        }
    }
}
