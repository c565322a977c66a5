//! Several network devices for one engine: the source has `rxe0` and `rxe2`, the target `rxe1` and
//! `rxe3`, of `tests/rdma-vm/run.sh -n rails`, where the first reach each other only, and so do the
//! second.

use std::collections::VecDeque;
use std::process::Command;

use io_engine::{
    DeviceChoice, Engine, RailReport, TransferHandle, TransportErrorKind, TransportKind,
};

use crate::support::{
    BYTES, DEADLINE, Pair, begin, config, contents, eventually, pair_with, remote_of,
    shuffled_pages, through_the_wire, write,
};

fn run(command: &str) {
    let status = Command::new("bash").args(["-c", command]).status();
    assert!(status.unwrap().success(), "{command}");
}

/// Ends what a test did to the network.
struct Network;

impl Drop for Network {
    fn drop(&mut self) {
        run("/run/veth-up v; /run/veth-up w");
    }
}

fn pair_by(nic_map: &str) -> Pair {
    let on = |key: &str, devices: [&str; 2]| {
        let mut config = config(key, TransportKind::Rdma);
        config.rdma.devices = DeviceChoice::Only(devices.map(str::to_owned).to_vec());
        config.rdma.nic_map = nic_map.parse().unwrap();
        config
    };
    pair_with(
        on("source", ["rxe0", "rxe2"]),
        on("target", ["rxe1", "rxe3"]),
    )
}

fn rails(engine: &Engine) -> [RailReport; 2] {
    engine.rails().try_into().expect("two devices")
}

fn all_arrived(pair: &Pair) -> bool {
    let (source, target) = (contents(&pair.source_memory), contents(&pair.target_memory));
    let pages = BYTES as usize / 4096;
    (0..pages).all(|page| {
        let (src, dst) = (page * 4096, page * 37 % pages * 4096);
        target[dst..dst + 4096] == source[src..src + 4096]
    })
}

fn pages_arrive(pair: &Pair) {
    let remote = remote_of(&pair.remote.desc());
    let handle = begin(&pair.session, &pair.local, &remote, shuffled_pages());
    handle.wait(DEADLINE).expect("it ends").unwrap();
    assert!(all_arrived(pair));
}

#[test]
#[ignore = "needs the pairs of devices of make test-rdma"]
fn batches_are_spread_over_the_devices() {
    let pair = pair_by("");
    for _ in 0..8 {
        pages_arrive(&pair);
    }
    let [first, second] = rails(&pair.source);
    assert_eq!(first.bytes + second.bytes, 8 * BYTES);
    for rail in [&first, &second] {
        assert!(rail.bytes * 4 > BYTES * 8, "{first:?} {second:?}");
        assert!(rail.is_up && rail.failures == 0, "{rail:?}");
    }
}

#[test]
#[ignore = "needs the pairs of devices of make test-rdma"]
fn memory_goes_by_the_devices_that_it_is_mapped_to() {
    let pair = pair_by("host=rxe2+rxe3");
    for _ in 0..4 {
        pages_arrive(&pair);
    }
    let [first, second] = rails(&pair.source);
    assert_eq!((first.bytes, second.bytes), (0, 4 * BYTES));
}

#[test]
#[ignore = "needs the pairs of devices of make test-rdma"]
fn a_device_that_loses_its_link_in_mid_batch_hands_its_work_to_the_next() {
    let _network = Network;
    let pair = pair_by("");
    let remote = remote_of(&pair.remote.desc());
    let begin = || begin(&pair.session, &pair.local, &remote, shuffled_pages());
    let mut handles: VecDeque<_> = (0..20).map(|_| begin()).collect();
    handles[1].wait(DEADLINE).expect("it ends").unwrap();
    // Beside it batches go on being submitted, so that the link goes down in their midst.
    let down = Command::new("ip")
        .args(["link", "set", "v1", "down"])
        .spawn();
    let mut down = down.expect("iproute2");
    // Batches have pieces on both devices, so one whose link is gone fails them.
    let is_failing = |handle: &TransferHandle| match handle.wait(DEADLINE).expect("a batch ends") {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.kind(), TransportErrorKind::PeerDead, "{error}");
            assert!(error.to_string().contains("rxe0"), "{error}");
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
    assert!(down.wait().unwrap().success());
    eventually("the other device has taken over", || {
        let [first, second] = rails(&pair.source);
        first.left > 0 && !first.is_up && second.is_up
    });
    while let Some(handle) = handles.pop_front() {
        let _ = handle.wait(DEADLINE).expect("what waited ends, too");
    }
    let [first, second] = rails(&pair.source);
    pages_arrive(&pair);
    pages_arrive(&pair);
    assert_eq!(rails(&pair.source)[0].bytes, first.bytes);
    assert_eq!(rails(&pair.source)[1].bytes, second.bytes + 2 * BYTES);
    assert!(pair.session.is_alive());
    // A session that is opened now does without it, too.
    let desc = through_the_wire(&pair.target.desc());
    drop(pair.source.connect(&desc).unwrap());
    run("/run/veth-up v");
    eventually("the port is up again", || rails(&pair.source)[0].is_up);
    let again = pair_by("");
    let remote = remote_of(&again.remote.desc());
    eventually("the link is used again", || {
        let before = rails(&again.source)[0].bytes;
        let arrived = write(
            &again.session,
            &again.local,
            remote.clone(),
            shuffled_pages(),
        );
        arrived.is_ok() && rails(&again.source)[0].bytes > before
    });
}
