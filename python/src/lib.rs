//! `ferry._ferry`, the extension module under the Python package `ferry`.
//!
//! What it does: gives Python the io engine under MoRI's names (`mori`) and under Mooncake's
//! (`mooncake`), ranks to drive (`rank`),
//! memory to share (`pool`), and the bootstrap server (`bootstrap`).
//!
//! What is absent on purpose: rules of transfers, which are in the crates below; and whatever is as
//! short in Python, which is in `ferry/`.
//!
//! Invariants:
//! * the interpreter's lock is released in every call that may block, and the threads that move
//!   bytes never ask for it;
//! * memory that Python owns is kept until its last user is gone;
//! * the only unsafe code is the registration of memory by address.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod bootstrap;
mod dlpack;
mod logging;
mod mooncake;
mod mori;
mod pool;
mod rank;
mod runtime;

use pyo3::prelude::*;

#[pymodule]
fn _ferry(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logging::start();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(logging::set_log_level, module)?)?;
    mori::add_to(module)?;
    mooncake::add_to(module)?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<pool::DevicePool>()?;
    module.add_class::<pool::Borrowed>()?;
    module.add_class::<bootstrap::BootstrapServer>()?;
    rank::add_to(module)
}
