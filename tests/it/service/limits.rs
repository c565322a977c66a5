//! What is beyond a limit waits or is refused with its reason, on every transport between processes
//! of one host; over `rdma` where there is a device (`make test-rdma`).

use tests::process::wait_for;
use transfer_actor::api::RoomStatus;

use super::{
    Pair, SmallEngine, begin, begin_and_stall, content_after_crossing, lifecycle::wait_until_safe,
    on_every_transport, whole_chunk,
};

on_every_transport!(
    a_chunk_beyond_the_bytes_waits_until_those_on_their_way_have_ended,
    a_chunk_beyond_the_bytes_is_refused_where_it_is_not_to_wait,
    a_room_beyond_those_of_its_peer_fails_with_that_reason,
);

/// No byte may be on its way beside a chunk, so each goes alone.
const ONE_AT_A_TIME: [&str; 4] = [
    "--inject-fault",
    "stall:kv",
    "--max-in-flight-mib-per-peer",
    "0",
];

fn finish(engine: &SmallEngine, room: u64) {
    let view = engine.wait(room, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Success, "{view:?}");
}

fn a_chunk_beyond_the_bytes_waits_until_those_on_their_way_have_ended(transport: &str) {
    let pair = Pair::start_over(transport, &ONE_AT_A_TIME, &[]);
    begin_and_stall(&pair, 1);
    begin(&pair.prefill, &pair.decode, 2);
    pair.prefill.send(2, whole_chunk()).expect("it is accepted");
    let service = &pair.prefill_service;
    wait_for("the chunk to be seen waiting", || {
        (service.metric("ferry_chunk_waiting_current_count", &[]) == 1.0).then_some(())
    });
    assert_eq!(service.metric("ferry_chunk_waits_total", &[]), 1.0);
    assert!(service.metric("ferry_chunk_in_flight_bytes", &[]) > 0.0);
    let view = pair.prefill.view(2).expect("it is known");
    assert_eq!(view.status, RoomStatus::Transferring);
    let pending = |outcome: &str| outcome == "pending";
    assert!(
        view.transfers.iter().all(|it| pending(&it.outcome)),
        "{view:?}"
    );
    pair.prefill.abort(1, "it is not needed");
    wait_until_safe(&pair.prefill, 1);
    finish(&pair.prefill, 2);
    finish(&pair.decode, 2);
    assert_eq!(pair.decode.content(), content_after_crossing());
    wait_for("nothing to be on its way", || {
        let names = [
            "ferry_chunk_waiting_current_count",
            "ferry_chunk_in_flight_bytes",
        ];
        let is_zero = |name| service.metric(name, &[]) == 0.0;
        names.into_iter().all(is_zero).then_some(())
    });
}

fn a_chunk_beyond_the_bytes_is_refused_where_it_is_not_to_wait(transport: &str) {
    let arguments = [&ONE_AT_A_TIME[..], &["--when-full", "refuse"]].concat();
    let pair = Pair::start_over(transport, &arguments, &[]);
    begin_and_stall(&pair, 1);
    begin(&pair.prefill, &pair.decode, 2);
    let error = pair.prefill.send(2, whole_chunk());
    let error = error.expect_err("there is no space");
    assert_eq!(error.code(), Some("in_flight_limit"), "{error}");
    let labels = ["in_flight_limit"];
    let refusals = pair
        .prefill_service
        .metric("ferry_limit_refusals_total", &labels);
    assert_eq!(refusals, 1.0);
    pair.prefill.abort(1, "it is not needed");
    wait_until_safe(&pair.prefill, 1);
    pair.prefill.send(2, whole_chunk()).expect("there is space");
    finish(&pair.decode, 2);
    assert_eq!(pair.decode.content(), content_after_crossing());
}

fn a_room_beyond_those_of_its_peer_fails_with_that_reason(transport: &str) {
    let pair = Pair::start_over(transport, &["--max-rooms-per-peer", "1"], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    pair.decode.open(2);
    pair.prefill.open(2);
    pair.decode.announce(2);
    for engine in [&pair.decode, &pair.prefill] {
        let view = engine.wait(2, RoomStatus::Success);
        assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
        let reason = view.reason.unwrap_or_default();
        assert!(reason.contains("the limit for one peer"), "{reason:?}");
        engine.clear(2);
    }
    pair.prefill.send(1, whole_chunk()).expect("it is accepted");
    finish(&pair.decode, 1);
    finish(&pair.prefill, 1);
    begin(&pair.prefill, &pair.decode, 2);
}
