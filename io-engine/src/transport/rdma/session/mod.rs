//! A session: several queue pairs to one engine, the keys of its regions, and a thread that talks
//! to it. Whoever submits a batch never waits for that.

mod keys;
mod slots;
mod thread;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use common::wire::rdma_control::{ControlTag, Retire};

use self::keys::Known;
use self::slots::Slot;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::RegionKey;
use crate::session::Job;
use crate::status::Status;
use crate::sys;
use crate::transport::queue::{PIECE_BYTES, Taken};
use crate::transport::rdma::control::{ControlClient, PeerAddress};
use crate::transport::rdma::endpoint::{Endpoint, requests_of};
use crate::transport::rdma::notifications::Notification;
use crate::transport::rdma::rail::Rails;
use crate::transport::{BatchQueue, Piece};

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

    /// The queue pairs' devices on both sides.
    fn lanes(&self) -> Vec<(Arc<Endpoint>, i32)> {
        let slots = self.slots.iter();
        slots
            .filter_map(|slot| lock(slot).endpoint_opt.clone())
            .collect()
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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
