//! Device memory of another process.

use std::time::Duration;

use io_engine::{
    DeviceRuntime, Direction, Engine, TransportErrorKind, TransportKind, WriteBatch, WritePair,
};
use rustix::process::Signal;

use super::{Bytes, Turn, pattern};
use crate::peers::{PeerProcess, heard_where, say_where, told_where};
use crate::support::{BYTES, DEADLINE, config, eventually, one_run};

/// An engine with a pool in device memory in a process of its own. Says the byte sum of its pool,
/// writes it into the pool named on its input, and deregisters.
#[test]
#[ignore = "started by other tests as a peer process"]
fn peer_process() {
    let _turn = Turn::take();
    let kind = std::env::var("FERRY_PEER_TRANSPORT")
        .unwrap()
        .parse()
        .unwrap();
    let engine = Engine::start(config("peer", kind)).unwrap();
    let memory = Bytes::allocate(Some(DeviceRuntime::Cuda), 1);
    memory.write(0, &pattern(0));
    let region = memory.register(&engine);
    say_where(&engine, &region);
    let mut written_to = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if let Some(place) = line.strip_prefix("write ") {
            let (peer, remote) = heard_where(place);
            let session = engine.connect(&peer).unwrap();
            let pair = WritePair {
                local: region.clone(),
                remote,
                runs: one_run(0, 0, BYTES),
            };
            let batch = WriteBatch { pairs: vec![pair] };
            session.transfer(Direction::Write, batch, DEADLINE).unwrap();
            // It goes on holding what it has mapped.
            written_to.push(session);
            println!("said 1");
            continue;
        }
        match line.as_str() {
            "sum" => {
                let sum: u64 = memory.contents().iter().map(|byte| u64::from(*byte)).sum();
                println!("said {sum}");
            }
            "deregister" => println!("said {}", u64::from(engine.deregister(&region, DEADLINE))),
            other => panic!("{other:?} is no command"),
        }
    }
}

#[test]
fn device_memory_of_another_process_is_shared_and_survives_its_death_without_a_leak() {
    let turn = Turn::take();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let live = turn.get("live");
        let mut peer = PeerProcess::start_test(kind, "devices::processes::peer_process");
        let engine = Engine::start(config("source", kind)).unwrap();
        let own = Bytes::allocate(Some(DeviceRuntime::Cuda), 0);
        own.write(0, &pattern(11));
        let region = own.register(&engine);
        let session = engine.connect(&peer.engine).unwrap();
        let batch = |runs| WriteBatch {
            pairs: vec![WritePair {
                local: region.clone(),
                remote: peer.region.clone(),
                runs,
            }],
        };
        let whole = batch(one_run(0, 0, BYTES));
        session
            .transfer(Direction::Write, whole.clone(), DEADLINE)
            .unwrap();
        let sum: u64 = pattern(11).iter().map(|byte| u64::from(*byte)).sum();
        assert_eq!(peer.ask("sum"), sum, "{kind}");
        own.write(0, &vec![0; BYTES as usize]);
        session
            .transfer(Direction::Read, whole.clone(), DEADLINE)
            .unwrap();
        assert!(own.contents() == pattern(11), "{kind}");
        peer.signal(Signal::KILL);
        peer.child.wait().unwrap();
        // What is mapped can still be written to; whether anybody is there is asked for here.
        eventually("the death is noticed", || !session.is_alive());
        let error = session
            .transfer(Direction::Write, whole, DEADLINE)
            .unwrap_err();
        assert_eq!(
            error.kind(),
            TransportErrorKind::PeerDead,
            "{kind}: {error}"
        );
        drop((session, engine, region, own));
        // What was gathered in is the lanes', and goes with the last memory.
        eventually("all that was imported is let go", || {
            turn.get("live") == live
        });
    }
}

#[test]
fn a_region_in_device_memory_is_free_once_its_writer_is_dead_or_has_let_go() {
    let turn = Turn::take();
    let kind = TransportKind::Shm;
    let mut peer = PeerProcess::start_test(kind, "devices::processes::peer_process");
    let engine = Engine::start(config("source", kind)).unwrap();
    let own = Bytes::allocate(None, 0);
    let region = own.register(&engine);
    let session = engine.connect(&peer.engine).unwrap();
    let pair = WritePair {
        local: region,
        remote: peer.region.clone(),
        runs: one_run(0, 0, BYTES),
    };
    let batch = WriteBatch { pairs: vec![pair] };
    session
        .transfer(Direction::Write, batch.clone(), DEADLINE)
        .unwrap();
    assert_eq!(
        peer.ask("deregister"),
        1,
        "this side lets go when it is told"
    );
    let error = session
        .transfer(Direction::Write, batch, DEADLINE)
        .unwrap_err();
    assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{error}");
    // The other way about: the peer writes into memory of this process.
    let mut peer = PeerProcess::start_test(kind, "devices::processes::peer_process");
    let live = turn.get("live");
    let written = Bytes::allocate(Some(DeviceRuntime::Cuda), 0);
    let region = written.register(&engine);
    peer.ask(&format!("write {}", told_where(&engine, &region)));
    assert!(written.contents() == pattern(0));
    peer.freeze();
    assert!(
        !engine.deregister(&region, Duration::from_millis(100)),
        "a writer that lives and has not let go holds it"
    );
    peer.signal(Signal::KILL);
    assert!(engine.deregister(&region, DEADLINE), "a dead one does not");
    drop((region, written));
    eventually("nothing is left of it", || turn.get("live") == live);
}
