//! The HTTP interface of an engine: what SGLang's router sends (`POST /generate`), and a check of
//! the idle pools for the driver.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::Server;
use actix_web::{App, HttpResponse, HttpServer, web};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;

use super::{Engine, Moved, Request, decode, prefill};
use crate::layout::Side;

/// Largest accepted body, in bytes.
const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// The driver is the only client and keeps its connections. One that ended just as the next request
/// came would fail it, and the machine may be too slow for any short time.
const KEEP_ALIVE: Duration = Duration::from_secs(3600);

/// Starts the server on a free port of 127.0.0.1.
pub fn serve(engine: Arc<Engine>) -> Result<(Server, u16)> {
    let data = web::Data::from(engine);
    let server = HttpServer::new(move || {
        App::new()
            .app_data(data.clone())
            .app_data(web::JsonConfig::default().limit(MAX_BODY_BYTES))
            .route("/health", web::get().to(HttpResponse::Ok))
            .route("/generate", web::post().to(generate))
            .route("/check", web::post().to(check))
    })
    .workers(1)
    .keep_alive(KEEP_ALIVE)
    .client_request_timeout(Duration::ZERO)
    .disable_signals()
    .bind((Ipv4Addr::LOCALHOST, 0))
    .context("binding the engine's http port")?;
    let port = server
        .addrs()
        .first()
        .context("the http server has no address")?
        .port();
    Ok((server.run(), port))
}

/// The part of the router's request that is used here; the router sends more.
#[derive(Debug, Deserialize)]
struct GenerateRequest {
    text: String,
    bootstrap_host: String,
    bootstrap_port: u16,
    bootstrap_room: u64,
}

async fn generate(engine: web::Data<Engine>, body: web::Json<GenerateRequest>) -> HttpResponse {
    match serve_request(&engine, &body).await {
        Ok(moved) => {
            let prompt_tokens = count_tokens(&body.text);
            HttpResponse::Ok().json(json!({
                "text": "",
                "meta_info": {
                    "id": body.bootstrap_room.to_string(),
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": 1,
                    "cached_tokens": 0,
                    "finish_reason": {"type": "length", "length": 1},
                    "moved": moved,
                }
            }))
        }
        Err(error) => failure(&error),
    }
}

async fn check(engine: web::Data<Engine>) -> HttpResponse {
    match engine.check_idle().await {
        Ok(checked) => HttpResponse::Ok().json(checked),
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> HttpResponse {
    let message = format!("{error:#}");
    tracing::error!(reason = %message, "request failed");
    HttpResponse::InternalServerError().json(json!({"error": {"message": message}}))
}

async fn serve_request(engine: &Engine, body: &GenerateRequest) -> Result<Vec<Moved>> {
    let tokens = count_tokens(&body.text);
    if tokens == 0 || tokens > engine.model.max_prompt_tokens {
        bail!(
            "the prompt has {tokens} tokens: 1 to {} fit",
            engine.model.max_prompt_tokens
        );
    }
    let bootstrap = format!("{}:{}", body.bootstrap_host, body.bootstrap_port);
    let request = Request {
        room: body.bootstrap_room,
        tokens,
    };
    match engine.side {
        Side::Prefill => {
            if bootstrap != engine.config.bootstrap {
                bail!(
                    "the router names bootstrap server {bootstrap}, but this prefill is registered at {}",
                    engine.config.bootstrap
                );
            }
            prefill::serve(engine, request).await
        }
        Side::Decode => decode::serve(engine, request, &bootstrap).await,
    }
}

/// The whole of this engine's tokeniser: a token is a word. Both sides count alike.
fn count_tokens(text: &str) -> u32 {
    u32::try_from(text.split_ascii_whitespace().count()).unwrap_or(u32::MAX)
}
