//! From a decode's metadata to Success for a request of one page, between two processes through the
//! rank API, interleaved with the bare round trip of the ZeroMQ implementation between the same two.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use common::ids::{ByteLen, ByteOffset};
use common::plan::PlannerOptions;
use common::schema::{AttentionKind, KvLayout, RankLayout, TensorLayout};
use common::topology::ParallelConfig;
use io_engine::{Engine, EngineConfig, Memory, Region, TransportKind};
use prometheus::Registry;
use serde::{Deserialize, Serialize};
use serde_json::json;
use transfer_actor::api::{Announce, Chunk, EngineSpec, Indices, OpenRoom, Role, RoomStatus};
use transfer_actor::metrics::TransferMetrics;
use transfer_actor::rank::{Limits, RankBuffers, RankConfig, RankHandle, Timeouts};
use zmtp::{Limits as FrameLimits, PullSocket, PushOptions, PushPeer};

use crate::process::{LineChild, quantile, reply};

/// What the turnaround should be of the bare round trip.
const GOAL: f64 = 3.0;
/// Pages of each pool.
const PAGES: u32 = 64;
/// Bytes of one aux row.
const AUX_ROW_BYTES: u64 = 64;
/// Bytes of the message of a bare round trip; a request's metadata is about as long.
const ECHO_BYTES: usize = 256;
/// Requests before the first that counts: they open the session and the sockets.
const WARM_UP: usize = 50;
const PATIENCE: Duration = Duration::from_secs(30);

/// Options of `turnaround`.
#[derive(Clone, Debug, Args)]
pub struct TurnaroundArgs {
    /// Requests that count, for each number of layers.
    #[arg(long, default_value_t = 2000)]
    samples: usize,
    /// Layers of K and V that the one page has; a run for each number.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 36])]
    layers: Vec<u32>,
    /// Bytes of the page in one tensor; 2048 is one token of Qwen3-8B, SGLang's default page.
    #[arg(long, default_value_t = 2048)]
    page_bytes: u64,
    /// Transport of the bytes.
    #[arg(long, default_value_t = TransportKind::Shm)]
    transport: TransportKind,
    /// The bootstrap server's program; beside this one if absent.
    #[arg(long, value_name = "FILE")]
    bootstrap_server: Option<PathBuf>,
    /// Where results are written as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What the prefill process is told in its first line.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Setup {
    bootstrap: String,
    layers: u32,
    page_bytes: u64,
    transport: String,
    rooms: u64,
}

/// Its answer, once all rooms are open.
#[derive(Debug, Serialize, Deserialize)]
struct Ready {
    echo_at: SocketAddr,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    layers: u32,
    page_bytes: u64,
    transport: String,
    samples: usize,
    turnaround_p50_us: f64,
    turnaround_p99_us: f64,
    round_trip_p50_us: f64,
    round_trip_p99_us: f64,
    ratio_p50: f64,
    goal: f64,
}

/// Runs the benchmark.
///
/// # Errors
/// When a process or a request fails.
pub fn run(args: &TurnaroundArgs) -> Result<()> {
    let beside = std::env::current_exe()?.with_file_name("bootstrap-server");
    let program = args.bootstrap_server.clone().unwrap_or(beside);
    let words = [
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--store",
        "memory",
        "--probe-interval",
        "0",
    ];
    let mut server = LineChild::start(program.as_os_str(), words)?;
    let line = server.line()?;
    let bootstrap = line
        .strip_prefix("ready default=")
        .and_then(|addresses| addresses.split(' ').next())
        .context("the bootstrap server is not ready")?;
    let mut rows = Vec::new();
    for layers in &args.layers {
        let measured = measure(args, *layers, bootstrap);
        rows.push(actix_rt::System::new().block_on(measured)?);
    }
    println!(
        "{:<7} {:>7} {:>11} {:>8} {:>12} {:>9} {:>11} {:>9} {:>7} {:>6}",
        "path",
        "layers",
        "page bytes",
        "samples",
        "turnaround",
        "p99",
        "round trip",
        "p99",
        "ratio",
        "goal"
    );
    for row in &rows {
        println!(
            "{:<7} {:>7} {:>11} {:>8} {:>9.1} us {:>6.1} us {:>8.1} us {:>6.1} us {:>7.2} {:>6.1}",
            row.transport,
            row.layers,
            row.page_bytes,
            row.samples,
            row.turnaround_p50_us,
            row.turnaround_p99_us,
            row.round_trip_p50_us,
            row.round_trip_p99_us,
            row.ratio_p50,
            row.goal
        );
    }
    if let Some(path) = &args.json {
        let results = json!({ "benchmark": "turnaround", "rows": rows });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Microseconds of each request, and of each bare round trip.
type Samples = (Vec<f64>, Vec<f64>);

async fn measure(args: &TurnaroundArgs, layers: u32, bootstrap: &str) -> Result<Row> {
    let setup = Setup {
        bootstrap: bootstrap.to_owned(),
        layers,
        page_bytes: args.page_bytes,
        transport: args.transport.name().to_owned(),
        rooms: (WARM_UP + args.samples) as u64,
    };
    // Its lines are few, and nothing else has begun.
    let mut prefill = LineChild::again("turnaround-prefill")?;
    let ready: Ready = prefill.ask(&setup)?;
    let rank = start_rank(&setup, Role::Decode).await?;
    let (done, is_done) = tokio::sync::oneshot::channel();
    let (engine, room_setup) = (rank.clone(), setup.clone());
    rank.spawn(async move {
        // Whoever waits for it has gone only if the whole run failed.
        let _ = done.send(decode(&engine, &room_setup, &ready).await);
    });
    let (turnarounds, round_trips) = is_done.await.context("the decode rank has ended")??;
    rank.stop("the benchmark is over").await;
    Ok(Row {
        layers,
        page_bytes: args.page_bytes,
        transport: setup.transport,
        samples: turnarounds.len(),
        turnaround_p50_us: quantile(&turnarounds, 0.5),
        turnaround_p99_us: quantile(&turnarounds, 0.99),
        round_trip_p50_us: quantile(&round_trips, 0.5),
        round_trip_p99_us: quantile(&round_trips, 0.99),
        ratio_p50: quantile(&turnarounds, 0.5) / quantile(&round_trips, 0.5),
        goal: GOAL,
    })
}

/// The decode engine, on its rank's thread.
async fn decode(rank: &RankHandle, setup: &Setup, ready: &Ready) -> Result<Samples> {
    let mut echoes = bind()?;
    // The echo is told where it goes.
    let message = [
        echoes.local_addr().to_string().into_bytes(),
        vec![0; ECHO_BYTES],
    ];
    let echo = PushPeer::new(&ready.echo_at.to_string(), PushOptions::default());
    let (mut turnarounds, mut round_trips) = (Vec::new(), Vec::new());
    for room in 0..setup.rooms {
        let open = OpenRoom {
            room,
            bootstrap: Some(setup.bootstrap.clone()),
            prefill_dp_rank: None,
            aux_index: None,
        };
        rank.open(open).await?;
        let page = i32::try_from(room * 7 % u64::from(PAGES))?;
        let announce = Announce {
            kv_indices: Indices(vec![page]),
            aux_index: Some(u32::try_from(room % u64::from(PAGES))?),
            ..Announce::default()
        };
        let begun = Instant::now();
        // An engine need not wait for the one before it asks for the other.
        let (announced, view) = tokio::join!(
            rank.announce(room, announce),
            rank.wait(room, Some(RoomStatus::Success), PATIENCE)
        );
        let turnaround = begun.elapsed();
        announced?;
        let view = view?;
        ensure!(
            view.status == RoomStatus::Success,
            "room {room} ended as {view:?}"
        );
        rank.clear(room).await?;

        let begun = Instant::now();
        echo.send(&message).await?;
        echoes.recv().await.context("the echo has gone")?;
        let round_trip = begun.elapsed();
        if room >= WARM_UP as u64 {
            turnarounds.push(turnaround.as_secs_f64() * 1e6);
            round_trips.push(round_trip.as_secs_f64() * 1e6);
        }
    }
    Ok((turnarounds, round_trips))
}

fn bind() -> Result<PullSocket> {
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Ok(PullSocket::bind(any_port, FrameLimits::default())?)
}

/// The prefill process: its engine and the echo run on the rank's thread.
///
/// # Errors
/// When a request fails.
pub fn serve_prefill() -> Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let setup: Setup = serde_json::from_str(&line)?;
    actix_rt::System::new().block_on(async move {
        let rank = start_rank(&setup, Role::Prefill).await?;
        for room in 0..setup.rooms {
            let aux_index = u32::try_from(room % u64::from(PAGES))?;
            let open = OpenRoom {
                room,
                bootstrap: None,
                prefill_dp_rank: None,
                aux_index: Some(aux_index),
            };
            rank.open(open).await?;
        }
        let engine = rank.clone();
        let (done, is_done) = tokio::sync::oneshot::channel();
        rank.spawn(async move {
            // Whoever waits for it has gone only if the whole run failed.
            let _ = done.send(prefill(&engine, &setup).await);
        });
        is_done.await.context("the prefill rank has ended")??;
        // The decode process ends this one.
        std::future::pending::<()>().await;
        Ok(())
    })
}

/// The prefill engine and the echo, on the rank's thread.
async fn prefill(rank: &RankHandle, setup: &Setup) -> Result<()> {
    let mut echoes = bind()?;
    let echo_at = echoes.local_addr();
    tokio::task::spawn_local(async move {
        let mut back_opt: Option<PushPeer> = None;
        while let Some(received) = echoes.recv().await {
            let to = received.frames.first().map(Vec::as_slice);
            let to = String::from_utf8_lossy(to.unwrap_or_default());
            let back = back_opt.get_or_insert_with(|| PushPeer::new(&to, PushOptions::default()));
            if back.send(&received.frames).await.is_err() {
                return;
            }
        }
    });
    reply(&Ready { echo_at })?;
    for room in 0..setup.rooms {
        let view = rank
            .wait(room, Some(RoomStatus::WaitingForInput), PATIENCE)
            .await?;
        ensure!(
            view.status == RoomStatus::WaitingForInput,
            "room {room}: {view:?}"
        );
        let page = i32::try_from(room * 5 % u64::from(PAGES))?;
        let chunk = Chunk {
            kv_indices: Indices(vec![page]),
            last: true,
            ..Chunk::default()
        };
        rank.send_chunk(room, chunk).await?;
    }
    Ok(())
}

/// A rank with one pool, as an engine in Rust starts it.
async fn start_rank(setup: &Setup, role: Role) -> Result<RankHandle> {
    let key = format!("bench-{}", role.name());
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.transports = vec![setup.transport.parse().map_err(anyhow::Error::msg)?];
    let engine = Engine::start(config)?;
    let tensor = |item_len: u64| TensorLayout {
        bytes: ByteLen(item_len * u64::from(PAGES)),
        item_len: ByteLen(item_len),
    };
    let layout = RankLayout {
        page_size: 1,
        kv: KvLayout {
            tensors: vec![tensor(setup.page_bytes); 2 * setup.layers as usize],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mha,
            head_num: 1,
            total_head_num: 1,
        },
        aux: vec![tensor(AUX_ROW_BYTES)],
        states: Vec::new(),
    };
    let tensors = layout.kv.tensors.iter().chain(&layout.aux);
    let total: u64 = tensors.clone().map(|tensor| tensor.bytes.get()).sum();
    let pool = Memory::allocate("bench-turnaround", ByteLen(total))?;
    let mut offset = 0;
    let mut regions = Vec::new();
    for tensor in tensors {
        let region: Region = engine.register(&pool, ByteOffset(offset), tensor.bytes, "bench")?;
        regions.push(Some(region));
        offset += tensor.bytes.get();
    }
    let aux = regions.split_off(layout.kv.tensors.len());
    let buffers = RankBuffers {
        layout,
        kv: regions,
        aux,
        states: Vec::new(),
    };
    let rank_config = RankConfig {
        role,
        parallel: ParallelConfig::default(),
        engine: EngineSpec {
            kv_cache_dtype: "auto".to_owned(),
            kv_layout: None,
            load_balance_method: "round_robin".to_owned(),
            decode_allocation_policy: "early".to_owned(),
            prefill_http_port: None,
            sglang_release: None,
        },
        bootstrap_opt: (role == Role::Prefill).then(|| setup.bootstrap.clone()),
        advertise_host: "127.0.0.1".to_owned(),
        control_bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        control_ports_opt: None,
        timeouts: Timeouts::default(),
        limits: Limits::default(),
        planner: PlannerOptions::default(),
        push: PushOptions::default(),
        verify_opt: None,
    };
    let metrics = Arc::new(TransferMetrics::new(&Registry::new())?);
    Ok(RankHandle::start(rank_config, engine, buffers, metrics).await?)
}
