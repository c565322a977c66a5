//! Two engines with a pool each, and what tests do with them.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    ByteLen, ByteOffset, Engine, EngineConfig, Memory, Region, RemoteRegion, Session,
    TransferHandle, Transferred, TransportErrorKind, TransportKind, WriteBatch, WritePair,
};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const BYTES: u64 = 1 << 20;

/// Every transport that can be had here, or that of them which `FERRY_TEST_TRANSPORT` names. One
/// that cannot be had is said to be skipped.
pub(crate) fn kinds() -> Vec<TransportKind> {
    if let Ok(name) = std::env::var("FERRY_TEST_TRANSPORT") {
        return vec![name.parse().unwrap()];
    }
    let can_be_had = |kind: &TransportKind| match kind {
        TransportKind::Rdma => has_rdma_device(),
        _ => true,
    };
    TransportKind::ALL.into_iter().filter(can_be_had).collect()
}

/// Runs one test of this binary, which is ignored otherwise, in a process of its own.
pub(crate) fn assert_passes_alone(test: &str) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("1 passed"), "{told}");
}

/// Those of [`kinds`] that reach another process.
pub(crate) fn process_kinds() -> Vec<TransportKind> {
    let mut kinds = kinds();
    kinds.retain(|kind| *kind != TransportKind::Local);
    kinds
}

#[cfg(feature = "rdma")]
pub(crate) fn has_rdma_device() -> bool {
    let names = io_engine::verbs::device_names();
    if names.as_ref().is_ok_and(|names| !names.is_empty()) {
        return true;
    }
    eprintln!("skipped: the rdma transport, without a device ({names:?}); make test-rdma has one");
    false
}

#[cfg(not(feature = "rdma"))]
pub(crate) fn has_rdma_device() -> bool {
    false
}

pub(crate) fn config(key: &str, kind: TransportKind) -> EngineConfig {
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.transports = vec![kind];
    config
}

pub(crate) struct Pair {
    pub(crate) source: Engine,
    pub(crate) target: Engine,
    pub(crate) source_memory: Memory,
    pub(crate) target_memory: Memory,
    pub(crate) local: Region,
    pub(crate) remote: Region,
    pub(crate) session: Session,
}

pub(crate) fn pair(kind: TransportKind) -> Pair {
    pair_with(config("source", kind), config("target", kind))
}

pub(crate) fn pair_with(source: EngineConfig, target: EngineConfig) -> Pair {
    let (source, target) = (
        Engine::start(source).unwrap(),
        Engine::start(target).unwrap(),
    );
    let source_memory = Memory::allocate("source", ByteLen(BYTES)).unwrap();
    let target_memory = Memory::allocate("target", ByteLen(BYTES)).unwrap();
    let pattern: Vec<u8> = (0..BYTES).map(|at| (at * 31 + at / 251) as u8).collect();
    source_memory.write(ByteOffset(0), &pattern).unwrap();
    target_memory
        .write(ByteOffset(0), &vec![0xEE; BYTES as usize])
        .unwrap();
    let whole = (ByteOffset(0), ByteLen(BYTES));
    let local = source
        .register(&source_memory, whole.0, whole.1, "kv")
        .unwrap();
    let remote = target
        .register(&target_memory, whole.0, whole.1, "kv")
        .unwrap();
    let session = source.connect(&through_the_wire(&target.desc())).unwrap();
    Pair {
        source,
        target,
        source_memory,
        target_memory,
        local,
        remote,
        session,
    }
}

pub(crate) fn through_the_wire(desc: &EngineDesc) -> EngineDesc {
    EngineDesc::unpack(&desc.pack().unwrap()).unwrap()
}

pub(crate) fn remote_of(desc: &MemoryDesc) -> RemoteRegion {
    RemoteRegion::from_desc(&MemoryDesc::unpack(&desc.pack().unwrap()).unwrap()).unwrap()
}

pub(crate) fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len().get() as usize];
    memory.read(ByteOffset(0), &mut bytes).unwrap();
    bytes
}

pub(crate) fn write(
    session: &Session,
    local: &Region,
    remote: RemoteRegion,
    runs: RunList,
) -> Result<Transferred, TransportErrorKind> {
    let batch = WriteBatch {
        pairs: vec![WritePair {
            local: local.clone(),
            remote,
            runs,
        }],
    };
    let handle = session.write(batch);
    handle
        .wait(DEADLINE)
        .expect("a batch ends")
        .map_err(|error| error.kind())
}

pub(crate) fn one_run(src: u64, dst: u64, len: u64) -> RunList {
    RunList::new(vec![StridedRun::contiguous(
        ByteOffset(src),
        ByteOffset(dst),
        ByteLen(len),
    )])
    .unwrap()
}

/// A small generator, so that a failing seed can be run again.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Runs whose destinations do not overlap: the target is cut into slots, each used once.
pub(crate) fn random_runs(random: &mut Random) -> RunList {
    const SLOT: u64 = 8192;
    let mut slots: Vec<u64> = (0..BYTES / SLOT).collect();
    let mut runs = Vec::new();
    for _ in 0..1 + random.below(60) {
        let slot = slots.swap_remove(random.below(slots.len() as u64) as usize);
        let count = 1 + random.below(20);
        let len = 1 + random.below(SLOT / count - 1);
        let stride = if count == 1 {
            0
        } else {
            len + random.below((SLOT - len * count) / count + 1)
        };
        let src_stride = len + random.below(500);
        let src = random.below(BYTES - (count * src_stride + len));
        runs.push(StridedRun {
            src: ByteOffset(src),
            dst: ByteOffset(slot * SLOT),
            len: ByteLen(len),
            count: count as u32,
            src_stride,
            dst_stride: stride,
        });
    }
    RunList::new(runs).unwrap()
}

/// Begins to write without waiting.
pub(crate) fn begin(
    session: &Session,
    local: &Region,
    remote: &RemoteRegion,
    runs: RunList,
) -> TransferHandle {
    let pair = WritePair {
        local: local.clone(),
        remote: remote.clone(),
        runs,
    };
    session.write(WriteBatch { pairs: vec![pair] })
}

/// Waits for a condition.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// Pages of 4 KiB, each to the place of another.
pub(crate) fn shuffled_pages() -> RunList {
    shuffled_pages_from(0)
}

/// Without those before `first`. Page 0 keeps its place in the target.
pub(crate) fn shuffled_pages_from(first: u64) -> RunList {
    const PAGE: u64 = 4096;
    let pages = BYTES / PAGE;
    let run = |page: u64| {
        let (src, dst) = (page * PAGE, (page * 37 % pages) * PAGE);
        StridedRun::contiguous(ByteOffset(src), ByteOffset(dst), ByteLen(PAGE))
    };
    RunList::new((first..pages).map(run).collect()).unwrap()
}
