//! Transfers between one local and one remote memory.

use std::sync::Arc;

use io_engine::{Direction, Session};
use pyo3::prelude::*;

use crate::mori::engine::Shared;
use crate::mori::numbers::{number, numbers};
use crate::mori::status::{StatusCell, TransferStatus};
use crate::mori::transfer::{Ranges, Route, begin};

/// Transfers between one local and one remote memory over the connection that was chosen when it
/// was made.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct IOEngineSession {
    pub(crate) shared: Arc<Shared>,
    pub(crate) session: Session,
    pub(crate) route: Route,
}

impl IOEngineSession {
    fn run(
        &self,
        py: Python<'_>,
        direction: Direction,
        ranges: &Ranges,
        status: &Arc<StatusCell>,
        id: u64,
    ) {
        py.detach(|| begin(&self.session, &self.route, direction, ranges, id, status));
    }
}

fn single(
    local_offset: &Bound<'_, PyAny>,
    remote_offset: &Bound<'_, PyAny>,
    size: &Bound<'_, PyAny>,
) -> PyResult<Ranges> {
    Ok(Ranges {
        local_offsets: vec![number(local_offset)?],
        remote_offsets: vec![number(remote_offset)?],
        sizes: vec![number(size)?],
    })
}

fn many(
    local_offsets: &Bound<'_, PyAny>,
    remote_offsets: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
) -> PyResult<Ranges> {
    Ok(Ranges {
        local_offsets: numbers(local_offsets)?,
        remote_offsets: numbers(remote_offsets)?,
        sizes: numbers(sizes)?,
    })
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
        let ranges = single(local_offset, remote_offset, size)?;
        self.run(size.py(), Direction::Read, &ranges, &status.cell, id);
        Ok(())
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
        let ranges = single(local_offset, remote_offset, size)?;
        self.run(size.py(), Direction::Write, &ranges, &status.cell, id);
        Ok(())
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
        let ranges = many(local_offsets, remote_offsets, sizes)?;
        self.run(sizes.py(), Direction::Read, &ranges, &status.cell, id);
        Ok(())
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
        let ranges = many(local_offsets, remote_offsets, sizes)?;
        self.run(sizes.py(), Direction::Write, &ranges, &status.cell, id);
        Ok(())
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
