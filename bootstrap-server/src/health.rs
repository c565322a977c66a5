//! `/v1/health/live` and `/v1/health/ready`, for whoever restarts this process or sends traffic to
//! it. What decodes ask is an engine's own `/health`.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use actix_web::web::{self, Data};
use serde_json::json;

use crate::fleet::Fleet;
use crate::writer::STORE_READ_ONLY;

pub(crate) fn configure(config: &mut web::ServiceConfig) {
    config
        .route("/v1/health/live", web::get().to(live))
        .route("/v1/health/ready", web::get().to(ready));
}

async fn live() -> HttpResponse {
    HttpResponse::Ok().json(json!({ "live": true }))
}

/// 503 when changes cannot be made durable: what is registered is still served then. An engine
/// whose ranks do not answer is named, but another process in this one's place would not help it.
async fn ready(fleet: Data<Fleet>) -> HttpResponse {
    let store = fleet.registrations.trouble();
    let problems: Vec<_> = store
        .iter()
        .map(|message| json!({ "code": STORE_READ_ONLY, "message": message }))
        .collect();
    let state = fleet.registrations.state();
    let engines = state.namespaces.keys().filter_map(|namespace| {
        let message = fleet.unhealthy(namespace)?;
        Some(json!({ "namespace": namespace, "message": message }))
    });
    let status = if problems.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    HttpResponse::build(status).json(json!({
        "ready": problems.is_empty(),
        "problems": problems,
        "warnings": fleet.guard.troubles(),
        "engines": engines.collect::<Vec<_>>(),
    }))
}
