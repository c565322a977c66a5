//! Our side of the benchmarks beside the peers (`bench/peers`): a target and an initiator, each in
//! a process of its own, driven by JSON lines on standard input and answered on standard output.
//!
//! The harness makes the page lists, fills the arenas (memfds, which it maps too) and verifies them
//! after the run. Here is only what would be an engine: registered memory, a session over the one
//! transport that is named, and one blocking batch for each sample.

#![forbid(unsafe_code)]

mod side;

use std::io::Write;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use io_engine::{FaultSpec, TransportKind};
use serde_json::json;

use crate::side::Side;

/// Moves pages for the benchmarks; started by bench/peers/bench_ours.py.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// Which side this process is; for `local` the initiator is both
    #[arg(long, value_enum)]
    role: Role,
    /// How bytes move: local, shm, cma, rdma (if it was built with it) or tcp
    #[arg(long)]
    transport: TransportKind,
    /// Copying threads
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Streams of tcp
    #[arg(long, default_value_t = 2)]
    streams: usize,
    /// Size of an arena in MiB
    #[arg(long, default_value_t = 512)]
    arena_mib: u64,
    /// A fault in one batch, `KIND:kv[:NTH]`: verification must notice it
    #[arg(long)]
    fault: Option<FaultSpec>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Initiator,
    Target,
}

fn main() -> Result<()> {
    let args = Args::parse();
    // Every path is measured with pages of 4 KiB.
    rustix::thread::disable_transparent_huge_pages(true).context("asking for small pages")?;
    let mut side = Side::start(&args)?;
    let say = |value: &serde_json::Value| -> Result<()> {
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{value}").context("answering the harness")
    };
    say(&side.hello()?)?;
    // The end of the input is the end of the run.
    for line in std::io::stdin().lines() {
        let ask = serde_json::from_str(&line?).context("a line that is no question")?;
        let answer = side
            .answer(ask)
            .unwrap_or_else(|error| json!({ "error": format!("{error:#}") }));
        say(&answer)?;
    }
    Ok(())
}
