//! The state traffic of the reference runs over loopback, interleaved with the raw limit.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use common::wire::{ControlMessage, Release};
use futures::stream::{FuturesUnordered, StreamExt};
use io_engine::{Engine, EngineConfig, Session, TransportKind};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::content::{FreeList, Generator};
use crate::model::{MODELS, Model};
use crate::process::{LineChild, available_memory, cpu_seconds, median, quantile, serve};
use crate::raw::RawLimit;
use crate::side::{Placed, Placement, Regions, Setup, Side};
use crate::traffic::Peer;

/// Memory of the pools of both sides is at most this part of what the system can give.
const MEMORY_PART: u64 = 3;
/// What each transport should reach of the raw limit.
const SHM_GOAL: f64 = 0.85;
const TCP_GOAL: f64 = 0.8;

/// Options of `replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// Models, by name.
    #[arg(long, value_delimiter = ',', default_values_t = MODELS.map(|model| model.name.to_owned()))]
    models: Vec<String>,
    /// Transports: shm, tcp.
    #[arg(long, value_delimiter = ',', default_values_t = [TransportKind::Shm, TransportKind::Tcp])]
    transports: Vec<TransportKind>,
    /// Tokens of one page.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    page_size: u32,
    /// Rounds of each transport; a round of ours and one of the raw limit take turns.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Requests of one round; twice as many as fit in memory if absent.
    #[arg(long)]
    requests: Option<usize>,
    /// MiB of memory for the pools of both sides, at most a third of what is available.
    #[arg(long, default_value_t = 4096)]
    memory_mib: u64,
    /// Threads that copy, and streams.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Requests whose bytes are checked on each transport; as many as the reference run kept in
    /// flight if absent.
    #[arg(long)]
    verify: Option<usize>,
    /// Of contents and orders.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where results are written as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What the decode process is told; it answers each with a line.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Allocate and register.
    Start(Setup),
    /// Make every byte background.
    Clear,
    /// Check every byte.
    Verify(Vec<Placed>),
}

/// What the decode process answers to [`Order::Start`].
#[derive(Debug, Serialize, Deserialize)]
struct Started {
    register: Vec<String>,
    pools: Vec<String>,
}

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
struct Row {
    model: &'static str,
    transport: &'static str,
    page_size: u32,
    request_bytes: u64,
    ranges_per_request: usize,
    in_flight: usize,
    requests_per_second: f64,
    gigabytes_per_second: f64,
    raw_gigabytes_per_second: f64,
    /// Median over rounds, each compared with the raw round beside it.
    ratio_to_raw: f64,
    ratio_lowest: f64,
    ratio_highest: f64,
    goal: f64,
    multiple_of_reference: f64,
    cpu_seconds_per_gigabyte: f64,
    raw_cpu_seconds_per_gigabyte: f64,
    verified_requests: usize,
    verified_bytes: u64,
}

/// Runs the benchmark.
///
/// # Errors
/// When a process fails or a byte is wrong.
pub fn run(args: &ReplayArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let mut rows = Vec::new();
    for name in &args.models {
        let model = Model::from_name(name).with_context(|| format!("there is no model {name}"))?;
        rows.extend(runtime.block_on(replay_model(args, &model))?);
    }
    print_table(&rows);
    if let Some(path) = &args.json {
        let results = json!({
            "benchmark": "replay",
            "threads": args.threads,
            "rounds": args.rounds,
            "rows": rows,
        });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Requests that fit in memory, both sides counted.
fn in_flight(args: &ReplayArgs, model: &Model) -> Result<usize> {
    let budget = (args.memory_mib << 20).min(available_memory()? / MEMORY_PART);
    // Pools have a quarter more than what is in flight.
    let each = model.request_bytes(args.page_size) * 2 * 5 / 4;
    Ok(usize::try_from(budget / each)?.clamp(1, model.concurrency))
}

async fn replay_model(args: &ReplayArgs, model: &Model) -> Result<Vec<Row>> {
    let in_flight = in_flight(args, model)?;
    let setup = Setup {
        model: model.name.to_owned(),
        page_size: args.page_size,
        requests: in_flight,
        seed: args.seed,
        threads: args.threads,
    };
    let mut decode = LineChild::again("replay-decode")?;
    let started: Started = decode.ask(&Order::Start(setup.clone()))?;
    let side = Side::new(&setup, 0)?;
    let peer = Peer::new(&started.register, &side)?;
    let count = args.requests.unwrap_or(2 * in_flight).max(1);
    let mut generator = Places::new(&side, &setup);
    let mut rounds_of_raw = Vec::new();
    for _ in 0..count {
        let (src, dst) = generator.take().context("no room for one request")?;
        rounds_of_raw.push(side.ranges(&src, &dst));
        generator.give_back(&src, &dst);
    }
    let ranges_per_request = rounds_of_raw.first().map_or(0, Vec::len);
    let mut raw = RawLimit::start(
        args.threads,
        &rounds_of_raw,
        &side.pool_paths(),
        &started.pools,
    )?;
    let request_bytes = model.request_bytes(args.page_size);
    let mut rows = Vec::new();
    for kind in &args.transports {
        let engine = start_engine("bench-prefill", vec![*kind], args.threads)?;
        let regions = side.register(&engine)?;
        let session = engine.connect(&peer.register.engine)?;
        let mut run = Run {
            side: &side,
            peer: &peer,
            session: &session,
            regions: &regions,
            places: Places::new(&side, &setup),
            in_flight,
        };
        let verified = args.verify.unwrap_or(model.concurrency);
        verify(&mut run, &mut decode, verified).await?;

        // One round of each that is not counted.
        run.round(count).await?;
        raw.round(*kind)?;
        let own_pids = [std::process::id(), decode.pid()];
        let (mut ours, mut raws, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut own_cpu, mut raw_cpu) = (0.0, 0.0);
        for round in 0..args.rounds.max(1) {
            let (mut own_seconds, mut raw_seconds) = (0.0, 0.0);
            for turn in 0..2 {
                let own_before = cpu_seconds(&own_pids)?;
                if (round + turn) % 2 == 0 {
                    own_seconds = run.round(count).await?;
                    own_cpu += cpu_seconds(&own_pids)? - own_before;
                } else {
                    let (seconds, cpu) = raw.round(*kind)?;
                    raw_seconds = seconds;
                    raw_cpu += cpu;
                }
            }
            ours.push(own_seconds);
            raws.push(raw_seconds);
            ratios.push(raw_seconds / own_seconds);
        }
        let gigabytes = (request_bytes * count as u64) as f64 / 1e9;
        let all_gigabytes = gigabytes * ours.len() as f64;
        let rate = count as f64 / median(&ours);
        rows.push(Row {
            model: model.name,
            transport: session.transport().name(),
            page_size: args.page_size,
            request_bytes,
            ranges_per_request,
            in_flight,
            requests_per_second: rate,
            gigabytes_per_second: gigabytes / median(&ours),
            raw_gigabytes_per_second: gigabytes / median(&raws),
            ratio_to_raw: median(&ratios),
            ratio_lowest: quantile(&ratios, 0.0),
            ratio_highest: quantile(&ratios, 1.0),
            goal: match kind {
                TransportKind::Tcp => TCP_GOAL,
                _ => SHM_GOAL,
            },
            multiple_of_reference: rate / model.reference_rate,
            cpu_seconds_per_gigabyte: own_cpu / all_gigabytes,
            raw_cpu_seconds_per_gigabyte: raw_cpu / all_gigabytes,
            verified_requests: verified,
            verified_bytes: request_bytes * verified as u64,
        });
        session.close();
        engine.shutdown();
    }
    Ok(rows)
}

fn start_engine(key: &str, transports: Vec<TransportKind>, threads: usize) -> Result<Engine> {
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.transports = transports;
    config.copy_threads = threads;
    config.tcp_lanes = threads;
    Ok(Engine::start(config)?)
}

/// The free places of both sides.
struct Places {
    lists: [FreeList; 4],
    pages: usize,
}

impl Places {
    fn new(side: &Side, setup: &Setup) -> Self {
        let capacity = setup.capacity();
        let list =
            |stream: u64, items: u32| FreeList::new(items, Generator::new(setup.seed, stream));
        Self {
            lists: [
                list(0, capacity.pages),
                list(1, capacity.requests),
                list(2, capacity.pages),
                list(3, capacity.requests),
            ],
            pages: side.pages_per_request(),
        }
    }

    /// Places of one request on both sides; none when the pools are full.
    fn take(&mut self) -> Option<(Placement, Placement)> {
        let [src_pages, src_slots, dst_pages, dst_slots] = &mut self.lists;
        let one = |pages: &mut FreeList, slots: &mut FreeList| {
            Some(Placement {
                pages: pages.take(self.pages)?,
                slot: slots.take(1)?.first().copied()?,
            })
        };
        Some((one(src_pages, src_slots)?, one(dst_pages, dst_slots)?))
    }

    fn give_back(&mut self, src: &Placement, dst: &Placement) {
        let [src_pages, src_slots, dst_pages, dst_slots] = &mut self.lists;
        src_pages.give_back(&src.pages);
        src_slots.give_back(&[src.slot]);
        dst_pages.give_back(&dst.pages);
        dst_slots.give_back(&[dst.slot]);
    }
}

/// What a round needs.
struct Run<'a> {
    side: &'a Side,
    peer: &'a Peer,
    session: &'a Session,
    regions: &'a Regions,
    places: Places,
    in_flight: usize,
}

impl Run<'_> {
    /// Moves so many requests, as many at once as fit; the seconds from the first plan to the last
    /// completion.
    async fn round(&mut self, count: usize) -> Result<f64> {
        let (peer, session, regions) = (self.peer, self.session, self.regions);
        let begun = Instant::now();
        let mut moving = FuturesUnordered::new();
        let mut left = count;
        loop {
            while left > 0 && moving.len() < self.in_flight {
                let (src, dst) = self.places.take().context("the pools are full")?;
                left -= 1;
                moving.push(async move {
                    let moved = peer.write(session, regions, &src, &dst).await;
                    moved.map(|_| (src, dst))
                });
            }
            match moving.next().await {
                Some(done) => {
                    let (src, dst) = done?;
                    self.places.give_back(&src, &dst);
                }
                None => return Ok(begun.elapsed().as_secs_f64()),
            }
        }
    }
}

/// Moves requests with known contents and has every byte of the decode side's pools checked.
async fn verify(run: &mut Run<'_>, decode: &mut LineChild, count: usize) -> Result<()> {
    let mut next = 0;
    while next < count {
        let _: bool = decode.ask(&Order::Clear)?;
        let some = run.in_flight.min(count - next);
        let (mut sources, mut targets, mut writes) = (Vec::new(), Vec::new(), Vec::new());
        for request in (next as u64..).take(some) {
            let (src, dst) = run.places.take().context("the pools are full")?;
            writes.push((src.clone(), dst.clone()));
            sources.push(Placed {
                request,
                placement: src,
            });
            targets.push(Placed {
                request,
                placement: dst,
            });
        }
        run.side.fill(&sources)?;
        let all = writes
            .iter()
            .map(|(src, dst)| run.peer.write(run.session, run.regions, src, dst));
        let moved: u64 = futures::future::try_join_all(all).await?.iter().sum();
        let model = run.side.setup().model()?;
        let wanted = model.request_bytes(run.side.setup().page_size) * some as u64;
        ensure!(moved == wanted, "{moved} bytes were moved, not {wanted}");
        let wrong: Option<String> = decode.ask(&Order::Verify(targets))?;
        ensure!(
            wrong.is_none(),
            "{}: {}",
            run.session.transport(),
            wrong.unwrap_or_default()
        );
        writes
            .iter()
            .for_each(|(src, dst)| run.places.give_back(src, dst));
        next += some;
    }
    Ok(())
}

/// The decode process: waits for orders until its input ends.
///
/// # Errors
/// When memory or sockets cannot be had.
pub fn serve_decode() -> Result<()> {
    let mut started: Option<(Side, Engine, Regions)> = None;
    serve(|order: Order| {
        let side = started
            .as_ref()
            .map(|(side, ..)| side)
            .context("not started");
        match order {
            Order::Start(setup) => {
                let side = Side::new(&setup, 1)?;
                let engine =
                    start_engine("bench-decode", TransportKind::ALL.to_vec(), setup.threads)?;
                let regions = side.register(&engine)?;
                let register = side.registration(&engine, &regions);
                let frames =
                    ControlMessage::Register(Box::new(register)).encode(Release::NEWEST)?;
                let answer = Started {
                    register: frames.iter().map(hex::encode).collect(),
                    pools: side.pool_paths(),
                };
                started = Some((side, engine, regions));
                Ok(serde_json::to_value(answer)?)
            }
            Order::Clear => {
                side?.fill(&[])?;
                Ok(json!(true))
            }
            Order::Verify(placed) => Ok(json!(
                side?
                    .verify(&placed)
                    .err()
                    .map(|error| format!("{error:#}"))
            )),
        }
    })
}

fn print_table(rows: &[Row]) {
    println!(
        "{:<13} {:<5} {:>5} {:>9} {:>6} {:>7} {:>8} {:>7} {:>7} {:>17} {:>5} {:>9} {:>8} {:>8} {:>9}",
        "model",
        "path",
        "page",
        "MB/req",
        "ranges",
        "flight",
        "req/s",
        "GB/s",
        "raw",
        "ratio (range)",
        "goal",
        "x ref",
        "cpu s/GB",
        "raw cpu",
        "verified"
    );
    for row in rows {
        let range = format!(
            "{:.2} ({:.2}-{:.2})",
            row.ratio_to_raw, row.ratio_lowest, row.ratio_highest
        );
        println!(
            "{:<13} {:<5} {:>5} {:>9.1} {:>6} {:>7} {:>8.1} {:>7.2} {:>7.2} {:>17} {:>5.2} {:>9.2} {:>8.2} {:>8.2} {:>6} req",
            row.model,
            row.transport,
            row.page_size,
            row.request_bytes as f64 / 1e6,
            row.ranges_per_request,
            row.in_flight,
            row.requests_per_second,
            row.gigabytes_per_second,
            row.raw_gigabytes_per_second,
            range,
            row.goal,
            row.multiple_of_reference,
            row.cpu_seconds_per_gigabyte,
            row.raw_cpu_seconds_per_gigabyte,
            row.verified_requests,
        );
    }
}
