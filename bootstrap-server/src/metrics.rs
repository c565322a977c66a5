//! What the server counts. Names and labels are `common::metrics`'.

use std::sync::Arc;

use common::metrics as names;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use crate::listener::REFUSED;

/// The counters; clones share them.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Metrics {
    pub registry: Registry,
    pub requests: IntCounterVec,
    succeeded: Arc<[(&'static str, Succeeded)]>,
    pub request_seconds: HistogramVec,
    pub connections: IntGauge,
    pub connections_refused: IntCounterVec,
    pub ranks: IntGaugeVec,
    pub ranks_expected: IntGaugeVec,
    pub generation: IntGaugeVec,
    pub generations: IntCounterVec,
    pub registrations: IntGaugeVec,
    pub rooms: IntGaugeVec,
    pub rooms_evicted: IntCounterVec,
    pub ranks_probed: IntGaugeVec,
    pub reports: IntGaugeVec,
    pub draining: IntGaugeVec,
    pub events: IntCounterVec,
    pub unknown_fields: IntCounterVec,
    pub store_seconds: Histogram,
    pub store_read_only: IntGauge,
    pub store_failures: IntCounter,
}

/// What calls of one route that succeed move; its labels are resolved once.
#[derive(Clone, Debug)]
pub(crate) struct Succeeded {
    pub(crate) requests: IntCounter,
    pub(crate) seconds: Histogram,
}

/// What engines call for each request.
const BUSY_ROUTES: [&str; 4] = ["/route", "/query_dp_ranks", "/register_dp_rank", "/health"];

impl Metrics {
    pub(crate) fn succeeded(&self, path: &str) -> Option<&Succeeded> {
        let mut routes = self.succeeded.iter();
        routes.find_map(|(route, succeeded)| (*route == path).then_some(succeeded))
    }

    /// Makes and registers everything.
    ///
    /// # Errors
    /// When a name is registered already.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let options = |name: &str, help: &str| {
            HistogramOpts::new(name, help).buckets(names::DURATION_BUCKETS.to_vec())
        };
        let request_seconds = HistogramVec::new(
            options(names::BOOTSTRAP_REQUEST_SECONDS, "time to answer a request"),
            &[names::LABEL_ROUTE],
        )?;
        registry.register(Box::new(request_seconds.clone()))?;
        let store_seconds = Histogram::with_opts(options(
            names::BOOTSTRAP_STORE_SECONDS,
            "time to make one group of changes durable",
        ))?;
        registry.register(Box::new(store_seconds.clone()))?;
        let store_read_only = IntGauge::new(
            names::BOOTSTRAP_STORE_READ_ONLY,
            "1 while changes are refused because the store fails",
        )?;
        registry.register(Box::new(store_read_only.clone()))?;
        let store_failures = IntCounter::new(
            names::BOOTSTRAP_STORE_FAILURES,
            "failed attempts to make something durable",
        )?;
        registry.register(Box::new(store_failures.clone()))?;
        let connections = IntGauge::new(
            names::BOOTSTRAP_CONNECTIONS,
            "open connections of engines' ports",
        )?;
        registry.register(Box::new(connections.clone()))?;
        let connections_refused = counter(
            names::BOOTSTRAP_CONNECTIONS_REFUSED,
            "connections that were closed before any request",
            &[names::LABEL_REASON],
        )?;
        for reason in REFUSED {
            connections_refused.with_label_values(&[reason]).inc_by(0);
        }
        let namespace = [names::LABEL_NAMESPACE];
        let requests = counter(
            names::BOOTSTRAP_REQUESTS,
            "http requests",
            &[names::LABEL_ROUTE, names::LABEL_CODE],
        )?;
        let succeeded = BUSY_ROUTES.map(|route| {
            let succeeded = Succeeded {
                requests: requests.with_label_values(&[route, "200"]),
                seconds: request_seconds.with_label_values(&[route]),
            };
            (route, succeeded)
        });
        Ok(Self {
            requests,
            succeeded: succeeded.into(),
            request_seconds,
            connections,
            connections_refused,
            ranks: gauge(
                names::BOOTSTRAP_RANKS,
                "registered prefill ranks",
                &namespace,
            )?,
            ranks_expected: gauge(
                names::BOOTSTRAP_RANKS_EXPECTED,
                "ranks of a complete engine",
                &namespace,
            )?,
            generation: gauge(
                names::BOOTSTRAP_GENERATION,
                "the engine's generation",
                &namespace,
            )?,
            generations: counter(
                names::BOOTSTRAP_GENERATIONS,
                "generations that replaced another",
                &namespace,
            )?,
            registrations: gauge(
                names::BOOTSTRAP_REGISTRATIONS,
                "registrations of io engines",
                &namespace,
            )?,
            rooms: gauge(names::BOOTSTRAP_ROOMS, "rooms with a dp rank", &namespace)?,
            rooms_evicted: counter(
                names::BOOTSTRAP_ROOMS_EVICTED,
                "rooms that left before their time",
                &namespace,
            )?,
            ranks_probed: gauge(
                names::BOOTSTRAP_RANKS_PROBED,
                "ranks by what the last probes found",
                &[names::LABEL_NAMESPACE, names::LABEL_STATE],
            )?,
            reports: gauge(
                names::BOOTSTRAP_REPORTS,
                "rank actors by the age of their last report",
                &[names::LABEL_NAMESPACE, names::LABEL_STATE],
            )?,
            draining: gauge(
                names::BOOTSTRAP_DRAINING,
                "1 while the engine takes no new rooms",
                &namespace,
            )?,
            events: counter(
                names::BOOTSTRAP_EVENTS,
                "what happened, by kind",
                &[names::LABEL_KIND],
            )?,
            unknown_fields: counter(
                names::BOOTSTRAP_UNKNOWN_FIELDS,
                "fields of registrations that no known release sends",
                &namespace,
            )?,
            store_seconds,
            store_read_only,
            store_failures,
            registry,
        })
    }
}
