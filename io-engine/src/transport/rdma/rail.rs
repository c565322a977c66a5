//! The network devices of an engine, each with its registered memory and its completion threads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use common::wire::rdma_control::EndpointHandle;

use crate::error::{TransportError, TransportErrorKind};
use crate::rdma_options::{RailReport, RdmaOptions, rdma_devices};
use crate::region::{Location, Region};
use crate::transport::rdma::affinity::{Affinity, node_of, own_node};
use crate::transport::rdma::endpoint::Endpoint;
use crate::transport::rdma::notifications::Notifications;
use crate::transport::rdma::poller::Poller;
use crate::transport::rdma::registration::Registration;
use crate::transport::rdma::verbs::{
    AsyncEvent, CompletionQueue, Depths, Device, Gid, GidEntry, Link, LinkLayer, Mtu,
    ProtectionDomain, QueuePair, RetryPolicy, best_gid, gid_table,
};

/// Messages that a peer may send before one is taken.
const RECEIVES: u32 = 128;

/// One network device.
pub(crate) struct Rail {
    /// Position among the engine's.
    pub(crate) place: usize,
    device: Arc<Device>,
    domain: Arc<ProtectionDomain>,
    options: RdmaOptions,
    port: u8,
    is_up: AtomicBool,
    /// No event brings it back.
    is_dead: AtomicBool,
    pollers: Vec<Arc<Poller>>,
    next_endpoint: AtomicU64,
    regions: Mutex<HashMap<u32, Arc<Registration>>>,
    bytes: AtomicU64,
    failures: AtomicU64,
    left: AtomicU64,
}

/// How a rail is reached now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RailAddress {
    pub(crate) gid: GidEntry,
    pub(crate) layer: LinkLayer,
    pub(crate) lid: u16,
    pub(crate) mtu: Mtu,
}

impl Rail {
    fn open(name: &str, place: usize, options: &RdmaOptions) -> Result<Arc<Self>, TransportError> {
        let device = Arc::new(Device::open(name)?);
        let domain = Arc::new(ProtectionDomain::new(&device)?);
        let is_up = device.port(options.port)?.is_active;
        let pollers = (0..options.completion_threads.max(1))
            .map(|_| Poller::new(&device).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let rail = Arc::new(Self {
            place,
            device,
            domain,
            options: options.clone(),
            port: options.port,
            is_up: AtomicBool::new(is_up),
            is_dead: AtomicBool::new(false),
            pollers,
            next_endpoint: AtomicU64::new(1),
            regions: Mutex::default(),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            left: AtomicU64::new(0),
        });
        for (number, poller) in rail.pollers.iter().enumerate() {
            // One of them hears what happens to the device.
            let device_opt = (number == 0).then(|| Arc::downgrade(&rail));
            if let Err(error) = Poller::start(poller, device_opt) {
                rail.end();
                return Err(error);
            }
        }
        Ok(rail)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) const fn port(&self) -> u8 {
        self.port
    }

    /// Whether packets can go.
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Acquire) && !self.is_dead.load(Ordering::Acquire)
    }

    /// How it is reached now: tables change while addresses come and go.
    pub(crate) fn address(&self, options: &RdmaOptions) -> Result<RailAddress, TransportError> {
        let port = self.device.port(self.port)?;
        let table = gid_table(self.device.name(), self.port)?;
        let configured = options.path_mtu_opt.and_then(Mtu::of_bytes);
        Ok(RailAddress {
            gid: best_gid(self.device.name(), &table, options.gid_index_opt)?,
            layer: port.link_layer,
            lid: port.lid,
            mtu: configured.unwrap_or(port.active_mtu),
        })
    }

    /// The way from here to a peer's queue pair.
    pub(crate) fn link(
        &self,
        address: &RailAddress,
        peer: &EndpointHandle,
        mtu: Mtu,
        options: &RdmaOptions,
    ) -> Link {
        Link {
            port: self.port,
            layer: address.layer,
            own: address.gid,
            peer_number: peer.queue_pair,
            peer_gid: Gid(peer.gid),
            peer_lid: peer.lid as u16,
            peer_packet_number: peer.packet_number,
            mtu,
            traffic_class: options.traffic_class,
            service_level: options.service_level,
            retry: RetryPolicy {
                timeout: options.timeout,
                retries: options.retries,
                receiver_not_ready_retries: options.receiver_not_ready_retries,
            },
        }
    }

    /// A queue pair with a number for its events, and the thread that will hear of them.
    pub(crate) fn queue_pair(
        &self,
        options: &RdmaOptions,
        sends: u32,
    ) -> Result<(u64, QueuePair, Arc<Poller>), TransportError> {
        let number = self.next_endpoint.fetch_add(1, Ordering::Relaxed);
        let place = number as usize % self.pollers.len().max(1);
        let poller = self.pollers.get(place).ok_or_else(|| {
            TransportError::quiesced(TransportErrorKind::Closed, "the device has no threads")
        })?;
        let limits = self.device.limits();
        let depths = Depths {
            sends: sends.min(limits.max_work_requests),
            receives: RECEIVES.min(limits.max_work_requests),
            ranges: options.ranges_per_request.min(limits.max_ranges).max(1),
            inline_bytes: options.inline_bytes,
        };
        // Every work request may complete, when all of them are flushed.
        let entries = (depths.sends + depths.receives + 1).min(limits.max_completions);
        let completions = CompletionQueue::new(poller.channel(), entries, number)?;
        let pair = QueuePair::new(&self.domain, completions, depths, self.port)?;
        Ok((number, pair, Arc::clone(poller)))
    }

    /// The registration of a region with this device, made when it is first needed. A region that
    /// is being deregistered gets none.
    pub(crate) fn register(&self, region: &Region) -> Result<Arc<Registration>, TransportError> {
        // Until the registration is among those that `forget` finds.
        let _guard = region.enter()?;
        self.register_for_job(region)
    }

    /// As [`Rail::register`], for a job that moves bytes of the region. It is inside already, so
    /// that whoever deregisters the region waits for its end, and lets it have what it needs.
    pub(crate) fn register_for_job(
        &self,
        region: &Region,
    ) -> Result<Arc<Registration>, TransportError> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = regions.get(&region.id()) {
            return Ok(Arc::clone(found));
        }
        let registered = Arc::new(Registration::new(&self.domain, region, &self.options)?);
        regions.insert(region.id(), Arc::clone(&registered));
        Ok(registered)
    }

    /// The registration, if there is one.
    pub(crate) fn registered(&self, region: u32) -> Option<Arc<Registration>> {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.get(&region).cloned()
    }

    /// Ends the device's access to a region, and a peer's. False: work that is posted still names it.
    fn forget(&self, region: u32) -> bool {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(registered) = regions.remove(&region) else {
            return true;
        };
        match registered.end() {
            Ok(()) => true,
            Err(in_use) => {
                regions.insert(region, in_use);
                false
            }
        }
    }

    pub(crate) fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_failure(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// A queue pair that failed was made again on another rail.
    pub(crate) fn count_left(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    /// Something happened to the device.
    pub(crate) fn heard(&self, event: AsyncEvent) {
        let device = self.device.name();
        match event {
            AsyncEvent::PortDown(port) if port == u32::from(self.port) => {
                self.is_up.store(false, Ordering::Release);
                tracing::warn!(device, port, "a network port is down");
            }
            AsyncEvent::PortUp(port) if port == u32::from(self.port) => {
                self.is_up.store(true, Ordering::Release);
                tracing::info!(device, port, "a network port is up");
            }
            AsyncEvent::DeviceFatal | AsyncEvent::CompletionQueueError => {
                self.is_dead.store(true, Ordering::Release);
                tracing::error!(device, ?event, "a network device failed");
                let reason = format!("network device {device} failed ({event:?})");
                let error = TransportError::quiesced(TransportErrorKind::Io, reason);
                for endpoint in self.endpoints() {
                    endpoint.fail(&error);
                }
            }
            AsyncEvent::QueuePairFatal(number) => {
                let reason = format!("{device} gave queue pair {number} up");
                let error = TransportError::quiesced(TransportErrorKind::Io, reason);
                for endpoint in self.endpoints() {
                    if endpoint.queue_pair_number() == Some(number) {
                        endpoint.fail(&error);
                    }
                }
            }
            _ => tracing::debug!(device, ?event, "event of a network device"),
        }
    }

    fn endpoints(&self) -> Vec<Arc<Endpoint>> {
        let pollers = self.pollers.iter();
        pollers.flat_map(|poller| poller.endpoints()).collect()
    }

    fn end(&self) {
        self.pollers.iter().for_each(|poller| poller.end());
    }
}

/// An engine's rails, and what its peers have told it over them.
pub(crate) struct Rails {
    rails: Vec<Arc<Rail>>,
    pub(crate) options: RdmaOptions,
    pub(crate) notifications: Arc<Notifications>,
    next: AtomicUsize,
    affinity: Affinity,
    /// Names and NUMA nodes of the devices.
    nodes: Vec<(String, Option<u32>)>,
    own_node_opt: Option<u32>,
}

impl Rails {
    /// Opens the devices that the options choose.
    pub(crate) fn open(options: &RdmaOptions) -> Result<Self, TransportError> {
        let present = rdma_devices()?;
        let used = options.devices.among(&present);
        let none =
            |what: String| TransportError::quiesced(TransportErrorKind::NoCommonTransport, what);
        if used.is_empty() {
            return Err(none(format!(
                "none of the rdma devices {} is in \"{}\"",
                present.join(", "),
                options.devices
            )));
        }
        let mut rails = Vec::new();
        let mut refused = Vec::new();
        for name in &used {
            match Rail::open(name, rails.len(), options) {
                Ok(rail) => rails.push(rail),
                Err(error) => {
                    tracing::warn!(device = name, %error, "an rdma device is not used");
                    refused.push(format!("{name}: {error}"));
                }
            }
        }
        if rails.is_empty() {
            return Err(none(refused.join("; ")));
        }
        let nodes = rails.iter().map(|rail| rail.device.name());
        let nodes = nodes.map(|name| (name.to_owned(), node_of(name))).collect();
        Ok(Self {
            affinity: Affinity::default(),
            nodes,
            own_node_opt: own_node(),
            rails,
            options: options.clone(),
            notifications: Arc::default(),
            next: AtomicUsize::new(0),
        })
    }

    /// A number for a session, so that sessions begin with different rails.
    pub(crate) fn next_number(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// An engine has memory there.
    pub(crate) fn note_memory(&self, location: Location) {
        let map = &self.options.nic_map;
        self.affinity
            .note(map, location, &self.nodes, self.own_node_opt);
    }

    /// The rail that is `number`th among those that are up and near to the engine's memory; among
    /// all that are up, if no near one is.
    pub(crate) fn pick(&self, number: usize) -> Result<&Arc<Rail>, TransportError> {
        let mut up: Vec<_> = self.rails.iter().filter(|rail| rail.is_up()).collect();
        if up.iter().any(|rail| self.affinity.is_near(rail.place)) {
            up.retain(|rail| self.affinity.is_near(rail.place));
        }
        let place = number.checked_rem(up.len());
        place
            .and_then(|place| up.get(place).copied())
            .ok_or_else(|| {
                let names = self.rails.iter().map(|rail| rail.device.name());
                let names: Vec<_> = names.collect();
                TransportError::quiesced(
                    TransportErrorKind::Unreachable,
                    format!("no rdma port is up ({})", names.join(", ")),
                )
            })
    }

    /// The rail that a peer asked for, if there is such a one; any other else.
    pub(crate) fn asked_for(&self, rail: i32) -> Result<&Arc<Rail>, TransportError> {
        let asked = usize::try_from(rail).ok();
        let asked = asked.and_then(|place| self.rails.get(place));
        match asked.filter(|rail| rail.is_up()) {
            Some(rail) => Ok(rail),
            None => self.pick(self.next_number()),
        }
    }

    /// The rail at a place.
    pub(crate) fn at(&self, place: i32) -> Option<&Arc<Rail>> {
        self.rails.get(usize::try_from(place).ok()?)
    }

    /// Registers a region with every device.
    pub(crate) fn register(&self, region: &Region) -> Result<(), TransportError> {
        let mut rails = self.rails.iter();
        rails.try_for_each(|rail| rail.register(region).map(|_| ()))
    }

    /// Ends every device's access to a region; false while posted work still names it.
    pub(crate) fn forget(&self, region: u32) -> bool {
        let still_used = self.rails.iter().filter(|rail| !rail.forget(region));
        still_used.count() == 0
    }

    /// Destroys the queue pairs that peers opened.
    pub(crate) fn end_accepted(&self) {
        let endpoints = self.rails.iter().flat_map(|rail| rail.endpoints());
        let accepted = endpoints.filter(|endpoint| endpoint.is_accepted());
        accepted.for_each(|endpoint| endpoint.destroy());
    }

    /// What each has done.
    pub(crate) fn reports(&self) -> Vec<RailReport> {
        let report = |rail: &Arc<Rail>| RailReport {
            device: rail.device.name().to_owned(),
            is_up: rail.is_up(),
            bytes: rail.bytes.load(Ordering::Relaxed),
            failures: rail.failures.load(Ordering::Relaxed),
            left: rail.left.load(Ordering::Relaxed),
        };
        self.rails.iter().map(report).collect()
    }

    /// Ends the threads.
    pub(crate) fn end(&self) {
        self.rails.iter().for_each(|rail| rail.end());
    }
}

impl Drop for Rails {
    fn drop(&mut self) {
        self.end();
    }
}
