//! What engines tell each other of themselves and of their memory.

use std::sync::Arc;

use common::wire::{EngineDesc as WireEngineDesc, MemoryDesc as WireMemoryDesc, WireError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::mori::enums;

/// The two texts of the original, with what was found as the cause.
fn unpack_error(py: Python<'_>, bytes: &[u8], error: &WireError) -> PyErr {
    let value = rmpv::decode::read_value(&mut &*bytes);
    let has_ended = value.is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof);
    let text = match has_ended {
        true => "insufficient bytes",
        false => "std::bad_cast",
    };
    let raised = PyRuntimeError::new_err(text);
    raised.set_cause(py, Some(PyValueError::new_err(error.to_string())));
    raised
}

fn packed<'py>(
    py: Python<'py>,
    bytes: Result<Vec<u8>, WireError>,
) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = bytes.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    Ok(PyBytes::new(py, &bytes))
}

/// Where an engine is. Peers get its packed form.
#[pyclass(module = "ferry.mori_compat.cpp", frozen, eq)]
#[derive(Clone, PartialEq)]
pub(crate) struct EngineDesc(pub(crate) WireEngineDesc);

#[pymethods]
impl EngineDesc {
    /// Unique name of the engine.
    #[getter]
    fn key(&self) -> &str {
        &self.0.key
    }

    /// Tells hosts apart.
    #[getter]
    fn node_id(&self) -> &str {
        &self.0.node_id
    }

    /// The host's name.
    #[getter]
    fn hostname(&self) -> &str {
        &self.0.hostname
    }

    /// Address of the engine's listener.
    #[getter]
    fn host(&self) -> &str {
        &self.0.host
    }

    /// Port of the engine's listener.
    #[getter]
    fn port(&self) -> u16 {
        self.0.port
    }

    /// Its process.
    #[getter]
    fn pid(&self) -> i64 {
        self.0.pid
    }

    /// The packed form: a msgpack array, with Ferry's tag behind the original's elements.
    fn pack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        packed(py, self.0.pack())
    }

    /// Reads a packed form; bytes behind it are ignored.
    #[staticmethod]
    fn unpack(data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let bytes = data.as_bytes();
        WireEngineDesc::unpack(bytes)
            .map(Self)
            .map_err(|error| unpack_error(data.py(), bytes, &error))
    }

    fn __repr__(&self) -> String {
        let desc = &self.0;
        format!(
            "<EngineDesc {:?} at {}:{} pid {}>",
            desc.key, desc.host, desc.port, desc.pid
        )
    }
}

/// A piece of registered memory. Peers get its packed form.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
#[derive(Clone)]
pub(crate) struct MemoryDesc(pub(crate) Arc<WireMemoryDesc>);

#[pymethods]
impl MemoryDesc {
    #[new]
    fn new() -> Self {
        Self(Arc::default())
    }

    /// Key of the engine that registered it.
    #[getter]
    fn engine_key(&self) -> &str {
        &self.0.engine_key
    }

    /// Number within that engine.
    #[getter]
    fn id(&self) -> u32 {
        self.0.id
    }

    /// Number of the device; -1 for host memory.
    #[getter]
    fn device_id(&self) -> i32 {
        self.0.device_id
    }

    /// PCI address of the device; empty for host memory.
    #[getter]
    fn device_bus_id(&self) -> &str {
        &self.0.device_bus_id
    }

    /// NUMA node of host memory; -1 for a device's.
    #[getter]
    fn numa_node(&self) -> i32 {
        self.0.numa_node
    }

    /// Address in the owner's process.
    #[getter]
    fn data(&self) -> u64 {
        self.0.data
    }

    /// Bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size
    }

    /// Host or device, as the owner registered it.
    #[getter]
    fn loc<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enums::location(py, self.0.location)
    }

    /// The device's handle: 64 bytes, zeros for host memory.
    #[getter]
    fn ipc_handle<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.ipc_handle)
    }

    /// The packed form: a msgpack array, with Ferry's tag behind the original's elements.
    fn pack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        packed(py, self.0.pack())
    }

    /// Reads a packed form; bytes behind it are ignored.
    #[staticmethod]
    fn unpack(data: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let bytes = data.as_bytes();
        WireMemoryDesc::unpack(bytes)
            .map(|desc| Self(Arc::new(desc)))
            .map_err(|error| unpack_error(data.py(), bytes, &error))
    }

    /// As in the original, handles and what belongs to a fabric do not count.
    fn __eq__(&self, other: &Self) -> bool {
        let of = |desc: &WireMemoryDesc| {
            let identity = (desc.engine_key.clone(), desc.id, desc.data, desc.size);
            let place = (desc.device_id, desc.device_bus_id.clone(), desc.location);
            (identity, place, desc.numa_node)
        };
        of(&self.0) == of(&other.0)
    }

    fn __repr__(&self) -> String {
        let desc = &self.0;
        format!(
            "<MemoryDesc {} of {:?}: {} bytes at {:#x}>",
            desc.id, desc.engine_key, desc.size, desc.data
        )
    }
}
