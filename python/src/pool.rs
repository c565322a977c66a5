//! Memory that can be shared: peers of one host map it.

use std::any::Any;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use io_engine::{ByteLen, ForeignMemory, Memory, TransportError};
use pyo3::exceptions::{PyMemoryError, PyOSError};
use pyo3::prelude::*;

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

/// Bytes of this process that somebody else manages, for a rank to use in a pool's place. Peers
/// cannot map them: they reach them by `cma` or `tcp`.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct Borrowed(pub(crate) ForeignMemory);

#[pymethods]
impl Borrowed {
    /// Takes `nbytes` at an address into use. `keeper` owns them, and is kept for as long as a rank
    /// needs them; without one, they must stay until the rank has stopped.
    #[new]
    #[pyo3(signature = (address, nbytes, keeper = None))]
    fn new(address: u64, nbytes: u64, keeper: Option<Py<PyAny>>) -> PyResult<Self> {
        foreign(address, ByteLen(nbytes), keeper)
            .map(Self)
            .map_err(|error| PyMemoryError::new_err(error.to_string()))
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.len().get()
    }
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
