//! What rank actors report of themselves.

use std::time::Instant;

use actix_web::HttpResponse;
use actix_web::web::{Data, Json, Path, Query};
use common::wire::route::{MAX_REPORT_ITEMS, RankReport};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{Paging, next};
use crate::api::{self, EventKind};
use crate::error::ApiError;
use crate::fleet::{ByPort, Fleet};

/// Separates the two parts of a place in the list.
const SEPARATOR: char = '/';

/// Which reports are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReportFilter {
    /// Only reports of this engine.
    namespace: Option<String>,
}

/// Keeps a rank actor's report; on its engine's port.
#[utoipa::path(
    put, path = "/v1/reports/{engine_key}", tag = "ranks", params(("engine_key" = String, Path, description = "the io engine's key")), request_body = RankReport,
    responses((status = 204, description = "kept"), (status = 400, description = "bad body", body = api::ErrorBody), (status = 413, description = "a long body", body = api::ErrorBody), (status = 429, description = "too many reports", body = api::ErrorBody))
)]
pub(crate) async fn put(
    port: ByPort,
    path: Path<String>,
    report: Json<RankReport>,
) -> Result<HttpResponse, ApiError> {
    let longest = [
        report.peers.len(),
        report.components.len(),
        report.failures.len(),
    ];
    if longest.iter().any(|length| *length > MAX_REPORT_ITEMS) {
        let message = format!("a list of a report has at most {MAX_REPORT_ITEMS} items");
        return Err(ApiError::new(400, "bad_body", message));
    }
    let (fleet, namespace) = (&port.fleet, &port.namespace);
    let kept = fleet
        .reports
        .put(namespace, &path, report.into_inner(), Instant::now());
    let news_opt = kept.map_err(|_| {
        ApiError::new(
            429,
            "too_many_reports",
            "too many rank actors report to this server",
        )
    })?;
    if let Some(news) = news_opt {
        fleet
            .events
            .record(EventKind::Failure, Some(namespace), news);
    }
    Ok(HttpResponse::NoContent().finish())
}

/// Lists what rank actors reported last, by engine and key.
#[utoipa::path(
    get, path = "/v1/reports", tag = "engines", params(Paging, ReportFilter),
    responses((status = 200, description = "a page", body = api::ReportList), (status = 400, description = "bad query", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    paging: Query<Paging>,
    filter: Query<ReportFilter>,
) -> Result<HttpResponse, ApiError> {
    let limit = paging.limit()?;
    let after_opt = paging.after.as_deref().map(|after| {
        let (namespace, key) = after.split_once(SEPARATOR).unwrap_or((after, ""));
        (namespace.to_owned(), key.to_owned())
    });
    let reports = fleet.reports.after(
        after_opt,
        limit,
        filter.namespace.as_deref(),
        Instant::now(),
    );
    let next = next(&reports, limit, |report| {
        format!("{}{SEPARATOR}{}", report.namespace, report.engine_key)
    });
    Ok(HttpResponse::Ok().json(api::ReportList { reports, next }))
}
