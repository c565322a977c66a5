//! Benchmarks of the project's own workloads, each between two processes of one machine.
//!
//! * `replay`: the state traffic of two reference runs, interleaved with the raw limit of the
//!   machine at the same ranges; a pass before it checks every byte.
//! * `turnaround`: from a decode's metadata to Success for a request of one page, interleaved with
//!   the bare round trip of the ZeroMQ implementation.
//! * `planner`: times plans for lists of pages that it reads as JSON; `planner_beside_sglang.py`
//!   drives it and times SGLang's own functions in the same run.
//!
//! What is absent on purpose: unsafe code (the raw limit is a C program of its own) and peers'
//! page-level comparisons.
//!
//! Invariants:
//! * what is compared takes turns within one run, and ratios are medians over neighbours;
//! * contents are checked without the planner and the wire;
//! * memory stays within its option and a third of what the system has.

#![forbid(unsafe_code)]

mod content;
mod model;
mod planner;
mod process;
mod raw;
mod replay;
mod side;
mod traffic;
mod turnaround;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(version, about = "Benchmarks of the project's own workloads")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The state traffic of the reference runs beside the raw limit.
    Replay(replay::ReplayArgs),
    /// The decode process of `replay`.
    #[command(hide = true)]
    ReplayDecode,
    /// From a decode's metadata to Success, beside the bare round trip of messages.
    Turnaround(turnaround::TurnaroundArgs),
    /// The prefill process of `turnaround`.
    #[command(hide = true)]
    TurnaroundPrefill,
    /// Times plans for lists of pages: JSON lines in, JSON lines out.
    Planner,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Replay(args) => replay::run(&args),
        Command::ReplayDecode => replay::serve_decode(),
        Command::Turnaround(args) => turnaround::run(&args),
        Command::TurnaroundPrefill => turnaround::serve_prefill(),
        Command::Planner => planner::serve_cases(),
    }
}
