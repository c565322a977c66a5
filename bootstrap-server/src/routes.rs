//! The routes together, and what every request passes through.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{StatusCode, Version, header};
use actix_web::middleware::Next;
use actix_web::web::{self, Data};
use actix_web::{Error, HttpResponse};
use common::metrics as names;
use prometheus::{Encoder, TextEncoder};

use crate::config::Config;
use crate::metrics::Metrics;
use crate::probe::{Place, Probes};
use crate::registry::RankId;
use crate::rooms::Rooms;
use crate::writer::{Registrations, now};
use crate::{admin, page, sglang};

/// Bytes of one body at most, as SGLang's server.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// Bytes of one header field at most, as SGLang's server.
const MAX_HEADER_BYTES: usize = 8190;
/// Time for a request, its body included: who sends a byte now and then is not waited for.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What handlers share.
#[derive(Debug)]
pub struct Server {
    /// Options.
    pub config: Config,
    /// The namespace of this port.
    pub namespace: String,
    /// The registrations.
    pub registrations: Registrations,
    /// What probes have found.
    pub probes: Probes,
    /// Counters.
    pub metrics: Metrics,
    rooms: Mutex<Rooms>,
}

impl Server {
    /// Joins the parts.
    pub fn new(
        config: Config,
        namespace: &str,
        registrations: Registrations,
        metrics: Metrics,
    ) -> Self {
        let rooms = Rooms::new(config.max_rooms, config.room_lifetime());
        Self {
            config,
            namespace: namespace.to_owned(),
            registrations,
            probes: Probes::default(),
            metrics,
            rooms: Mutex::new(rooms),
        }
    }

    /// The table of rooms; hold it shortly.
    pub fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the last probes found of each rank: whether it answers, or nothing yet.
    fn probed(&self) -> Vec<(RankId, Option<bool>)> {
        let state = self.registrations.state();
        let Some(space) = state.namespaces.get(&self.namespace) else {
            return Vec::new();
        };
        let probed = space.ranks.iter().map(|(id, rank)| {
            let place = Place::rank(&self.namespace, *id);
            let misses = self.config.probe_misses;
            (
                *id,
                self.probes.is_reachable(&place, &rank.instance(), misses),
            )
        });
        probed.collect()
    }

    /// Why `/health` is 503, if it is.
    pub fn unhealthy(&self) -> Option<String> {
        let probed = self.probed();
        let mut gone = probed
            .iter()
            .filter(|(_, reachable)| *reachable == Some(false));
        if let Some((first, _)) = gone.next() {
            let number = gone.count() + 1;
            return Some(format!(
                "{number} ranks do not answer, the first is {first}"
            ));
        }
        let state = self.registrations.state();
        let generation = state
            .namespaces
            .get(&self.namespace)?
            .generation_opt
            .as_ref()?;
        let age = now().saturating_sub(generation.began_at);
        let settles = generation.number > 1 && age < self.config.settle_seconds;
        settles.then(|| format!("generation {} began {age} s ago", generation.number))
    }

    /// Gauges are set when they are read.
    fn update_gauges(&self) {
        let labels = [self.namespace.as_str()];
        let state = self.registrations.state();
        let empty = crate::registry::Namespace::default();
        let space = state.namespaces.get(&self.namespace).unwrap_or(&empty);
        let set = |gauge: &prometheus::IntGaugeVec, value: usize| {
            gauge
                .with_label_values(&labels)
                .set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.metrics.ranks, space.ranks.len());
        set(&self.metrics.ranks_expected, space.expected());
        set(&self.metrics.registrations, space.registrations.len());
        let number = space
            .generation_opt
            .as_ref()
            .map_or(0, |generation| generation.number);
        set(
            &self.metrics.generation,
            usize::try_from(number).unwrap_or(usize::MAX),
        );
        let (rooms, evicted) = {
            let mut rooms = self.rooms();
            rooms.expire(Instant::now());
            (rooms.len(), rooms.evicted())
        };
        set(&self.metrics.rooms, rooms);
        let counter = self.metrics.rooms_evicted.with_label_values(&labels);
        counter.inc_by(evicted.saturating_sub(counter.get()));
        let probed = self.probed();
        for (name, wanted) in [
            ("reachable", Some(true)),
            ("unreachable", Some(false)),
            ("unprobed", None),
        ] {
            let number = probed.iter().filter(|(_, found)| *found == wanted).count();
            let gauge = self
                .metrics
                .ranks_probed
                .with_label_values(&[self.namespace.as_str(), name]);
            gauge.set(i64::try_from(number).unwrap_or(i64::MAX));
        }
        // A label set that has not moved yet is shown as 0, so that queries find it.
        self.metrics
            .generations
            .with_label_values(&labels)
            .inc_by(0);
        self.metrics
            .unknown_fields
            .with_label_values(&labels)
            .inc_by(0);
    }
}

/// All routes.
pub fn configure(config: &mut web::ServiceConfig) {
    config
        .app_data(web::PayloadConfig::new(MAX_BODY_BYTES))
        .service(web::resource("/route").to(sglang::route))
        .service(web::resource("/register_dp_rank").to(sglang::register_dp_rank))
        .service(web::resource("/query_dp_ranks").to(sglang::query_dp_ranks))
        .service(web::resource("/health").to(sglang::health))
        .route("/metrics", web::get().to(metrics))
        .route("/", web::get().to(page::page))
        .configure(admin::configure)
        .default_service(web::to(|| async {
            sglang::text(StatusCode::NOT_FOUND, "404: Not Found")
        }));
}

async fn metrics(server: Data<Server>) -> HttpResponse {
    server.update_gauges();
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    match encoder.encode(&server.metrics.registry.gather(), &mut text) {
        Ok(()) => HttpResponse::Ok()
            .content_type(encoder.format_type())
            .body(text),
        Err(error) => sglang::text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// Refuses what breaks HTTP's own rules, counts and times the rest.
///
/// # Errors
/// As the handlers.
pub async fn around(
    server: Data<Server>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let begun = Instant::now();
    let no_host =
        request.version() == Version::HTTP_11 && !request.headers().contains_key(header::HOST);
    let too_long = request
        .headers()
        .iter()
        .any(|(name, value)| name.as_str().len() + value.len() > MAX_HEADER_BYTES);
    let refusal = match (no_host, too_long) {
        (true, _) => Some("Missing 'Host' header in request."),
        (_, true) => Some("a header field is longer than 8190 bytes"),
        _ => None,
    };
    let response = match refusal {
        Some(reason) => {
            let refused = sglang::text(StatusCode::BAD_REQUEST, reason);
            request.into_response(refused).map_into_right_body()
        }
        None => match tokio::time::timeout(REQUEST_TIMEOUT, next.call(request)).await {
            Ok(answered) => answered?.map_into_left_body(),
            Err(_) => {
                let labels = [names::COMPONENT_UNKNOWN, "408"];
                server.metrics.requests.with_label_values(&labels).inc();
                let reason = "the request did not arrive and end in time";
                return Err(actix_web::error::ErrorRequestTimeout(reason));
            }
        },
    };
    let route = response
        .request()
        .match_pattern()
        .unwrap_or_else(|| names::COMPONENT_UNKNOWN.to_owned());
    let code = response.status().as_u16().to_string();
    server
        .metrics
        .requests
        .with_label_values(&[route.as_str(), code.as_str()])
        .inc();
    let seconds = server
        .metrics
        .request_seconds
        .with_label_values(&[route.as_str()]);
    seconds.observe(begun.elapsed().as_secs_f64());
    Ok(response)
}
