//! A device's memory in the form that array libraries take: a DLPack capsule of bytes.

use std::ffi::c_void;

use io_engine::{DeviceMemory, DeviceRuntime, Location};
use pyo3::ffi;
use pyo3::prelude::*;

const NAME: &std::ffi::CStr = c"dltensor";

/// `DLTensor`, with its device and its type in place.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    /// 1: unsigned.
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, and behind it what it needs.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    shape: [i64; 1],
    _memory: DeviceMemory,
}

/// The kind and the number of a device, by DLPack's numbers.
pub(crate) fn device(memory: &DeviceMemory) -> (i32, u32) {
    match memory.location() {
        Location::Device {
            runtime: DeviceRuntime::Hip,
            number,
        } => (10, number),
        Location::Device { number, .. } => (2, number),
        Location::Host => (1, 0),
    }
}

/// A capsule over all bytes, which it keeps.
pub(crate) fn capsule(py: Python<'_>, memory: &DeviceMemory) -> PyResult<Py<PyAny>> {
    let (device_type, number) = device(memory);
    let managed = Box::new(Managed {
        tensor: Tensor {
            data: std::ptr::without_provenance_mut(memory.address() as usize),
            device_type,
            device_id: number.cast_signed(),
            dimensions: 1,
            code: 1,
            bits: 8,
            lanes: 1,
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        },
        context: std::ptr::null_mut(),
        deleter: Some(let_go),
        shape: [memory.len().get().cast_signed()],
        _memory: memory.clone(),
    });
    let managed = Box::into_raw(managed);
    // SAFETY: the box was just given up to us; its shape stays where it is, because the box is
    // only dropped, never moved. The capsule takes the pointer with a static name.
    unsafe {
        (*managed).tensor.shape = (&raw const (*managed).shape).cast();
        let capsule = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(capsule_is_gone));
        let capsule = Bound::from_owned_ptr_or_err(py, capsule);
        if capsule.is_err() {
            let_go(managed);
        }
        capsule.map(Bound::unbind)
    }
}

/// # Safety
/// `managed` is one of `capsule`'s, and this is called once for each: by whoever took it, or by the
/// end of the capsule that nobody took.
unsafe extern "C" fn let_go(managed: *mut Managed) {
    // SAFETY: made by `Box::into_raw`, and given back once.
    drop(unsafe { Box::from_raw(managed) });
}

/// # Safety
/// Called by Python at the end of a capsule.
unsafe extern "C" fn capsule_is_gone(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule lives for the length of the call. Whoever took the tensor has given it
    // another name; with this one the pointer is still ours. Neither call changes an exception that
    // is on its way.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) != 0 {
            let_go(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
