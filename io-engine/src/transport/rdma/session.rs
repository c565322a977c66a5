//! A session: several queue pairs to one engine, the keys of its regions, and a thread that talks
//! to it. Whoever submits a batch never waits for that.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use common::wire::MemoryLocation;
use common::wire::rdma_control::{
    AskMemoryRegion, ControlTag, ControlType, EndpointHandle, MemoryKeys, RegEndpoint, Retire,
    TopoKey,
};

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Region, RegionKey, RemoteRegion};
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::sys::{self, Interest};
use crate::transport::queue::{PIECE_BYTES, Taken};
use crate::transport::rdma::control::{ControlClient, PeerAddress, check_refusal};
use crate::transport::rdma::endpoint::{Ended, Endpoint, Owner, Route, requests_of};
use crate::transport::rdma::notifications::Notification;
use crate::transport::rdma::rail::{Rail, Rails};
use crate::transport::rdma::registration::Registration;
use crate::transport::rdma::requests::{Lane, PairKeys, RemoteKeys};
use crate::transport::rdma::verbs::{Gid, Link, Mtu, RetryPolicy, Verb};
use crate::transport::{BatchQueue, Piece};

/// First wait before a failed queue pair is made again; it doubles.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(2);
/// A queue pair that worked for so long begins anew with the first wait.
const WORKED: Duration = Duration::from_secs(5);
/// A queue pair has ended within this time after it was stopped.
const ENDED_WITHIN: Duration = Duration::from_secs(5);
/// After so many failures in a row the session is given up.
const MOST_FAILURES: u32 = 9;

/// What regions say of themselves in their descriptors.
const HOST_MEMORY: TopoKey = TopoKey {
    device_id: -1,
    location: MemoryLocation::Host,
    numa_node: 0,
};

/// Whose session it is, and to whom.
pub(crate) struct SessionNames {
    pub(crate) own_key: String,
    pub(crate) own_instance: [u8; 16],
    pub(crate) peer_key: String,
    /// Which start of the peer; `None` when it is no Ferry engine.
    pub(crate) peer_instance_opt: Option<[u8; 16]>,
}

pub(crate) struct Session {
    rails: Arc<Rails>,
    names: SessionNames,
    is_ferry: bool,
    number: usize,
    queue: BatchQueue<()>,
    slots: Vec<Mutex<Slot>>,
    next_slot: AtomicUsize,
    keys: RwLock<HashMap<(i32, u32), Known>>,
    /// Batches with a region whose keys are not known here yet.
    waiting: Mutex<VecDeque<(Job, Arc<Status>)>>,
    wake: File,
    /// The connection that a Ferry engine keeps: its end is the peer's.
    stream_opt: Mutex<Option<Arc<TcpStream>>>,
    has_ended: AtomicBool,
    ended_opt: Mutex<Option<TransportError>>,
}

/// A region of the peer on one of its devices.
#[derive(Clone, Debug)]
struct Known {
    keys: RemoteKeys,
    /// What it was asked for with.
    region_key_opt: Option<RegionKey>,
    /// The peer's device has refused some keys: new batches ask again. What is queued goes on with
    /// these, so that a refusal is that of the region which it is about.
    is_doubted: bool,
}

/// The place of one queue pair.
struct Slot {
    /// With the number of the peer's device.
    endpoint_opt: Option<(Arc<Endpoint>, i32)>,
    /// The peer's queue pair that is to be ended.
    retired_opt: Option<Retire>,
    /// Told when that has ended.
    ended: Vec<Ended>,
    /// What the peer calls the queue pair.
    peer_name: Retire,
    failures: u32,
    /// The rail of the last queue pair that failed.
    failed_rail_opt: Option<Arc<Rail>>,
    made: Instant,
    due: Instant,
}

impl Session {
    /// Connects every queue pair, or none.
    pub(crate) fn connect(
        rails: &Arc<Rails>,
        names: SessionNames,
        peer: PeerAddress,
    ) -> Result<Arc<Self>, TransportError> {
        let now = Instant::now();
        let slot = || {
            Mutex::new(Slot {
                endpoint_opt: None,
                retired_opt: None,
                ended: Vec::new(),
                peer_name: Retire::default(),
                failures: 0,
                failed_rail_opt: None,
                made: now,
                due: now,
            })
        };
        let session = Arc::new(Self {
            rails: Arc::clone(rails),
            names,
            is_ferry: peer.is_ferry,
            number: rails.next_number(),
            queue: BatchQueue::default(),
            slots: (0..rails.options.queue_pairs.max(1))
                .map(|_| slot())
                .collect(),
            next_slot: AtomicUsize::new(0),
            keys: RwLock::default(),
            waiting: Mutex::default(),
            wake: sys::event().map_err(|error| TransportError::io("eventfd", &error))?,
            stream_opt: Mutex::default(),
            has_ended: AtomicBool::new(false),
            ended_opt: Mutex::default(),
        });
        let mut client = ControlClient::new(peer);
        for place in 0..session.slots.len() {
            session.make_endpoint(&mut client, place)?;
        }
        *lock(&session.stream_opt) = client.stream().cloned();
        let thread = Arc::clone(&session);
        std::thread::Builder::new()
            .name("ferry-rdma-peer".to_owned())
            .spawn(move || thread.run(client))
            .map_err(|error| TransportError::io("starting a thread", &error))?;
        Ok(session)
    }

    /// Begins a batch: at once if every region is known, else as soon as it is.
    pub(crate) fn submit(&self, job: Job, status: Arc<Status>) {
        if let Some(error) = self.failure() {
            return status.fail(error.with_proof());
        }
        let foreign = job
            .pairs
            .iter()
            .find(|pair| pair.local.owner_instance() != &self.names.own_instance);
        if let Some(pair) = foreign {
            return status.fail(TransportError::quiesced(
                TransportErrorKind::NotRegistered,
                format!(
                    "region {} ({}) is of another engine",
                    pair.local.id(),
                    pair.local.label()
                ),
            ));
        }
        // An event of a driver is waited for by the thread that talks to the peer.
        if job.after_opt.is_none() && self.knows_all(&job) {
            self.queue.push(job, status, (), PIECE_BYTES);
            return self.pump();
        }
        lock(&self.waiting).push_back((job, status));
        self.wake();
        // The thread may have looked for the last time just before.
        if let Some(error) = self.failure() {
            self.fail_waiting(&error);
        }
    }

    /// Why nothing is moved any more.
    pub(crate) fn failure(&self) -> Option<TransportError> {
        if !self.has_ended.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.ended_opt).clone()
    }

    /// Whether the peer is still there, without sending.
    pub(crate) fn is_alive(&self) -> bool {
        let stream_opt = lock(&self.stream_opt).clone();
        let is_connected = stream_opt.is_none_or(|stream| sys::is_connected(stream.as_fd()));
        is_connected && self.failure().is_none()
    }

    /// Ends the session: what is queued fails at once, what is under way once it has stopped.
    pub(crate) fn end(&self, error: &TransportError) {
        let error = {
            let mut ended = lock(&self.ended_opt);
            let first = ended.get_or_insert_with(|| error.clone()).clone();
            self.has_ended.store(true, Ordering::Release);
            first
        };
        self.queue.close(&error);
        self.fail_waiting(&error);
        for endpoint in self.endpoints() {
            endpoint.fail(&error);
        }
        self.wake();
    }

    fn fail_waiting(&self, error: &TransportError) {
        for (job, status) in std::mem::take(&mut *lock(&self.waiting)) {
            drop(job);
            status.fail(error.clone().with_proof());
        }
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        let slots = self.slots.iter();
        let endpoints = slots.filter_map(|slot| {
            let slot = lock(slot);
            slot.endpoint_opt
                .as_ref()
                .map(|(endpoint, _)| Arc::clone(endpoint))
        });
        endpoints.collect()
    }

    fn wake(&self) {
        // Full only after 2^64 wake-ups that nobody took.
        let _ = (&self.wake).write(&1u64.to_ne_bytes());
    }

    /// Posts pieces, one queue pair after the other, for as long as one has room. Those on a device
    /// whose port is down get none while another could take them.
    pub(crate) fn pump(&self) {
        let mut piece = Piece::default();
        let mut lanes = self.lanes().into_iter();
        let is_one_up = lanes.any(|(endpoint, _)| endpoint.rail().is_up());
        let first = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let mut idle = 0;
        let mut step = 0;
        while idle < self.slots.len() {
            let place = (first + step) % self.slots.len();
            step += 1;
            match self.post_one(place, is_one_up, &mut piece) {
                true => idle = 0,
                false => idle += 1,
            }
        }
    }

    /// Whether a piece was taken.
    fn post_one(&self, place: usize, is_one_up: bool, piece: &mut Piece) -> bool {
        let endpoint_opt = self
            .slots
            .get(place)
            .and_then(|slot| lock(slot).endpoint_opt.clone());
        let Some((endpoint, peer_device)) = endpoint_opt else {
            return false;
        };
        if !endpoint.has_room() || (is_one_up && !endpoint.rail().is_up()) {
            return false;
        }
        let Taken::Piece { job, status, .. } = self.queue.take(piece, Some(Duration::ZERO)) else {
            return false;
        };
        match self.lane(&endpoint, peer_device, &job, piece) {
            Ok(lane) => {
                let mut requests = requests_of(&job, piece);
                lane.cut(&mut requests);
                lane.sort(&mut requests);
                endpoint.post(lane, requests, job, status);
            }
            Err(error) => {
                drop(job);
                status.piece_done(Err(error));
            }
        }
        true
    }

    /// The keys of a piece's pairs on the devices of a queue pair.
    fn lane(
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

    fn registered(
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

    /// The queue pairs' devices on both sides.
    fn lanes(&self) -> Vec<(Arc<Endpoint>, i32)> {
        let slots = self.slots.iter();
        slots
            .filter_map(|slot| lock(slot).endpoint_opt.clone())
            .collect()
    }

    fn knows_all(&self, job: &Job) -> bool {
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

    /// The peer used the queue pair for a transfer of its own.
    pub(crate) fn notified(&self, notification: Notification) {
        self.rails
            .notifications
            .note(&self.names.peer_key, notification);
    }

    /// Sends a notification over every queue pair; [`Status::piece_done`] is called for each.
    pub(crate) fn notify(&self, uid: u64, status: &Arc<Status>) {
        let endpoints = self.endpoints();
        let total = endpoints.len() as i32;
        for (place, endpoint) in endpoints.iter().enumerate() {
            if status.take_piece() {
                let place = place as i32;
                endpoint.notify(Notification { uid, place, total }, Arc::clone(status));
            }
        }
        status.exhausted();
    }

    fn tag(&self, region_key_opt: Option<RegionKey>, path_mtu: u8) -> Option<ControlTag> {
        self.is_ferry.then(|| ControlTag {
            token: self.rails.options.token.clone().into_bytes(),
            region_key: region_key_opt.map_or_else(Vec::new, |key| key.0.to_vec()),
            path_mtu,
            refusal: String::new(),
            instance: self
                .names
                .peer_instance_opt
                .map_or_else(Vec::new, |instance| instance.to_vec()),
            ..ControlTag::default()
        })
    }

    fn make_endpoint(
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
        pair.connect(&Link {
            port: rail.port(),
            layer: address.layer,
            own: address.gid,
            peer_number: answer.endpoint.queue_pair,
            peer_gid,
            peer_lid: answer.endpoint.lid as u16,
            peer_packet_number: answer.endpoint.packet_number,
            mtu: agreed.map_or(address.mtu, |code| Mtu::from_code(u32::from(code))),
            traffic_class: options.traffic_class,
            service_level: options.service_level,
            retry: RetryPolicy {
                timeout: options.timeout,
                retries: options.retries,
                receiver_not_ready_retries: options.receiver_not_ready_retries,
            },
        })?;
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

    /// Asks for all regions that are known on another device of the peer.
    fn learn_known(&self, client: &mut ControlClient, device: i32) -> Result<(), TransportError> {
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
    fn learn(
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
    fn mismatch(&self, remote: &RemoteRegion, told: u64) -> TransportError {
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
    fn prepare(
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

    fn run(self: Arc<Self>, mut client: ControlClient) {
        while self.failure().is_none() {
            if let Err(error) = self.turn(&mut client) {
                self.end(&error);
            }
        }
        self.finish(&mut client);
        *lock(&self.stream_opt) = None;
    }

    /// Waits for the end of the queue pairs here and at the peer, and tells what was under way.
    fn finish(&self, client: &mut ControlClient) {
        // One that was just being made when the session ended goes on by itself.
        if let Some(error) = self.failure() {
            let endpoints = self.endpoints();
            endpoints.iter().for_each(|endpoint| endpoint.fail(&error));
        }
        let deadline = Instant::now() + ENDED_WITHIN;
        while !self.lanes().is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!(peer = self.names.peer_key, "a queue pair does not end");
                break;
            }
            // A wake-up that fails is noticed by the deadline.
            if let Ok([true]) = sys::wait_for([(self.wake.as_fd(), Interest::Readable)], Some(left))
            {
                self.take_wake_ups();
            }
        }
        let slots = self.slots.iter();
        let ended: Vec<_> = slots
            .flat_map(|slot| std::mem::take(&mut lock(slot).ended))
            .collect();
        let is_owed = ended.iter().any(|ended| !ended.owed.is_empty());
        let is_proved = is_owed && self.is_ferry && client.finish();
        // A peer that dies loses its memory before its queue pairs: a refusal was of that.
        let death = self.failure();
        let death_opt = death.filter(|error| error.kind() == TransportErrorKind::PeerDead);
        let told = |mut it: Ended| {
            it.owed
                .iter_mut()
                .for_each(|owed| owed.explain_by(death_opt.as_ref()));
            it.tell(is_proved)
        };
        let pairs: Vec<_> = ended.into_iter().map(told).collect();
        drop(pairs);
    }

    /// Has the peer end its side of queue pairs that have failed, and tells what was under way.
    fn retire(&self, client: &mut ControlClient) -> Result<(), TransportError> {
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

    /// Does what there is to do, then waits.
    fn turn(self: &Arc<Self>, client: &mut ControlClient) -> Result<(), TransportError> {
        self.retire(client)?;
        let mut next_due: Option<Instant> = None;
        for place in 0..self.slots.len() {
            next_due = match (self.mend(client, place)?, next_due) {
                (Some(due), Some(other)) => Some(due.min(other)),
                (due, other) => due.or(other),
            };
        }
        if !self.lanes().is_empty() {
            loop {
                let Some((job, status)) = lock(&self.waiting).pop_front() else {
                    break;
                };
                if status.is_concluded() {
                    continue;
                }
                match self.prepare(client, &job) {
                    Ok(Ok(())) => {
                        self.queue.push(job, status, (), PIECE_BYTES);
                        self.pump();
                    }
                    Ok(Err(error)) => {
                        drop(job);
                        status.fail(error);
                    }
                    Err(error) => {
                        drop(job);
                        status.fail(error.clone().with_proof());
                        return Err(error);
                    }
                }
            }
        }
        self.sleep(client, next_due)
    }

    /// Makes a queue pair again if it is time; when it will be, otherwise.
    fn mend(
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

    fn say_made_again(&self, slot: &Mutex<Slot>, place: usize) {
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

    fn sleep(
        &self,
        client: &ControlClient,
        due_opt: Option<Instant>,
    ) -> Result<(), TransportError> {
        let timeout_opt = due_opt.map(|due| due.saturating_duration_since(Instant::now()));
        let wake = (self.wake.as_fd(), Interest::Readable);
        let waited = match client.stream() {
            Some(stream) => sys::wait_for([wake, (stream.as_fd(), Interest::Ended)], timeout_opt),
            None => sys::wait_for([wake], timeout_opt).map(|[is_woken]| [is_woken, false]),
        };
        let [is_woken, has_ended] =
            waited.map_err(|error| TransportError::io("waiting for a peer", &error))?;
        if has_ended {
            return Err(TransportError::quiesced(
                TransportErrorKind::PeerDead,
                format!("engine {} closed its connection", self.names.peer_key),
            ));
        }
        if is_woken {
            self.take_wake_ups();
        }
        Ok(())
    }

    fn take_wake_ups(&self) {
        // Takes the count back to zero; what it was does not matter.
        let _ = (&self.wake).read(&mut [0; 8]);
    }
}

impl Known {
    fn fits(&self, remote: &RemoteRegion) -> bool {
        let is_same_key = match (&self.region_key_opt, &remote.key_opt) {
            (Some(asked), Some(now)) => asked.matches(now),
            (None, None) => true,
            _ => false,
        };
        is_same_key && self.keys.keys.length == remote.len
    }
}

impl Slot {
    fn back_off(&mut self) {
        let wait = FIRST_WAIT * 2u32.saturating_pow(self.failures);
        self.failures += 1;
        self.due = Instant::now() + wait.min(LONGEST_WAIT);
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
