//! The HTTP API: every error has one shape and a stable code, and rooms live as documented.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::http::{Reply, Request};
use tests::process::PATIENCE;
use transfer_actor::api::{Chunk, Indices, RoomStatus};

use super::{Pair, begin, content_after_crossing, cross, first_content, whole_chunk};

/// Well below a poll's time, well above a busy machine's.
const PROMPT: Duration = Duration::from_secs(20);

/// The code of an error, whose body has exactly two texts.
fn code(reply: &Reply) -> String {
    let text = reply.text();
    assert!(reply.status >= 400, "{} is no error: {text}", reply.status);
    assert_eq!(
        reply.header("content-type"),
        Some("application/json"),
        "{text}"
    );
    let body: Value = serde_json::from_slice(&reply.body).expect("an error's body is JSON");
    let fields: Vec<&String> = body.as_object().expect("an object").keys().collect();
    assert_eq!(fields, ["code", "message"]);
    assert!(!body["message"].as_str().expect("a text").is_empty());
    body["code"].as_str().expect("a text").to_owned()
}

fn path(engine: &super::SmallEngine, rest: &str) -> String {
    format!("/v1/ranks/{}{rest}", engine.client.rank())
}

#[test]
fn every_wrong_call_has_its_code_and_changes_nothing() {
    let pair = Pair::start(&[]);
    pair.decode.open(5);
    pair.prefill.open(5);
    let get = |path: String| Request::get(&path);
    let post = |path: String, body: Value| Request::post(&path, &body);
    let raw = |path: String, body: &str| Request::new("POST", &path, Some(body.into()));
    let prefill = |rest: &str| path(&pair.prefill, rest);
    let decode = |rest: &str| path(&pair.decode, rest);
    let chunk = || json!({ "kv_indices": [1], "last": false });
    let mut untyped = raw(prefill("/rooms"), "{\"room\": 6}");
    untyped
        .headers
        .push(("Content-Type".to_owned(), "text/plain".to_owned()));
    let at_prefill = [
        (get("/v1/ranks/99".to_owned()), 404, "unknown_rank"),
        (get("/v1/ranks/99/rooms/5".to_owned()), 404, "unknown_rank"),
        (
            post("/v1/ranks/99/rooms".to_owned(), json!({ "room": 1 })),
            404,
            "unknown_rank",
        ),
        (get("/v1/ranks/first".to_owned()), 400, "bad_request"),
        (get("/v1/ranks/-1".to_owned()), 400, "bad_request"),
        (get("/v2/ranks".to_owned()), 404, "unknown_route"),
        (
            Request::new("DELETE", "/v1/ranks", None),
            404,
            "unknown_route",
        ),
        (get(prefill("/rooms/6")), 404, "unknown_room"),
        (get(prefill("/rooms/six")), 400, "bad_request"),
        (get(prefill("/rooms/-6")), 400, "bad_request"),
        (get(prefill("/rooms/9223372036854775808")), 400, "bad_room"),
        (get(prefill("/rooms/5?wait_for=soon")), 400, "bad_request"),
        (get(prefill("/rooms/5?timeout_ms=-1")), 400, "bad_request"),
        (get(prefill("/rooms/5?colour=1")), 400, "bad_request"),
        (raw(prefill("/rooms"), ""), 400, "bad_request"),
        (raw(prefill("/rooms"), "{"), 400, "bad_request"),
        (raw(prefill("/rooms"), "[]"), 400, "bad_request"),
        (
            raw(prefill("/rooms"), "{\"room\": 1, \"colour\": 2}"),
            400,
            "bad_request",
        ),
        (untyped, 400, "bad_request"),
        (
            post(prefill("/rooms"), json!({ "room": -1 })),
            400,
            "bad_request",
        ),
        (
            post(
                prefill("/rooms"),
                json!({ "room": 9_223_372_036_854_775_808_u64 }),
            ),
            400,
            "bad_room",
        ),
        (
            post(prefill("/rooms"), json!({ "room": 5 })),
            409,
            "room_exists",
        ),
        (
            post(prefill("/rooms/5/announce"), json!({ "kv_indices": [1] })),
            400,
            "wrong_role",
        ),
        (post(prefill("/rooms/5/chunks"), chunk()), 409, "not_ready"),
        (
            post(prefill("/rooms/6/chunks"), chunk()),
            404,
            "unknown_room",
        ),
        (
            post(
                prefill("/rooms/5/chunks"),
                json!({ "kv_indices": "1", "last": true }),
            ),
            400,
            "bad_request",
        ),
        (
            post(prefill("/rooms/5/chunks"), json!({ "kv_indices": [1] })),
            400,
            "bad_request",
        ),
        (
            post(
                prefill("/rooms/5/chunks"),
                json!({ "kv_indices": [4_294_967_295_u32], "last": true }),
            ),
            400,
            "bad_request",
        ),
        (
            post(prefill("/rooms/6/prefill-complete"), json!({})),
            404,
            "unknown_room",
        ),
        (
            post(prefill("/rooms/6/abort"), json!({})),
            404,
            "unknown_room",
        ),
        (
            post(prefill("/rooms/5/abort"), json!({ "because": "so" })),
            400,
            "bad_request",
        ),
        (
            Request::new("DELETE", &prefill("/rooms/6"), None),
            404,
            "unknown_room",
        ),
    ];
    for (request, status, expected) in at_prefill {
        let reply = pair.prefill_service.send(&request);
        let found = (code(&reply), reply.status);
        assert_eq!(
            found,
            (expected.to_owned(), status),
            "{request:?}: {}",
            reply.text()
        );
    }
    let wrong_indices = [
        json!({ "kv_indices": [16] }),
        json!({ "kv_indices": [-1] }),
        json!({ "kv_indices": [3, 3] }),
        json!({ "kv_indices": [3], "state_indices": [[8]] }),
        json!({ "kv_indices": [3], "state_indices": [[1], [1]] }),
        json!({ "kv_indices": [3], "aux_index": 4 }),
        json!({ "kv_indices": [3], "aux_index": 4_294_967_295_u32 }),
    ];
    let wrong_indices =
        wrong_indices.map(|body| (post(decode("/rooms/5/announce"), body), 400, "bad_indices"));
    let at_decode = [
        (
            post(decode("/rooms"), json!({ "room": 6 })),
            400,
            "bootstrap_missing",
        ),
        (
            post(
                decode("/rooms"),
                json!({ "room": 5, "bootstrap": "127.0.0.1:1" }),
            ),
            409,
            "room_exists",
        ),
        (post(decode("/rooms/5/chunks"), chunk()), 400, "wrong_role"),
        (
            post(decode("/rooms/5/prefill-complete"), json!({})),
            400,
            "wrong_role",
        ),
        (
            post(decode("/rooms/6/announce"), json!({ "kv_indices": [1] })),
            404,
            "unknown_room",
        ),
        (
            post(decode("/rooms/5/announce"), json!({})),
            400,
            "bad_request",
        ),
    ];
    for (request, status, expected) in at_decode.into_iter().chain(wrong_indices) {
        let reply = pair.decode_service.send(&request);
        let found = (code(&reply), reply.status);
        assert_eq!(
            found,
            (expected.to_owned(), status),
            "{request:?}: {}",
            reply.text()
        );
    }
    for service in [&pair.prefill_service, &pair.decode_service] {
        let reply = service.send_to_metrics_port(&Request::get("/v1/ranks"));
        assert_eq!(
            code(&reply),
            "unknown_route",
            "rooms are not driven from outside"
        );
    }
    // Room 5 took no harm.
    pair.decode.announce(5);
    let again = json!({ "kv_indices": [1] });
    let again = pair
        .decode_service
        .send(&post(decode("/rooms/5/announce"), again));
    assert_eq!(code(&again), "room_announced");
    pair.prefill.wait(5, RoomStatus::WaitingForInput);
    pair.prefill.send(5, whole_chunk()).expect("it is accepted");
    assert_eq!(
        pair.decode.wait(5, RoomStatus::Success).status,
        RoomStatus::Success
    );
    let late = pair
        .prefill_service
        .send(&post(prefill("/rooms/5/chunks"), chunk()));
    assert_eq!(code(&late), "room_complete");
    assert_eq!(pair.decode.content(), content_after_crossing());
}

#[test]
fn a_chunk_that_cannot_be_right_fails_its_room_before_a_byte_moves() {
    let pair = Pair::start(&[]);
    let indices = |list: &[i32]| Indices(list.to_vec());
    let with_states = |list: &[i32]| Chunk {
        state_indices: vec![Some(indices(list))],
        ..whole_chunk()
    };
    let with_pages = |list: &[i32]| Chunk {
        kv_indices: indices(list),
        ..whole_chunk()
    };
    let cases = [
        ("16", with_pages(&[2, 4, 16])),
        ("-1", with_pages(&[2, 4, -1])),
        ("2147483647", with_pages(&[2, 4, i32::MAX])),
        (
            "kv: the last chunk ends after 2 pages, the decode side announced 3",
            with_pages(&[2, 4]),
        ),
        ("kv", with_pages(&[2, 4, 6, 8])),
        ("mamba", with_states(&[8])),
        ("mamba", with_states(&[-1])),
        (
            "mamba: the decode side announced it, and the last chunk does not send it",
            with_states(&[]),
        ),
    ];
    for (room, (expected, chunk)) in (1..).zip(cases) {
        begin(&pair.prefill, &pair.decode, room);
        let error = pair.prefill.send(room, chunk).expect_err("it is refused");
        assert_eq!(error.code(), Some("bad_indices"), "{error}");
        assert!(
            error.to_string().contains(expected),
            "{error} says {expected:?}"
        );
        let failed = pair.prefill.view(room).expect("it is known");
        assert_eq!(failed.status, RoomStatus::Failed);
        let told = pair.decode.wait(room, RoomStatus::Success);
        assert_eq!(told.status, RoomStatus::Failed);
        let reason = told.reason.unwrap_or_default();
        assert!(
            reason.contains("prefill rank 0: "),
            "{reason:?} names the rank"
        );
        assert!(reason.contains(expected), "{reason:?} says {expected:?}");
        let again = pair
            .prefill
            .send(room, whole_chunk())
            .expect_err("it has failed");
        assert_eq!(again.code(), Some("room_failed"));
    }
    assert_eq!(pair.decode.content(), first_content("decode"));
    let moved = pair
        .prefill_service
        .metric("ferry_transfer_bytes_total", &[]);
    assert_eq!(moved, 0.0);
    cross(&pair.prefill, &pair.decode, 100);
}

/// What a long poll answers, and how long it took.
fn poll(pair: &Pair, query: &str) -> (Reply, Duration) {
    let begun = Instant::now();
    let path = path(&pair.prefill, &format!("/rooms/1?{query}"));
    let reply = pair.prefill_service.send(&Request::get(&path));
    (reply, begun.elapsed())
}

#[test]
fn a_long_poll_answers_at_once_on_change_or_at_its_deadline() {
    let pair = Pair::start(&[]);
    pair.decode.open(1);
    pair.prefill.open(1);
    let status = |reply: &Reply| {
        let body: Value = serde_json::from_slice(&reply.body).expect("JSON");
        body["status"].as_str().map(str::to_owned)
    };
    let (reply, took) = poll(&pair, "timeout_ms=60000");
    assert_eq!(status(&reply).as_deref(), Some("bootstrapping"));
    assert!(took < PROMPT, "without a wanted status it took {took:?}");
    let (reply, took) = poll(&pair, "wait_for=waiting_for_input&timeout_ms=300");
    assert_eq!(status(&reply).as_deref(), Some("bootstrapping"));
    assert!(took >= Duration::from_millis(300), "it took {took:?}");
    assert!(took < PROMPT, "it took {took:?}");
    let (reply, _) = poll(&pair, "wait_for=success&timeout_ms=0");
    assert_eq!(status(&reply).as_deref(), Some("bootstrapping"));
    std::thread::scope(|scope| {
        let polled = scope.spawn(|| poll(&pair, "wait_for=waiting_for_input&timeout_ms=60000"));
        pair.decode.announce(1);
        let (reply, took) = polled.join().expect("it is answered");
        assert_eq!(status(&reply).as_deref(), Some("waiting_for_input"));
        assert!(took < PROMPT, "on change it took {took:?}");
        // A room that has ended will not get where it was wanted.
        let polled = scope.spawn(|| poll(&pair, "wait_for=success&timeout_ms=60000"));
        let other = scope.spawn(|| poll(&pair, "wait_for=transferring&timeout_ms=60000"));
        pair.prefill.abort(1, "for a test");
        for polled in [polled, other] {
            let (reply, took) = polled.join().expect("it is answered");
            assert_eq!(status(&reply).as_deref(), Some("failed"));
            assert!(took < PROMPT, "at the end it took {took:?}");
        }
    });
}

#[test]
fn a_room_that_is_cleared_is_unknown_also_to_whoever_waits_for_it() {
    let pair = Pair::start(&[]);
    pair.prefill.open(1);
    std::thread::scope(|scope| {
        let polled = scope.spawn(|| poll(&pair, "wait_for=success&timeout_ms=60000"));
        tests::process::wait_for("the poll's end", || {
            // Cleared and opened until the poll has met the room.
            match pair.prefill.view(1) {
                Ok(_) => pair.prefill.clear(1),
                Err(_) => drop(pair.prefill.open(1)),
            }
            polled.is_finished().then_some(())
        });
        let (reply, took) = polled.join().expect("it is answered");
        // Clearing fails the room first; the poll may see either.
        let answered = match reply.status {
            200 => reply.text().contains("the engine cleared the room"),
            _ => code(&reply) == "unknown_room",
        };
        assert!(answered, "{}", reply.text());
        assert!(took < PATIENCE, "it took {took:?}");
    });
}

#[test]
fn an_aborted_room_fails_on_both_sides_and_its_number_can_be_used_again() {
    let pair = Pair::start(&[]);
    for (room, from_prefill) in [(1, true), (2, false)] {
        begin(&pair.prefill, &pair.decode, room);
        let (aborting, other) = if from_prefill {
            (&pair.prefill, &pair.decode)
        } else {
            (&pair.decode, &pair.prefill)
        };
        let view = aborting.abort(room, "the user went away");
        assert_eq!(view.status, RoomStatus::Failed);
        assert_eq!(view.reason.as_deref(), Some("the user went away"));
        let told = other.wait(room, RoomStatus::Success);
        assert_eq!(told.status, RoomStatus::Failed);
        let reason = told.reason.unwrap_or_default();
        let expected = if from_prefill {
            "prefill rank 0: the user went away".to_owned()
        } else {
            format!(
                "decode rank {} gave the room up",
                pair.decode.client.control()
            )
        };
        assert_eq!(reason, expected);
        // A second one changes nothing: the first reason stays.
        let again = aborting.abort(room, "again");
        assert_eq!(again.reason.as_deref(), Some("the user went away"));
        for engine in [&pair.prefill, &pair.decode] {
            engine.clear(room);
            let gone = engine.view(room).expect_err("it is cleared");
            assert_eq!(gone.code(), Some("unknown_room"), "{gone}");
            let gone = engine
                .try_wait(room, RoomStatus::Success)
                .expect_err("it is cleared");
            assert_eq!(gone.code(), Some("unknown_room"), "{gone}");
        }
    }
    assert_eq!(pair.prefill.open(1).generation, 3);
    pair.prefill.clear(1);
    cross(&pair.prefill, &pair.decode, 1);
}
