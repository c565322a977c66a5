//! Throughput of each transport by range size, pages in random order on both sides, through the
//! public API. `cma` and `tcp` write to another process (this binary, started again); `memcpy` is
//! the same copy on one thread without an engine, as the machine's own limit.

use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, MemoryDesc};
use criterion::{BenchmarkId, Criterion, Throughput};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, Memory, Region, RemoteRegion, Session,
    TransportKind, WriteBatch, WritePair,
};

const POOL_BYTES: u64 = 64 << 20;
const BATCH_BYTES: u64 = 16 << 20;
const PAGE_SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 1 << 20];
const DEADLINE: Duration = Duration::from_secs(60);
/// Set in the peer's process: the transport that it offers.
const PEER_VARIABLE: &str = "FERRY_BENCH_PEER";

fn start(key: &str, kind: TransportKind) -> (Engine, Region) {
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.transports = vec![kind];
    let engine = Engine::start(config).expect("an engine starts");
    let memory = Memory::allocate(key, ByteLen(POOL_BYTES)).expect("a pool");
    let region = engine
        .register(&memory, ByteOffset(0), ByteLen(POOL_BYTES), "kv")
        .expect("a region");
    (engine, region)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex"))
        .collect()
}

/// The peer's process: tells its descriptors, and stays until its input ends.
fn serve_as_peer(kind: TransportKind) {
    let (engine, region) = start("peer", kind);
    println!(
        "{} {}",
        hex(&engine.desc().pack().expect("packs")),
        hex(&region.desc().pack().expect("packs"))
    );
    std::io::stdin().lines().for_each(drop);
}

/// Where the writes go; ends the peer's process on drop.
struct Target {
    engine: EngineDesc,
    region: RemoteRegion,
    child_opt: Option<Child>,
    _own_opt: Option<(Engine, Region)>,
}

impl Target {
    fn start(kind: TransportKind) -> Self {
        if kind == TransportKind::Local {
            let (engine, region) = start("target", kind);
            return Self {
                engine: engine.desc(),
                region: RemoteRegion::from_desc(&region.desc()).expect("a region"),
                child_opt: None,
                _own_opt: Some((engine, region)),
            };
        }
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .env(PEER_VARIABLE, kind.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the peer starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let (engine, region) = line.trim().split_once(' ').expect("two descriptors");
        let region = MemoryDesc::unpack(&unhex(region)).expect("a descriptor");
        Self {
            engine: EngineDesc::unpack(&unhex(engine)).expect("a descriptor"),
            region: RemoteRegion::from_desc(&region).expect("a region"),
            child_opt: Some(child),
            _own_opt: None,
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child_opt {
            drop(child.stdin.take());
            child.wait().expect("the peer ends");
        }
    }
}

/// Pages of a batch in an order that is random on both sides, the same in each run.
fn random_pages(page_bytes: u64) -> RunList {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut shuffled = || {
        let mut pages: Vec<u64> = (0..POOL_BYTES / page_bytes).collect();
        for last in (1..pages.len()).rev() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            pages.swap(last, (state >> 33) as usize % (last + 1));
        }
        pages
    };
    let runs = shuffled()
        .into_iter()
        .zip(shuffled())
        .take((BATCH_BYTES / page_bytes) as usize)
        .map(|(src, dst)| {
            StridedRun::contiguous(
                ByteOffset(src * page_bytes),
                ByteOffset(dst * page_bytes),
                ByteLen(page_bytes),
            )
        });
    RunList::new(runs.collect()).expect("a run list")
}

fn write(session: &Session, local: &Region, remote: &RemoteRegion, runs: &RunList) {
    let pair = WritePair {
        local: local.clone(),
        remote: remote.clone(),
        runs: runs.clone(),
    };
    let batch = WriteBatch { pairs: vec![pair] };
    let moved = session.transfer(Direction::Write, batch, DEADLINE);
    let moved = moved.expect("moved");
    assert_eq!(moved.bytes, runs.bytes().get());
}

fn bench_transports(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("write_16_mib");
    group.throughput(Throughput::Bytes(BATCH_BYTES));
    let (src, mut dst) = (
        vec![1u8; POOL_BYTES as usize],
        vec![0u8; POOL_BYTES as usize],
    );
    for page_bytes in PAGE_SIZES {
        let runs = random_pages(page_bytes);
        group.bench_function(BenchmarkId::new("memcpy", page_bytes), |bencher| {
            bencher.iter(|| {
                for range in runs.iter_ranges() {
                    let (from, to) = (range.src.get() as usize, range.dst.get() as usize);
                    let len = range.len.get() as usize;
                    dst[to..to + len].copy_from_slice(&src[from..from + len]);
                }
                black_box(&mut dst);
            });
        });
    }
    for kind in TransportKind::ALL {
        let target = Target::start(kind);
        let (source, local) = start("source", kind);
        let session = source.connect(&target.engine).expect("a session");
        for page_bytes in PAGE_SIZES {
            let runs = random_pages(page_bytes);
            group.bench_function(BenchmarkId::new(kind.name(), page_bytes), |bencher| {
                bencher.iter(|| write(&session, &local, &target.region, &runs));
            });
        }
    }
    group.finish();

    let mut group = criterion.benchmark_group("write_one_page");
    let runs = RunList::new(vec![StridedRun::contiguous(
        ByteOffset(0),
        ByteOffset(0),
        ByteLen(4 << 10),
    )])
    .expect("a run list");
    for kind in TransportKind::ALL {
        let target = Target::start(kind);
        let (source, local) = start("source", kind);
        let session = source.connect(&target.engine).expect("a session");
        group.bench_function(kind.name(), |bencher| {
            bencher.iter(|| write(&session, &local, &target.region, &runs));
        });
    }
    group.finish();
}

/// What the engine itself costs for each range: expansion, checks and posting, with copies of one
/// byte, on one worker.
fn bench_submission(criterion: &mut Criterion) {
    const RANGES: u64 = 200_000;
    let mut group = criterion.benchmark_group("submission");
    group.throughput(Throughput::Elements(RANGES));
    let mut config = EngineConfig::new("one worker", "127.0.0.1");
    config.transports = vec![TransportKind::Local];
    config.copy_threads = 1;
    let source = Engine::start(config).expect("an engine starts");
    let memory = Memory::allocate("source", ByteLen(POOL_BYTES)).expect("a pool");
    let local = source
        .register(&memory, ByteOffset(0), ByteLen(POOL_BYTES), "kv")
        .expect("a region");
    let target = Target::start(TransportKind::Local);
    let session = source.connect(&target.engine).expect("a session");
    // Within a page, so that no cache miss of the copy is counted.
    let scattered = (0..RANGES).map(|at| {
        StridedRun::contiguous(
            ByteOffset(at * 37 % 4096),
            ByteOffset(at * 41 % 4096),
            ByteLen(1),
        )
    });
    let strided = StridedRun {
        src: ByteOffset(0),
        dst: ByteOffset(0),
        len: ByteLen(1),
        count: RANGES as u32,
        src_stride: 0,
        dst_stride: 0,
    };
    for (name, runs) in [
        ("scattered", scattered.collect()),
        ("strided", vec![strided]),
    ] {
        let runs = RunList::new(runs).expect("a run list");
        group.bench_function(name, |bencher| {
            bencher.iter(|| write(&session, &local, &target.region, &runs));
        });
    }
    group.finish();
}

fn main() {
    if let Ok(kind) = std::env::var(PEER_VARIABLE) {
        return serve_as_peer(kind.parse().expect("a transport"));
    }
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    bench_transports(&mut criterion);
    bench_submission(&mut criterion);
    criterion.final_summary();
}
