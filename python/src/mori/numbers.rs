//! Lists of offsets and sizes, as Python has them.

use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PyTuple};

/// Reads a list, a tuple, an array of any library that has buffers, or any other sequence, of
/// numbers that are not negative. A buffer of integers is copied as a whole.
///
/// # Errors
/// `TypeError` for anything else, and for a negative number.
pub(crate) fn numbers(values: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if let Ok(list) = values.cast::<PyList>() {
        return match list.len() {
            ..ARRAY_FROM => list.iter().map(|value| number(&value)).collect(),
            _ => through_array(list),
        };
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

/// Lists of this length and longer go through an array, which reads them three times as fast as
/// item by item from here.
const ARRAY_FROM: usize = 32;

fn through_array(list: &Bound<'_, PyList>) -> PyResult<Vec<u64>> {
    static ARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = list.py();
    let array = ARRAY.get_or_try_init(py, || {
        py.import("array")?.getattr("array").map(Bound::unbind)
    })?;
    let numbers = array.bind(py).call1(("Q", list));
    let numbers = numbers.map_err(|error| no_number(py, error, "an item of the list"))?;
    let copied = numbers.call_method0("tobytes")?.cast_into::<PyBytes>()?;
    Ok(words(copied.as_bytes()))
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().copied().map(u64::from_le_bytes).collect()
}

fn no_number(py: Python<'_>, error: PyErr, what: impl std::fmt::Display) -> PyErr {
    match error.is_instance_of::<PyOverflowError>(py) {
        true => PyTypeError::new_err(format!("{what} is no offset or size of 64 bits")),
        false => error,
    }
}

/// A number that is not negative.
pub(crate) fn number(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value
        .extract()
        .map_err(|error: PyErr| no_number(value.py(), error, value))
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
    let negative = || PyTypeError::new_err("an offset or size is negative");
    if width == 8 {
        let words = words(copied.as_bytes());
        let highest = words.iter().fold(0, |all, word| all | word);
        return match is_signed && highest >> 63 == 1 {
            true => Err(negative()),
            false => Ok(words),
        };
    }
    let items = copied.as_bytes().chunks_exact(width);
    items
        .map(|item| {
            let mut bytes = [0; 8];
            let (low, _) = bytes.split_at_mut(width);
            low.copy_from_slice(item);
            let is_negative = is_signed && item.last().is_some_and(|top| top & 0x80 != 0);
            match is_negative {
                true => Err(negative()),
                false => Ok(u64::from_le_bytes(bytes)),
            }
        })
        .collect()
}
