//! Rooms over a network that fails: two services with a device each of `tests/rdma-vm/run.sh -n
//! veth`, whose packets cross a pair of interfaces; control messages do not.

use std::process::Command;
use std::time::{Duration, Instant};

use tests::process::wait_for;
use tests::service::TransferService;
use transfer_actor::api::{RoomStatus, RoomView};

use super::lifecycle::{wait_until_ended, wait_until_safe};
use super::live_metrics::RDMA_DEVICE_NAMES;
use super::{
    AUX_BYTES, KV_BYTES, MAMBA_BYTES, Pair, SmallEngine, begin, cross, probing_bootstrap,
    whole_chunk,
};

/// How long packets are held on their way where a test wants to meet them there.
const ON_THE_WAY: Duration = Duration::from_secs(3);

fn run(command: &str) {
    let status = Command::new("bash").args(["-c", command]).status();
    assert!(status.expect("bash starts").success(), "{command}");
}

/// Ends what a test did to the network.
struct Network;

impl Network {
    fn delay() {
        let held = ON_THE_WAY.as_millis();
        run(&format!("tc qdisc add dev v0 root netem delay {held}ms"));
    }

    fn repair() {
        run(
            "tc qdisc del dev v0 root 2>/dev/null; tc qdisc del dev v1 root 2>/dev/null; /run/veth-up",
        );
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        Self::repair();
    }
}

const SOURCE: &str = "rxe0";
const TARGET: &str = "rxe1";

/// A service that has one of the two devices. A prefill offers `shm`, too, which its decode does
/// not take: it is how the death of its process is proved.
fn service(device: &str) -> TransferService {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let transports = if device == SOURCE { "shm,rdma" } else { "rdma" };
    let mut command = TransferService::command(folder.path(), &["--transports", transports]);
    command.env("MORI_RDMA_DEVICES", device);
    TransferService::spawn(folder, &mut command)
}

/// A pair that has moved a request over the wire.
fn across() -> Pair {
    let pair = Pair::join(probing_bootstrap(), service(SOURCE), service(TARGET));
    cross(&pair.prefill, &pair.decode, 9);
    pair
}

/// A request whose packets were sent, and have not arrived.
fn begin_on_the_way(pair: &Pair, room: u64) {
    Network::delay();
    begin(&pair.prefill, &pair.decode, room);
    let before = pair.decode.content();
    pair.prefill
        .send(room, whole_chunk())
        .expect("it is accepted");
    wait_for("its packets to be held", || {
        let shown = Command::new("tc")
            .args(["-s", "qdisc", "show", "dev", "v0"])
            .output();
        let shown = shown.expect("tc starts").stdout;
        let shown = String::from_utf8(shown).expect("tc prints text");
        (!shown.contains("backlog 0b 0p")).then_some(())
    });
    assert_eq!(pair.decode.content(), before, "they are on their way");
}

fn reason(view: &RoomView) -> String {
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    let reason = view.reason.clone().unwrap_or_default();
    assert!(!reason.is_empty(), "{view:?} has a reason");
    reason
}

/// Its requests succeed, with every byte, as soon as the network is whole again.
fn assert_repaired(prefill: &SmallEngine, decode: &SmallEngine) {
    Network::repair();
    let mut room = 100;
    wait_for("requests to succeed again", || {
        room += 1;
        begin(prefill, decode, room);
        prefill.send(room, whole_chunk()).ok()?;
        let ended = [prefill, decode].map(|engine| engine.wait(room, RoomStatus::Success));
        let succeeded = ended.iter().all(|view| view.status == RoomStatus::Success);
        for engine in [prefill, decode] {
            wait_until_ended(engine, room);
            engine.clear(room);
        }
        succeeded.then_some(())
    });
    cross(prefill, decode, 1);
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn what_the_dashboard_asks_of_network_devices_is_served_under_their_names() {
    let pair = across();
    let (text, label) = (
        pair.prefill_service.metrics(),
        format!("device=\"{SOURCE}\""),
    );
    for name in RDMA_DEVICE_NAMES {
        let is_its = |line: &str| line.starts_with(name) && line.contains(&label);
        assert!(text.lines().any(is_its), "{name} of {SOURCE}: {text}");
    }
    // A rank publishes what its devices have done at its next look around.
    wait_for("what was moved to be counted", || {
        let moved = pair.prefill_service.metric(RDMA_DEVICE_NAMES[0], &[&label]);
        (moved == (KV_BYTES + MAMBA_BYTES + AUX_BYTES) as f64).then_some(())
    });
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn rooms_of_a_link_that_goes_down_fail_with_its_name_and_later_ones_succeed() {
    let _network = Network;
    let pair = across();
    begin_on_the_way(&pair, 1);
    run("ip link set v1 down");
    let view = pair.prefill.wait(1, RoomStatus::Success);
    let told = reason(&view);
    assert!(told.contains(SOURCE), "{told:?} names the device");
    let view = pair.decode.wait(1, RoomStatus::Success);
    reason(&view);
    for engine in [&pair.prefill, &pair.decode] {
        wait_until_safe(engine, 1);
        engine.clear(1);
    }
    assert_repaired(&pair.prefill, &pair.decode);
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn rooms_succeed_with_every_byte_while_one_packet_in_a_hundred_is_lost() {
    let _network = Network;
    let pair = across();
    run("tc qdisc add dev v0 root netem loss 1% && tc qdisc add dev v1 root netem loss 1%");
    for room in 10..40 {
        // A new use of the same places each time, which `cross` compares.
        cross(&pair.prefill, &pair.decode, room);
    }
    assert_repaired(&pair.prefill, &pair.decode);
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn packets_of_a_killed_prefill_do_not_arrive_in_pages_that_are_free() {
    let _network = Network;
    let mut pair = across();
    begin_on_the_way(&pair, 1);
    let sent = Instant::now();
    pair.prefill_service.kill();
    let view = pair.decode.wait(1, RoomStatus::Success);
    reason(&view);
    wait_until_safe(&pair.decode, 1);
    let freed = pair.decode.content();
    assert!(sent.elapsed() < ON_THE_WAY, "{:?}", sent.elapsed());
    // Whatever is on its way comes within this.
    while sent.elapsed() < 2 * ON_THE_WAY {
        assert!(pair.decode.content() == freed, "a free page was written");
    }
    Network::repair();
    pair.decode.clear(1);
    pair.prefill_service = service(SOURCE);
    pair.prefill = SmallEngine::prefill(&pair.prefill_service, &pair.server);
    assert_repaired(&pair.prefill, &pair.decode);
}

#[test]
#[ignore = "needs the pair of devices of make test-rdma"]
fn rooms_of_a_decode_that_is_killed_while_it_is_written_fail_and_its_successor_is_served() {
    let _network = Network;
    let mut pair = across();
    begin_on_the_way(&pair, 1);
    pair.decode_service.kill();
    let view = pair.prefill.wait(1, RoomStatus::Success);
    let told = reason(&view);
    assert!(told.contains("decode rank"), "{told:?} names the rank");
    wait_until_safe(&pair.prefill, 1);
    pair.prefill.clear(1);
    Network::repair();
    pair.decode_service = service(TARGET);
    pair.decode = SmallEngine::decode(&pair.decode_service, &pair.server);
    assert_repaired(&pair.prefill, &pair.decode);
}
