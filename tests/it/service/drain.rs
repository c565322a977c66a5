//! A service that is asked to end finishes what it has begun, on every transport between processes
//! of one host; over `rdma` where there is a device (`make test-rdma`).

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::http::Request;
use tests::process::wait_for;
use tests::service::TransferService;
use transfer_actor::api::RoomStatus;
use transfer_actor::client::ClientError;

use super::{
    Pair, SmallEngine, begin, begin_and_stall, content_after_crossing, cross, on_every_transport,
    whole_chunk,
};

on_every_transport!(
    a_prefill_that_drains_finishes_its_rooms_and_turns_others_away,
    a_decode_that_drains_finishes_its_rooms_and_opens_no_others,
    a_drain_ends_at_its_deadline_and_the_other_side_is_told,
    a_second_signal_ends_a_drain_at_once,
    ranks_switch_their_roles_and_back_without_a_leak,
);

/// Far less than a drain may take by default, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(10);

fn health(service: &TransferService) -> Value {
    let reply = service.send_to_metrics_port(&Request::get("/health"));
    assert_eq!(
        reply.status, 503,
        "a service that drains is not for new rooms"
    );
    serde_json::from_slice(&reply.body).expect("json")
}

fn wait_until_it_drains(service: &TransferService) {
    wait_for("the drain to begin", || {
        let reply = service.send_to_metrics_port(&Request::get("/health"));
        let body: Value = serde_json::from_slice(&reply.body).ok()?;
        (body["draining"] == json!(true)).then_some(())
    });
}

fn assert_refused(opened: Result<impl std::fmt::Debug, ClientError>) {
    let error = opened.expect_err("no new room is taken");
    assert_eq!(error.code(), Some("draining"), "{error}");
}

/// Room 1 was open when the drain began: it goes on, and every byte arrives.
fn finish(pair: &Pair) {
    pair.prefill.send(1, whole_chunk()).expect("it is accepted");
    for engine in [&pair.prefill, &pair.decode] {
        let view = engine.wait(1, RoomStatus::Success);
        assert_eq!(view.status, RoomStatus::Success, "{view:?}");
    }
    assert_eq!(pair.decode.content(), content_after_crossing());
    for engine in [&pair.prefill, &pair.decode] {
        engine.clear(1);
    }
}

fn a_prefill_that_drains_finishes_its_rooms_and_turns_others_away(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    // Announced, and the prefill's engine has not opened it when the drain begins.
    pair.decode.open(2);
    pair.decode.announce(2);
    wait_for("the announcement to arrive", || {
        let path = format!("/v1/ranks/{}", pair.prefill.client.rank());
        let reply = pair.prefill_service.send(&Request::get(&path));
        let body: Value = serde_json::from_slice(&reply.body).ok()?;
        (body["state"]["rooms"]["early"] == json!(1)).then_some(())
    });
    pair.prefill_service.signal("TERM");
    wait_until_it_drains(&pair.prefill_service);
    assert_eq!(health(&pair.prefill_service)["shutting_down"], json!(false));
    assert_refused(pair.prefill.try_open(3));
    // And one that is announced while it drains.
    pair.decode.open(3);
    pair.decode.announce(3);
    for room in [2, 3] {
        let view = pair.decode.wait(room, RoomStatus::Success);
        assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
        let reason = view.reason.unwrap_or_default();
        assert!(reason.contains("takes no new rooms"), "{reason:?}");
    }
    assert!(pair.prefill_service.ended().is_none(), "room 1 is open");
    finish(&pair);
    assert_eq!(pair.prefill_service.wait().code(), Some(0));
}

fn a_decode_that_drains_finishes_its_rooms_and_opens_no_others(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    pair.decode_service.signal("TERM");
    wait_until_it_drains(&pair.decode_service);
    assert_refused(pair.decode.try_open(2));
    assert!(pair.decode_service.ended().is_none(), "room 1 is open");
    finish(&pair);
    assert_eq!(pair.decode_service.wait().code(), Some(0));
}

fn a_drain_ends_at_its_deadline_and_the_other_side_is_told(transport: &str) {
    let arguments = ["--inject-fault", "stall:kv", "--drain-timeout", "1"];
    let mut pair = Pair::start_over(transport, &arguments, &[]);
    begin_and_stall(&pair, 1);
    let begun = Instant::now();
    pair.prefill_service.signal("TERM");
    assert_eq!(pair.prefill_service.wait().code(), Some(0));
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1), "the room had {took:?}");
    assert!(took < AT_ONCE, "it took {took:?}");
    let view = pair.decode.wait(1, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("shutting down"), "{reason:?}");
    super::lifecycle::wait_until_safe(&pair.decode, 1);
}

fn a_second_signal_ends_a_drain_at_once(transport: &str) {
    let mut pair = Pair::start_over(transport, &["--drain-timeout", "3600"], &[]);
    begin(&pair.prefill, &pair.decode, 1);
    pair.prefill_service.signal("TERM");
    wait_until_it_drains(&pair.prefill_service);
    let begun = Instant::now();
    pair.prefill_service.signal("TERM");
    assert_eq!(pair.prefill_service.wait().code(), Some(0));
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
}

#[test]
fn a_drain_that_is_asked_for_over_http_waits_as_long_as_it_says() {
    let mut pair = Pair::start(&["--drain-timeout", "3600"]);
    let drain = |body: &Value| {
        let request = Request::post("/v1/drain", body);
        pair.prefill_service.send(&request)
    };
    let refused = drain(&json!({ "seconds": 1 }));
    assert_eq!(refused.status, 400, "{}", refused.text());
    begin(&pair.prefill, &pair.decode, 1);
    let begun = Instant::now();
    let asked = drain(&json!({ "timeout_s": 1 }));
    assert_eq!(asked.status, 202, "{}", asked.text());
    wait_until_it_drains(&pair.prefill_service);
    assert_refused(pair.prefill.try_open(2));
    assert_eq!(pair.prefill_service.wait().code(), Some(0));
    assert!(
        begun.elapsed() >= Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    let view = pair.decode.wait(1, RoomStatus::Success);
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("shutting down"), "{reason:?}");
}

/// Whether anything of a pool is mapped in the service.
fn pools_mapped(service: &TransferService) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", service.pid()));
    let maps = maps.expect("it is running");
    maps.lines()
        .filter(|line| line.contains("memfd:pool"))
        .count()
}

/// Each service serves a prefill and a decode in turn. The room that is open when its rank is asked
/// to switch is finished in the old role, and what the old role held is given back.
fn ranks_switch_their_roles_and_back_without_a_leak(transport: &str) {
    let mut pair = Pair::start_over(transport, &[], &[]);
    let switch = |pair: &mut Pair| {
        begin(&pair.prefill, &pair.decode, 1);
        std::thread::scope(|scope| {
            let drains = [&pair.prefill_service, &pair.decode_service].map(|service| {
                let rank = service.ranks()[0];
                let path = format!("/v1/ranks/{rank}/drain");
                let request = Request::post(&path, &json!({ "timeout_s": 60 }));
                let api = service.api_socket();
                scope.spawn(move || request.send_unix(&api))
            });
            wait_for("both ranks to drain", || {
                let services = [&pair.prefill_service, &pair.decode_service];
                let is_draining = |service: &TransferService| {
                    let listed = service.send(&Request::get("/v1/ranks"));
                    let listed: Value = serde_json::from_slice(&listed.body).expect("json");
                    listed["ranks"][0]["state"]["draining"] == json!(true)
                };
                services.into_iter().all(is_draining).then_some(())
            });
            assert_refused(pair.prefill.try_open(2));
            assert_refused(pair.decode.try_open(2));
            finish(pair);
            for drained in drains {
                let reply = drained.join().expect("no panic").expect("an answer");
                assert_eq!(reply.status, 200, "{}", reply.text());
                assert_eq!(reply.text(), r#"{"unfinished":0}"#);
            }
        });
        for service in [&pair.prefill_service, &pair.decode_service] {
            wait_for("the rank to go", || {
                service.ranks().is_empty().then_some(())
            });
        }
        std::mem::swap(&mut pair.prefill_service, &mut pair.decode_service);
        pair.prefill = SmallEngine::prefill(&pair.prefill_service, &pair.server);
        pair.decode = SmallEngine::decode(&pair.decode_service, &pair.server);
        cross(&pair.prefill, &pair.decode, 1);
    };
    switch(&mut pair);
    switch(&mut pair);
    let held = |service: &TransferService| {
        let (threads, descriptors) = service.resources();
        [threads, descriptors, pools_mapped(service)]
    };
    let before = [held(&pair.prefill_service), held(&pair.decode_service)];
    for _ in 0..3 {
        switch(&mut pair);
        switch(&mut pair);
    }
    wait_for("what the old roles held to be given back", || {
        let now = [held(&pair.prefill_service), held(&pair.decode_service)];
        let mut both = now.iter().flatten().zip(before.iter().flatten());
        both.all(|(now, before)| *now <= before + 2).then_some(())
    });
}

#[test]
fn a_rank_that_does_not_finish_in_time_ends_all_the_same() {
    let pair = Pair::start(&["--inject-fault", "stall:kv"]);
    begin_and_stall(&pair, 1);
    let unfinished = pair.prefill.drain(Duration::from_secs(1));
    assert_eq!(unfinished.expect("it answers"), 1);
    let view = pair.decode.wait(1, RoomStatus::Success);
    assert_eq!(view.status, RoomStatus::Failed, "{view:?}");
    let reason = view.reason.unwrap_or_default();
    assert!(reason.contains("drained"), "{reason:?}");
    wait_for("the rank to go", || {
        pair.prefill_service.ranks().is_empty().then_some(())
    });
}
