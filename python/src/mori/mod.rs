//! The classes behind `ferry.mori_compat`: names, arguments and results are the original's.

mod desc;
mod engine;
mod enums;
mod notify;
pub(crate) mod numbers;
mod outbox;
mod ranges;
mod remote;
mod session;
mod settings;
mod shared;
mod status;
mod transfer;
mod ways;

use pyo3::prelude::*;

pub(crate) use settings::{fault, resolved, transports};

/// Adds the classes to the extension module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<desc::EngineDesc>()?;
    module.add_class::<desc::MemoryDesc>()?;
    module.add_class::<engine::IOEngine>()?;
    module.add_class::<remote::PeerFailureEvent>()?;
    module.add_class::<session::IOEngineSession>()?;
    module.add_class::<status::TransferStatus>()
}
