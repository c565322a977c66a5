//! `/v1/health/live` and `/v1/health/ready`, for whoever restarts this process or sends traffic to
//! it. What decodes ask is an engine's own `/health`.

use actix_web::HttpResponse;
use actix_web::http::{Method, StatusCode};
use actix_web::web::{self, Data};

use crate::admin::resource;
use crate::api;
use crate::fleet::Fleet;
use crate::writer::STORE_READ_ONLY;

pub(crate) fn configure(config: &mut web::ServiceConfig) {
    config
        .service(resource("/v1/health/live", [(Method::GET, web::to(live))]))
        .service(resource(
            "/v1/health/ready",
            [(Method::GET, web::to(ready))],
        ));
}

/// Whether the process runs.
#[utoipa::path(get, path = "/v1/health/live", tag = "health", security(()), responses((status = 200, description = "it does", body = api::Live)))]
pub(crate) async fn live() -> HttpResponse {
    HttpResponse::Ok().json(api::Live { live: true })
}

/// Whether changes can be made.
///
/// 503 when changes cannot be made durable: what is registered is still served then. An engine
/// whose ranks do not answer is named, but another process in this one's place would not help it.
#[utoipa::path(get, path = "/v1/health/ready", tag = "health", security(()), responses((status = 200, description = "they can", body = api::Readiness), (status = 503, description = "they cannot", body = api::Readiness)))]
pub(crate) async fn ready(fleet: Data<Fleet>) -> HttpResponse {
    let store = fleet.registrations.trouble();
    let problems: Vec<api::Problem> = store
        .into_iter()
        .map(|message| api::Problem {
            code: STORE_READ_ONLY.to_owned(),
            message,
        })
        .collect();
    let state = fleet.registrations.state();
    let engines = state.namespaces.keys().filter_map(|namespace| {
        Some(api::EngineProblem {
            namespace: namespace.clone(),
            message: fleet.unhealthy(namespace)?,
        })
    });
    let status = if problems.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    HttpResponse::build(status).json(api::Readiness {
        ready: problems.is_empty(),
        problems,
        warnings: fleet.guard.troubles(),
        engines: engines.collect(),
    })
}
