//! Faults of a network, between the devices `rxe0` and `rxe1` of `tests/rdma-vm/run.sh -n veth`.
//! Their packets cross a pair of interfaces; control messages do not, so that what is proved of
//! packets is seen.

use std::collections::VecDeque;
use std::process::Command;
use std::time::{Duration, Instant};

use io_engine::{
    ByteOffset, DeviceChoice, Direction, TransferHandle, TransportErrorKind, TransportKind,
    WriteBatch, WritePair,
};

use crate::support::{
    BYTES, DEADLINE, Pair, begin, config, contents, eventually, pair_with, remote_of,
    shuffled_pages, write,
};

fn run(command: &str) {
    let status = Command::new("bash").args(["-c", command]).status();
    assert!(status.unwrap().success(), "{command}");
}

/// Ends what a test did to the network.
struct Network;

impl Drop for Network {
    fn drop(&mut self) {
        run("tc qdisc del dev v0 root 2>/dev/null; /run/veth-up");
    }
}

/// A source on `rxe0` and a target on `rxe1`.
fn across() -> Pair {
    across_with(14)
}

/// The same with another patience of the devices: 4.096 us, doubled `timeout` times.
fn across_with(timeout: u8) -> Pair {
    let on = |key: &str, device: &str| {
        let mut config = config(key, TransportKind::Rdma);
        config.rdma.timeout = timeout;
        config.rdma.devices = DeviceChoice::Only(vec![device.to_owned()]);
        config
    };
    pair_with(on("source", "rxe0"), on("target", "rxe1"))
}

fn all_arrived(pair: &Pair) -> bool {
    let (source, target) = (contents(&pair.source_memory), contents(&pair.target_memory));
    let pages = BYTES as usize / 4096;
    (0..pages).all(|page| {
        let (src, dst) = (page * 4096, page * 37 % pages * 4096);
        target[dst..dst + 4096] == source[src..src + 4096]
    })
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn lost_packets_are_sent_again() {
    let _network = Network;
    let pair = across();
    let remote = remote_of(&pair.remote.desc());
    run("tc qdisc add dev v0 root netem loss 1% && tc qdisc add dev v1 root netem loss 1%");
    let mut outcomes = (0, 0);
    for _ in 0..10 {
        let handle = begin(&pair.session, &pair.local, &remote, shuffled_pages());
        match handle.wait(DEADLINE).expect("a batch ends") {
            Ok(_) => {
                outcomes.0 += 1;
                assert!(all_arrived(&pair));
            }
            Err(error) => {
                outcomes.1 += 1;
                assert_eq!(error.kind(), TransportErrorKind::PeerDead, "{error}");
            }
        }
    }
    println!("{} arrived, {} were given up", outcomes.0, outcomes.1);
    run("tc qdisc del dev v0 root; tc qdisc del dev v1 root");
    assert!(outcomes.0 > 0);
    eventually("the network is whole again", || {
        write(&pair.session, &pair.local, remote.clone(), shuffled_pages()).is_ok()
    });
    assert!(all_arrived(&pair));
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn a_link_that_goes_down_fails_what_is_under_way_and_is_used_again() {
    let _network = Network;
    let pair = across();
    let remote = remote_of(&pair.remote.desc());
    let begin = || begin(&pair.session, &pair.local, &remote, shuffled_pages());
    let mut handles: VecDeque<_> = (0..20).map(|_| begin()).collect();
    handles[1].wait(DEADLINE).expect("it ends").unwrap();
    run("ip link set v1 down");
    // Those before may all have arrived by then.
    let is_failing = |handle: &TransferHandle| match handle.wait(DEADLINE).expect("a batch ends") {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.kind(), TransportErrorKind::PeerDead, "{error}");
            for part in ["RETRY_EXC_ERR", "rxe0", "target", "::ffff:10.9.0.2"] {
                assert!(error.to_string().contains(part), "{error}");
            }
            assert!(error.is_quiesced(), "the peer has said so: {error}");
            true
        }
    };
    eventually("the link is down", || {
        handles.push_back(begin());
        handles
            .pop_front()
            .is_some_and(|handle| is_failing(&handle))
    });
    assert!(pair.session.is_alive(), "the session waits for the link");
    run("/run/veth-up");
    eventually("the link is used again", || {
        write(&pair.session, &pair.local, remote.clone(), shuffled_pages()).is_ok()
    });
    assert!(all_arrived(&pair));
    for handle in handles {
        let _ = handle.wait(DEADLINE).expect("what waited ends, too");
    }
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn a_link_that_stays_down_ends_its_sessions() {
    let _network = Network;
    let pair = across();
    let remote = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, remote.clone(), shuffled_pages()).unwrap();
    run("ip link set v1 down");
    eventually("the session is given up", || {
        let ended = begin(&pair.session, &pair.local, &remote, shuffled_pages()).wait(DEADLINE);
        let error = ended.expect("a batch ends").unwrap_err();
        assert!(error.is_retryable(), "{error}");
        !pair.session.is_alive()
    });
    let desc = pair.target.desc();
    let refused = pair.source.connect(&desc).unwrap_err().to_string();
    assert!(refused.contains("no rdma port is up (rxe0)"), "{refused}");
    run("/run/veth-up");
    let mut session_opt = None;
    eventually("a new session is opened", || {
        session_opt = pair.source.connect(&desc).ok();
        session_opt.is_some()
    });
    write(&session_opt.unwrap(), &pair.local, remote, shuffled_pages()).unwrap();
    assert!(all_arrived(&pair));
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn a_batch_that_was_given_up_writes_nothing_although_its_packets_were_sent() {
    let _network = Network;
    // Longer than the delay, or nothing would arrive at all.
    let pair = across_with(19);
    let remote = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, remote.clone(), shuffled_pages()).unwrap();
    run("tc qdisc add dev v0 root netem delay 700ms limit 100000");
    let batch = || WriteBatch {
        pairs: vec![WritePair {
            local: pair.local.clone(),
            remote: remote.clone(),
            runs: shuffled_pages(),
        }],
    };
    pair.target_memory
        .write(ByteOffset(0), &vec![0xAA; BYTES as usize])
        .unwrap();
    let began = Instant::now();
    let timeout = Duration::from_millis(20);
    let handle = pair
        .session
        .submit(Direction::Write, batch(), Some(timeout));
    let error = handle.wait(DEADLINE).expect("it ends").unwrap_err();
    assert_eq!(error.kind(), TransportErrorKind::Timeout, "{error}");
    let took = began.elapsed();
    assert!(error.is_quiesced(), "the peer ended its side: {took:?}");
    assert!(
        took < Duration::from_millis(600),
        "before the packets came: {took:?}"
    );
    assert!(
        contents(&pair.target_memory)
            .iter()
            .all(|byte| *byte == 0xAA),
        "its packets are still on their way"
    );
    // What is written now arrives behind those packets, and waits for them.
    let one = |at| crate::support::one_run(at, at, 4096);
    eventually("another batch arrives", || {
        write(&pair.session, &pair.local, remote.clone(), one(0)).is_ok()
    });
    let target = contents(&pair.target_memory);
    assert!(target[..4096] == contents(&pair.source_memory)[..4096]);
    assert!(
        target[4096..].iter().all(|byte| *byte == 0xAA),
        "nothing of what was given up has come"
    );
}
