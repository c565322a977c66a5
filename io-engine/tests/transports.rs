//! Every transport moves exactly the bytes it is told to, checks where they land, and says what
//! happened when it cannot.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::ids::{ByteLen, ByteOffset};
use common::plan::{RunList, StridedRun};
use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    Engine, EngineConfig, FaultSpec, Memory, Region, RemoteRegion, Session, Transferred,
    TransportErrorKind, TransportKind, WriteBatch, WritePair,
};

const DEADLINE: Duration = Duration::from_secs(20);
const BYTES: u64 = 1 << 20;

fn config(key: &str, kind: TransportKind) -> EngineConfig {
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.transports = vec![kind];
    config
}

struct Pair {
    source: Engine,
    target: Engine,
    source_memory: Memory,
    target_memory: Memory,
    local: Region,
    remote: Region,
    session: Session,
}

fn pair(kind: TransportKind) -> Pair {
    pair_with(config("source", kind), config("target", kind))
}

fn pair_with(source: EngineConfig, target: EngineConfig) -> Pair {
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

fn through_the_wire(desc: &EngineDesc) -> EngineDesc {
    EngineDesc::unpack(&desc.pack().unwrap()).unwrap()
}

fn remote_of(desc: &MemoryDesc) -> RemoteRegion {
    RemoteRegion::from_desc(&MemoryDesc::unpack(&desc.pack().unwrap()).unwrap()).unwrap()
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len().get() as usize];
    memory.read(ByteOffset(0), &mut bytes).unwrap();
    bytes
}

fn write(
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

/// A small generator, so that a failing seed can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// Runs whose destinations do not overlap: the target is cut into slots, each used once.
fn random_runs(random: &mut Random) -> RunList {
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

#[test]
fn random_runs_arrive_and_nothing_else_changes() {
    let seed = std::env::var("FERRY_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) * 7919);
    println!("seed {seed} (FERRY_SEED={seed} runs it again)");
    for kind in TransportKind::ALL {
        let pair = pair(kind);
        assert_eq!(pair.session.transport(), kind);
        let mut random = Random(seed);
        let source = contents(&pair.source_memory);
        for round in 0..20 {
            let runs = random_runs(&mut random);
            let mut expected = contents(&pair.target_memory);
            for range in runs.iter_ranges() {
                let (src, dst, len) = (
                    range.src.get() as usize,
                    range.dst.get() as usize,
                    range.len.get() as usize,
                );
                expected[dst..dst + len].copy_from_slice(&source[src..src + len]);
            }
            let (bytes, ranges) = (runs.bytes().get(), runs.ranges());
            let moved = write(
                &pair.session,
                &pair.local,
                remote_of(&pair.remote.desc()),
                runs,
            )
            .unwrap();
            assert_eq!((moved.bytes, moved.ranges), (bytes, ranges));
            assert!(
                contents(&pair.target_memory) == expected,
                "{kind}: seed {seed} round {round}"
            );
        }
    }
}

#[test]
fn many_batches_share_a_session() {
    for kind in TransportKind::ALL {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        let handles: Vec<_> = (0..200u64)
            .map(|slot| {
                let run = StridedRun::contiguous(
                    ByteOffset(slot * 5000),
                    ByteOffset(slot * 5000),
                    ByteLen(5000),
                );
                let runs = RunList::new(vec![run]).unwrap();
                let batch = WritePair {
                    local: pair.local.clone(),
                    remote: remote.clone(),
                    runs,
                };
                pair.session.write(WriteBatch { pairs: vec![batch] })
            })
            .collect();
        for handle in handles {
            handle.wait(DEADLINE).expect("ends").unwrap();
        }
        assert!(
            contents(&pair.target_memory)[..1_000_000]
                == contents(&pair.source_memory)[..1_000_000]
        );
    }
}

fn one_run(src: u64, dst: u64, len: u64) -> RunList {
    RunList::new(vec![StridedRun::contiguous(
        ByteOffset(src),
        ByteOffset(dst),
        ByteLen(len),
    )])
    .unwrap()
}

#[test]
fn what_was_not_registered_is_not_written() {
    for kind in TransportKind::ALL {
        let pair = pair(kind);
        let before = contents(&pair.target_memory);
        let good = pair.remote.desc();

        let mut forged_key = good.clone();
        forged_key.extra = vec![rmpv::Value::Array(vec![
            "FRY1".into(),
            rmpv::Value::Binary(vec![7; 16]),
        ])];
        let mut longer = good.clone();
        longer.size = 4 * BYTES;
        let mut unknown = good.clone();
        unknown.id = 4711;
        let cases = [
            (forged_key, one_run(0, 0, 64), TransportErrorKind::BadKey),
            (
                longer,
                one_run(0, BYTES - 32, 64),
                TransportErrorKind::OutOfBounds,
            ),
            (
                unknown,
                one_run(0, 0, 64),
                TransportErrorKind::NotRegistered,
            ),
            (
                good.clone(),
                one_run(0, BYTES - 32, 64),
                TransportErrorKind::OutOfBounds,
            ),
            (
                good.clone(),
                one_run(BYTES - 32, 0, 64),
                TransportErrorKind::OutOfBounds,
            ),
        ];
        for (desc, runs, expected) in cases {
            let result = write(&pair.session, &pair.local, remote_of(&desc), runs);
            assert_eq!(result.unwrap_err(), expected, "{kind}");
        }
        assert!(
            contents(&pair.target_memory) == before,
            "{kind}: nothing changed"
        );
        // The session goes on.
        write(
            &pair.session,
            &pair.local,
            remote_of(&good),
            one_run(0, 0, 64),
        )
        .unwrap();

        assert!(pair.target.deregister(&pair.remote, DEADLINE));
        if kind != TransportKind::Cma {
            let result = write(
                &pair.session,
                &pair.local,
                remote_of(&good),
                one_run(0, 0, 64),
            );
            assert_eq!(
                result.unwrap_err(),
                TransportErrorKind::NotRegistered,
                "{kind}"
            );
        }
    }
}

#[test]
fn a_descriptor_with_a_pid_and_addresses_is_not_believed() {
    let pair = pair(TransportKind::Cma);
    let mut stock = pair.target.desc();
    stock.extra.clear();
    let refused = pair.source.connect(&stock).unwrap_err();
    assert_eq!(refused.kind(), TransportErrorKind::NoCommonTransport);
    assert!(
        refused.to_string().contains("--cma-trust-descriptors"),
        "{refused}"
    );

    let mut trusting = config("trusting", TransportKind::Cma);
    trusting.cma_trust_descriptors = true;
    let trusting = Engine::start(trusting).unwrap();
    let local = trusting
        .register(&pair.source_memory, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    let session = trusting.connect(&stock).unwrap();
    let mut desc = pair.remote.desc();
    desc.extra.clear();
    write(&session, &local, remote_of(&desc), one_run(0, 100, 5000)).unwrap();
    assert!(contents(&pair.target_memory)[100..5100] == contents(&pair.source_memory)[..5000]);
}

#[test]
fn the_order_of_choice_is_kept_and_shown() {
    let mut both = EngineConfig::new("both", "127.0.0.1");
    both.transports = vec![TransportKind::Tcp, TransportKind::Cma];
    let mut other = EngineConfig::new("other", "127.0.0.1");
    other.transports = vec![TransportKind::Cma, TransportKind::Tcp];
    let chosen = pair_with(both, other).session.transport();
    assert_eq!(chosen, TransportKind::Tcp, "the writer's order counts");
    let refused = Engine::start(config("a", TransportKind::Tcp))
        .unwrap()
        .connect(
            &Engine::start(config("b", TransportKind::Cma))
                .unwrap()
                .desc(),
        );
    assert_eq!(
        refused.unwrap_err().kind(),
        TransportErrorKind::NoCommonTransport
    );
}

#[test]
fn garbage_and_slow_clients_do_not_disturb_the_listener() {
    let pair = pair(TransportKind::Tcp);
    let address = pair.target.tcp_address();
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(b"F").unwrap();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 100],
        b"FRYT\x09\x00",
        &[0xff; 64],
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(garbage).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        // The engine closes without a word (or resets, when it had not read everything).
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    write(
        &pair.session,
        &pair.local,
        remote_of(&pair.remote.desc()),
        one_run(0, 0, 4096),
    )
    .unwrap();
}

#[test]
fn a_cancelled_batch_ends_and_says_that_it_has_stopped() {
    for kind in TransportKind::ALL {
        let mut source = config("source", kind);
        source.fault_opt = Some("stall:kv:1".parse::<FaultSpec>().unwrap());
        let pair = pair_with(source, config("target", kind));
        let remote = remote_of(&pair.remote.desc());
        write(
            &pair.session,
            &pair.local,
            remote.clone(),
            one_run(0, 0, 64),
        )
        .unwrap();
        let batch = WritePair {
            local: pair.local.clone(),
            remote,
            runs: one_run(0, 64, 64),
        };
        let handle = pair.session.write(WriteBatch { pairs: vec![batch] });
        assert!(
            handle.wait(Duration::from_millis(20)).is_none(),
            "it stalls"
        );
        handle.cancel();
        let error = handle.wait(DEADLINE).expect("ends").unwrap_err();
        assert_eq!(
            (error.kind(), error.is_quiesced()),
            (TransportErrorKind::Cancelled, true)
        );
    }
}

#[test]
fn injected_faults_do_what_they_say() {
    for kind in TransportKind::ALL {
        for (spec, differs) in [
            ("drop-write:kv", true),
            ("misdirect:kv", true),
            ("drop-write:other", false),
        ] {
            let mut source = config("source", kind);
            source.fault_opt = Some(spec.parse().unwrap());
            let pair = pair_with(source, config("target", kind));
            write(
                &pair.session,
                &pair.local,
                remote_of(&pair.remote.desc()),
                one_run(0, 0, 4096),
            )
            .unwrap();
            let arrived =
                contents(&pair.target_memory)[..4096] == contents(&pair.source_memory)[..4096];
            assert_eq!(arrived, !differs, "{kind} {spec}");
        }
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_handle_can_be_awaited() {
    let pair = pair(TransportKind::Tcp);
    let batch = WritePair {
        local: pair.local.clone(),
        remote: remote_of(&pair.remote.desc()),
        runs: one_run(0, 0, BYTES),
    };
    let moved = pair
        .session
        .write(WriteBatch { pairs: vec![batch] })
        .await
        .unwrap();
    assert_eq!(moved.bytes, BYTES);
    assert!(contents(&pair.target_memory) == contents(&pair.source_memory));
    pair.session.close();
    assert!(!pair.session.is_alive());
    let batch = WritePair {
        local: pair.local.clone(),
        remote: remote_of(&pair.remote.desc()),
        runs: one_run(0, 0, 1),
    };
    assert!(
        pair.session
            .write(WriteBatch { pairs: vec![batch] })
            .await
            .is_err()
    );
}

/// A target engine in another process: this test binary, started again. Prints its descriptors as
/// hex, then a byte sum of its memory for each line on its input.
#[test]
#[ignore = "started by other tests as a peer process"]
fn peer_process() {
    let kind = std::env::var("FERRY_PEER_TRANSPORT")
        .unwrap()
        .parse()
        .unwrap();
    let engine = Engine::start(config("peer", kind)).unwrap();
    let memory = Memory::allocate("peer", ByteLen(BYTES)).unwrap();
    let region = engine
        .register(&memory, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    let hex = |bytes: Vec<u8>| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    println!(
        "peer {} {}",
        hex(engine.desc().pack().unwrap()),
        hex(region.desc().pack().unwrap())
    );
    for line in std::io::stdin().lines() {
        line.unwrap();
        let sum: u64 = contents(&memory).iter().map(|byte| u64::from(*byte)).sum();
        println!("sum {sum}");
    }
}

struct PeerProcess {
    child: Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
    engine: EngineDesc,
    region: RemoteRegion,
}

impl PeerProcess {
    fn start(kind: TransportKind) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "peer_process",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("FERRY_PEER_TRANSPORT", kind.name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut lines = std::io::BufRead::lines(stdout);
        let line = lines
            .by_ref()
            .map(Result::unwrap)
            .find_map(|line| line.split_once("peer ").map(|(_, rest)| rest.to_owned()))
            .expect("the peer says where it is");
        let (engine, region) = line.split_once(' ').unwrap();
        let unhex = |text: &str| -> Vec<u8> {
            (0..text.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
                .collect()
        };
        let engine = EngineDesc::unpack(&unhex(engine)).unwrap();
        let region = RemoteRegion::from_desc(&MemoryDesc::unpack(&unhex(region)).unwrap()).unwrap();
        Self {
            child,
            lines,
            engine,
            region,
        }
    }

    fn sum(&mut self) -> u64 {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let lines = self.lines.by_ref().map(Result::unwrap);
        let line = lines
            .into_iter()
            .find_map(|line| line.strip_prefix("sum ").map(str::to_owned));
        line.expect("a sum").parse().unwrap()
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn bytes_cross_processes_and_a_killed_peer_is_noticed() {
    for kind in [TransportKind::Cma, TransportKind::Tcp] {
        let mut peer = PeerProcess::start(kind);
        let source = Engine::start(config("source", kind)).unwrap();
        let memory = Memory::allocate("source", ByteLen(BYTES)).unwrap();
        memory
            .write(ByteOffset(0), &vec![3; BYTES as usize])
            .unwrap();
        let local = source
            .register(&memory, ByteOffset(0), ByteLen(BYTES), "kv")
            .unwrap();
        let session = source.connect(&peer.engine).unwrap();
        assert_eq!(session.transport(), kind);
        let moved = write(&session, &local, peer.region.clone(), one_run(0, 0, BYTES)).unwrap();
        assert_eq!(moved.bytes, BYTES);
        assert_eq!(peer.sum(), 3 * BYTES);

        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        let deadline = std::time::Instant::now() + DEADLINE;
        while session.is_alive() {
            assert!(
                std::time::Instant::now() < deadline,
                "{kind}: the death is noticed"
            );
            std::thread::yield_now();
        }
        let error = write(&session, &local, peer.region.clone(), one_run(0, 0, BYTES)).unwrap_err();
        assert!(
            matches!(
                error,
                TransportErrorKind::PeerDead | TransportErrorKind::Closed
            ),
            "{kind}: {error:?}"
        );
        assert!(
            source.connect(&peer.engine).is_err(),
            "{kind}: nobody is there"
        );
    }
}
