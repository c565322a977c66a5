//! The routes together, and what every request passes through.

use std::time::{Duration, Instant};

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{StatusCode, Version, header};
use actix_web::middleware::Next;
use actix_web::web::{self, Data};
use actix_web::{Error, HttpMessage, HttpRequest, HttpResponse};
use common::metrics as names;
use prometheus::{Encoder, TextEncoder};

use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::guard::audit::{Attempt, Reason};
use crate::guard::{Refusal, Who};
use crate::metrics::Metrics;
use crate::{admin, health, page, sglang};

/// Bytes of one body at most, as SGLang's server.
pub const MAX_BODY_BYTES: usize = 1 << 20;
/// Bytes of one header field at most, as SGLang's server.
const MAX_HEADER_BYTES: usize = 8190;
/// Time for a request, its body included: who sends a byte now and then is not waited for.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The routes of an engine's port: what its ranks and its decodes call.
pub fn configure_engine(config: &mut web::ServiceConfig) {
    config
        .app_data(web::PayloadConfig::new(MAX_BODY_BYTES))
        .service(
            web::resource("/route")
                .route(web::get().to(sglang::get_route))
                .route(web::put().to(sglang::put_route))
                .default_service(web::to(sglang::no_route)),
        )
        .service(web::resource("/register_dp_rank").to(sglang::register_dp_rank))
        .service(web::resource("/query_dp_ranks").to(sglang::query_dp_ranks))
        .service(web::resource("/health").to(sglang::health))
        .configure(admin::configure_engine)
        .default_service(web::to(not_found));
}

/// The routes of the admin port.
pub fn configure_admin(config: &mut web::ServiceConfig) {
    config
        .app_data(web::PayloadConfig::new(MAX_BODY_BYTES))
        .route("/metrics", web::get().to(metrics))
        .configure(health::configure)
        .configure(page::configure)
        .configure(admin::configure_admin)
        .default_service(web::to(admin::unknown_path));
}

async fn not_found() -> HttpResponse {
    sglang::text(StatusCode::NOT_FOUND, "404: Not Found")
}

async fn metrics(fleet: Data<Fleet>) -> HttpResponse {
    fleet.update_gauges();
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    match encoder.encode(&fleet.metrics.registry.gather(), &mut text) {
        Ok(()) => HttpResponse::Ok()
            .content_type(encoder.format_type())
            .body(text),
        Err(error) => sglang::text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

/// What breaks HTTP's own rules or our limits.
fn broken_rule(request: &ServiceRequest) -> Result<(), Refusal> {
    let no_host =
        request.version() == Version::HTTP_11 && !request.headers().contains_key(header::HOST);
    let too_long = request
        .headers()
        .iter()
        .any(|(name, value)| name.as_str().len() + value.len() > MAX_HEADER_BYTES);
    match (no_host, too_long) {
        (true, _) => Err(Refusal::broken("Missing 'Host' header in request.")),
        (_, true) => Err(Refusal::broken("a header field is longer than 8190 bytes")),
        _ => Ok(()),
    }
}

/// Refuses what must get no further, counts and times the rest, and tells the audit log of every
/// write that was refused.
///
/// # Errors
/// As the handlers.
pub async fn around(
    fleet: Data<Fleet>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let begun = Instant::now();
    let attempt_opt = Attempt::of(&request);
    let admitted = broken_rule(&request).and_then(|()| fleet.guard.admit(&request));
    let who_opt = attempt_opt.as_ref().map(|_| Who::of(request.request()));
    let response = match admitted {
        Err(refusal) => {
            let refused = refusal.response(&request);
            request.into_response(refused).map_into_right_body()
        }
        Ok(()) => match tokio::time::timeout(REQUEST_TIMEOUT, next.call(request)).await {
            Ok(answered) => answered?.map_into_left_body(),
            Err(_) => {
                let labels = [names::COMPONENT_UNKNOWN, "408"];
                fleet.metrics.requests.with_label_values(&labels).inc();
                let reason = "the request did not arrive and end in time";
                if let (Some(attempt), Some(who)) = (attempt_opt, who_opt) {
                    attempt.refused(&who, StatusCode::REQUEST_TIMEOUT, reason);
                }
                return Err(ApiError::new(408, "too_slow", reason).into());
            }
        },
    };
    let status = response.status();
    if let (Some(attempt), Some(who)) = (attempt_opt, who_opt)
        && !status.is_success()
    {
        attempt.refused(&who, status, &reason_of(&response));
    }
    count(&fleet.metrics, response.request(), status, begun.elapsed());
    Ok(response)
}

fn count(metrics: &Metrics, request: &HttpRequest, status: StatusCode, took: Duration) {
    if status == StatusCode::OK
        && let Some(succeeded) = metrics.succeeded(request.path())
    {
        succeeded.requests.inc();
        succeeded.seconds.observe(took.as_secs_f64());
        return;
    }
    let route = request
        .match_pattern()
        .unwrap_or_else(|| names::COMPONENT_UNKNOWN.to_owned());
    let labels = [route.as_str(), status.as_str()];
    metrics.requests.with_label_values(&labels).inc();
    let seconds = metrics.request_seconds.with_label_values(&labels[..1]);
    seconds.observe(took.as_secs_f64());
}

/// Why a request was refused: what its handler left, or the error that it returned.
fn reason_of<B>(response: &ServiceResponse<B>) -> String {
    let left_opt = response.request().extensions_mut().remove::<Reason>();
    let error_opt = response.response().error();
    left_opt
        .map(|left| left.0)
        .or_else(|| error_opt.map(ToString::to_string))
        .unwrap_or_default()
}
