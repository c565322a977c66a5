//! What an engine knows: its memory, its peers, and the ways between them.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use common::wire::MemoryDesc as WireMemoryDesc;
use io_engine::{Direction, Engine, Reach, Region, RemoteRegion, Session, TransportError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::mori::notify::Notifier;
use crate::mori::outbox::{Asked, Outbox};
use crate::mori::ranges::{LastRanges, Ranges, Runs};
use crate::mori::remote::{PeerFailures, Remote};
use crate::mori::status::{StatusCell, code};
use crate::mori::transfer::Route;
use crate::mori::ways::Ways;

const NO_BACKEND: &str = "No available backend found, create backend first";

pub(super) fn raised(error: &TransportError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

/// What an engine has, for the module's objects to share.
pub(crate) struct Shared {
    pub(super) engine: Engine,
    pub(super) key: String,
    pub(super) bind: IpAddr,
    pub(super) next_transfer: AtomicU32,
    pub(super) backends: Mutex<BTreeSet<u32>>,
    pub(super) notifier: Mutex<Option<Arc<Notifier>>>,
    pub(super) remotes: RwLock<HashMap<String, Arc<Remote>>>,
    pub(super) regions: RwLock<HashMap<u32, Region>>,
    pub(super) failures: Arc<PeerFailures>,
    pub(super) ways: Ways,
    pub(super) last_ranges: Mutex<LastRanges>,
    pub(super) outbox: Arc<Outbox>,
    /// Whether a fault is to be injected into one transfer, which are counted then.
    pub(super) is_faulty: bool,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.outbox.close();
    }
}

impl Shared {
    pub(super) fn backends(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.backends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As in the original the numbers have 32 bits and begin again.
    pub(crate) fn allocate_transfer_number(&self) -> u64 {
        u64::from(self.next_transfer.fetch_add(1, Ordering::Relaxed))
    }

    /// The way from a local to a remote memory; an error has MoRI's code and text.
    pub(super) fn route(
        &self,
        local: &Arc<WireMemoryDesc>,
        far: &Arc<WireMemoryDesc>,
    ) -> Result<Arc<Route>, (u32, String)> {
        self.ways.get(local, far, || self.find_route(local, far))
    }

    fn find_route(
        &self,
        local: &WireMemoryDesc,
        far: &WireMemoryDesc,
    ) -> Result<Route, (u32, String)> {
        let remotes = self.remotes.read().unwrap_or_else(PoisonError::into_inner);
        let remote_opt = remotes.get(&far.engine_key).cloned();
        drop(remotes);
        let remote_opt = remote_opt.filter(|_| !self.backends().is_empty());
        let remote = remote_opt.ok_or_else(|| (code::ERR_BAD_STATE, NO_BACKEND.to_owned()))?;
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region_opt = regions.get(&local.id).cloned();
        drop(regions);
        let region_opt = region_opt.filter(|_| local.engine_key == self.key);
        let local = region_opt.ok_or_else(|| {
            let text = format!(
                "memory {} of engine {} is not registered with engine {}",
                local.id, local.engine_key, self.key
            );
            (code::ERR_NOT_FOUND, text)
        })?;
        let far = RemoteRegion::from_desc(far)
            .map_err(|error| (code::ERR_INVALID_ARGS, error.to_string()))?;
        let notifier = self.notifier.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Route {
            reach: Reach::of(&local, &far),
            local,
            far,
            remote,
            notifier_opt: notifier.clone(),
        })
    }

    /// Notes a transfer; everything that happens to it goes into the status, but for a peer that
    /// cannot be reached, which is raised. Only the first transfer to a peer waits, for its session.
    pub(crate) fn ask(
        &self,
        py: Python<'_>,
        (route, session_opt): (Arc<Route>, Option<Session>),
        (direction, runs, number): (Direction, Runs, u64),
        status: Arc<StatusCell>,
    ) -> PyResult<()> {
        if session_opt.is_none() && !route.has_session() {
            py.detach(|| route.session(&self.engine))
                .map_err(|error| raised(&error))?;
        }
        match runs {
            Err((code, message)) => status.update(code, message),
            Ok(runs) if runs.ranges() == 0 => status.update(code::SUCCESS, "success"),
            Ok(runs) => {
                status.set_code(code::IN_PROGRESS);
                self.outbox.push(Asked {
                    route,
                    session_opt,
                    direction,
                    runs,
                    number,
                    status,
                    is_alone: self.is_faulty,
                });
            }
        }
        Ok(())
    }

    /// As [`Ranges::many`], by what the last call has read where it is the same.
    pub(super) fn read_ranges(
        &self,
        ranges: &Ranges<'_, '_>,
        direction: Direction,
    ) -> PyResult<Runs> {
        // Reading may run code of Python, during which nobody may wait for a lock of ours.
        let place = || {
            self.last_ranges
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        let mut last = std::mem::take(&mut *place());
        let runs = last.read(ranges, direction)?;
        *place() = last;
        Ok(runs)
    }
}
