//! The places of a session's queue pairs: how they are made, end, and are made again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::wire::MemoryLocation;
use common::wire::rdma_control::{ControlType, EndpointHandle, RegEndpoint, Retire, TopoKey};

use super::{Session, lock};
use crate::error::{TransportError, TransportErrorKind};
use crate::transport::rdma::control::{ControlClient, check_refusal};
use crate::transport::rdma::endpoint::{Ended, Endpoint, Owner, Route};
use crate::transport::rdma::rail::Rail;
use crate::transport::rdma::verbs::{Gid, Mtu};

/// First wait before a failed queue pair is made again; it doubles.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// A queue pair that worked for so long begins anew with the first wait.
const WORKED: Duration = Duration::from_secs(5);
/// After so many failures in a row the session is given up.
const MOST_FAILURES: u32 = 9;

/// What regions say of themselves in their descriptors.
const HOST_MEMORY: TopoKey = TopoKey {
    device_id: -1,
    location: MemoryLocation::Host,
    numa_node: 0,
};

/// The place of one queue pair.
pub(super) struct Slot {
    /// With the number of the peer's device.
    pub(super) endpoint_opt: Option<(Arc<Endpoint>, i32)>,
    /// The peer's queue pair that is to be ended.
    pub(super) retired_opt: Option<Retire>,
    /// Told when that has ended.
    pub(super) ended: Vec<Ended>,
    /// What the peer calls the queue pair.
    pub(super) peer_name: Retire,
    pub(super) failures: u32,
    /// The rail of the last queue pair that failed.
    pub(super) failed_rail_opt: Option<Arc<Rail>>,
    pub(super) made: Instant,
    pub(super) due: Instant,
}

impl Slot {
    fn back_off(&mut self) {
        let wait = FIRST_WAIT * 2u32.saturating_pow(self.failures);
        self.failures += 1;
        self.due = Instant::now() + wait.min(LONGEST_WAIT);
    }
}

impl Session {
    pub(super) fn make_endpoint(
        self: &Arc<Self>,
        client: &mut ControlClient,
        place: usize,
    ) -> Result<(), TransportError> {
        let Some(slot) = self.slots.get(place) else {
            return Ok(());
        };
        let failures = lock(slot).failures;
        let options = &self.rails.options;
        // Another rail at each try, where there are several.
        let rail = self.rails.pick(self.number + place + failures as usize)?;
        let address = rail.address(options)?;
        let (number, mut pair, poller) = rail.queue_pair(options, options.send_depth)?;
        let device = i32::try_from(rail.place).unwrap_or(0);
        let asked = RegEndpoint {
            engine_key: self.names.own_key.clone(),
            local: HOST_MEMORY,
            remote: HOST_MEMORY,
            device,
            endpoint: EndpointHandle {
                queue_pair: pair.number(),
                port: u32::from(rail.port()),
                lid: u32::from(address.lid),
                gid: address.gid.gid.0,
                ..EndpointHandle::default()
            },
            nic_rank: 0,
            rail: device,
            tag_opt: self.tag(None, address.mtu.code()),
        };
        let answer: RegEndpoint = client.ask(ControlType::RegEndpoint, &asked)?;
        check_refusal(answer.tag_opt.as_ref())?;
        let agreed = answer
            .tag_opt
            .map(|tag| tag.path_mtu)
            .filter(|mtu| *mtu > 0);
        let peer_gid = Gid(answer.endpoint.gid);
        let mtu = agreed.map_or(address.mtu, |code| Mtu::from_code(u32::from(code)));
        pair.connect(&rail.link(&address, &answer.endpoint, mtu, options))?;
        let route = Route {
            peer: self.names.peer_key.clone(),
            own_gid: address.gid.gid,
            peer_gid,
        };
        let owner = Owner::Session(Arc::downgrade(self), place);
        self.learn_known(client, answer.device)?;
        let endpoint = Endpoint::new(rail, &poller, pair, owner, route);
        {
            let mut slot = lock(slot);
            slot.endpoint_opt = Some((Arc::clone(&endpoint), answer.device));
            slot.peer_name = Retire {
                queue_pair: answer.endpoint.queue_pair,
                device: answer.device,
            };
            slot.made = Instant::now();
        }
        // Only now can it fail: the failure of one that has no place yet would be nobody's, and the
        // place would keep it.
        poller.adopt(number, &endpoint);
        Ok(())
    }

    /// A queue pair has ended and is to be made again; the peer's end of it is to be ended, too.
    pub(crate) fn endpoint_ended(
        &self,
        place: usize,
        endpoint: &Endpoint,
        error: &TransportError,
        ended: Ended,
    ) {
        let Some(slot) = self.slots.get(place) else {
            drop(ended.tell(false));
            return;
        };
        let mut slot = lock(slot);
        let is_current = slot
            .endpoint_opt
            .as_ref()
            .is_some_and(|(current, _)| std::ptr::eq(&**current, endpoint));
        if !is_current {
            drop(slot);
            drop(ended.tell(false));
            return;
        }
        let endpoint = slot.endpoint_opt.take();
        slot.failed_rail_opt = endpoint.as_ref().map(|(it, _)| Arc::clone(it.rail()));
        slot.retired_opt = Some(slot.peer_name);
        slot.ended.push(ended);
        if slot.made.elapsed() >= WORKED {
            slot.failures = 0;
        }
        slot.back_off();
        drop(slot);
        drop(endpoint);
        if error.kind() == TransportErrorKind::NotRegistered {
            // The peer may have registered its memory anew.
            let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
            keys.values_mut().for_each(|known| known.is_doubted = true);
        }
        if self.failure().is_none() {
            tracing::warn!(peer = self.names.peer_key, %error, "a queue pair failed");
        }
        self.wake();
        self.pump();
    }

    /// Has the peer end its side of queue pairs that have failed, and tells what was under way.
    pub(super) fn retire(&self, client: &mut ControlClient) -> Result<(), TransportError> {
        let mut pairs = Vec::new();
        for slot in &self.slots {
            let Some(retired) = lock(slot).retired_opt else {
                continue;
            };
            // MoRI has no word for it.
            if self.is_ferry {
                let _: Retire = client.ask(ControlType::Retire, &retired)?;
            }
            let ended = {
                let mut slot = lock(slot);
                slot.retired_opt = None;
                std::mem::take(&mut slot.ended)
            };
            pairs.extend(ended.into_iter().map(|it| it.tell(self.is_ferry)));
        }
        // Only now: nobody's news wait for it.
        drop(pairs);
        Ok(())
    }

    /// Makes a queue pair again if it is time; when it will be, otherwise.
    pub(super) fn mend(
        self: &Arc<Self>,
        client: &mut ControlClient,
        place: usize,
    ) -> Result<Option<Instant>, TransportError> {
        let Some(slot) = self.slots.get(place) else {
            return Ok(None);
        };
        let due = {
            let slot = lock(slot);
            if slot.endpoint_opt.is_some() {
                return Ok(None);
            }
            slot.due
        };
        if due > Instant::now() {
            return Ok(Some(due));
        }
        match self.make_endpoint(client, place) {
            Ok(()) => {
                self.say_made_again(slot, place);
                self.pump();
                Ok(None)
            }
            // Without its connection the peer is gone, or will be known by a new session.
            Err(error) if self.is_ferry && client.stream().is_none() => Err(error),
            Err(error) => {
                let mut slot = lock(slot);
                slot.back_off();
                if slot.failures > MOST_FAILURES {
                    return Err(error);
                }
                Ok(Some(slot.due))
            }
        }
    }

    pub(super) fn say_made_again(&self, slot: &Mutex<Slot>, place: usize) {
        let (failed_opt, made_opt) = {
            let mut slot = lock(slot);
            let made = slot.endpoint_opt.as_ref();
            let made_opt = made.map(|(endpoint, _)| Arc::clone(endpoint.rail()));
            (slot.failed_rail_opt.take(), made_opt)
        };
        let (Some(failed), Some(made)) = (failed_opt, made_opt) else {
            return;
        };
        let (peer, from, to) = (
            &self.names.peer_key,
            failed.device().name(),
            made.device().name(),
        );
        if Arc::ptr_eq(&failed, &made) {
            tracing::info!(peer, place, device = to, "a queue pair was made again");
        } else {
            failed.count_left();
            tracing::warn!(
                peer,
                place,
                from,
                to,
                "a queue pair was moved to another device"
            );
        }
    }
}
