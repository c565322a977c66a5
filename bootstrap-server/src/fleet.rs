//! What the process shares, and what belongs to one listening port.

use std::future::{Ready, ready};
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use actix_web::dev::Payload;
use actix_web::web::Data;
use actix_web::{Error, FromRequest, HttpRequest};

use crate::answers::{AnswerCache, Answers};
use crate::config::{Config, ProbeReadiness};
use crate::error::ApiError;
use crate::events::Events;
use crate::guard::Guard;
use crate::listener::{Connection, Connections};
use crate::metrics::Metrics;
use crate::probe::{Place, Probes};
use crate::registry::{Namespace, RankId};
use crate::reports::Reports;
use crate::rooms::Rooms;
use crate::writer::{Registrations, now};

/// All engines that this process serves.
#[derive(Debug)]
pub struct Fleet {
    /// Options.
    pub config: Config,
    /// The registrations of every engine, listening or not.
    pub registrations: Registrations,
    /// What probes have found.
    pub probes: Probes,
    /// Who may do what.
    pub guard: Guard,
    /// What happened.
    pub events: Arc<Events>,
    /// What rank actors report.
    pub reports: Reports,
    /// Counters.
    pub metrics: Metrics,
    /// Those of engines' ports.
    pub(crate) connections: Connections,
    ports: Vec<Arc<Port>>,
    /// Rooms of all ports.
    rooms: Arc<AtomicUsize>,
}

/// One listening port, which serves one engine: a namespace.
#[derive(Debug)]
pub struct Port {
    /// The engine's name.
    pub namespace: String,
    rooms: Mutex<Rooms>,
    answers: AnswerCache,
}

impl Port {
    /// The table of rooms; hold it shortly.
    pub fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fleet {
    /// Joins the parts. There is a port for each that the configuration names, in its order.
    pub(crate) fn new(
        config: Config,
        registrations: Registrations,
        guard: Guard,
        connections: Connections,
        events: Arc<Events>,
        metrics: Metrics,
    ) -> Self {
        let total = Arc::new(AtomicUsize::new(0));
        let ports = config.listen.iter().map(|listen| {
            let total = Arc::clone(&total);
            let rooms = Rooms::new(config.max_rooms, config.room_lifetime(), total);
            let namespace = listen.namespace.clone();
            let rooms = Mutex::new(rooms);
            Arc::new(Port {
                namespace,
                rooms,
                answers: AnswerCache::default(),
            })
        });
        Self {
            ports: ports.collect(),
            rooms: total,
            probes: Probes::new(
                config.allow_rank_cidr.clone(),
                config.probe_misses,
                Arc::clone(&events),
            ),
            config,
            registrations,
            guard,
            connections,
            events,
            reports: Reports::default(),
            metrics,
        }
    }

    /// The engines' ports, in the order of the configuration.
    pub fn ports(&self) -> &[Arc<Port>] {
        &self.ports
    }

    /// Keeps the rooms of all engines together within their bound: the oldest leave first,
    /// whosever they are.
    pub(crate) fn bound_rooms(&self) {
        while self.rooms.load(Ordering::Relaxed) > self.config.max_rooms_total {
            let ages = self.ports.iter().filter_map(|port| {
                let oldest = port.rooms().oldest()?;
                Some((oldest, port))
            });
            let Some((_, port)) = ages.min_by_key(|(oldest, _)| *oldest) else {
                return;
            };
            port.rooms().evict_oldest();
        }
    }

    /// Drops rooms that are too old.
    pub(crate) fn expire_rooms(&self) {
        let now = Instant::now();
        self.ports.iter().for_each(|port| port.rooms().expire(now));
    }

    /// The port of an engine, if this server has one for it.
    pub fn port(&self, namespace: &str) -> Option<&Port> {
        let found = self.ports.iter().find(|port| port.namespace == namespace);
        found.map(|port| &**port)
    }

    /// What the last probes found of each rank: whether it answers, or nothing yet.
    fn probed(&self, namespace: &str, space: &Namespace) -> Vec<(RankId, Option<bool>)> {
        let probed = space.ranks.iter().map(|(id, rank)| {
            let place = Place::rank(namespace, *id);
            let reachable_opt = self.probes.is_reachable(&place, &rank.instance());
            (*id, reachable_opt)
        });
        probed.collect()
    }

    /// Since when each of an engine's unreachable ranks has not answered, in seconds since 1970.
    pub fn unreachable_since(&self, namespace: &str, space: &Namespace) -> Vec<u64> {
        let since = space.ranks.iter().filter_map(|(id, rank)| {
            let place = Place::rank(namespace, *id);
            self.probes.unreachable_since(&place, &rank.instance())
        });
        since.collect()
    }

    /// Why an engine's `/health` is 503, if it is.
    pub fn unhealthy(&self, namespace: &str) -> Option<String> {
        let state = self.registrations.state();
        let space = state.namespaces.get(namespace)?;
        let probed = self.probed(namespace, space);
        let counts = self.config.probe_readiness == ProbeReadiness::Fail;
        let mut gone = probed
            .iter()
            .filter(|(_, reachable)| counts && *reachable == Some(false));
        if let Some((first, _)) = gone.next() {
            let number = gone.count() + 1;
            return Some(format!(
                "{number} ranks do not answer, the first is {first}"
            ));
        }
        let generation = space.generation_opt.as_ref()?;
        let age = now().saturating_sub(generation.began_at);
        let settles = generation.number > 1 && age < self.config.settle_seconds;
        settles.then(|| format!("generation {} began {age} s ago", generation.number))
    }

    /// Sets the gauges; they are read only then.
    pub(crate) fn update_gauges(&self) {
        let connections = i64::try_from(self.connections.number()).unwrap_or(i64::MAX);
        self.metrics.connections.set(connections);
        let state = self.registrations.state();
        for (namespace, space) in &state.namespaces {
            self.update_engine_gauges(namespace, space);
        }
        for port in self.ports() {
            if !state.namespaces.contains_key(&port.namespace) {
                self.update_engine_gauges(&port.namespace, &Namespace::default());
            }
            let (rooms, evicted) = {
                let mut rooms = port.rooms();
                rooms.expire(Instant::now());
                (rooms.len(), rooms.evicted())
            };
            let labels = [port.namespace.as_str()];
            set(&self.metrics.rooms, &labels, rooms);
            let counter = self.metrics.rooms_evicted.with_label_values(&labels);
            counter.inc_by(evicted.saturating_sub(counter.get()));
        }
    }

    fn update_engine_gauges(&self, namespace: &str, space: &Namespace) {
        let labels = [namespace];
        set(&self.metrics.ranks, &labels, space.ranks.len());
        set(&self.metrics.ranks_expected, &labels, space.expected());
        set(
            &self.metrics.registrations,
            &labels,
            space.registrations.len(),
        );
        let generation = space.generation_opt.as_ref();
        let number = generation.map_or(0, |generation| generation.number);
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        set(&self.metrics.generation, &labels, number);
        let probed = self.probed(namespace, space);
        for (name, wanted) in [
            ("reachable", Some(true)),
            ("unreachable", Some(false)),
            ("unprobed", None),
        ] {
            let number = probed.iter().filter(|(_, found)| *found == wanted).count();
            set(&self.metrics.ranks_probed, &[namespace, name], number);
        }
        let is_draining = space.draining_since_opt.is_some();
        set(&self.metrics.draining, &labels, usize::from(is_draining));
        let reports = self.reports.ages(namespace, Instant::now());
        set(&self.metrics.reports, &[namespace, "fresh"], reports.fresh);
        set(&self.metrics.reports, &[namespace, "stale"], reports.stale);
        // A label set that has not moved yet is shown as 0, so that queries find it.
        let counters = [&self.metrics.generations, &self.metrics.unknown_fields];
        for counter in counters {
            counter.with_label_values(&labels).inc_by(0);
        }
    }
}

fn set(gauge: &prometheus::IntGaugeVec, labels: &[&str], value: usize) {
    gauge
        .with_label_values(labels)
        .set(i64::try_from(value).unwrap_or(i64::MAX));
}

/// In a handler's arguments: the port that a request came in by, and the fleet.
#[derive(Clone, Debug)]
pub struct ByPort {
    /// The whole process.
    pub fleet: Data<Fleet>,
    port: Arc<Port>,
}

impl ByPort {
    /// Whether the engine takes no new rooms.
    pub fn is_draining(&self) -> bool {
        let state = self.fleet.registrations.state();
        let space_opt = state.namespaces.get(&self.port.namespace);
        space_opt.is_some_and(|space| space.draining_since_opt.is_some())
    }
}

impl Deref for ByPort {
    type Target = Port;

    fn deref(&self) -> &Port {
        &self.port
    }
}

impl ByPort {
    /// What lookups are answered now; nothing while no rank is registered.
    pub(crate) fn answers(&self) -> Option<Arc<Answers>> {
        let state = self.fleet.registrations.state();
        let space = state.namespaces.get(&self.namespace)?;
        Some(self.port.answers.of(space))
    }
}

impl FromRequest for ByPort {
    type Error = Error;
    type Future = Ready<Result<Self, Error>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let fleet_opt = request.app_data::<Data<Fleet>>();
        let found = fleet_opt.and_then(|fleet| {
            let port = request.conn_data::<Connection>()?.port_opt.as_ref()?;
            Some(Self {
                fleet: fleet.clone(),
                port: Arc::clone(port),
            })
        });
        let unknown = || ApiError::new(500, "unknown_port", "this port belongs to no engine");
        ready(found.ok_or_else(|| unknown().into()))
    }
}
