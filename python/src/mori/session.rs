//! Transfers between one local and one remote memory.

use std::sync::Arc;

use io_engine::{Direction, Session};
use pyo3::prelude::*;

use crate::mori::engine::ranges;
use crate::mori::ranges::Runs;
use crate::mori::shared::Shared;
use crate::mori::status::TransferStatus;
use crate::mori::transfer::Route;

/// Transfers between one local and one remote memory over the connection that was chosen when it
/// was made.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct IOEngineSession {
    pub(crate) shared: Arc<Shared>,
    pub(crate) session: Session,
    pub(crate) route: Arc<Route>,
}

impl IOEngineSession {
    fn ask(
        &self,
        py: Python<'_>,
        transfer: (Direction, Runs, u64),
        status: &TransferStatus,
    ) -> PyResult<()> {
        let way = (Arc::clone(&self.route), Some(self.session.clone()));
        self.shared.ask(py, way, transfer, Arc::clone(&status.cell))
    }
}

#[pymethods]
#[allow(non_snake_case, reason = "the names of the original")]
impl IOEngineSession {
    /// A number for a transfer, from the engine's.
    fn AllocateTransferUniqueId(&self) -> u64 {
        self.shared.allocate_transfer_number()
    }

    /// Reads one range.
    fn Read(
        &self,
        local_offset: &Bound<'_, PyAny>,
        remote_offset: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offset, remote_offset, size);
        let runs = ranges.single(Direction::Read)?;
        self.ask(size.py(), (Direction::Read, runs, id), status)
    }

    /// Writes one range.
    fn Write(
        &self,
        local_offset: &Bound<'_, PyAny>,
        remote_offset: &Bound<'_, PyAny>,
        size: &Bound<'_, PyAny>,
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offset, remote_offset, size);
        let runs = ranges.single(Direction::Write)?;
        self.ask(size.py(), (Direction::Write, runs, id), status)
    }

    /// Reads many ranges as one transfer.
    fn BatchRead(
        &self,
        local_offsets: &Bound<'_, PyAny>,
        remote_offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offsets, remote_offsets, sizes);
        let runs = ranges.many(Direction::Read)?;
        self.ask(sizes.py(), (Direction::Read, runs, id), status)
    }

    /// Writes many ranges as one transfer.
    fn BatchWrite(
        &self,
        local_offsets: &Bound<'_, PyAny>,
        remote_offsets: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        status: &TransferStatus,
        id: u64,
    ) -> PyResult<()> {
        let ranges = ranges(local_offsets, remote_offsets, sizes);
        let runs = ranges.many(Direction::Write)?;
        self.ask(sizes.py(), (Direction::Write, runs, id), status)
    }

    /// Whether the peer is still there.
    fn Alive(&self) -> bool {
        self.session.is_alive()
    }

    /// How the bytes move; Ferry's own addition.
    #[getter]
    fn transport(&self) -> &'static str {
        self.session.transport().name()
    }
}
