//! The main job: moves many requests' hybrid state between real processes and verifies every byte.
//!
//! One binary plays three parts. As the **driver** (no subcommand) it starts a `bootstrap-server`,
//! a `transfer-actor serve` and an engine for each side, and stands in the place of the PD router.
//! As an **engine** it hosts several ranks, each attached to the service with pools of its own. As
//! a **child** it becomes another program that cannot outlive the driver.
//!
//! What is absent on purpose: the planner. What every byte must be, and where, is computed from a
//! model's shape and logical coordinates ([`content`], [`layout`]), so a fault of the planner
//! cannot hide itself. This crate does not depend on `common`.

#![forbid(unsafe_code)]

mod args;
mod content;
mod driver;
mod engine;
mod layout;
mod memory;
mod model;
mod pages;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command_opt {
        None => driver::run(cli.run),
        Some(Command::Child(args)) => driver::children::become_program(&args),
        Some(Command::Engine(args)) => run_engine(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_engine(args: &args::EngineArgs) -> Result<ExitCode> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    let config = serde_json::from_str(&args.config).context("reading the configuration")?;
    actix_web::rt::System::new().block_on(engine::run(args.side, config))?;
    Ok(ExitCode::SUCCESS)
}
