//! The bootstrap server's own behaviour: generations, liveness, the admin API, and how it starts
//! and ends.

use std::net::TcpListener;
use std::process::Command;

use serde_json::{Map, Value, json};
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, program, run_to_end, wait_for};
use tests::registrations::{
    registration_body, registration_path, route_body, route_path, topology_path, with,
};

fn put(server: &BootstrapServer, body: &Value) -> Reply {
    server.send(&Request::put("/route", body))
}

fn status(server: &BootstrapServer, path: &str) -> u16 {
    server.send(&Request::get(path)).status
}

fn start(arguments: &[&str]) -> (BootstrapServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    (BootstrapServer::start(folder.path(), arguments), folder)
}

#[test]
fn a_restart_with_another_shape_begins_a_generation_and_the_old_instance_is_told_so() {
    let (server, _folder) = start(&[]);
    assert_eq!(put(&server, &route_body(1, 0, 41000, 64)).status, 200);
    let settled = server.send(&Request::get(&topology_path()));
    assert_eq!(settled.header("x-ferry-generation"), Some("1"));
    assert_eq!(put(&server, &route_body(2, 0, 41001, 64)).status, 200);
    let incomplete = server.send(&Request::get(&topology_path()));
    assert_eq!(incomplete.status, 503);
    assert!(
        incomplete.text().contains("(1 workers registered)"),
        "{}",
        incomplete.text()
    );
    let retired = put(&server, &route_body(1, 0, 41000, 64));
    let text = retired.text();
    assert_eq!(retired.status, 409, "{text}");
    for part in [
        "\"tp_size\":1",
        "\"tp_size\":2",
        "127.0.0.1:41000",
        "Restart",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert_eq!(put(&server, &route_body(2, 1, 41002, 64)).status, 200);
    assert_eq!(server.json(&topology_path())["attn_tp_size"], 2);
    assert_eq!(
        server.metric("ferry_bootstrap_generations_total{namespace=\"default\"}"),
        Some(1.0)
    );
}

#[test]
fn a_new_address_replaces_in_an_incomplete_generation_and_begins_one_in_a_complete_one() {
    let (server, _folder) = start(&[]);
    put(&server, &route_body(2, 0, 41000, 64));
    put(&server, &route_body(2, 0, 41001, 64));
    put(&server, &route_body(2, 1, 41002, 64));
    assert_eq!(server.json(&route_path(0, 0, 0, 0))["rank_port"], 41001);
    assert_eq!(server.json("/v1/engines/default")["generation"], 1);
    put(&server, &route_body(2, 1, 41003, 64));
    assert_eq!(status(&server, &topology_path()), 503);
    let engine = server.json("/v1/engines/default");
    assert_eq!(engine["generation"], 2);
    assert_eq!(engine["ranks_missing"], json!(["dp0 cp0 tp0 pp0"]));
    assert_eq!(put(&server, &route_body(2, 0, 41004, 64)).status, 200);
    assert_eq!(status(&server, &topology_path()), 200);
}

/// Four registrations of one rank do not make four ranks.
#[test]
fn readiness_counts_distinct_ranks() {
    let (server, _folder) = start(&[]);
    for _ in 0..4 {
        assert_eq!(put(&server, &route_body(4, 0, 41000, 64)).status, 200);
    }
    assert_eq!(status(&server, &topology_path()), 503);
    let missing = server.json("/v1/engines/default")["ranks_missing"].clone();
    assert_eq!(
        missing,
        json!(["dp0 cp0 tp1 pp0", "dp0 cp0 tp2 pp0", "dp0 cp0 tp3 pp0"])
    );
}

/// The last table of the specification: which keys a release's PUT has, and which its topology.
#[test]
fn the_topology_has_only_keys_that_the_registering_release_knows() {
    let optional = [
        "enable_dsa_cache_layer_split",
        "prefill_http_port",
        "dsv41_spec_layout",
        "decode_allocation_policy",
        "kv_layout",
        "enable_kv_cache_sharding",
    ];
    let nulls = [
        "target_tp_rank",
        "target_tp_ranks",
        "target_cp_ranks",
        "target_pp_ranks",
        "required_dst_info_num",
        "required_prefill_response_num",
    ];
    let base = [
        "attn_tp_size",
        "attn_cp_size",
        "dp_size",
        "pp_size",
        "page_size",
        "kv_cache_dtype",
        "follow_bootstrap_room",
    ];
    for (known, release) in [
        (0, "0.5.12 to 0.5.15"),
        (2, "0.5.17 to 0.5.20"),
        (3, "0.5.21"),
        (4, "0.5.22"),
        (6, "0.5.23"),
    ] {
        let (server, _folder) = start(&[]);
        let mut body = route_body(1, 0, 41000, 64);
        let fields = body.as_object_mut().expect("an object");
        fields.insert("kv_layout".to_owned(), json!("hnd"));
        fields.insert(
            "dsv41_spec_layout".to_owned(),
            json!({ "num_draft_tokens": 3 }),
        );
        optional[known..]
            .iter()
            .for_each(|name| drop(fields.remove(*name)));
        assert_eq!(put(&server, &body).status, 200);
        let topology = server.json(&topology_path());
        let topology: &Map<String, Value> = topology.as_object().expect("an object");
        let mut keys: Vec<&str> = topology.keys().map(String::as_str).collect();
        let mut expected = [&base[..], &optional[..known], &nulls[..]].concat();
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(keys, expected, "{release}");
        assert_eq!(server.json("/v1/engines/default")["release"], release);
    }
}

#[test]
fn a_field_of_the_future_is_kept_shown_counted_and_not_echoed() {
    let (server, _folder) = start(&[]);
    let mut body = route_body(1, 0, 41000, 64);
    body["a_new_field"] = json!({ "deep": [1, 2] });
    assert_eq!(put(&server, &body).status, 200);
    assert!(server.json(&topology_path()).get("a_new_field").is_none());
    let rank = server.json("/v1/engines/default")["ranks_present"][0].clone();
    assert_eq!(
        rank["unknown_fields"],
        json!({ "a_new_field": { "deep": [1, 2] } })
    );
    let counted = server.metric("ferry_bootstrap_unknown_fields_total{namespace=\"default\"}");
    assert_eq!(counted, Some(1.0));
}

#[test]
fn health_follows_the_addresses_of_ranks() {
    let (server, _folder) = start(&["--probe-interval", "1", "--probe-misses", "2"]);
    assert_eq!(status(&server, "/health"), 200, "nothing ever registered");
    let rank = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = rank.local_addr().expect("an address");
    assert_eq!(
        put(&server, &route_body(1, 0, address.port(), 64)).status,
        200
    );
    let probed = |state: &str| {
        let series = format!(
            "ferry_bootstrap_ranks_probed_count{{namespace=\"default\",state=\"{state}\"}}"
        );
        server.metric(&series)
    };
    wait_for("the first probe", || {
        (probed("reachable") == Some(1.0)).then_some(())
    });
    assert_eq!(status(&server, "/health"), 200);
    drop(rank);
    wait_for("/health to fail", || {
        (status(&server, "/health") == 503).then_some(())
    });
    let shown = server.json("/v1/engines/default")["ranks_present"][0]["reachable"].clone();
    assert_eq!((shown, probed("unreachable")), (json!(false), Some(1.0)));
    let _rank = TcpListener::bind(address).expect("the address is free again");
    wait_for("/health to recover", || {
        (status(&server, "/health") == 200).then_some(())
    });
}

#[test]
fn health_is_503_for_a_while_after_a_generation_began() {
    let (server, _folder) = start(&["--settle-seconds", "4", "--probe-interval", "0"]);
    put(&server, &route_body(1, 0, 41000, 64));
    assert_eq!(
        status(&server, "/health"),
        200,
        "the first generation replaces nothing"
    );
    put(&server, &route_body(1, 0, 41001, 64));
    assert_eq!(status(&server, "/health"), 503);
    wait_for("/health to recover", || {
        (status(&server, "/health") == 200).then_some(())
    });
}

#[test]
fn rooms_are_bounded_in_number_and_time() {
    let (server, _folder) = start(&["--max-rooms", "10"]);
    for room in 0..25 {
        let body = json!({ "bootstrap_room": room, "dp_rank": 3 });
        assert_eq!(
            server
                .send(&Request::post("/register_dp_rank", &body))
                .status,
            200
        );
    }
    let all = json!({ "bootstrap_rooms": (0..25).collect::<Vec<_>>() });
    let known = server.send(&Request::post("/query_dp_ranks", &all)).text();
    let known: Map<String, Value> = serde_json::from_str(&known).expect("an object");
    assert_eq!(
        known.keys().cloned().collect::<Vec<_>>(),
        (15..25).map(|room| room.to_string()).collect::<Vec<_>>()
    );
    assert_eq!(
        server.metric("ferry_bootstrap_rooms_current_count{namespace=\"default\"}"),
        Some(10.0)
    );
    assert_eq!(
        server.metric("ferry_bootstrap_rooms_evicted_total{namespace=\"default\"}"),
        Some(15.0)
    );

    let (server, _folder) = start(&["--room-seconds", "1"]);
    let body = json!({ "bootstrap_room": 7, "dp_rank": 3 });
    server.send(&Request::post("/register_dp_rank", &body));
    wait_for("the room to be forgotten", || {
        let asked = json!({ "bootstrap_rooms": [7] });
        let reply = server.send(&Request::post("/query_dp_ranks", &asked));
        (reply.text() == "{}").then_some(())
    });
}

#[test]
fn registrations_of_engines_are_checked_shown_and_removed() {
    let (server, _folder) = start(&[]);
    let path = registration_path("engine-a");
    let body = registration_body("engine-a", 40001);
    assert_eq!(server.send(&Request::put(&path, &body)).status, 200);
    let shown = server.json("/v1/engines/default")["registrations"][0].clone();
    assert_eq!(
        (&shown["engine_key"], &shown["role"]),
        (&json!("engine-a"), &json!("decode"))
    );
    let components = shown["components"].as_array().expect("a list");
    let types: Vec<&Value> = components
        .iter()
        .map(|component| &component["type"])
        .collect();
    assert_eq!(types, ["kv", "mamba", "aux"]);
    let mamba = &components[1];
    assert_eq!(mamba["tensors"], 2);
    assert_eq!(mamba["item_lengths"], json!([2048, 1024]));
    assert_eq!(mamba["layer_ids"], json!([3, 5]));
    assert_eq!(mamba["bytes"], 8192 + 4096);
    assert_eq!(
        (&components[0]["bytes"], &components[2]["bytes"]),
        (&json!(65536), &json!(512))
    );
    assert_eq!(
        server.json("/v1/registrations")["registrations"][0]["components"],
        json!(components)
    );
    assert_eq!(
        server.metric("ferry_bootstrap_registrations_current_count{namespace=\"default\"}"),
        Some(1.0)
    );

    let refused = [
        (
            registration_path("engine-b"),
            body.clone(),
            "the path names engine engine-b",
        ),
        (
            path.clone(),
            with(&body, "register_frames", json!(["zz"])),
            "no hex",
        ),
        (
            path.clone(),
            with(&body, "register_frames", json!([])),
            "register_frames",
        ),
        (
            path.clone(),
            with(&body, "role", json!("router")),
            "there are prefill and decode",
        ),
        (path.clone(), with(&body, "rank", json!(true)), "the body"),
    ];
    for (path, body, reason) in refused {
        let reply = server.send(&Request::put(&path, &body));
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(
            reply.text().contains(reason),
            "{reason} is not in {}",
            reply.text()
        );
    }
    assert_eq!(
        server.json(&path)["engine_key"],
        "engine-a",
        "what was refused changed nothing"
    );
    assert_eq!(
        server.send(&Request::new("DELETE", &path, None)).status,
        204
    );
    assert_eq!(status(&server, &path), 404);
    assert_eq!(
        server.send(&Request::new("DELETE", &path, None)).status,
        404
    );
}

/// The REGISTER holds the keys of the engine's regions; whoever may read the list may not write.
#[test]
fn region_keys_are_not_shown() {
    let (server, _folder) = start(&[]);
    let path = registration_path("engine-a");
    let body = registration_body("engine-a", 40001);
    server.send(&Request::put(&path, &body));
    let frame = body["register_frames"][5].as_str().expect("hex");
    for path in [path.as_str(), "/v1/registrations", "/v1/engines/default"] {
        let text = server.send(&Request::get(path)).text();
        assert!(
            text.contains("engine-a") && !text.contains(frame),
            "{path}: {text}"
        );
    }
}

#[test]
fn the_page_is_files_of_this_server_and_runs_nothing_else() {
    let (server, _folder) = start(&[]);
    let admin = server.admin();
    let ask = |path: &str| Request::get(path).send(admin).expect("an answer");
    let mut open = vec!["/".to_owned()];
    let mut seen = std::collections::BTreeSet::new();
    while let Some(path) = open.pop() {
        let reply = ask(&path);
        assert_eq!(reply.status, 200, "{path}");
        let policy = reply.header("content-security-policy").unwrap_or_default();
        assert!(policy.starts_with("default-src 'none'"), "{path}: {policy}");
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
        let text = reply.text();
        let is_inline =
            text.contains("<script>") || text.contains("<style") || text.contains("style=");
        assert!(!is_inline && !text.contains("innerHTML"), "{path}");
        // What a file names: `"/page/style.css"` in HTML, `"./api.js"` in a module.
        let named = text.split('"').filter_map(|word| {
            let file = word
                .strip_prefix("/page/")
                .or_else(|| word.strip_prefix("./"))?;
            Some(format!("/page/{file}"))
        });
        open.extend(named.filter(|path| seen.insert(path.clone())));
    }
    assert!(seen.len() > 10, "{seen:?}");
    assert_eq!(ask("/page/../Cargo.toml").status, 404);
}

#[test]
fn every_metric_is_there_and_requests_are_counted_by_route_and_code() {
    use common::metrics as names;
    let (server, _folder) = start(&[]);
    put(&server, &route_body(2, 0, 41000, 64));
    put(&server, &json!({}));
    let text = server.send(&Request::get("/metrics")).text();
    for name in [
        names::BOOTSTRAP_REQUESTS,
        names::BOOTSTRAP_REQUEST_SECONDS,
        names::BOOTSTRAP_RANKS,
        names::BOOTSTRAP_RANKS_EXPECTED,
        names::BOOTSTRAP_GENERATION,
        names::BOOTSTRAP_GENERATIONS,
        names::BOOTSTRAP_REGISTRATIONS,
        names::BOOTSTRAP_ROOMS,
        names::BOOTSTRAP_ROOMS_EVICTED,
        names::BOOTSTRAP_RANKS_PROBED,
        names::BOOTSTRAP_UNKNOWN_FIELDS,
        names::BOOTSTRAP_STORE_SECONDS,
        names::BOOTSTRAP_STORE_READ_ONLY,
        names::BOOTSTRAP_STORE_FAILURES,
    ] {
        assert!(
            text.contains(&format!("# TYPE {name} ")),
            "{name} is not in {text}"
        );
    }
    for (series, expected) in [
        (
            "ferry_bootstrap_requests_total{code=\"200\",route=\"/route\"}",
            1.0,
        ),
        (
            "ferry_bootstrap_requests_total{code=\"400\",route=\"/route\"}",
            1.0,
        ),
        (
            "ferry_bootstrap_ranks_current_count{namespace=\"default\"}",
            1.0,
        ),
        (
            "ferry_bootstrap_ranks_expected_count{namespace=\"default\"}",
            2.0,
        ),
        (
            "ferry_bootstrap_generation_number{namespace=\"default\"}",
            1.0,
        ),
        ("ferry_bootstrap_store_commit_seconds_count", 1.0),
    ] {
        assert_eq!(server.metric(series), Some(expected), "{series}");
    }
}

#[test]
fn a_busy_port_and_a_locked_folder_end_the_process_with_their_names() {
    let (server, folder) = start(&[]);
    let other = tempfile::tempdir().expect("a temporary folder");
    let mut busy = Command::new(program("bootstrap-server"));
    let address = server.address().to_string();
    busy.args(["--listen", "127.0.0.1:0=other", "--listen", &address])
        .args(["--admin-listen", "127.0.0.1:0", "--data-dir"])
        .arg(other.path());
    let (ended, stderr) = run_to_end(&mut busy);
    assert!(
        !ended.success() && stderr.contains(&address),
        "{ended}: {stderr}"
    );
    let mut locked = Command::new(program("bootstrap-server"));
    BootstrapServer::command(&mut locked, folder.path(), &[]);
    let (ended, stderr) = run_to_end(&mut locked);
    let named = folder.path().display().to_string();
    assert!(
        !ended.success() && stderr.contains(&named),
        "{ended}: {stderr}"
    );
    assert_eq!(status(&server, "/health"), 200, "the first server goes on");
}

#[test]
fn term_and_int_end_it_cleanly() {
    for signal in ["TERM", "INT"] {
        let (server, _folder) = start(&[]);
        put(&server, &route_body(1, 0, 41000, 64));
        let ended = server.end_with(signal);
        assert_eq!(ended.code(), Some(0), "SIG{signal}: {ended}");
    }
}

#[test]
fn it_listens_on_ipv6_too() {
    if TcpListener::bind("[::1]:0").is_err() {
        return tests::process::skip("it_listens_on_ipv6_too", "this machine has no IPv6");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(program("bootstrap-server"));
    command
        .args(["--listen", "[::1]:0", "--admin-listen", "[::1]:0"])
        .arg("--data-dir")
        .arg(folder.path());
    let server = BootstrapServer::spawn(&mut command);
    assert!(server.address().is_ipv6());
    assert_eq!(status(&server, "/health"), 200);
}
