//! How rooms end when something goes wrong, on every transport between processes of one host.

use std::time::{Duration, Instant};

use tests::process::{PATIENCE, wait_for};
use tests::service::TransferService;
use transfer_actor::api::{RoomStatus, RoomView};

use super::{K, MAMBA, Pair, SmallEngine, begin, cross, first_content, whole_chunk};

macro_rules! on_every_transport {
    ($($behaviour:ident),+ $(,)?) => {
        on_every_transport!(@on shm, $($behaviour),+);
        on_every_transport!(@on cma, $($behaviour),+);
        on_every_transport!(@on tcp, $($behaviour),+);
    };
    (@on $transport:ident, $($behaviour:ident),+) => {
        mod $transport {
            $(#[test]
            fn $behaviour() {
                super::$behaviour(stringify!($transport));
            })+
        }
    };
}

on_every_transport!(
    pages_of_a_room_that_the_decode_gives_up_are_safe_once_its_write_has_stopped,
    pages_of_a_room_that_the_prefill_gives_up_are_safe_once_its_write_has_stopped,
    a_failed_write_names_its_component_on_both_sides_at_once,
    a_killed_prefill_fails_its_rooms_and_its_successor_is_used,
    a_killed_decode_leaves_the_prefill_serving_its_successor,
    a_room_that_was_announced_and_never_sent_is_cleared_and_used_again,
);

/// A look at the prefill ranks often enough for a test.
const HEARTBEATS: [&str; 4] = ["--heartbeat-interval", "0.2", "--heartbeat-misses", "2"];

fn assert_moved_over(view: &RoomView, transport: &str) {
    let moved = &view.transfers;
    assert!(!moved.is_empty(), "{view:?}");
    for transfer in moved {
        assert_eq!(transfer.transport, transport, "{view:?}");
    }
}

/// A request whose write of pages hangs.
fn begin_and_stall(pair: &Pair, room: u64) {
    begin(&pair.prefill, &pair.decode, room);
    pair.prefill
        .send(room, whole_chunk())
        .expect("it is accepted");
    let view = pair.prefill.wait(room, RoomStatus::Transferring);
    assert_eq!(view.status, RoomStatus::Transferring, "the write stalls");
    let view = pair.decode.view(room).expect("it is known");
    assert!(!view.release_safe, "a write is under way");
}

fn wait_until_safe(engine: &SmallEngine, room: u64) -> RoomView {
    wait_for("the places to be safe", || {
        let view = engine.view(room).expect("it is known");
        (view.status == RoomStatus::Failed && view.release_safe).then_some(view)
    })
}

/// Nothing of the pages came, and the next use of the same pages has its own bytes.
fn assert_untouched_and_used_again(pair: &Pair, transport: &str) {
    let pages = K..MAMBA;
    assert_eq!(
        pair.decode.content()[pages.clone()],
        first_content("decode")[pages],
        "no page has come"
    );
    for engine in [&pair.prefill, &pair.decode] {
        engine.clear(1);
    }
    // The same number, the same places: `cross` compares every byte of both pools.
    cross(&pair.prefill, &pair.decode, 1);
    begin(&pair.prefill, &pair.decode, 2);
    pair.prefill.send(2, whole_chunk()).expect("it is accepted");
    let view = pair.prefill.wait(2, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Success, "{view:?}");
    assert_moved_over(&view, transport);
}

fn pages_of_a_room_that_the_decode_gives_up_are_safe_once_its_write_has_stopped(transport: &str) {
    let pair = Pair::start_over(transport, &["--inject-fault", "stall:kv"], &[]);
    begin_and_stall(&pair, 1);
    let view = pair.decode.abort(1, "the user went away");
    assert_eq!(view.status, RoomStatus::Failed);
    wait_until_safe(&pair.decode, 1);
    let view = wait_until_safe(&pair.prefill, 1);
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("gave the room up"), "{reason:?}");
    assert_untouched_and_used_again(&pair, transport);
}

fn pages_of_a_room_that_the_prefill_gives_up_are_safe_once_its_write_has_stopped(transport: &str) {
    let pair = Pair::start_over(transport, &["--inject-fault", "stall:kv"], &[]);
    begin_and_stall(&pair, 1);
    pair.prefill.abort(1, "out of memory");
    let view = wait_until_safe(&pair.decode, 1);
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("out of memory"), "{reason:?}");
    wait_until_safe(&pair.prefill, 1);
    assert_untouched_and_used_again(&pair, transport);
}

fn a_failed_write_names_its_component_on_both_sides_at_once(transport: &str) {
    let pair = Pair::start_over(transport, &["--inject-fault", "fail:mamba"], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    let begun = Instant::now();
    pair.prefill.send(1, whole_chunk()).expect("it is accepted");
    for engine in [&pair.decode, &pair.prefill] {
        let view = engine.wait(1, RoomStatus::Success);
        assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
        let reason = view.reason.unwrap_or_default();
        assert!(reason.contains("mamba"), "{reason:?} names the component");
    }
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    // It stays failed, and the next request is whole.
    for engine in [&pair.decode, &pair.prefill] {
        wait_until_safe(engine, 1);
        engine.clear(1);
    }
    cross(&pair.prefill, &pair.decode, 2);
}

fn a_killed_prefill_fails_its_rooms_and_its_successor_is_used(transport: &str) {
    let faults = ["--inject-fault", "stall:kv"];
    let mut pair = Pair::start_over(transport, &faults, &HEARTBEATS);
    begin_and_stall(&pair, 1);
    let begun = Instant::now();
    pair.prefill_service.kill();
    let view = pair.decode.wait(1, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    assert!(
        begun.elapsed() < Duration::from_secs(3),
        "{:?}",
        begun.elapsed()
    );
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("prefill rank"), "{reason:?} names the rank");
    pair.decode.clear(1);
    pair.prefill_service = TransferService::start(&["--transports", transport]);
    pair.prefill = SmallEngine::prefill(&pair.prefill_service, &pair.server);
    cross(&pair.prefill, &pair.decode, 2);
}

fn a_killed_decode_leaves_the_prefill_serving_its_successor(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    cross(&pair.prefill, &pair.decode, 1);
    begin(&pair.prefill, &pair.decode, 2);
    pair.decode_service.kill();
    pair.prefill.send(2, whole_chunk()).expect("it is accepted");
    // Its memory may have outlived it for a moment; the room ends either way.
    let view = pair.prefill.wait(2, RoomStatus::Success);
    assert!(view.status != RoomStatus::Transferring, "{view:?}");
    pair.prefill.clear(2);
    pair.decode_service = TransferService::start(&["--transports", transport]);
    pair.decode = SmallEngine::decode(&pair.decode_service, &pair.server);
    cross(&pair.prefill, &pair.decode, 3);
}

fn a_room_that_was_announced_and_never_sent_is_cleared_and_used_again(transport: &str) {
    let pair = Pair::start_over(transport, &[], &[]);
    let begun = Instant::now();
    for _ in 0..3 {
        begin(&pair.prefill, &pair.decode, 1);
        pair.decode.abort(1, "retracted");
        for engine in [&pair.decode, &pair.prefill] {
            wait_until_safe(engine, 1);
            engine.clear(1);
        }
    }
    assert_eq!(pair.decode.content(), first_content("decode"));
    cross(&pair.prefill, &pair.decode, 1);
    assert!(begun.elapsed() < PATIENCE);
}
