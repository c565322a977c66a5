//! The HTTP API on the Unix socket, and metrics and health on a TCP port.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actix_web::dev::Server;
use actix_web::http::{KeepAlive, StatusCode};
use actix_web::web::{Bytes, Data, Json, JsonConfig, Path, PathConfig, Query, QueryConfig};
use actix_web::{App, HttpResponse, HttpServer, ResponseError, web};
use anyhow::{Context, Result};
use prometheus::{Encoder, TextEncoder};
use serde_json::json;

use crate::api::{AbortRoom, Announce, Chunk, Drain, Drained, OpenRoom, RoomQuery, RoomView};
use crate::error::ApiError;
use crate::rank::RankHandle;
use crate::service::Service;

/// Bytes of one body at most: a million indices take some 8 MB.
const MAX_BODY_BYTES: usize = 32 << 20;
/// A long poll answers at the latest after this time, unless it asks for another.
const DEFAULT_POLL: Duration = Duration::from_secs(30);
const MAX_POLL: Duration = Duration::from_secs(300);
/// Handlers never block, so few threads serve many engines.
const WORKERS: usize = 2;
const SHUTDOWN_SECONDS: u64 = 1;
/// A rank that has not answered a question within this time is held up by something.
const ANSWER_BOUND: Duration = Duration::from_secs(2);
/// Time for a new connection's first request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status_code()).json(self.body())
    }
}

type Answer = Result<Json<RoomView>, ApiError>;

/// The whole API, on a Unix socket.
pub(super) fn api_server(service: Arc<Service>, listener: UnixListener) -> Result<Server> {
    let data = Data::from(service);
    let bad_request = |what: &'static str, error: String| {
        ApiError::new(400, "bad_request", format!("{what}: {error}"))
    };
    let server =
        HttpServer::new(move || {
            App::new()
                .app_data(data.clone())
                .app_data(JsonConfig::default().limit(MAX_BODY_BYTES).error_handler(
                    move |error, _| bad_request("the body", error.to_string()).into(),
                ))
                .app_data(QueryConfig::default().error_handler(move |error, _| {
                    bad_request("the query", error.to_string()).into()
                }))
                .app_data(PathConfig::default().error_handler(move |error, _| {
                    bad_request("the path", error.to_string()).into()
                }))
                .configure(shared_routes)
                .route("/v1/drain", web::post().to(drain))
                .route("/v1/ranks", web::get().to(ranks))
                .route("/v1/ranks/{rank}", web::get().to(rank))
                .route("/v1/ranks/{rank}/drain", web::post().to(drain_rank))
                .route("/v1/ranks/{rank}/rooms", web::post().to(open))
                .route("/v1/ranks/{rank}/rooms/{room}", web::get().to(room))
                .route("/v1/ranks/{rank}/rooms/{room}", web::delete().to(clear))
                .route(
                    "/v1/ranks/{rank}/rooms/{room}/announce",
                    web::post().to(announce),
                )
                .route(
                    "/v1/ranks/{rank}/rooms/{room}/prefill-complete",
                    web::post().to(prefill_complete),
                )
                .route(
                    "/v1/ranks/{rank}/rooms/{room}/chunks",
                    web::post().to(chunk),
                )
                .route("/v1/ranks/{rank}/rooms/{room}/abort", web::post().to(abort))
                .default_service(web::to(unknown_route))
        })
        .workers(WORKERS)
        // An engine keeps its connections, and must not find one closed just when it writes.
        .keep_alive(KeepAlive::Os)
        .client_request_timeout(REQUEST_TIMEOUT)
        .shutdown_timeout(SHUTDOWN_SECONDS)
        .disable_signals()
        .listen_uds(listener)
        .context("serving the api socket")?;
    Ok(server.run())
}

/// Metrics and health, on a TCP port.
pub(super) fn metrics_server(service: Arc<Service>, listener: TcpListener) -> Result<Server> {
    let data = Data::from(service);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(data.clone())
            .configure(shared_routes)
            .default_service(web::to(unknown_route))
    })
    .workers(1)
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .disable_signals()
    .listen(listener)
    .context("serving the metrics port")?;
    Ok(server.run())
}

fn shared_routes(config: &mut web::ServiceConfig) {
    config
        .route("/metrics", web::get().to(metrics))
        .route("/health", web::get().to(health));
}

async fn unknown_route(request: actix_web::HttpRequest) -> HttpResponse {
    let message = format!("there is no {} {}", request.method(), request.path());
    ApiError::new(404, "unknown_route", message).error_response()
}

async fn metrics(service: Data<Service>) -> Result<HttpResponse, ApiError> {
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    encoder
        .encode(&service.registry.gather(), &mut text)
        .map_err(|error| ApiError::new(500, "metrics", error.to_string()))?;
    Ok(HttpResponse::Ok()
        .content_type(encoder.format_type())
        .body(text))
}

/// Healthy while every rank's actor runs, hears and gets round to what it is asked, and engines can
/// attach: the control path counts, not the peers.
async fn health(service: Data<Service>) -> HttpResponse {
    let ranks = service.ranks();
    let ill = Ill::among(&ranks).await;
    let is_accepting = service.is_accepting.load(Ordering::Acquire);
    let body = json!({
        "healthy": ill.is_nobody() && is_accepting && service.is_open(),
        "ranks": ranks.len(),
        "dead_ranks": ill.dead,
        "deaf_ranks": ill.deaf,
        "stuck_ranks": ill.stuck,
        "accepts_engines": is_accepting,
        "draining": service.is_draining(),
        "shutting_down": service.is_ending(),
    });
    let healthy = body.get("healthy").and_then(serde_json::Value::as_bool) == Some(true);
    if healthy {
        HttpResponse::Ok().json(body)
    } else {
        HttpResponse::ServiceUnavailable().json(body)
    }
}

/// How long a drain may take.
fn drain_timeout(service: &Service, body: &Bytes) -> Result<Duration, ApiError> {
    let drain = match body.is_empty() {
        true => Drain::default(),
        false => serde_json::from_slice(body)
            .map_err(|error| ApiError::new(400, "bad_request", format!("the body: {error}")))?,
    };
    let asked_opt = drain.timeout_s.map(u64::from);
    let timeout_s = asked_opt.unwrap_or(service.config.drain_timeout);
    Ok(Duration::from_secs(timeout_s))
}

/// Lets one rank finish its rooms, and ends it; its engine may attach again, in either role.
async fn drain_rank(
    service: Data<Service>,
    path: Path<u32>,
    body: Bytes,
) -> Result<Json<Drained>, ApiError> {
    let rank = service.rank(*path)?;
    let timeout = drain_timeout(&service, &body)?;
    // By itself, so that a rank that drains ends even if who asked does not wait for it.
    let drained = actix_web::rt::spawn(async move {
        let reason = "this rank drains, it takes no new rooms";
        let unfinished = rank.drain(reason, timeout).await;
        rank.stop("the rank was drained").await;
        Drained { unfinished }
    });
    let drained = drained.await.map_err(|error| {
        ApiError::new(
            500,
            "drain_failed",
            format!("the drain ended early: {error}"),
        )
    })?;
    Ok(Json(drained))
}

/// Asks the process to finish its rooms and to end, as a signal does.
async fn drain(service: Data<Service>, body: Bytes) -> Result<HttpResponse, ApiError> {
    let timeout = drain_timeout(&service, &body)?;
    let timeout_s = timeout.as_secs();
    // The first to ask says how long; a signal cuts it short.
    service.drain_asked.send_if_modified(|asked| {
        let is_first = asked.is_none();
        asked.get_or_insert(timeout);
        is_first
    });
    let body = json!({ "draining": true, "timeout_s": timeout_s });
    Ok(HttpResponse::Accepted().json(body))
}

/// Ranks that something is wrong with, by their numbers.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Ill {
    /// No actor runs: between a panic and its restart, or for good.
    pub dead: Vec<u32>,
    /// They hear their peers no more.
    pub deaf: Vec<u32>,
    /// Something holds their threads up.
    pub stuck: Vec<u32>,
}

impl Ill {
    pub(crate) async fn among(ranks: &[(u32, RankHandle)]) -> Self {
        let mut ill = Self::default();
        let asked = ranks.iter().filter(|(_, rank)| rank.is_alive());
        let asked = asked
            .map(|(number, rank)| async { (*number, rank.answers_within(ANSWER_BOUND).await) });
        let answered = futures::future::join_all(asked).await;
        let stuck = answered
            .into_iter()
            .filter(|(_, has_answered)| !has_answered);
        ill.stuck.extend(stuck.map(|(number, _)| number));
        for (number, rank) in ranks {
            if !rank.is_alive() {
                ill.dead.push(*number);
            }
            if rank.is_deaf() {
                ill.deaf.push(*number);
            }
        }
        // One that ended meanwhile is dead, and no more.
        ill.stuck.retain(|number| !ill.dead.contains(number));
        ill
    }

    pub(crate) fn is_nobody(&self) -> bool {
        *self == Self::default()
    }
}

async fn ranks(service: Data<Service>) -> HttpResponse {
    let mut listed = Vec::new();
    for (number, rank) in service.ranks() {
        // A rank that has just ended is not listed.
        if let Ok(snapshot) = rank.observe().await {
            listed.push(json!({ "rank": number, "state": snapshot }));
        }
    }
    HttpResponse::Ok().json(json!({ "ranks": listed }))
}

async fn rank(service: Data<Service>, path: Path<u32>) -> Result<HttpResponse, ApiError> {
    let number = path.into_inner();
    let snapshot = service.rank(number)?.observe().await?;
    Ok(HttpResponse::Ok().json(json!({ "rank": number, "state": snapshot })))
}

async fn open(service: Data<Service>, path: Path<u32>, body: Json<OpenRoom>) -> Answer {
    if service.is_ending() {
        let message = "the service is shutting down; use another";
        return Err(ApiError::new(503, "shutting_down", message));
    }
    if service.is_draining() {
        let message = "the service drains, it takes no new rooms; use another";
        return Err(ApiError::new(503, "draining", message));
    }
    service.rank(*path)?.open(body.into_inner()).await.map(Json)
}

async fn announce(service: Data<Service>, path: Path<(u32, u64)>, body: Json<Announce>) -> Answer {
    let (rank, room) = path.into_inner();
    service
        .rank(rank)?
        .announce(room, body.into_inner())
        .await
        .map(Json)
}

async fn prefill_complete(service: Data<Service>, path: Path<(u32, u64)>) -> Answer {
    let (rank, room) = path.into_inner();
    service.rank(rank)?.prefill_complete(room).await.map(Json)
}

async fn chunk(service: Data<Service>, path: Path<(u32, u64)>, body: Json<Chunk>) -> Answer {
    let (rank, room) = path.into_inner();
    service
        .rank(rank)?
        .send_chunk(room, body.into_inner())
        .await
        .map(Json)
}

async fn room(service: Data<Service>, path: Path<(u32, u64)>, query: Query<RoomQuery>) -> Answer {
    let (rank, room) = path.into_inner();
    let timeout = query
        .timeout_ms
        .map_or(DEFAULT_POLL, Duration::from_millis)
        .min(MAX_POLL);
    service
        .rank(rank)?
        .wait(room, query.wait_for, timeout)
        .await
        .map(Json)
}

async fn abort(service: Data<Service>, path: Path<(u32, u64)>, body: Json<AbortRoom>) -> Answer {
    let (rank, room) = path.into_inner();
    service
        .rank(rank)?
        .abort(room, body.into_inner().reason)
        .await
        .map(Json)
}

async fn clear(service: Data<Service>, path: Path<(u32, u64)>) -> Result<HttpResponse, ApiError> {
    let (rank, room) = path.into_inner();
    service.rank(rank)?.clear(room).await?;
    Ok(HttpResponse::NoContent().finish())
}
