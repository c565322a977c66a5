//! Between real processes: bytes cross, and a peer that dies or freezes is noticed.

use std::collections::VecDeque;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, Memory, Region, RemoteRegion,
    TransportErrorKind, TransportKind, WriteBatch, WritePair,
};
use rustix::process::{Pid, Signal, WaitOptions};

use crate::support::{
    BYTES, DEADLINE, begin, config, contents, eventually, one_run, process_kinds, shuffled_pages,
    write,
};

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
    say_where(&engine, &region);
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "sum" => {
                let sum: u64 = contents(&memory).iter().map(|byte| u64::from(*byte)).sum();
                println!("said {sum}");
            }
            "deregister" => println!("said {}", u64::from(engine.deregister(&region, DEADLINE))),
            other => panic!("{other:?} is no command"),
        }
    }
}

/// Tells whoever started this process of its engine and region.
pub(crate) fn say_where(engine: &Engine, region: &Region) {
    println!("peer {}", told_where(engine, region));
}

/// The descriptors of an engine and a region, as a line tells them.
pub(crate) fn told_where(engine: &Engine, region: &Region) -> String {
    let hex = |bytes: Vec<u8>| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    format!(
        "{} {}",
        hex(engine.desc().pack().unwrap()),
        hex(region.desc().pack().unwrap())
    )
}

/// What [`told_where`] told.
pub(crate) fn heard_where(line: &str) -> (EngineDesc, RemoteRegion) {
    let (engine, region) = line.split_once(' ').unwrap();
    let unhex = |text: &str| -> Vec<u8> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
            .collect()
    };
    let engine = EngineDesc::unpack(&unhex(engine)).unwrap();
    let region = RemoteRegion::from_desc(&MemoryDesc::unpack(&unhex(region)).unwrap()).unwrap();
    (engine, region)
}

pub(crate) struct PeerProcess {
    pub(crate) child: Child,
    lines: std::io::Lines<std::io::BufReader<std::process::ChildStdout>>,
    pub(crate) engine: EngineDesc,
    pub(crate) region: RemoteRegion,
}

impl PeerProcess {
    fn start(kind: TransportKind) -> Self {
        Self::start_test(kind, "peers::peer_process")
    }

    /// Starts another test of this binary that says where it is, as `peer_process` does.
    pub(crate) fn start_test(kind: TransportKind, test: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                test,
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
        let (engine, region) = heard_where(&line);
        Self {
            child,
            lines,
            engine,
            region,
        }
    }

    pub(crate) fn ask(&mut self, command: &str) -> u64 {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{command}").unwrap();
        let mut lines = self.lines.by_ref().map(Result::unwrap);
        let said = lines.find_map(|line| line.strip_prefix("said ").map(str::to_owned));
        said.expect("an answer").parse().unwrap()
    }

    /// Stops the process and waits until all its threads stand still.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_child(&self.child);
        let stopped = rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

/// An engine with a pool full of threes.
fn source(config: EngineConfig) -> (Engine, Region) {
    let source = Engine::start(config).unwrap();
    let memory = Memory::allocate("source", ByteLen(BYTES)).unwrap();
    memory
        .write(ByteOffset(0), &vec![3; BYTES as usize])
        .unwrap();
    let local = source
        .register(&memory, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    (source, local)
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn bytes_cross_processes_and_a_killed_peer_is_noticed() {
    for kind in process_kinds() {
        let mut peer = PeerProcess::start(kind);
        let (source, local) = source(config("source", kind));
        let session = source.connect(&peer.engine).unwrap();
        assert_eq!(session.transport(), kind);
        let moved = write(&session, &local, peer.region.clone(), one_run(0, 0, BYTES)).unwrap();
        assert_eq!(moved.bytes, BYTES);
        assert_eq!(peer.ask("sum"), 3 * BYTES);

        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        eventually("the death is noticed", || !session.is_alive());
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

#[test]
fn a_peer_that_is_killed_ends_what_is_in_flight() {
    for kind in process_kinds() {
        let mut peer = PeerProcess::start(kind);
        let (source, local) = source(config("source", kind));
        let session = source.connect(&peer.engine).unwrap();
        let mut in_flight: VecDeque<_> = (0..50)
            .map(|_| begin(&session, &local, &peer.region, shuffled_pages()))
            .collect();
        in_flight[1].wait(DEADLINE).expect("ends").unwrap();
        peer.child.kill().unwrap();
        let killed = Instant::now();
        // Batches go on being submitted until the death is noticed.
        let error = loop {
            in_flight.push_back(begin(&session, &local, &peer.region, shuffled_pages()));
            let oldest = in_flight.pop_front().unwrap();
            if let Err(error) = oldest.wait(DEADLINE).expect("a batch ends") {
                break error;
            }
        };
        println!("{kind}: noticed {:?} after the kill", killed.elapsed());
        let others = in_flight.iter().map(|handle| handle.wait(DEADLINE));
        let others = others.filter_map(|ended| ended.expect("a batch ends").err());
        for error in others.chain([error]) {
            assert!(error.is_retryable(), "{kind}: {error:?}");
            // A call or a copy that is over writes no more; a stream may hold bytes.
            let is_proved = kind == TransportKind::Tcp || error.is_quiesced();
            assert!(is_proved, "{error:?}");
        }
    }
}

#[test]
fn a_region_is_let_go_by_a_writer_in_another_process() {
    for kind in process_kinds() {
        let mut peer = PeerProcess::start(kind);
        let (source, local) = source(config("source", kind));
        let session = source.connect(&peer.engine).unwrap();
        let handles: Vec<_> = (0..100)
            .map(|_| begin(&session, &local, &peer.region, shuffled_pages()))
            .collect();
        handles[1].wait(DEADLINE).expect("ends").unwrap();
        assert_eq!(peer.ask("deregister"), 1, "{kind}");
        for handle in handles {
            if let Err(error) = handle.wait(DEADLINE).expect("ends") {
                assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{kind}");
            }
        }
        assert!(session.is_alive(), "{kind}: the session goes on");
        assert_eq!(
            peer.ask("sum"),
            3 * BYTES,
            "{kind}: the first batch had arrived"
        );
    }
}

#[test]
fn a_frozen_peer_fails_in_time_and_holds_up_nobody() {
    const PATIENCE: Duration = Duration::from_millis(300);
    for kind in process_kinds() {
        let (frozen, healthy) = (PeerProcess::start(kind), PeerProcess::start(kind));
        let mut config = config("source", kind);
        config.connect_timeout = PATIENCE;
        config.stall_timeout = PATIENCE;
        let (source, local) = source(config);
        let to_frozen = source.connect(&frozen.engine).unwrap();
        let to_healthy = source.connect(&healthy.engine).unwrap();
        frozen.freeze();
        let stuck: Vec<_> = (0..20)
            .map(|_| begin(&to_frozen, &local, &frozen.region, shuffled_pages()))
            .collect();
        for _ in 0..20 {
            write(
                &to_healthy,
                &local,
                healthy.region.clone(),
                shuffled_pages(),
            )
            .unwrap();
        }
        assert!(to_frozen.is_alive(), "{kind}: its time had not come");
        for handle in stuck {
            let error = handle.wait(DEADLINE).expect("ends").unwrap_err();
            assert_eq!(error.kind(), TransportErrorKind::Timeout, "{kind}: {error}");
        }
        assert!(!to_frozen.is_alive(), "{kind}");
        frozen.signal(Signal::CONT);
    }
}

#[test]
fn batches_to_a_frozen_peer_fail_at_their_own_timeout() {
    const TIMEOUT: Duration = Duration::from_millis(200);
    let (frozen, healthy) = (
        PeerProcess::start(TransportKind::Tcp),
        PeerProcess::start(TransportKind::Tcp),
    );
    let (source, local) = source(config("source", TransportKind::Tcp));
    let to_frozen = source.connect(&frozen.engine).unwrap();
    let to_healthy = source.connect(&healthy.engine).unwrap();
    frozen.freeze();
    let batch = |region: &RemoteRegion, runs| WriteBatch {
        pairs: vec![WritePair {
            local: local.clone(),
            remote: region.clone(),
            runs,
        }],
    };
    let began = Instant::now();
    let stuck: Vec<_> = (0..200)
        .map(|_| {
            let batch = batch(&frozen.region, shuffled_pages());
            to_frozen.submit(Direction::Write, batch, Some(TIMEOUT))
        })
        .collect();
    // A thread that waits for itself is no exception, and nobody else is held up.
    let batch_of_one = batch(&frozen.region, one_run(0, 0, 64));
    let error = to_frozen.transfer(Direction::Write, batch_of_one, TIMEOUT);
    assert_eq!(error.unwrap_err().kind(), TransportErrorKind::Timeout);
    for _ in 0..20 {
        let batch = batch(&healthy.region, shuffled_pages());
        let moved = to_healthy.transfer(Direction::Write, batch, DEADLINE);
        assert_eq!(moved.unwrap().bytes, BYTES);
    }
    let mut unproved = 0;
    for handle in stuck {
        let error = handle.wait(DEADLINE).expect("ends").unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::Timeout, "{error}");
        unproved += usize::from(!error.is_quiesced());
    }
    let took = began.elapsed();
    println!("{unproved} of 200 without proof, {took:?} after the first began");
    assert!(unproved > 0, "what is under way may still land");
    assert!(unproved < 200, "what was not begun will not");
    frozen.signal(Signal::CONT);
}
