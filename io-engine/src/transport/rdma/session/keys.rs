//! The keys of the peer's regions on each of its devices.

use std::sync::{Arc, PoisonError};

use common::wire::rdma_control::{AskMemoryRegion, ControlType, MemoryKeys};

use super::Session;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Region, RegionKey, RemoteRegion};
use crate::session::{Direction, Job};
use crate::transport::Piece;
use crate::transport::rdma::control::{ControlClient, check_refusal};
use crate::transport::rdma::endpoint::Endpoint;
use crate::transport::rdma::registration::Registration;
use crate::transport::rdma::requests::{Lane, PairKeys, RemoteKeys};
use crate::transport::rdma::verbs::Verb;

/// A region of the peer on one of its devices.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) keys: RemoteKeys,
    /// What it was asked for with.
    pub(super) region_key_opt: Option<RegionKey>,
    /// The peer's device has refused some keys: new batches ask again. What is queued goes on with
    /// these, so that a refusal is that of the region which it is about.
    pub(super) is_doubted: bool,
}

impl Known {
    pub(super) fn fits(&self, remote: &RemoteRegion) -> bool {
        let is_same_key = match (&self.region_key_opt, &remote.key_opt) {
            (Some(asked), Some(now)) => asked.matches(now),
            (None, None) => true,
            _ => false,
        };
        is_same_key && self.keys.keys.length == remote.len
    }
}

impl Session {
    /// The keys of a piece's pairs on the devices of a queue pair.
    pub(super) fn lane(
        &self,
        endpoint: &Endpoint,
        peer_device: i32,
        job: &Job,
        piece: &Piece,
    ) -> Result<Lane, TransportError> {
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let mut pairs: Vec<Option<PairKeys>> = vec![None; job.pairs.len()];
        for range in &piece.ranges {
            let (Some(slot), Some(pair)) = (pairs.get_mut(range.pair), job.pairs.get(range.pair))
            else {
                continue;
            };
            if slot.is_some() {
                continue;
            }
            let remote = known
                .get(&(peer_device, pair.remote.id))
                .filter(|known| known.fits(&pair.remote))
                .map(|known| known.keys.clone());
            let remote = remote.ok_or_else(|| {
                TransportError::quiesced(
                    TransportErrorKind::Closed,
                    format!(
                        "the keys of region {} on the peer's device {peer_device} are not known yet",
                        pair.remote.id
                    ),
                )
            })?;
            *slot = Some(PairKeys {
                local: self.registered(endpoint, &pair.local)?,
                remote,
                place: pair.remote.location,
            });
        }
        let verb = match job.direction {
            Direction::Write => Verb::Write,
            Direction::Read => Verb::Read,
        };
        Ok(Lane { verb, pairs })
    }

    pub(super) fn registered(
        &self,
        endpoint: &Endpoint,
        region: &Region,
    ) -> Result<Arc<Registration>, TransportError> {
        match endpoint.rail().registered(region.id()) {
            Some(registered) => Ok(registered),
            // Only after a change of rail: `knows_all` has seen to it otherwise.
            None => endpoint.rail().register_for_job(region),
        }
    }

    pub(super) fn knows_all(&self, job: &Job) -> bool {
        let lanes = self.lanes();
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let mut pairs = job.pairs.iter().filter(|pair| pair.runs.ranges() > 0);
        !lanes.is_empty()
            && pairs.all(|pair| {
                let mut lanes = lanes.iter();
                lanes.all(|(endpoint, device)| {
                    known
                        .get(&(*device, pair.remote.id))
                        .is_some_and(|known| known.fits(&pair.remote) && !known.is_doubted)
                        && endpoint.rail().registered(pair.local.id()).is_some()
                })
            })
    }

    /// Asks for all regions that are known on another device of the peer.
    pub(super) fn learn_known(
        &self,
        client: &mut ControlClient,
        device: i32,
    ) -> Result<(), TransportError> {
        let known: Vec<_> = {
            let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
            let others = keys.iter().filter(|((other, _), _)| *other != device);
            let others = others.filter(|((_, id), _)| !keys.contains_key(&(device, *id)));
            others
                .map(|((_, id), known)| (*id, known.region_key_opt))
                .collect()
        };
        for (id, region_key_opt) in known {
            // One that is gone is refused again to whoever names it.
            let _ = self.learn(client, device, id, region_key_opt)?;
        }
        Ok(())
    }

    /// Asks for a region's keys. The outer error is the connection's, the inner one a refusal.
    pub(super) fn learn(
        &self,
        client: &mut ControlClient,
        device: i32,
        id: u32,
        region_key_opt: Option<RegionKey>,
    ) -> Result<Result<MemoryKeys, TransportError>, TransportError> {
        let asked = AskMemoryRegion {
            engine_key: self.names.peer_key.clone(),
            device,
            id,
            keys: MemoryKeys::default(),
            tag_opt: self.tag(region_key_opt, 0),
        };
        let told: AskMemoryRegion = client.ask(ControlType::AskMemoryRegion, &asked)?;
        if let Err(refused) = check_refusal(told.tag_opt.as_ref()) {
            return Ok(Err(refused));
        }
        let tag = told.tag_opt.unwrap_or_default();
        let keys = RemoteKeys::new(told.keys, &tag.parts, tag.reads_back).ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::Protocol,
                format!(
                    "the pieces of region {id} are not its {} bytes",
                    told.keys.length
                ),
            )
        });
        let known = match keys {
            Ok(keys) => Known {
                keys,
                region_key_opt,
                is_doubted: false,
            },
            Err(nonsense) => return Ok(Err(nonsense)),
        };
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        if told.keys.length > 0 {
            keys.insert((device, id), known);
        }
        Ok(Ok(told.keys))
    }

    /// The descriptor of a region says something else than its owner.
    pub(super) fn mismatch(&self, remote: &RemoteRegion, told: u64) -> TransportError {
        let kind = match told {
            0 => TransportErrorKind::NotRegistered,
            _ => TransportErrorKind::OutOfBounds,
        };
        TransportError::quiesced(
            kind,
            format!(
                "region {} of engine {} has {told} bytes, its descriptor says {}",
                remote.id, self.names.peer_key, remote.len
            ),
        )
    }

    /// Learns and registers what a batch needs. The outer error ends the session, the inner one the
    /// batch.
    pub(super) fn prepare(
        &self,
        client: &mut ControlClient,
        job: &Job,
    ) -> Result<Result<(), TransportError>, TransportError> {
        if let Err(error) = wait_for_event(job) {
            return Ok(Err(error));
        }
        for (endpoint, device) in self.lanes() {
            for pair in job.pairs.iter().filter(|pair| pair.runs.ranges() > 0) {
                let is_known = {
                    let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
                    let known = keys.get(&(device, pair.remote.id));
                    known.is_some_and(|known| known.fits(&pair.remote) && !known.is_doubted)
                };
                if !is_known {
                    let (id, key_opt) = (pair.remote.id, pair.remote.key_opt);
                    let told = match self.learn(client, device, id, key_opt)? {
                        Ok(told) => told,
                        Err(refused) => return Ok(Err(refused)),
                    };
                    if told.length != pair.remote.len {
                        return Ok(Err(self.mismatch(&pair.remote, told.length)));
                    }
                }
                if let Err(error) = endpoint.rail().register_for_job(&pair.local) {
                    return Ok(Err(error));
                }
            }
        }
        Ok(Ok(()))
    }
}

/// Waits until a batch's bytes are where they are to be read, if an event says when.
fn wait_for_event(job: &Job) -> Result<(), TransportError> {
    let locals = job
        .pairs
        .iter()
        .filter_map(|pair| pair.local.memory().device());
    match (job.after_opt, locals.into_iter().next()) {
        (Some(event), Some(memory)) => memory.wait_for(event),
        _ => Ok(()),
    }
}
