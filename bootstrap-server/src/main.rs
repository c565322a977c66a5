//! The bootstrap server's process.

#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use bootstrap_server::config::{Cli, Command, Config, LogFormat};
use bootstrap_server::server::{Server, take_all_files};
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Bytes that are no HTTP are a client's mistake; actix-http would log each as an error. What sled
/// finds is told where it is handled.
const DEFAULT_LOG_FILTER: &str = "info,actix_http::h1::dispatcher=off,sled=off";

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Ctl(ctl)) = cli.command_opt {
        return actix_web::rt::System::new().block_on(bootstrap_server::ctl::run(ctl));
    }
    let config = cli.config;
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
    take_all_files();
    let server = Server::bind(config)?;
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let mut ready = String::from("ready");
    for (namespace, address) in server.engines() {
        tracing::info!(namespace, %address, "serving an engine");
        ready.push_str(&format!(" {namespace}={address}"));
    }
    let admin = server.admin();
    tracing::info!(%admin, "ready");
    // For whoever started this process; nobody may be reading.
    let _ = writeln!(std::io::stdout(), "{ready} admin={admin}");
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("SIGTERM"),
            _ = interrupt.recv() => tracing::info!("SIGINT"),
        }
    };
    server.run(stop).await?;
    tracing::info!("ended");
    Ok(())
}
