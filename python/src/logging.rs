//! The log of this module goes to standard error.

use std::io::IsTerminal;
use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Registry, fmt, reload};

static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Begins to log what `FERRY_LOG` says, warnings without it. A process that logs already keeps its
/// own log.
pub(crate) fn start() {
    let filter = EnvFilter::try_from_env("FERRY_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let (filter, handle) = reload::Layer::new(filter);
    let output = fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let started = tracing_subscriber::registry()
        .with(filter)
        .with(output)
        .try_init();
    if started.is_ok() {
        // Only this function sets it, and the module is initialised once.
        let _ = FILTER.set(handle);
    }
}

/// Sets how much is logged: trace, debug, info, warning (or warn), error, critical or off.
#[pyfunction]
pub(crate) fn set_log_level(level: &str) -> PyResult<()> {
    let directive = match level.to_ascii_lowercase().as_str() {
        level @ ("trace" | "debug" | "info" | "warn" | "error" | "off") => level.to_owned(),
        "warning" => "warn".to_owned(),
        "critical" | "err" => "error".to_owned(),
        _ => {
            return Err(PyValueError::new_err(format!(
                "log level {level:?}: there are trace, debug, info, warning, error, critical, off"
            )));
        }
    };
    let Some(handle) = FILTER.get() else {
        return Ok(());
    };
    handle
        .reload(EnvFilter::new(directive))
        .map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
