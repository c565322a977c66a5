//! Our side of the benchmarks beside the peers (`bench/peers`): a target and an initiator, each in
//! a process of its own, driven by JSON lines on standard input and answered on standard output.
//!
//! The harness makes the page lists, fills the arenas (memfds, which it maps too) and verifies them
//! after the run. Here is only what would be an engine: registered memory, a session, and one
//! blocking batch for each sample.

#![forbid(unsafe_code)]

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, Memory, Region, RemoteRegion, Session,
    TransferHandle, TransportKind, WriteBatch, WritePair,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// A batch that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Moves pages for the benchmarks; started by bench/peers/bench_ours.py.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    /// Which side this process is
    #[arg(long, value_enum)]
    role: Role,
    /// How bytes move: local, shm, cma or tcp
    #[arg(long)]
    transport: TransportKind,
    /// Copying threads, and streams of tcp
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Size of the arena in MiB
    #[arg(long, default_value_t = 512)]
    arena_mib: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Initiator,
    Target,
}

/// What the harness asks for.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
enum Ask {
    /// The initiator opens its session to the target's engine and region (hex).
    Connect { engine: String, region: String },
    /// The initiator learns the page lists of a case.
    Prepare { size: u64, lists: Vec<PageList> },
    /// The initiator moves `warm` batches, then times up to `samples` of them.
    Measure {
        direction: Way,
        warm: usize,
        samples: usize,
        budget_s: f64,
    },
    /// The initiator moves one batch.
    Transfer { direction: Way, list: usize },
    /// The initiator submits a batch of each list at once; when each was complete.
    Concurrent { direction: Way },
    /// The initiator submits one range of `large` bytes and at once one of `small`; when each was
    /// complete.
    Behind { large: u64, small: u64 },
    /// CPU-seconds of this process and its peak memory.
    Stat {},
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    Write,
    Read,
}

/// Offsets of equal ranges on both sides.
#[derive(Deserialize)]
struct PageList {
    src: Vec<u64>,
    dst: Vec<u64>,
}

#[derive(Serialize)]
struct Measured {
    nanoseconds: Vec<u64>,
}

/// One side: its engine and arena, and for the initiator what it writes to.
struct Side {
    engine: Engine,
    memory: Memory,
    region: Region,
    peer_opt: Option<(Session, RemoteRegion)>,
    lists: Vec<RunList>,
}

impl Side {
    fn start(args: &Args) -> Result<Self> {
        let key = match args.role {
            Role::Initiator => "initiator",
            Role::Target => "target",
        };
        let mut config = EngineConfig::new(key, "127.0.0.1");
        config.tcp_bind = ([127, 0, 0, 1], 0).into();
        config.transports = vec![args.transport];
        config.copy_threads = args.threads;
        config.tcp_lanes = args.threads;
        let engine = Engine::start(config).context("starting an engine")?;
        let len = ByteLen(args.arena_mib << 20);
        let memory = Memory::allocate(key, len).context("allocating the arena")?;
        let region = engine.register(&memory, ByteOffset(0), len, "kv")?;
        Ok(Self {
            engine,
            memory,
            region,
            peer_opt: None,
            lists: Vec::new(),
        })
    }

    fn hello(&self) -> Result<serde_json::Value> {
        Ok(json!({
            "pid": std::process::id(),
            "fd": self.memory.as_fd().as_raw_fd(),
            "engine": hex::encode(self.engine.desc().pack()?),
            "region": hex::encode(self.region.desc().pack()?),
        }))
    }

    fn answer(&mut self, ask: Ask) -> Result<serde_json::Value> {
        match ask {
            Ask::Connect { engine, region } => {
                let engine = EngineDesc::unpack(&hex::decode(engine)?)?;
                let region = MemoryDesc::unpack(&hex::decode(region)?)?;
                let session = self.engine.connect(&engine)?;
                self.peer_opt = Some((session, RemoteRegion::from_desc(&region)?));
                // Every page of both arenas is touched once here, as the harness does for all.
                let whole = vec![0];
                let list = PageList {
                    src: whole.clone(),
                    dst: whole,
                };
                self.lists = vec![run_list(self.region.len().get(), &list)?];
                self.transfer(Way::Write, 0)?;
                Ok(json!({}))
            }
            Ask::Prepare { size, lists } => {
                let lists = lists.iter().map(|list| run_list(size, list));
                self.lists = lists.collect::<Result<_>>()?;
                Ok(json!({}))
            }
            Ask::Measure {
                direction,
                warm,
                samples,
                budget_s,
            } => {
                for sample in 0..warm {
                    self.transfer(direction, sample % self.lists.len().max(1))?;
                }
                let deadline = Instant::now() + Duration::from_secs_f64(budget_s);
                let mut nanoseconds = Vec::with_capacity(samples);
                while nanoseconds.len() < samples
                    && (nanoseconds.len() < 5 || Instant::now() < deadline)
                {
                    let list = (warm + nanoseconds.len()) % self.lists.len().max(1);
                    let began = Instant::now();
                    self.transfer(direction, list)?;
                    nanoseconds.push(u64::try_from(began.elapsed().as_nanos())?);
                }
                Ok(serde_json::to_value(Measured { nanoseconds })?)
            }
            Ask::Transfer { direction, list } => {
                self.transfer(direction, list)?;
                Ok(json!({}))
            }
            Ask::Concurrent { direction } => {
                let began = Instant::now();
                let handles = (0..self.lists.len()).map(|list| self.submit(direction, list));
                let handles = handles.collect::<Result<Vec<_>>>()?;
                finished(began, &handles)
            }
            Ask::Behind { large, small } => {
                let whole = [large, small].map(|size| {
                    let whole = PageList {
                        src: vec![0],
                        dst: vec![0],
                    };
                    run_list(size, &whole)
                });
                self.lists = whole.into_iter().collect::<Result<_>>()?;
                let began = Instant::now();
                let handles = (0..2).map(|list| self.submit(Way::Write, list));
                let handles = handles.collect::<Result<Vec<_>>>()?;
                finished(began, &handles)
            }
            Ask::Stat {} => stat(),
        }
    }

    /// What a user's call costs: the batch is made, submitted and waited for.
    fn transfer(&self, direction: Way, list: usize) -> Result<()> {
        let (session, batch) = self.batch(list)?;
        session.transfer(direction.into(), batch, TIMEOUT)?;
        Ok(())
    }

    fn submit(&self, direction: Way, list: usize) -> Result<TransferHandle> {
        let (session, batch) = self.batch(list)?;
        Ok(session.submit(direction.into(), batch, Some(TIMEOUT)))
    }

    fn batch(&self, list: usize) -> Result<(&Session, WriteBatch)> {
        let (Some((session, remote)), Some(runs)) = (&self.peer_opt, self.lists.get(list)) else {
            bail!("nothing was connected or prepared");
        };
        let pair = WritePair {
            local: self.region.clone(),
            remote: remote.clone(),
            runs: runs.clone(),
        };
        Ok((session, WriteBatch { pairs: vec![pair] }))
    }
}

impl From<Way> for Direction {
    fn from(way: Way) -> Self {
        match way {
            Way::Write => Self::Write,
            Way::Read => Self::Read,
        }
    }
}

/// When each batch was complete, by its own clock and by the wall.
fn finished(began: Instant, handles: &[TransferHandle]) -> Result<serde_json::Value> {
    let mut nanoseconds = Vec::with_capacity(handles.len());
    for handle in handles {
        let moved = handle.wait(TIMEOUT).context("a batch did not end")??;
        nanoseconds.push(u64::try_from(moved.elapsed.as_nanos())?);
    }
    let wall = u64::try_from(began.elapsed().as_nanos())?;
    Ok(json!({ "nanoseconds": nanoseconds, "wall": wall }))
}

fn run_list(size: u64, list: &PageList) -> Result<RunList> {
    if list.src.len() != list.dst.len() {
        bail!("a page list with two lengths");
    }
    let pages = list.src.iter().zip(&list.dst).map(|(src, dst)| {
        StridedRun::contiguous(ByteOffset(*src), ByteOffset(*dst), ByteLen(size))
    });
    Ok(RunList::new(pages.collect())?)
}

fn stat() -> Result<serde_json::Value> {
    let text = std::fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak_kib: u64 = peak
        .and_then(|peak| peak.trim().strip_suffix("kB")?.trim().parse().ok())
        .context("/proc/self/status has no VmHWM")?;
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(json!({
        "cpu_s": cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
        "peak_bytes": peak_kib * 1024,
    }))
}

fn main() -> Result<()> {
    let args = Args::parse();
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
