//! What a peer has told of its regions and pools.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use common::ids::ByteLen;

use super::Link;
use crate::device::{DeviceMemory, device_by_uuid};
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::AnyMemory;
use crate::memory::Memory;
use crate::region::{DeviceRuntime, RegionKey, RemoteRegion};
use crate::transport::same_host::{DevicePoolRow, TableRow, Way};

pub(super) struct Known {
    pub(super) key: RegionKey,
    pub(super) place: Place,
    pub(super) len: u64,
    pub(super) writers: usize,
    pub(super) is_forgotten: bool,
}

/// Where a region of the peer is.
#[derive(Clone)]
pub(super) enum Place {
    /// In the peer's address space.
    Address(u64),
    /// In a pool that is mapped here.
    Mapped {
        pool: AnyMemory,
        offset: u64,
        len: u64,
    },
    /// In device memory that could not be mapped here.
    Unreachable(TransportError),
}

/// A pool of the peer, as this process has it: mapped, or why it could not be.
pub(super) type MappedPool = Result<AnyMemory, TransportError>;

/// Where a region is in a pool; `None` when it is not inside.
fn place_in(pool: &MappedPool, offset: u64, len: u64) -> Option<Place> {
    match pool {
        Ok(pool) => {
            pool.place(offset, len).ok()?;
            let pool = pool.clone();
            Some(Place::Mapped { pool, offset, len })
        }
        Err(error) => Some(Place::Unreachable(error.clone())),
    }
}

impl Known {
    /// The place of a region, if it is what the descriptor says.
    pub(super) fn check(&self, remote: &RemoteRegion) -> Result<Place, TransportError> {
        let refused = |kind, what: String| Err(TransportError::quiesced(kind, what));
        let id = remote.id;
        let key_opt = remote.key_opt.as_ref();
        if !key_opt.is_some_and(|key| self.key.matches(key)) {
            return refused(
                TransportErrorKind::BadKey,
                format!("wrong key for region {id}"),
            );
        }
        if self.is_forgotten {
            return refused(
                TransportErrorKind::NotRegistered,
                format!("region {id} was deregistered"),
            );
        }
        if remote.len > self.len {
            return refused(
                TransportErrorKind::OutOfBounds,
                format!(
                    "region {id} has {} bytes at the peer, its descriptor says {}",
                    self.len, remote.len
                ),
            );
        }
        match &self.place {
            Place::Unreachable(error) => Err(error.clone()),
            place => Ok(place.clone()),
        }
    }
}

impl Link {
    /// Maps the pools that a table will name.
    pub(super) fn map(
        &self,
        pools: &[(u64, u64)],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), TransportError> {
        if self.way != Way::Mapping || pools.len() != descriptors.len() {
            return Err(self.nonsense("of its pools"));
        }
        for ((pool, bytes), descriptor) in pools.iter().zip(descriptors) {
            if self.state().pools.contains_key(pool) {
                continue;
            }
            let memory = Memory::from_fd(descriptor, ByteLen(*bytes))?;
            memory.populate();
            let mapped = Ok(AnyMemory::Pool(memory));
            self.state().pools.insert(*pool, mapped);
        }
        Ok(())
    }

    /// Maps a device's pool once all its parts are here. What cannot be mapped fails the batches
    /// that name it, and nothing else.
    pub(super) fn map_device(
        &self,
        row: &DevicePoolRow,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), TransportError> {
        if !row.refusal.is_empty() {
            let error = TransportError::quiesced(
                TransportErrorKind::Device,
                format!("the peer cannot share its device memory: {}", row.refusal),
            );
            self.state().pools.entry(row.pool).or_insert(Err(error));
            return Ok(());
        }
        let uuid = <[u8; 16]>::try_from(row.device.as_slice()).ok();
        let is_sound = self.way == Way::Mapping && row.parts.len() == descriptors.len();
        let Some(uuid) = uuid.filter(|_| is_sound) else {
            return Err(self.nonsense("of its device memory"));
        };
        let mut state = self.state();
        let parts = descriptors.into_iter().zip(row.parts.iter().copied());
        state.device_parts.extend(parts);
        if !row.is_last {
            return Ok(());
        }
        let parts = std::mem::take(&mut state.device_parts);
        if state.pools.contains_key(&row.pool) {
            return Ok(());
        }
        drop(state);
        let parts: Vec<_> = parts.iter().map(|(fd, len)| (fd.as_fd(), *len)).collect();
        let runtime = DeviceRuntime::from_name(Some(&row.runtime));
        let imported = device_by_uuid(runtime, &uuid)
            .and_then(|device| DeviceMemory::import(device, &parts, row.lead, row.bytes));
        if let Err(error) = &imported {
            tracing::warn!(pid = self.pid, %error, "a peer's device memory cannot be mapped");
        }
        let mapped = imported.map(AnyMemory::Device);
        self.state().pools.insert(row.pool, mapped);
        Ok(())
    }

    /// Takes in a table and decides on the batches that waited for it.
    pub(super) fn learn(
        self: &Arc<Self>,
        number: u64,
        rows: Vec<TableRow>,
    ) -> Result<(), TransportError> {
        let mut state = self.state();
        for row in rows {
            let key = <[u8; 16]>::try_from(row.key.as_slice()).ok();
            let end = row.place.checked_add(row.bytes);
            let place = match self.way {
                Way::Process => Some(Place::Address(row.place)),
                Way::Mapping => state
                    .pools
                    .get(&row.pool)
                    .and_then(|pool| place_in(pool, row.place, row.bytes)),
            };
            let (Some(key), Some(_), Some(place)) = (key, end, place) else {
                return Err(self.nonsense(&format!("of region {}", row.id)));
            };
            // A number is given once, so what is known of it does not change.
            state.regions.entry(row.id).or_insert(Known {
                key: RegionKey(key),
                place,
                len: row.bytes,
                writers: 0,
                is_forgotten: false,
            });
        }
        // A pool is held by its regions, which may have gone meanwhile.
        state
            .pools
            .retain(|_, pool| pool.as_ref().is_ok_and(AnyMemory::is_shared));
        let mut decided = Vec::new();
        for batch in std::mem::take(&mut state.waiting) {
            if batch.table > number {
                state.waiting.push_back(batch);
                continue;
            }
            let admitted = self.try_admit(&mut state, &batch.job);
            decided.push((batch, admitted));
        }
        drop(state);
        for (batch, admitted) in decided {
            match admitted {
                Ok(Some(admitted)) => (self.begin)(admitted, batch.job, batch.status),
                Ok(None) => batch.status.fail(TransportError::quiesced(
                    TransportErrorKind::NotRegistered,
                    format!("process {} has no such region", self.pid),
                )),
                Err(error) => batch.status.fail(error),
            }
        }
        Ok(())
    }
}
