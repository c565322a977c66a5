//! How rooms end when something goes wrong, on every transport between processes of one host; over
//! `rdma` where there is a device (`make test-rdma`).

use std::time::{Duration, Instant};

use tests::process::{PATIENCE, wait_for};
use tests::service::TransferService;
use transfer_actor::api::{RoomStatus, RoomView, Verification};

use super::{
    AUX_BYTES, K, KV_BYTES, MAMBA, MAMBA_BYTES, Pair, SmallEngine, begin, begin_and_stall,
    content_after_crossing, cross, first_content, on_every_transport, whole_chunk,
};

on_every_transport!(
    pages_of_a_room_that_the_decode_gives_up_are_safe_once_its_write_has_stopped,
    pages_of_a_room_that_the_prefill_gives_up_are_safe_once_its_write_has_stopped,
    a_failed_write_names_its_component_on_both_sides_at_once,
    a_component_that_stalls_fails_its_room_in_time_and_frees_it,
    a_killed_prefill_fails_its_rooms_and_its_successor_is_used,
    pages_of_a_stopped_writer_are_held_until_it_goes_on,
    pages_of_a_stopped_writer_are_held_until_it_is_dead,
    nothing_of_a_stopped_writer_lands_in_pages_that_were_called_safe,
    a_killed_decode_fails_the_rooms_that_wait_for_their_engine,
    a_killed_decode_leaves_the_prefill_serving_its_successor,
    a_room_that_was_announced_and_never_sent_is_cleared_and_used_again,
    compared_rooms_say_so_on_both_sides,
    a_flipped_byte_fails_its_room_on_both_sides_and_is_named_with_its_place,
    a_sample_has_a_range_of_every_component,
);

/// From a failure, or the death of a process, to what its peers tell their engines, at most. The
/// machine with a device for `rdma` is an emulated one.
fn bound(transport: &str) -> Duration {
    Duration::from_secs(if transport == "rdma" { 10 } else { 1 })
}

/// Whether a dead peer can be proved to write no more: by its exit, which its engine's own socket lets
/// a rank watch, or by its permission to write, which `tcp` lets it take back. `rdma` alone has
/// neither.
fn has_proof(transport: &str) -> bool {
    transport != "rdma"
}

/// Whether a permission to write can be taken back from a peer that lives.
fn is_revocable(transport: &str) -> bool {
    transport == "tcp"
}

fn assert_moved_over(view: &RoomView, transport: &str) {
    let moved = &view.transfers;
    assert!(!moved.is_empty(), "{view:?}");
    for transfer in moved {
        assert_eq!(transfer.transport, transport, "{view:?}");
    }
}

pub(super) fn wait_until_safe(engine: &SmallEngine, room: u64) -> RoomView {
    wait_until(engine, room, |view| {
        view.status == RoomStatus::Failed && view.release_safe
    })
}

/// Until it has ended, either way, and its places are safe.
pub(super) fn wait_until_ended(engine: &SmallEngine, room: u64) -> RoomView {
    wait_until(engine, room, |view| {
        let has_ended = matches!(view.status, RoomStatus::Failed | RoomStatus::Success);
        has_ended && view.release_safe
    })
}

/// # Panics
/// When the room is not like that in [`PATIENCE`]; it says how it is.
fn wait_until(engine: &SmallEngine, room: u64, is_there: impl Fn(&RoomView) -> bool) -> RoomView {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let view = engine.view(room).expect("it is known");
        if is_there(&view) {
            return view;
        }
        assert!(Instant::now() < deadline, "after {PATIENCE:?}: {view:?}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
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
    assert!(begun.elapsed() < bound(transport), "{:?}", begun.elapsed());
    // It stays failed, and the next request is whole.
    for engine in [&pair.decode, &pair.prefill] {
        wait_until_safe(engine, 1);
        engine.clear(1);
    }
    cross(&pair.prefill, &pair.decode, 2);
}

fn a_component_that_stalls_fails_its_room_in_time_and_frees_it(transport: &str) {
    // In it a session opens and what goes beside the pages arrives; emulated devices take long.
    let seconds = if transport == "rdma" { 15 } else { 3 };
    let timeout = seconds.to_string();
    let arguments = ["--inject-fault", "stall:kv", "--transfer-timeout", &timeout];
    let pair = Pair::start_over(transport, &arguments, &[]);
    begin_and_stall(&pair, 1);
    let begun = Instant::now();
    for engine in [&pair.prefill, &pair.decode] {
        let view = wait_until_safe(engine, 1);
        let reason = view.reason.unwrap_or_default();
        let limit = format!("within {seconds} s");
        assert!(reason.contains(&limit), "{reason:?}");
    }
    let bound = Duration::from_secs(seconds) + bound(transport);
    assert!(begun.elapsed() < bound, "{:?}", begun.elapsed());
    assert_untouched_and_used_again(&pair, transport);
}

fn a_killed_prefill_fails_its_rooms_and_its_successor_is_used(transport: &str) {
    let mut pair = start_acquainted(transport);
    begin_and_stall(&pair, 1);
    let begun = Instant::now();
    pair.prefill_service.kill();
    let view = pair.decode.wait(1, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("prefill rank"), "{reason:?} names the rank");
    if has_proof(transport) {
        wait_until_safe(&pair.decode, 1);
    }
    assert!(begun.elapsed() < bound(transport), "{:?}", begun.elapsed());
    if !has_proof(transport) {
        let view = pair.decode.view(1).expect("it is known");
        assert!(!view.release_safe, "nobody has proved anything");
    }
    pair.decode.clear(1);
    pair.prefill_service = TransferService::start(&["--transports", transport]);
    pair.prefill = SmallEngine::prefill(&pair.prefill_service, &pair.server);
    cross(&pair.prefill, &pair.decode, 2);
}

/// A pair that has moved one request, so that each has met the other's process: of one that dies
/// before, nothing is proved. The next write of pages hangs.
fn start_acquainted(transport: &str) -> Pair {
    let pair = Pair::start_over(transport, &["--inject-fault", "stall:kv:1"], &[]);
    cross(&pair.prefill, &pair.decode, 9);
    pair
}

/// A signal takes a moment to reach every thread.
fn wait_until_it_stands_still(pid: u32) {
    wait_for("every thread to be stopped", || {
        let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let is_stopped = threads.all(|thread| {
            let path = thread.expect("a thread").path().join("stat");
            // A thread that has just ended has no such file.
            let stat = std::fs::read_to_string(path).unwrap_or_default();
            stat.is_empty() || stat.contains(") T ")
        });
        is_stopped.then_some(())
    });
}

/// A prefill whose write hangs is stopped, and its decode gives the room up: nothing is proved.
fn stop_the_writer(transport: &str) -> Pair {
    let pair = start_acquainted(transport);
    begin_and_stall(&pair, 1);
    pair.prefill_service.signal("STOP");
    wait_until_it_stands_still(pair.prefill_service.pid());
    let view = pair.decode.abort(1, "the user went away");
    assert_eq!(view.status, RoomStatus::Failed);
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until && !is_revocable(transport) {
        let view = pair.decode.view(1).expect("it is known");
        assert!(!view.release_safe, "a stopped process may go on");
    }
    pair
}

fn pages_of_a_stopped_writer_are_held_until_it_goes_on(transport: &str) {
    let pair = stop_the_writer(transport);
    if is_revocable(transport) {
        // Not even that long: it may not write any more, and nothing of it is under way.
        wait_until_safe(&pair.decode, 1);
    }
    pair.prefill_service.signal("CONT");
    wait_until_safe(&pair.decode, 1);
    wait_until_safe(&pair.prefill, 1);
    cross(&pair.prefill, &pair.decode, 2);
}

/// The chunk waits before the stopped process, which may take it before or behind the abort.
fn nothing_of_a_stopped_writer_lands_in_pages_that_were_called_safe(transport: &str) {
    let pair = Pair::start_over(transport, &[], &[]);
    cross(&pair.prefill, &pair.decode, 9);
    begin(&pair.prefill, &pair.decode, 1);
    let before = pair.decode.content();
    pair.prefill_service.signal("STOP");
    wait_until_it_stands_still(pair.prefill_service.pid());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pair.decode.abort(1, "the user went away");
            if is_revocable(transport) {
                wait_until_safe(&pair.decode, 1);
            }
            pair.prefill_service.signal("CONT");
        });
        // It is taken and written, or fails, or comes too late.
        let _ = pair.prefill.send(1, whole_chunk());
    });
    wait_until_safe(&pair.decode, 1);
    // A prefill that has written everything before it hears of the abort has succeeded.
    wait_until_ended(&pair.prefill, 1);
    if is_revocable(transport) {
        assert!(pair.decode.content() == before, "something has landed");
    }
}

fn pages_of_a_stopped_writer_are_held_until_it_is_dead(transport: &str) {
    let mut pair = stop_the_writer(transport);
    let begun = Instant::now();
    pair.prefill_service.kill();
    if has_proof(transport) {
        wait_until_safe(&pair.decode, 1);
        // A permission is taken back when an acknowledgement has been waited for.
        let waited = Duration::from_secs(u64::from(is_revocable(transport)));
        assert!(
            begun.elapsed() < bound(transport) + waited,
            "{:?}",
            begun.elapsed()
        );
    }
}

fn a_killed_decode_fails_the_rooms_that_wait_for_their_engine(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    let begun = Instant::now();
    pair.decode_service.kill();
    let view = pair.prefill.wait(1, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    assert!(begun.elapsed() < bound(transport), "{:?}", begun.elapsed());
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("decode rank"), "{reason:?} names the rank");
}

fn a_killed_decode_leaves_the_prefill_serving_its_successor(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    cross(&pair.prefill, &pair.decode, 1);
    begin(&pair.prefill, &pair.decode, 2);
    pair.decode_service.kill();
    // The prefill may have noticed already; its memory may have outlived it for a moment. The
    // room ends either way.
    if let Err(error) = pair.prefill.send(2, whole_chunk()) {
        assert!(error.to_string().contains("gone"), "{error}");
    }
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

/// One request whose bytes are compared, or fail to be the same.
fn cross_compared(pair: &Pair, room: u64) -> [RoomView; 2] {
    begin(&pair.prefill, &pair.decode, room);
    pair.prefill
        .send(room, whole_chunk())
        .expect("it is accepted");
    [&pair.decode, &pair.prefill].map(|engine| engine.wait(room, RoomStatus::Success))
}

fn compared_bytes(pair: &Pair, component: &str) -> f64 {
    let labels = [&*format!("component=\"{component}\"")];
    let service = &pair.decode_service;
    service.metric("ferry_verify_bytes_total", &labels)
}

fn compared_rooms_say_so_on_both_sides(transport: &str) {
    // The decode asks; what the prefill is told is the least that it does.
    for (prefill, decode, expected) in [
        ("off", "full", Verification::Full),
        ("full", "sampled", Verification::Full),
        ("off", "sampled", Verification::Sampled),
    ] {
        let pair = Pair::start_over(transport, &["--verify", prefill], &["--verify", decode]);
        let [at_decode, at_prefill] = cross_compared(&pair, 1);
        assert_eq!(at_prefill.verification, Some(expected), "{at_prefill:?}");
        assert_eq!(at_decode.verification, Some(expected), "{at_decode:?}");
        assert_moved_over(&at_prefill, transport);
        assert_eq!(pair.decode.content(), content_after_crossing());
        if expected == Verification::Full {
            for (component, bytes) in [("kv", KV_BYTES), ("mamba", MAMBA_BYTES), ("aux", AUX_BYTES)]
            {
                assert_eq!(
                    compared_bytes(&pair, component),
                    bytes as f64,
                    "{component}"
                );
            }
        }
        for engine in [&pair.prefill, &pair.decode] {
            engine.clear(1);
        }
    }
}

/// The numbers that a reason shows as checksums.
fn sums_in(reason: &str) -> Vec<&str> {
    let is_sum =
        |word: &&str| word.len() == 16 && word.chars().all(|digit| digit.is_ascii_hexdigit());
    reason.split([' ', ',']).filter(is_sum).collect()
}

fn a_flipped_byte_fails_its_room_on_both_sides_and_is_named_with_its_place(transport: &str) {
    for (component, place) in [
        ("kv", "tensor 0, page 3 (bytes 192 to 256)"),
        ("mamba", "tensor 0, row 6 (bytes 384 to 448)"),
        ("aux", "tensor 0, row 3 (bytes 192 to 256)"),
    ] {
        let fault = format!("flip:{component}");
        let pair = Pair::start_over(
            transport,
            &["--inject-fault", &fault],
            &["--verify", "full"],
        );
        for view in cross_compared(&pair, 1) {
            assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
            assert_eq!(view.verification, Some(Verification::Mismatch), "{view:?}");
            let reason = view.reason.unwrap_or_default();
            assert!(
                reason.contains(&format!("{component} is not what was sent")),
                "{reason}"
            );
            assert!(reason.contains(place), "{reason}");
            let sums = sums_in(&reason);
            assert!(sums.len() == 2 && sums[0] != sums[1], "{reason}");
        }
        let labels = [&*format!("component=\"{component}\"")];
        let mismatches = pair
            .decode_service
            .metric("ferry_verify_mismatches_total", &labels);
        assert_eq!(mismatches, 1.0);
        for engine in [&pair.decode, &pair.prefill] {
            wait_until_safe(engine, 1);
            engine.clear(1);
        }
        cross(&pair.prefill, &pair.decode, 1);
    }
}

fn a_sample_has_a_range_of_every_component(transport: &str) {
    for component in ["mamba", "aux"] {
        let fault = format!("flip:{component}");
        let pair = Pair::start_over(
            transport,
            &["--inject-fault", &fault],
            &["--verify", "sampled"],
        );
        for view in cross_compared(&pair, 1) {
            assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
            let reason = view.reason.unwrap_or_default();
            assert!(reason.contains(component), "{reason}");
        }
        // Of six ranges of pages one is compared.
        let at_least = compared_bytes(&pair, "kv");
        assert!(at_least <= 64.0, "{at_least}");
    }
}

/// A peer that does not ask is served without, and each side says so of the room.
#[test]
fn a_decode_that_does_not_ask_is_served_and_counted() {
    let pair = Pair::start_over("tcp", &["--verify", "full"], &[]);
    let [at_decode, at_prefill] = cross_compared(&pair, 1);
    assert_eq!(at_prefill.status, RoomStatus::Success);
    assert_eq!(at_prefill.verification, Some(Verification::Unavailable));
    assert_eq!(at_decode.verification, None);
    let count = pair
        .prefill_service
        .metric("ferry_verify_unavailable_total", &["role=\"prefill\""]);
    assert_eq!(count, 1.0);
}
