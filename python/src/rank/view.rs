//! A room, as an engine sees it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use transfer_actor::api::{self, RoomStatus};

/// The numbers that SGLang gives to statuses.
const STATUSES: [RoomStatus; 5] = [
    RoomStatus::Failed,
    RoomStatus::Bootstrapping,
    RoomStatus::WaitingForInput,
    RoomStatus::Transferring,
    RoomStatus::Success,
];

/// The status of a number.
pub(super) fn status_of(number: u8) -> PyResult<RoomStatus> {
    STATUSES
        .get(usize::from(number))
        .copied()
        .ok_or_else(|| PyValueError::new_err(format!("{number} is no status of a room")))
}

/// A room at one moment.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct RoomView(pub(super) api::RoomView);

impl RoomView {
    /// Whether a wait for this status is over.
    pub(super) fn is_at_least(&self, wanted_opt: Option<RoomStatus>) -> bool {
        let status = self.0.status;
        let has_ended = [RoomStatus::Failed, RoomStatus::Success].contains(&status);
        has_ended || wanted_opt.is_none_or(|wanted| status >= wanted)
    }
}

#[pymethods]
impl RoomView {
    /// The room's number.
    #[getter]
    fn room(&self) -> u64 {
        self.0.room
    }

    /// How often this rank has used the number.
    #[getter]
    fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Its status.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let class = CLASS.get_or_try_init(py, || {
            py.import("ferry.rank")?
                .getattr("RoomStatus")
                .map(Bound::unbind)
        })?;
        let number = STATUSES.iter().position(|status| *status == self.0.status);
        class.bind(py).call1((number,))
    }

    /// Why it failed; `None` if it did not.
    #[getter]
    fn reason(&self) -> Option<&str> {
        self.0.reason.as_deref()
    }

    /// Tokens that the decode holds already, once it has announced them (prefill).
    #[getter]
    fn decode_prefix_len(&self) -> Option<u64> {
        self.0.decode_prefix_len
    }

    /// Whether every prefill rank has proved that its writes have stopped, after an abort (decode).
    #[getter]
    fn release_safe(&self) -> bool {
        self.0.release_safe
    }

    /// How far its bytes were compared with checksums: `pending`, `sampled`, `full`, `mismatch` or
    /// `unavailable`; `None` where nobody asked for that.
    #[getter]
    fn verification(&self) -> Option<&'static str> {
        self.0
            .verification
            .map(transfer_actor::api::Verification::name)
    }

    /// What each component has moved to each decode rank (prefill).
    #[getter]
    fn transfers(&self) -> Vec<TransferView> {
        self.0.transfers.iter().cloned().map(TransferView).collect()
    }

    fn __repr__(&self) -> String {
        let reason = self.0.reason.as_deref().map(|reason| format!(": {reason}"));
        let (room, status) = (self.0.room, self.0.status);
        format!("<RoomView {room} {status:?}{}>", reason.unwrap_or_default())
    }
}

/// One component of a room on its way to one decode rank.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct TransferView(api::TransferView);

#[pymethods]
impl TransferView {
    /// The component's name, for example `kv`.
    #[getter]
    fn component(&self) -> &str {
        &self.0.component
    }

    /// The decode rank's control socket.
    #[getter]
    fn peer(&self) -> &str {
        &self.0.peer
    }

    /// How the bytes move.
    #[getter]
    fn transport(&self) -> &str {
        &self.0.transport
    }

    /// Bytes that are in the decode's memory.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes
    }

    /// Contiguous ranges that were written.
    #[getter]
    fn ranges(&self) -> u64 {
        self.0.ranges
    }

    /// Seconds from submission to completion, over all chunks.
    #[getter]
    fn seconds(&self) -> f64 {
        self.0.seconds
    }

    /// `success`, `failed`, `aborted` or `pending`.
    #[getter]
    fn outcome(&self) -> &str {
        &self.0.outcome
    }

    fn __repr__(&self) -> String {
        let transfer = &self.0;
        format!(
            "<TransferView {} to {} by {}: {} bytes, {}>",
            transfer.component, transfer.peer, transfer.transport, transfer.bytes, transfer.outcome
        )
    }
}
