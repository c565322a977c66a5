//! Mooncake's transfer engine over the io engine: memory by address, peers by session, integers for
//! results.
//!
//! A session is `host:port` of a directory that every engine serves: whoever connects is told the
//! engine and its registered memory. That is Mooncake's own rule too (its peers ask each other for
//! segments), and as there whoever reaches the port can write: it belongs in a trusted network.

mod directory;
mod engine;

use pyo3::prelude::*;

/// Adds the class to the extension module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<engine::MooncakeEngine>()
}
