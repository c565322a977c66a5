//! The bootstrap server's process.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use actix_web::middleware::from_fn;
use actix_web::web::Data;
use actix_web::{App, HttpServer};
use anyhow::{Context, Result};
use bootstrap_server::config::{Config, LogFormat};
use bootstrap_server::metrics::Metrics;
use bootstrap_server::routes::{self, Server};
use bootstrap_server::store::{MemoryStore, SledStore, Store};
use bootstrap_server::writer::Registrations;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// One port, one namespace.
const NAMESPACE: &str = "default";
/// Handlers never block.
const WORKERS: usize = 2;
/// Time for a client to send its request's head.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that are no HTTP are a client's mistake; actix-http would log each as an error.
const DEFAULT_LOG_FILTER: &str = "info,actix_http::h1::dispatcher=off";
const SHUTDOWN_SECONDS: u64 = 1;
const MAX_CONNECTIONS: usize = 10_000;

fn main() -> ExitCode {
    let config = Config::parse();
    let filter =
        EnvFilter::try_from_env("FERRY_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_LOG_FILTER));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Pretty => logs.with_ansi(false).init(),
        LogFormat::Json => logs.json().init(),
    }
    match actix_web::rt::System::new().block_on(run(config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(config: Config) -> Result<()> {
    let listener = std::net::TcpListener::bind(config.listen)
        .with_context(|| format!("binding {}", config.listen))?;
    let address = listener.local_addr()?;
    let store: Box<dyn Store> = if config.ephemeral {
        Box::new(MemoryStore::default())
    } else {
        Box::new(SledStore::open(&config.data_dir)?)
    };
    let metrics = Metrics::new().context("registering metrics")?;
    let registrations = Registrations::start(store, metrics.clone())?;
    let interval = config.probe_interval;
    let server = Data::new(Server::new(config, NAMESPACE, registrations, metrics));
    let data = server.clone();
    let http = HttpServer::new(move || {
        App::new()
            .app_data(data.clone())
            .wrap(from_fn(routes::around))
            .configure(routes::configure)
    })
    .workers(WORKERS)
    .client_request_timeout(REQUEST_TIMEOUT)
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .max_connections(MAX_CONNECTIONS)
    .disable_signals()
    .listen(listener)
    .with_context(|| format!("serving {address}"))?
    .run();
    if interval > 0 {
        let probing = server.clone();
        actix_web::rt::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_secs(interval)).await;
                probing.probes.round(&probing.registrations).await;
            }
        });
    }
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let handle = http.handle();
    tracing::info!(%address, "ready");
    // For whoever started this process; nobody may be reading.
    let _ = writeln!(std::io::stdout(), "ready {address}");
    tokio::pin!(http);
    tokio::select! {
        ended = &mut http => return ended.context("the http server ended"),
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("SIGINT"),
    }
    // Requests that have begun are answered; what was acknowledged is durable already. The
    // server acts on its handle only while it is polled.
    let ((), ended) = tokio::join!(handle.stop(true), http);
    ended.context("the http server ended")?;
    tracing::info!("ended");
    Ok(())
}
