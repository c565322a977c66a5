//! Memory of devices: drivers that are opened at run time, memory of theirs, and the staging of
//! bytes between it and the host.
//!
//! [`Runtime`] has two implementations, CUDA's driver API ([`cuda`]) and HIP ([`hip`]). Neither is
//! needed to build or to start: a library is looked for when somebody names its runtime for the
//! first time. Every call restores the calling thread's current device, because the thread may be
//! the engine's own.

pub(crate) mod copies;
mod cuda;
mod hip;
mod library;
mod memory;
pub(crate) mod mover;
#[cfg(any(feature = "rdma", test))]
pub(crate) mod nic;
mod nic_path;
pub(crate) mod packed;
pub(crate) mod staging;

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::{LazyLock, OnceLock};

use crate::error::{TransportError, TransportErrorKind};
use crate::region::DeviceRuntime;
use library::Calls;

pub(crate) use memory::device_by_uuid;
pub use memory::{DeviceHandles, DeviceMemory};
pub use nic_path::NicPath;
pub use staging::{DeviceReport, device_report};

/// One copy; a driver finds out by itself which side is where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyRange {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
}

/// Ranges of one length in equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub dst: u64,
    pub src: u64,
    pub width: u64,
    pub height: u64,
    pub dst_pitch: u64,
    pub src_pitch: u64,
    /// What each side is, for drivers that want to know.
    pub dst_is_host: bool,
    pub src_is_host: bool,
}

/// What CUDA and HIP do differently. Results of calls are their numbers.
pub(crate) trait Runtime: Send + Sync {
    /// Which it is.
    fn kind(&self) -> DeviceRuntime;
    /// What they do alike.
    fn calls(&self) -> &Calls;
    /// The name and the text of a result.
    fn words(&self, code: c_int) -> (String, String);
    /// What [`Runtime::set_current`] takes to make a device current.
    fn context_of(&self, device: u32) -> Result<u64, TransportError>;
    /// What is current in the calling thread.
    fn current(&self) -> Result<u64, c_int>;
    /// Makes a device, or what was current before, current in the calling thread.
    fn set_current(&self, context: u64) -> Result<(), c_int>;
    /// Whether a network device's writes into a device's memory are only sure to be seen there after
    /// a read; true where the driver does not say.
    #[cfg(feature = "rdma")]
    fn needs_read_back(&self, device: u32) -> bool;
    /// A handle of a descriptor that was exported; the descriptor stays the caller's.
    fn import(&self, descriptor: c_int) -> Result<u64, (&'static str, c_int)>;
    /// Begins copies in a stream, in as few calls as the driver has.
    ///
    /// # Safety
    /// Every range is device memory, or pinned host memory, that stays so until the stream is past
    /// it, and nobody has a reference to what is written.
    unsafe fn copy(&self, stream: u64, ranges: &[CopyRange]) -> Result<(), (&'static str, c_int)>;
    /// Begins a copy of rows in a stream.
    ///
    /// # Safety
    /// As [`Runtime::copy`].
    unsafe fn copy_rows(&self, stream: u64, rows: &Rows) -> Result<(), (&'static str, c_int)>;
}

/// The error of a driver's call, with what the driver says of it.
pub(crate) fn driver_error(runtime: &dyn Runtime, call: &str, code: c_int) -> TransportError {
    let (name, text) = runtime.words(code);
    TransportError::quiesced(
        TransportErrorKind::Device,
        format!("{call}: {name} ({code}): {text}"),
    )
}

static CUDA: LazyLock<Result<cuda::Cuda, String>> =
    LazyLock::new(|| cuda::Cuda::open(CUDA_LIBRARY.get()));
static HIP: LazyLock<Result<hip::Hip, String>> =
    LazyLock::new(|| hip::Hip::open(HIP_LIBRARY.get()));
static CUDA_LIBRARY: OnceLock<PathBuf> = OnceLock::new();
static HIP_LIBRARY: OnceLock<PathBuf> = OnceLock::new();

/// Says which library is a runtime's driver, in the place of `FERRY_CUDA_LIBRARY`,
/// `FERRY_HIP_LIBRARY` and the usual names. False when it was said before; it has no effect once the
/// driver was used.
pub fn set_device_library(runtime: DeviceRuntime, path: impl Into<PathBuf>) -> bool {
    match runtime {
        DeviceRuntime::Cuda => CUDA_LIBRARY.set(path.into()).is_ok(),
        DeviceRuntime::Hip => HIP_LIBRARY.set(path.into()).is_ok(),
        DeviceRuntime::Unnamed => false,
    }
}

fn runtime(kind: DeviceRuntime) -> Result<&'static dyn Runtime, TransportError> {
    let found = match kind {
        DeviceRuntime::Cuda => CUDA.as_ref().map(|found| found as &dyn Runtime),
        DeviceRuntime::Hip => HIP.as_ref().map(|found| found as &dyn Runtime),
        DeviceRuntime::Unnamed => {
            return Err(TransportError::quiesced(
                TransportErrorKind::Device,
                "device memory of a runtime that is not named",
            ));
        }
    };
    found.map_err(|reason| {
        TransportError::quiesced(
            TransportErrorKind::Device,
            format!("no driver of {} was found: {reason}", kind.name()),
        )
    })
}

/// Which drivers there are here, in words: devices of each, or why there are none. Opens them.
pub fn device_drivers() -> Vec<String> {
    [DeviceRuntime::Cuda, DeviceRuntime::Hip]
        .into_iter()
        .map(|kind| match device_count(kind) {
            Ok(count) => format!("{}: {count} devices", kind.name()),
            Err(error) => error.to_string(),
        })
        .collect()
}

/// How many devices a runtime has here.
///
/// # Errors
/// [`TransportErrorKind::Device`] when there is no driver, or the driver's own error.
pub fn device_count(kind: DeviceRuntime) -> Result<u32, TransportError> {
    let runtime = runtime(kind)?;
    let mut count = 0;
    // SAFETY: the call writes one int, which lives for its length.
    let code = unsafe { (runtime.calls().device_count)(&mut count) };
    match code {
        0 => Ok(u32::try_from(count).unwrap_or(0)),
        _ => Err(driver_error(runtime, "the number of devices", code)),
    }
}

/// One device of a driver.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    runtime: &'static dyn Runtime,
    number: u32,
    context: u64,
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.number) == (other.kind(), other.number)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}", self.runtime.kind().name(), self.number)
    }
}

/// While this lives, the device is current in the calling thread.
pub(crate) struct Entered<'a> {
    runtime: &'a dyn Runtime,
    before: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // Set, not popped: some drivers' calls change what is current.
        if let Err(code) = self.runtime.set_current(self.before) {
            let error = driver_error(self.runtime, "restoring the current device", code);
            tracing::error!(%error, "a thread has lost its current device");
        }
    }
}

impl Device {
    pub(crate) fn new(kind: DeviceRuntime, number: u32) -> Result<Self, TransportError> {
        let runtime = runtime(kind)?;
        Ok(Self {
            runtime,
            number,
            context: runtime.context_of(number)?,
        })
    }

    pub(crate) fn kind(&self) -> DeviceRuntime {
        self.runtime.kind()
    }

    pub(crate) const fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn calls(&self) -> &'static Calls {
        self.runtime.calls()
    }

    pub(crate) fn check(&self, call: &str, code: c_int) -> Result<(), TransportError> {
        match code {
            0 => Ok(()),
            _ => Err(self.failed(call, code)),
        }
    }

    /// Makes it current until the result is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'static>, TransportError> {
        let before = self.runtime.current();
        let before = before.map_err(|code| self.failed("asking for the current device", code))?;
        self.runtime
            .set_current(self.context)
            .map_err(|code| self.failed("making a device current", code))?;
        Ok(Entered {
            runtime: self.runtime,
            before,
        })
    }

    /// Begins copies. Nothing is begun of an empty list.
    ///
    /// # Safety
    /// As [`Runtime::copy`].
    pub(crate) unsafe fn copy(
        &self,
        stream: u64,
        ranges: &[CopyRange],
    ) -> Result<(), TransportError> {
        if ranges.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let begun = unsafe { self.runtime.copy(stream, ranges) };
        begun.map_err(|(call, code)| self.failed(call, code))
    }

    /// Begins a copy of rows.
    ///
    /// # Safety
    /// As [`Runtime::copy`].
    pub(crate) unsafe fn copy_rows(&self, stream: u64, rows: &Rows) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        let begun = unsafe { self.runtime.copy_rows(stream, rows) };
        begun.map_err(|(call, code)| self.failed(call, code))
    }

    pub(crate) fn import(&self, descriptor: c_int) -> Result<u64, TransportError> {
        let imported = self.runtime.import(descriptor);
        imported.map_err(|(call, code)| self.failed(call, code))
    }

    fn failed(&self, call: &str, code: c_int) -> TransportError {
        driver_error(self.runtime, &format!("{call} ({self:?})"), code)
    }
}
