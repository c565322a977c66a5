//! Lists of offsets and sizes, as Python has them.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyTuple};

/// Reads a list, a tuple, an array of any library that has buffers, or any other sequence, of
/// numbers that are not negative. A buffer of integers is copied as a whole.
///
/// # Errors
/// `TypeError` for anything else, and for a negative number.
pub(crate) fn numbers(values: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(list) = values.cast::<PyList>() {
        return list.iter().map(|value| number(&value)).collect();
    }
    // Asking a tuple for its buffer would make and drop an exception.
    if !values.is_instance_of::<PyTuple>()
        && let Ok(view) = PyMemoryView::from(values)
    {
        return of_buffer(&view);
    }
    let items = values.try_iter()?;
    let mut numbers = Vec::with_capacity(values.len().unwrap_or(0));
    for item in items {
        numbers.push(number(&item?)?);
    }
    Ok(numbers)
}

/// A number that is not negative.
pub(crate) fn number(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|error: PyErr| {
        match error.is_instance_of::<PyOverflowError>(value.py()) {
            true => PyTypeError::new_err(format!("{value} is no offset or size")),
            false => error,
        }
    })
}

fn of_buffer(view: &Bound<'_, PyMemoryView>) -> PyResult<Vec<u64>> {
    let format: String = view.getattr("format")?.extract()?;
    let width: usize = view.getattr("itemsize")?.extract()?;
    let dimensions: usize = view.getattr("ndim")?.extract()?;
    // "=" and "<" say the byte order of this machine, which is little-endian.
    let kind = format.trim_start_matches(['@', '=', '<']);
    let is_signed = matches!(kind, "b" | "h" | "i" | "l" | "q" | "n");
    let is_unsigned = matches!(kind, "B" | "H" | "I" | "L" | "Q" | "N");
    if dimensions != 1 || !(is_signed || is_unsigned) || !(1..=8).contains(&width) {
        return Err(PyTypeError::new_err(format!(
            "a buffer of format {format:?} with {dimensions} dimensions is no list of integers"
        )));
    }
    let copied = view.call_method0("tobytes")?.cast_into::<PyBytes>()?;
    let items = copied.as_bytes().chunks_exact(width);
    items
        .map(|item| {
            let mut bytes = [0; 8];
            let (low, _) = bytes.split_at_mut(width);
            low.copy_from_slice(item);
            let is_negative = is_signed && item.last().is_some_and(|top| top & 0x80 != 0);
            match is_negative {
                true => Err(PyTypeError::new_err("an offset or size is negative")),
                false => Ok(u64::from_le_bytes(bytes)),
            }
        })
        .collect()
}
