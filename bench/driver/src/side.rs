//! One side: an engine with its arena, and what the harness asks of it.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    AnyMemory, ByteLen, ByteOffset, Direction, Engine, EngineConfig, ForeignMemory, Memory,
    RdmaOptions, Region, RemoteRegion, Session, TransferHandle, TransportKind, WriteBatch,
    WritePair,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Args, Role};

/// A batch that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the harness asks for. `Stat` is for both sides, the rest for the initiator.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Ask {
    /// Opens the session to an engine and its region (descriptors in hexadecimal), and moves the
    /// whole arena once, so that every page is faulted in as the rules want it.
    Connect {
        engine: String,
        region: String,
        direction: Way,
    },
    /// Learns the page lists of a case.
    Prepare {
        case: String,
        size: u64,
        lists: Vec<PageList>,
    },
    /// Learns one list of `count` ranges that follow each other at a stride, as one run.
    PrepareStrided {
        case: String,
        size: u64,
        stride: u64,
        count: u32,
    },
    /// Moves `warm` batches, then times `samples` of them, or fewer when the time is up.
    Measure {
        case: String,
        direction: Way,
        warm: usize,
        samples: usize,
        fewest: usize,
        budget_s: f64,
    },
    /// Moves one batch.
    Transfer {
        case: String,
        direction: Way,
        list: usize,
    },
    /// Submits a batch of each list of each case at once, and says after which time each was
    /// complete.
    Concurrent { cases: Vec<String>, direction: Way },
    /// CPU-seconds of this process.
    Stat {},
}

/// Which way bytes go, seen from the initiator.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    Write,
    Read,
}

/// Offsets of equal ranges on both sides.
#[derive(Deserialize)]
pub(crate) struct PageList {
    src: Vec<u64>,
    dst: Vec<u64>,
}

/// An engine with one arena, registered whole.
struct Pool {
    engine: Engine,
    arena: Arena,
    region: Region,
}

/// Memory of the kind that a transport is for.
enum Arena {
    /// That a peer can map.
    Shared(Memory),
    /// Of this process alone, as engines allocate it: what `cma` reaches.
    Private(ForeignMemory),
}

pub(crate) struct Side {
    pool: Pool,
    /// For `local`: the target beside the initiator.
    local_opt: Option<Pool>,
    peer_opt: Option<(Session, RemoteRegion)>,
    cases: HashMap<String, Vec<RunList>>,
}

impl Side {
    /// Starts the engine and allocates the arena.
    pub(crate) fn start(args: &Args) -> Result<Self> {
        let key = match args.role {
            Role::Initiator => "initiator",
            Role::Target => "target",
        };
        let is_local = args.transport == TransportKind::Local;
        ensure!(
            !is_local || args.role == Role::Initiator,
            "local has no target process"
        );
        let beside = is_local.then(|| Pool::start(args, "beside")).transpose()?;
        Ok(Self {
            pool: Pool::start(args, key)?,
            local_opt: beside,
            peer_opt: None,
            cases: HashMap::new(),
        })
    }

    /// What the harness must know of this side.
    pub(crate) fn hello(&self) -> Result<Value> {
        let mut hello = self.pool.hello()?;
        if let (Some(local), Some(fields)) = (&self.local_opt, hello.as_object_mut()) {
            fields.insert("local_arena".to_owned(), local.arena.hello());
            fields.insert("local".to_owned(), local.hello()?);
        }
        Ok(hello)
    }

    /// Does what is asked.
    pub(crate) fn answer(&mut self, ask: Ask) -> Result<Value> {
        match ask {
            Ask::Connect {
                engine,
                region,
                direction,
            } => {
                self.connect(&engine, &region)?;
                let whole = PageList {
                    src: vec![0],
                    dst: vec![0],
                };
                let whole = run_list(self.pool.region.len().get(), &whole)?;
                self.transfer(direction, &whole)?;
            }
            Ask::Prepare { case, size, lists } => {
                let lists = lists.iter().map(|list| run_list(size, list));
                self.cases.insert(case, lists.collect::<Result<_>>()?);
            }
            Ask::PrepareStrided {
                case,
                size,
                stride,
                count,
            } => {
                let run = StridedRun {
                    src: ByteOffset(0),
                    dst: ByteOffset(0),
                    len: ByteLen(size),
                    count,
                    src_stride: stride,
                    dst_stride: stride,
                };
                self.cases.insert(case, vec![RunList::new(vec![run])?]);
            }
            Ask::Measure {
                case,
                direction,
                warm,
                samples,
                fewest,
                budget_s,
            } => {
                let lists = self.lists(&case)?;
                let mut batches = lists.iter().cycle();
                let mut next = || batches.next().context("a case without lists");
                for _ in 0..warm {
                    self.transfer(direction, next()?)?;
                }
                let deadline = Instant::now() + Duration::from_secs_f64(budget_s);
                let mut nanoseconds = Vec::with_capacity(samples);
                while nanoseconds.len() < samples
                    && (nanoseconds.len() < fewest || Instant::now() < deadline)
                {
                    let runs = next()?;
                    let began = Instant::now();
                    self.transfer(direction, runs)?;
                    nanoseconds.push(u64::try_from(began.elapsed().as_nanos())?);
                }
                return Ok(json!({ "nanoseconds": nanoseconds }));
            }
            Ask::Transfer {
                case,
                direction,
                list,
            } => {
                let runs = self.lists(&case)?.get(list);
                self.transfer(direction, runs.context("no such list")?)?;
            }
            Ask::Concurrent { cases, direction } => return self.concurrent(&cases, direction),
            Ask::Stat {} => {
                let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
                return Ok(json!({ "cpu_s": cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9 }));
            }
        }
        Ok(json!({}))
    }

    fn connect(&mut self, engine: &str, region: &str) -> Result<()> {
        let engine = EngineDesc::unpack(&hex::decode(engine)?)?;
        let region = MemoryDesc::unpack(&hex::decode(region)?)?;
        let session = self.pool.engine.connect(&engine)?;
        self.peer_opt = Some((session, RemoteRegion::from_desc(&region)?));
        Ok(())
    }

    fn lists(&self, case: &str) -> Result<&[RunList]> {
        let lists = self.cases.get(case);
        let lists = lists.with_context(|| format!("case {case} was not prepared"))?;
        Ok(lists)
    }

    /// What a user's call costs: the batch is made, submitted and waited for.
    fn transfer(&self, direction: Way, runs: &RunList) -> Result<()> {
        let (session, batch) = self.batch(runs)?;
        session.transfer(direction.into(), batch, TIMEOUT)?;
        Ok(())
    }

    fn concurrent(&self, cases: &[String], direction: Way) -> Result<Value> {
        let lists = cases.iter().map(|case| self.lists(case));
        let lists = lists.collect::<Result<Vec<_>>>()?.concat();
        let began = Instant::now();
        let submit = |runs: &RunList| {
            let (session, batch) = self.batch(runs)?;
            Ok(session.submit(direction.into(), batch, Some(TIMEOUT)))
        };
        let handles: Vec<TransferHandle> = lists.iter().map(submit).collect::<Result<_>>()?;
        let mut nanoseconds = Vec::with_capacity(handles.len());
        for handle in handles {
            let moved = handle.wait(TIMEOUT).context("a batch did not end")??;
            nanoseconds.push(u64::try_from(moved.elapsed.as_nanos())?);
        }
        let wall = u64::try_from(began.elapsed().as_nanos())?;
        Ok(json!({ "nanoseconds": nanoseconds, "wall": wall }))
    }

    fn batch(&self, runs: &RunList) -> Result<(&Session, WriteBatch)> {
        let Some((session, remote)) = &self.peer_opt else {
            bail!("nothing was connected");
        };
        let pair = WritePair {
            local: self.pool.region.clone(),
            remote: remote.clone(),
            runs: runs.clone(),
        };
        Ok((session, WriteBatch { pairs: vec![pair] }))
    }
}

impl Pool {
    fn start(args: &Args, key: &str) -> Result<Self> {
        let mut config = EngineConfig::new(key, "127.0.0.1");
        config.tcp_bind = ([127, 0, 0, 1], 0).into();
        config.transports = vec![args.transport];
        config.copy_threads = args.threads;
        config.tcp_lanes = args.streams;
        config.fault_opt = args.fault.clone();
        config.rdma = RdmaOptions::from_environment().map_err(anyhow::Error::msg)?;
        let engine = Engine::start(config).context("starting an engine")?;
        let len = ByteLen(args.arena_mib << 20);
        let (arena, memory) = if args.transport == TransportKind::Cma {
            let memory = ForeignMemory::allocate(len).context("allocating the arena")?;
            let any = AnyMemory::from(&memory);
            (Arena::Private(memory), any)
        } else {
            let memory = Memory::allocate(key, len).context("allocating the arena")?;
            let any = AnyMemory::from(&memory);
            (Arena::Shared(memory), any)
        };
        let region = engine.register(memory, ByteOffset(0), len, "kv")?;
        Ok(Self {
            engine,
            arena,
            region,
        })
    }

    fn hello(&self) -> Result<Value> {
        Ok(json!({
            "arena": self.arena.hello(),
            "engine": hex::encode(self.engine.desc().pack()?),
            "region": hex::encode(self.region.desc().pack()?),
        }))
    }
}

impl Arena {
    /// How the harness reaches it.
    fn hello(&self) -> Value {
        match self {
            Self::Shared(memory) => json!({ "fd": memory.as_fd().as_raw_fd() }),
            Self::Private(memory) => json!({ "address": memory.address() }),
        }
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

fn run_list(size: u64, list: &PageList) -> Result<RunList> {
    ensure!(
        list.src.len() == list.dst.len(),
        "a page list with two lengths"
    );
    let pages = list.src.iter().zip(&list.dst).map(|(src, dst)| {
        StridedRun::contiguous(ByteOffset(*src), ByteOffset(*dst), ByteLen(size))
    });
    Ok(RunList::new(pages.collect())?)
}
