//! The admin API: lists, filters, events, reports, drain, eviction, export and import.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, wait_for};
use tests::registrations::{registration_body, registration_path, route_body, topology_path};

fn start(arguments: &[&str]) -> (BootstrapServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    (BootstrapServer::start(folder.path(), arguments), folder)
}

fn register(server: &BootstrapServer, tp_size: u32) {
    for tp_rank in 0..tp_size {
        let body = route_body(tp_size, tp_rank, 41000 + tp_rank as u16, 64);
        assert_eq!(server.send(&Request::put("/route", &body)).status, 200);
    }
}

fn admin(server: &BootstrapServer, request: &Request) -> Reply {
    request.send(server.admin()).expect("an answer")
}

#[test]
fn lists_come_in_pages_and_can_be_filtered() {
    let (server, _folder) = start(&[]);
    register(&server, 5);
    let mut path = "/v1/engines/default/ranks?limit=2".to_owned();
    let mut seen = Vec::new();
    loop {
        let page = server.json(&path);
        let ranks = page["ranks"].as_array().expect("a list");
        assert!(ranks.len() <= 2, "{page}");
        seen.extend(
            ranks
                .iter()
                .map(|rank| rank["tp"].as_u64().expect("a number")),
        );
        let Some(next) = page["next"].as_str() else {
            break;
        };
        path = format!(
            "/v1/engines/default/ranks?limit=2&after={}",
            next.replace(' ', "%20")
        );
    }
    assert_eq!(seen, [0, 1, 2, 3, 4]);
    for (filter, number) in [
        ("complete=true", 1),
        ("complete=false", 0),
        ("prefix=de", 1),
        ("prefix=x", 0),
        ("draining=true", 0),
    ] {
        let engines = server.json(&format!("/v1/engines?{filter}"));
        assert_eq!(
            engines["engines"].as_array().expect("a list").len(),
            number,
            "{filter}"
        );
    }
    for key in ["a", "b"] {
        let body = registration_body(key, 40001);
        server.send(&Request::put(&registration_path(key), &body));
    }
    let first = server.json("/v1/engines/default/registrations?limit=1");
    assert_eq!(
        (&first["registrations"][0]["engine_key"], &first["next"]),
        (&json!("a"), &json!("a"))
    );
    let second = server.json("/v1/engines/default/registrations?limit=1&after=a");
    assert_eq!(second["registrations"][0]["engine_key"], "b");
    let others = server.json("/v1/engines/default/registrations?role=prefill");
    assert_eq!(others["registrations"], json!([]));
    for room in [3, 1, 2] {
        let bound = json!({ "bootstrap_room": room, "dp_rank": 0 });
        assert_eq!(
            server
                .send(&Request::post("/register_dp_rank", &bound))
                .status,
            200
        );
    }
    let rooms = server.json("/v1/engines/default/rooms?limit=2");
    let numbers: Vec<&Value> = rooms["rooms"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|room| &room["room"])
        .collect();
    assert_eq!(
        (numbers, &rooms["next"]),
        (vec![&json!(1), &json!(2)], &json!("2"))
    );
    let rooms = server.json("/v1/engines/default/rooms?limit=2&after=2");
    assert_eq!(
        (&rooms["rooms"][0]["room"], &rooms["next"]),
        (&json!(3), &Value::Null)
    );
}

#[test]
fn every_mistake_has_a_stable_code() {
    let (server, _folder) = start(&[]);
    register(&server, 1);
    let long = json!({ "draining": "x".repeat(2 << 20) });
    for (request, status, code) in [
        (Request::get("/v1/nothing"), 404, "unknown_path"),
        (
            Request::new("POST", "/v1/engines", None),
            405,
            "method_not_allowed",
        ),
        (Request::get("/v1/engines/nobody"), 404, "unknown_engine"),
        (
            Request::get("/v1/engines/nobody/ranks"),
            404,
            "unknown_engine",
        ),
        (
            Request::new("DELETE", "/v1/engines/nobody", None),
            404,
            "unknown_engine",
        ),
        (
            Request::new("DELETE", "/v1/engines/default/ranks/dp0-cp0-tp9-pp0", None),
            404,
            "unknown_rank",
        ),
        (
            Request::new("DELETE", "/v1/engines/default/ranks/nine", None),
            400,
            "bad_rank",
        ),
        (
            Request::get("/v1/engines/default/registrations/x"),
            404,
            "unknown_registration",
        ),
        (Request::get("/v1/engines?limit=0"), 400, "bad_query"),
        (Request::get("/v1/engines?limit=many"), 400, "bad_query"),
        (Request::get("/v1/events?kind=weather"), 400, "bad_query"),
        (
            Request::put("/v1/engines/default/drain", &json!({ "draining": 1 })),
            400,
            "bad_body",
        ),
        (
            Request::put("/v1/engines/default/drain", &json!({})),
            400,
            "bad_body",
        ),
        (
            Request::put("/v1/engines/default/drain", &long),
            413,
            "body_too_long",
        ),
        (
            Request::post(
                "/v1/import",
                &json!({ "version": 2, "exported_at": 0, "engines": {} }),
            ),
            400,
            "bad_import",
        ),
    ] {
        let reply = admin(&server, &request);
        let what = format!("{} {}", request.method, request.path);
        assert_eq!(reply.status, status, "{what}: {}", reply.text());
        let body = reply.json();
        assert_eq!(body["code"], code, "{what}: {body}");
        assert!(
            body["message"].is_string() && body.get("detail").is_some(),
            "{what}: {body}"
        );
    }
}

#[test]
fn an_engine_that_drains_takes_no_new_rooms_and_remembers_it() {
    let (server, folder) = start(&[]);
    register(&server, 1);
    let bind = |server: &BootstrapServer, room: u64| {
        let bound = json!({ "bootstrap_room": room, "dp_rank": 0 });
        server.send(&Request::post("/register_dp_rank", &bound))
    };
    let drain = |server: &BootstrapServer, draining: bool| {
        let body = json!({ "draining": draining });
        admin(server, &Request::put("/v1/engines/default/drain", &body)).json()
    };
    assert_eq!(bind(&server, 1).status, 200);
    assert!(drain(&server, true)["draining_since"].is_u64());
    let refused = bind(&server, 2);
    assert_eq!(
        (refused.status, refused.text().contains("drains")),
        (503, true)
    );
    assert_eq!(bind(&server, 1).status, 200, "a room that it knows");
    assert_eq!(server.send(&Request::get(&topology_path())).status, 200);
    assert_eq!(server.send(&Request::get("/health")).status, 200);
    assert!(server.end_with("TERM").success());
    let server = BootstrapServer::start(folder.path(), &[]);
    assert!(server.json("/v1/engines/default")["draining_since"].is_u64());
    assert_eq!(bind(&server, 3).status, 503);
    assert_eq!(drain(&server, false)["draining_since"], Value::Null);
    assert_eq!(bind(&server, 3).status, 200);
}

#[test]
fn a_rank_and_an_engine_are_evicted() {
    let (server, _folder) = start(&[]);
    register(&server, 2);
    let evict = |path: &str| admin(&server, &Request::new("DELETE", path, None)).status;
    assert_eq!(evict("/v1/engines/default/ranks/dp0-cp0-tp1-pp0"), 204);
    let ranks = server.json("/v1/engines/default/ranks");
    assert_eq!(ranks["ranks_missing"], json!(["dp0 cp0 tp1 pp0"]));
    assert_eq!(server.send(&Request::get(&topology_path())).status, 503);
    let summary = || server.json("/v1/engines")["engines"][0].clone();
    assert!(summary()["failing_since"].is_u64(), "{}", summary());
    assert_eq!(summary()["ranks_unreachable"], 0);
    register(&server, 2);
    assert_eq!(
        server.send(&Request::get(&topology_path())).status,
        200,
        "it may come back"
    );
    assert_eq!(summary()["failing_since"], Value::Null);
    assert_eq!(evict("/v1/engines/default"), 204);
    assert_eq!(server.json("/v1/engines")["engines"], json!([]));
}

#[test]
fn generations_are_listed_with_their_instances() {
    let (server, _folder) = start(&[]);
    register(&server, 1);
    register(&server, 2);
    let listed = server.json("/v1/engines/default/generations");
    let generations = listed["generations"].as_array().expect("a list");
    let numbers: Vec<&Value> = generations
        .iter()
        .map(|generation| &generation["generation"])
        .collect();
    assert_eq!(numbers, [2, 1]);
    assert_eq!(
        generations[0]["instances"]["dp0 cp0 tp1 pp0"],
        "127.0.0.1:41001"
    );
    assert_eq!(generations[1]["topology"]["tp_size"], 1);
}

#[test]
fn an_export_is_imported_elsewhere_and_means_the_same() {
    let (server, _folder) = start(&[]);
    register(&server, 1);
    register(&server, 2);
    let body = registration_body("engine-a", 40001);
    assert_eq!(
        server
            .send(&Request::put(&registration_path("engine-a"), &body))
            .status,
        200
    );
    admin(
        &server,
        &Request::put("/v1/engines/default/drain", &json!({ "draining": true })),
    );
    let export = server_json(&server, "/v1/export");
    let (other, _other_folder) = start(&["--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0=own"]);
    let own = route_body(1, 0, 42000, 16);
    let own_port = other.engines()[1];
    assert_eq!(
        Request::put("/route", &own)
            .send(own_port)
            .expect("an answer")
            .status,
        200
    );
    // Anything wrong and nothing is taken.
    let mut broken = export.clone();
    broken["engines"]["another"] = json!({ "generation": null, "ranks": [], "registrations": { "x": 1 }, "draining_since": null });
    let refused = admin(&other, &Request::post("/v1/import", &broken));
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert_eq!(
        other.json("/v1/engines")["engines"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    let imported = admin(&other, &Request::post("/v1/import", &export)).json();
    assert_eq!(imported, json!({ "engines": ["default"], "removed": [] }));
    assert_eq!(
        server_json(&other, "/v1/export")["engines"]["default"],
        export["engines"]["default"]
    );
    assert_eq!(other.json(&topology_path())["attn_tp_size"], 2);
    let replaced = admin(&other, &Request::post("/v1/import?mode=replace", &export)).json();
    assert_eq!(
        replaced,
        json!({ "engines": ["default"], "removed": ["own"] })
    );
    assert_eq!(
        other.json("/v1/engines")["engines"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
}

fn server_json(server: &BootstrapServer, path: &str) -> Value {
    admin(server, &Request::get(path)).json()
}

/// The data of the events that a stream has sent.
fn next_event(stream: &mut impl BufRead) -> Value {
    loop {
        let mut line = String::new();
        assert!(
            stream.read_line(&mut line).expect("a line in time") > 0,
            "it ended"
        );
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str(data).expect("JSON");
        }
    }
}

fn follow(server: &BootstrapServer, path: &str, headers: &str) -> BufReader<TcpStream> {
    let mut stream = TcpStream::connect(server.admin()).expect("it listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("a deadline");
    let request = format!("GET {path} HTTP/1.1\r\nHost: ferry\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).expect("it is sent");
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with(": following") {
        line.clear();
        assert!(
            stream.read_line(&mut line).expect("a line in time") > 0,
            "it ended"
        );
    }
    stream
}

#[test]
fn events_are_remembered_and_followed() {
    let (server, _folder) = start(&[]);
    let mut live = follow(&server, "/v1/events/stream", "");
    register(&server, 1);
    register(&server, 2);
    let seen: Vec<Value> = (0..3).map(|_| next_event(&mut live)).collect();
    let kinds: Vec<&Value> = seen.iter().map(|event| &event["kind"]).collect();
    assert_eq!(kinds, ["registration", "generation", "registration"]);
    let ids: Vec<u64> = seen
        .iter()
        .map(|event| event["id"].as_u64().expect("a number"))
        .collect();
    assert!(ids.is_sorted_by(|one, next| one < next), "{ids:?}");
    let all = server_json(&server, "/v1/events");
    assert_eq!(all["events"].as_array().map(Vec::len), Some(3), "{all}");
    let generation = server_json(&server, "/v1/events?kind=generation");
    assert_eq!(generation["events"][0]["namespace"], "default");
    // A follower that comes back misses nothing and sees nothing twice.
    let from = format!("Last-Event-ID: {}\r\n", ids[1]);
    let mut resumed = follow(&server, "/v1/events/stream", &from);
    assert_eq!(next_event(&mut resumed)["id"], ids[2]);
    admin(
        &server,
        &Request::new("DELETE", "/v1/engines/default", None),
    );
    let removal = next_event(&mut resumed);
    assert_eq!(removal["kind"], "operator");
    assert_eq!(next_event(&mut live), removal);
    let mut filtered = follow(&server, "/v1/events/stream?since=0&kind=operator", "");
    assert_eq!(next_event(&mut filtered), removal);
}

#[test]
fn ranks_that_stop_answering_are_events_and_say_since_when() {
    let (server, _folder) = start(&["--probe-interval", "1", "--probe-misses", "1"]);
    register(&server, 1);
    let event = wait_for("the event", || {
        let seen = server_json(&server, "/v1/events?kind=reachability");
        seen["events"].get(0).cloned()
    });
    let message = event["message"].as_str().expect("text");
    assert_eq!(
        message,
        "rank dp0 cp0 tp0 pp0 at 127.0.0.1:41000 does not answer"
    );
    let rank = server.json("/v1/engines/default/ranks?reachable=false")["ranks"][0].clone();
    assert!(rank["unreachable_since"].is_u64(), "{rank}");
    let engines = server.json("/v1/engines");
    assert!(engines["engines"][0]["problem"].is_string(), "{engines}");
}

#[test]
fn reports_are_kept_by_key_and_failures_become_events() {
    let (server, _folder) = start(&[]);
    let report = |failures: Value| {
        json!({
            "version": "0.1.0", "role": "prefill", "rank": "dp0 cp0 tp0 pp0",
            "instance": "127.0.0.1:41000", "interval_seconds": 5, "rooms_open": 2,
            "peers": [{ "engine_key": "decode-a", "transport": "shm" }],
            "components": [{ "component": "kv", "bytes": 4096, "failures": 1 }],
            "failures": failures,
        })
    };
    let failure = json!({ "at": 1, "room": 7, "reason": "kv: the peer is dead" });
    for failures in [json!([]), json!([failure]), json!([failure])] {
        let sent = server.send(&Request::put("/v1/reports/prefill-a", &report(failures)));
        assert_eq!(sent.status, 204, "{}", sent.text());
    }
    let listed = server_json(&server, "/v1/reports");
    let kept = &listed["reports"][0];
    assert_eq!(
        (&kept["namespace"], &kept["engine_key"]),
        (&json!("default"), &json!("prefill-a"))
    );
    assert_eq!(kept["report"]["peers"][0]["transport"], "shm");
    assert_eq!(kept["stale"], false);
    let events = server_json(&server, "/v1/events?kind=failure");
    let events = events["events"].as_array().expect("a list");
    assert_eq!(events.len(), 1, "{events:?}");
    let bad = server.send(&Request::put(
        "/v1/reports/prefill-a",
        &json!({ "version": 1 }),
    ));
    assert_eq!((bad.status, &bad.json()["code"]), (400, &json!("bad_body")));
}

#[test]
fn the_document_is_served() {
    let (server, _folder) = start(&[]);
    let served = server_json(&server, "/v1/openapi.json");
    let committed = include_str!("../../bootstrap-server/openapi.json");
    assert_eq!(
        served,
        serde_json::from_str::<Value>(committed).expect("JSON")
    );
}
