//! The transfer service.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use transfer_actor::config::{Cli, Command, LogFormat};

fn main() -> ExitCode {
    let Command::Serve(config) = Cli::parse().command;
    let filter = EnvFilter::try_from_env("FERRY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Pretty => logs.with_ansi(false).init(),
        LogFormat::Json => logs.json().init(),
    }
    let served = actix_web::rt::System::new().block_on(transfer_actor::service::serve(*config));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
