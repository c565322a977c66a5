//! Memory that can be shared: peers of one host map it.

use std::any::Any;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use io_engine::{
    AnyMemory, ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, ForeignMemory, Location, Memory,
    TransportError,
};
use pyo3::exceptions::{PyMemoryError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::dlpack;

/// A pool of bytes in shared memory, zero at first. It stays for as long as this object, a rank
/// or a transfer needs it.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct Pool(pub(crate) Memory);

#[pymethods]
impl Pool {
    /// Takes memory; `name` is what `/proc/PID/maps` shows.
    #[new]
    #[pyo3(signature = (nbytes, name = "ferry"))]
    fn new(py: Python<'_>, nbytes: u64, name: &str) -> PyResult<Self> {
        let allocated = py.detach(|| Memory::allocate(name, ByteLen(nbytes)));
        let memory = allocated.map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        Ok(Self(memory))
    }

    /// Maps a pool that another process made and whose descriptor this one was given. The
    /// descriptor stays the caller's.
    #[staticmethod]
    fn from_fd(py: Python<'_>, fd: i32, nbytes: u64) -> PyResult<Self> {
        // A second descriptor of the same memory, without trusting the number.
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{fd}"));
        let file = opened.map_err(|error| {
            PyOSError::new_err(format!("descriptor {fd} cannot be opened again: {error}"))
        })?;
        let mapped = py.detach(|| Memory::from_fd(OwnedFd::from(file), ByteLen(nbytes)));
        let memory = mapped.map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        Ok(Self(memory))
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len().get()
    }

    /// Where the first byte is in this process.
    #[getter]
    fn address(&self) -> u64 {
        self.0.base_address()
    }

    /// The descriptor of the memory, to hand to another process. It is the pool's.
    fn fileno(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }

    fn __repr__(&self) -> String {
        format!("<Pool of {} bytes>", self.0.len())
    }
}

/// A pool of bytes in a device's memory. It is not zeroed, and stays for as long as this object, a
/// rank or a transfer needs it.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct DevicePool(pub(crate) DeviceMemory);

fn device_error(error: &TransportError) -> PyErr {
    PyMemoryError::new_err(error.to_string())
}

#[pymethods]
impl DevicePool {
    /// Takes memory of a device: `cuda:0`, `hip:1`; without a number, of the first one.
    #[new]
    fn new(py: Python<'_>, nbytes: u64, device: &str) -> PyResult<Self> {
        let (name, number) = device.split_once(':').unwrap_or((device, "0"));
        let runtime = DeviceRuntime::from_name(Some(name));
        let number = number
            .parse()
            .ok()
            .filter(|_| runtime != DeviceRuntime::Unnamed);
        let number: u32 = number.ok_or_else(|| {
            PyValueError::new_err(format!(
                "{device:?} is no device; there are cuda:N and hip:N"
            ))
        })?;
        let len = ByteLen(nbytes);
        let allocated = py.detach(|| DeviceMemory::allocate(runtime, number, len));
        allocated.map(Self).map_err(|error| device_error(&error))
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len().get()
    }

    /// Where the first byte is, to the device.
    #[getter]
    fn address(&self) -> u64 {
        self.0.address()
    }

    /// The runtime's name and the device's number in it.
    #[getter]
    fn device(&self) -> (&'static str, u32) {
        match self.0.location() {
            Location::Device { runtime, number } => (runtime.name(), number),
            Location::Host => ("host", 0),
        }
    }

    /// A capsule over all bytes.
    fn __dlpack__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        dlpack::capsule(py, &self.0)
    }

    /// The kind of the device and its number.
    fn __dlpack_device__(&self) -> (i32, u32) {
        dlpack::device(&self.0)
    }

    /// Copies bytes out of the device.
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        nbytes: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(nbytes)
            .map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        bytes.resize(nbytes, 0);
        let read = py.detach(|| self.0.read(ByteOffset(offset), &mut bytes));
        read.map_err(|error| device_error(&error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Copies bytes into the device.
    fn write(&self, py: Python<'_>, offset: u64, bytes: Vec<u8>) -> PyResult<()> {
        let written = py.detach(|| self.0.write(ByteOffset(offset), &bytes));
        written.map_err(|error| device_error(&error))
    }

    fn __repr__(&self) -> String {
        let (runtime, number) = self.device();
        format!(
            "<DevicePool of {} bytes on {runtime}:{number}>",
            self.0.len()
        )
    }
}

/// Bytes that somebody else manages, for a rank to use in a pool's place: of this process, which
/// peers reach by `cma` or `tcp`, or a device's, which they can map where its driver exports them.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct Borrowed(pub(crate) AnyMemory, u64);

#[pymethods]
impl Borrowed {
    /// Takes `nbytes` at an address into use. `keeper` owns them, and is kept for as long as a rank
    /// needs them; without one, they must stay until the rank has stopped.
    #[new]
    #[pyo3(signature = (address, nbytes, keeper = None))]
    fn new(address: u64, nbytes: u64, keeper: Option<Py<PyAny>>) -> PyResult<Self> {
        borrowed(address, ByteLen(nbytes), keeper)
            .map(|memory| Self(memory, nbytes))
            .map_err(|error| PyMemoryError::new_err(error.to_string()))
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.1
    }
}

/// Memory by its address: of this process where it is mapped, of a device otherwise.
pub(crate) fn borrowed(
    address: u64,
    len: ByteLen,
    keeper: Option<Py<PyAny>>,
) -> Result<AnyMemory, TransportError> {
    let kept = Python::attach(|py| keeper.as_ref().map(|keeper| keeper.clone_ref(py)));
    match foreign(address, len, keeper) {
        Ok(memory) => Ok(AnyMemory::from(&memory)),
        Err(host) => foreign_device(address, len, kept)
            .map(|memory| AnyMemory::from(&memory))
            .map_err(|device| TransportError::quiesced(host.kind(), format!("{host}; {device}"))),
    }
}

/// A device's memory by its address, whichever driver here knows it.
fn foreign_device(
    address: u64,
    len: ByteLen,
    keeper: Option<Py<PyAny>>,
) -> Result<DeviceMemory, TransportError> {
    let keeper: Arc<dyn Any + Send + Sync> = Arc::new(keeper);
    let take = |runtime| {
        // SAFETY: as of `foreign`.
        unsafe { DeviceMemory::new(runtime, address, len, Arc::clone(&keeper)) }
    };
    take(DeviceRuntime::Cuda).or_else(|cuda| {
        take(DeviceRuntime::Hip).map_err(|hip| {
            let message = format!("no device's memory: {cuda}; {hip}");
            TransportError::quiesced(cuda.kind(), message)
        })
    })
}

/// Memory of Python's by its address; the one place where its word is taken for it.
pub(crate) fn foreign(
    address: u64,
    len: ByteLen,
    keeper: Option<Py<PyAny>>,
) -> Result<ForeignMemory, TransportError> {
    let keeper: Box<dyn Any + Send + Sync> = Box::new(keeper);
    // SAFETY: the keeper owns the bytes and is dropped after the last user of the region; where
    // there is none, the caller has taken that upon itself, as the documentation of both ways here
    // says.
    unsafe { ForeignMemory::new(address, len, keeper) }
}
