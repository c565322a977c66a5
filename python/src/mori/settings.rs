//! What an engine is told by its configuration and by the environment.

use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};

use io_engine::{FaultSpec, TransportKind};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;

use crate::mori::numbers::number;

/// The least that the original takes for `chunk_bytes`.
const MIN_CHUNK_BYTES: u64 = 4096;

/// The address that a host stands for; every address of the machine when it is empty.
pub(super) fn bind_address(host: &str) -> PyResult<IpAddr> {
    if host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .is_empty()
    {
        return Ok(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    }
    resolved(host).ok_or_else(|| {
        PyRuntimeError::new_err(format!("host {host:?} is no address of this machine"))
    })
}

/// The first address of a host, which may stand in brackets.
pub(crate) fn resolved(host: &str) -> Option<IpAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = (bare, 0).to_socket_addrs().ok()?.next()?;
    Some(address.ip())
}

/// What `FERRY_TRANSPORTS` names, or all.
pub(crate) fn transports() -> PyResult<Vec<TransportKind>> {
    let named = std::env::var("FERRY_TRANSPORTS").unwrap_or_default();
    let names = named.split(',').filter(|name| !name.is_empty());
    let kinds = names
        .map(str::parse)
        .collect::<Result<Vec<TransportKind>, _>>();
    let mut kinds =
        kinds.map_err(|error| PyRuntimeError::new_err(format!("FERRY_TRANSPORTS: {error}")))?;
    if kinds.is_empty() {
        kinds.extend(TransportKind::ALL);
    }
    Ok(kinds)
}

/// A fault in one transfer, `KIND:memory[:NTH]`, to test whoever must notice.
pub(crate) fn fault() -> PyResult<Option<FaultSpec>> {
    let named = std::env::var("FERRY_INJECT_FAULT").unwrap_or_default();
    if named.is_empty() {
        return Ok(None);
    }
    let fault = named.parse().map(Some);
    fault.map_err(|error| PyRuntimeError::new_err(format!("FERRY_INJECT_FAULT: {error}")))
}

pub(super) fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| ["1", "true"].contains(&value.as_str()))
}

/// Whether an RDMA configuration asks for notifications; refuses what the original refuses.
pub(super) fn wants_notifications(config: &Bound<'_, PyAny>) -> PyResult<bool> {
    let read = |name: &str| -> PyResult<Bound<'_, PyAny>> {
        config.getattr(name).map_err(|_| {
            PyTypeError::new_err(format!("{config} is no RdmaBackendConfig: no {name}"))
        })
    };
    let wanted = match std::env::var("MORI_IO_ENABLE_NOTIFICATION") {
        Ok(value) => ["1", "true"].contains(&value.as_str()),
        Err(_) => read("enable_notification")?.is_truthy()?,
    };
    if wanted && number(&read("notif_per_qp")?)? == 0 {
        return Err(PyRuntimeError::new_err(
            "notif_per_qp must not be 0 when notifications are enabled",
        ));
    }
    let chunks = read("enable_transfer_chunking")?.is_truthy()?;
    let chunk_bytes = number(&read("chunk_bytes")?)?;
    if chunks && chunk_bytes < MIN_CHUNK_BYTES {
        return Err(PyRuntimeError::new_err(format!(
            "chunk_bytes must be at least {MIN_CHUNK_BYTES}, it is {chunk_bytes}"
        )));
    }
    Ok(wanted)
}
