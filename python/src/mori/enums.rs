//! The enums of the compatible module are written in Python; this finds them and reads them.

use common::wire::MemoryLocation;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

const MODULE: &str = "ferry.mori_compat.enums";

/// A member of one of the enums.
fn member<'py>(
    py: Python<'py>,
    class: &'static PyOnceLock<Py<PyAny>>,
    name: &str,
    number: u32,
) -> PyResult<Bound<'py, PyAny>> {
    class_of(py, class, name)?.call1((number,))
}

fn class_of<'py>(
    py: Python<'py>,
    class: &'static PyOnceLock<Py<PyAny>>,
    name: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let class =
        class.get_or_try_init(py, || py.import(MODULE)?.getattr(name).map(Bound::unbind))?;
    Ok(class.bind(py).clone())
}

/// The number of a member; anything else is a `TypeError`.
fn number(
    value: &Bound<'_, PyAny>,
    class: &'static PyOnceLock<Py<PyAny>>,
    name: &str,
) -> PyResult<u32> {
    if !value.is_instance(&class_of(value.py(), class, name)?)? {
        return Err(PyTypeError::new_err(format!(
            "a {name} is needed, not {}",
            value.get_type().name()?
        )));
    }
    value.getattr("value")?.extract()
}

static STATUS_CODE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static LOCATION: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static BACKEND: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static REASON: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The `StatusCode` of a number.
pub(crate) fn status_code(py: Python<'_>, number: u32) -> PyResult<Bound<'_, PyAny>> {
    member(py, &STATUS_CODE, "StatusCode", number)
}

/// The number of a `StatusCode`.
pub(crate) fn status_number(code: &Bound<'_, PyAny>) -> PyResult<u32> {
    number(code, &STATUS_CODE, "StatusCode")
}

/// The `MemoryLocationType` of a location.
pub(crate) fn location(py: Python<'_>, location: MemoryLocation) -> PyResult<Bound<'_, PyAny>> {
    member(py, &LOCATION, "MemoryLocationType", location.number())
}

/// The location of a `MemoryLocationType`.
pub(crate) fn location_of(value: &Bound<'_, PyAny>) -> PyResult<MemoryLocation> {
    number(value, &LOCATION, "MemoryLocationType").map(MemoryLocation::from_number)
}

/// The number of a `BackendType`.
pub(crate) fn backend_number(value: &Bound<'_, PyAny>) -> PyResult<u32> {
    number(value, &BACKEND, "BackendType")
}

/// The `PeerFailureReason` of a number.
pub(crate) fn reason(py: Python<'_>, number: u32) -> PyResult<Bound<'_, PyAny>> {
    member(py, &REASON, "PeerFailureReason", number)
}
