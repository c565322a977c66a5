//! A shared library with the names of CUDA's driver API and of HIP's, backed by host memory, so that
//! everything above a driver can be tested without a device.
//!
//! What is like a device's: an address that it hands out lies in address space that the processor
//! may not touch, so code that takes device memory for host memory ends with a fault. Copies are
//! made by a thread of their stream, later than the call returns. Allocations are made of handles
//! that can be exported as descriptors and mapped by another process. A call without a current
//! context fails, and so does a copy from or to host memory that is not pinned.
//!
//! What it can be told to do wrong (`FERRY_STAND_IN="name=number,..."`, or
//! [`control::ferry_stand_in_set`]): see [`control::Setting`].
//!
//! What is absent on purpose: kernels, arrays, graphs, and every call that Ferry does not make.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

pub mod control;
pub mod cuda;
pub mod hip;
mod memory;
mod stream;
mod world;

/// Results of both APIs; the numbers that are used here are the same in both.
mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const CONTEXT_IS_DESTROYED: i32 = 709;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
}

type Answer<T> = Result<T, i32>;

fn number(answer: Answer<()>) -> i32 {
    answer.err().unwrap_or(code::SUCCESS)
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `place` is null or writable.
unsafe fn store<T>(place: *mut T, answer: Answer<T>) -> i32 {
    match answer {
        Ok(_) if place.is_null() => code::INVALID_VALUE,
        Ok(value) => {
            // SAFETY: not null, and the caller says that it is writable.
            unsafe { place.write(value) };
            code::SUCCESS
        }
        Err(code) => code,
    }
}
