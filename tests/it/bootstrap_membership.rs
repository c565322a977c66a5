//! Who is a member of an engine: generations as clients see them, probes, and bounded rooms.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, program, wait_for};
use tests::registrations::{route_body, route_path, topology_path, with};

const GENERATION: &str = "x-ferry-generation";

fn start(arguments: &[&str]) -> (BootstrapServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    (BootstrapServer::start(folder.path(), arguments), folder)
}

fn put(server: &BootstrapServer, body: &Value) -> Reply {
    let reply = server.send(&Request::put("/route", body));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// A stock decode would fail on a new key, so it is a header; and only there, in every answer that
/// decodes read.
#[test]
fn clients_see_a_replaced_engine_by_its_generation() {
    let (server, _folder) = start(&["--probe-interval", "0"]);
    let reads = [
        Request::get(&topology_path()),
        Request::get(&route_path(0, 0, 0, 0)),
        Request::get(&route_path(5, 0, 0, 0)),
        Request::get("/health"),
        Request::post("/query_dp_ranks", &json!({ "bootstrap_rooms": [1] })),
    ];
    let seen = || {
        let replies = reads.iter().map(|request| server.send(request));
        let numbers = replies.map(|reply| {
            assert!(!reply.text().contains("generation\""), "{}", reply.text());
            reply.header(GENERATION).map(str::to_owned)
        });
        numbers.collect::<Vec<_>>()
    };
    assert_eq!(seen(), vec![None; reads.len()], "nothing ever registered");
    put(&server, &route_body(1, 0, 41000, 64));
    assert_eq!(seen(), vec![Some("1".to_owned()); reads.len()]);
    put(&server, &route_body(1, 0, 41000, 64));
    assert_eq!(seen(), vec![Some("1".to_owned()); reads.len()], "the same");
    put(&server, &route_body(2, 0, 41001, 64));
    assert_eq!(seen(), vec![Some("2".to_owned()); reads.len()]);
}

fn reachable(server: &BootstrapServer) -> Value {
    server.json("/v1/engines/default")["ranks_present"][0]["reachable"].clone()
}

#[test]
fn an_unreachable_rank_may_be_shown_only() {
    let flags = ["--probe-interval", "1", "--probe-misses", "1"];
    let (server, _folder) = start(&[&flags[..], &["--probe-readiness", "ignore"]].concat());
    let gone = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let port = gone.local_addr().expect("an address").port();
    drop(gone);
    put(&server, &route_body(1, 0, port, 64));
    wait_for("the rank to be missed", || {
        (reachable(&server) == json!(false)).then_some(())
    });
    assert_eq!(server.send(&Request::get("/health")).status, 200);
}

/// A registration that names somebody else's address must not make this server dial it.
#[test]
fn only_allowed_networks_are_dialled() {
    let victim = TcpListener::bind("127.0.0.1:0").expect("a listener");
    victim.set_nonblocking(true).expect("it can be polled");
    let port = victim.local_addr().expect("an address").port();
    let own = TcpListener::bind("127.0.0.2:0").expect("a listener");
    let own_port = own.local_addr().expect("an address").port();
    let flags = ["--probe-interval", "1", "--allow-rank-cidr", "127.0.0.2/32"];
    let (server, _folder) = start(&flags);
    put(&server, &route_body(2, 0, port, 64));
    let allowed = with(
        &route_body(2, 1, own_port, 64),
        "rank_ip",
        json!("127.0.0.2"),
    );
    put(&server, &allowed);
    let shown = |at: usize| {
        let engine = server.json("/v1/engines/default");
        engine["ranks_present"][at]["reachable"].clone()
    };
    wait_for("two rounds of probes", || {
        let _ = own.accept().expect("a probe");
        let _ = own.accept().expect("another");
        (shown(1) == json!(true)).then_some(())
    });
    assert_eq!(shown(0), json!(null), "it was never tried");
    assert!(victim.accept().is_err(), "nobody was there");
}

/// A fleet's ranks are not dialled all at once, and each about once in an interval.
#[test]
fn probes_are_spread_over_their_interval() {
    const RANKS: u32 = 40;
    let rank = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let port = rank.local_addr().expect("an address").port();
    let (server, _folder) = start(&["--probe-interval", "2"]);
    for number in 0..RANKS {
        // The same address in each: what counts is how often it is dialled.
        put(&server, &route_body(RANKS, number, port, 64));
    }
    let wait = || rank.accept().expect("a probe");
    // The round that is under way may have begun before all were there.
    for _ in 0..RANKS {
        wait();
    }
    let begun = Instant::now();
    for _ in 0..RANKS {
        wait();
    }
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(1500), "{RANKS} in {took:?}");
}

#[test]
fn the_rooms_of_all_engines_are_bounded_and_the_oldest_leave_first() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(program("bootstrap-server"));
    command.args(["--listen", "127.0.0.1:0=a", "--listen", "127.0.0.1:0=b"]);
    command.args(["--admin-listen", "127.0.0.1:0", "--max-rooms-total", "6"]);
    let server = BootstrapServer::spawn(command.arg("--data-dir").arg(folder.path()));
    let [first, second] = server.engines() else {
        panic!("two ports: {:?}", server.engines());
    };
    let bind = |address: SocketAddr, room: u32| {
        let body = json!({ "bootstrap_room": room, "dp_rank": 1 });
        let sent = Request::post("/register_dp_rank", &body).send(address);
        assert_eq!(sent.expect("an answer").status, 200);
    };
    let known = |address: SocketAddr| {
        let body = json!({ "bootstrap_rooms": (0..10).collect::<Vec<_>>() });
        let sent = Request::post("/query_dp_ranks", &body).send(address);
        let known = sent.expect("an answer").json();
        let rooms = known.as_object().expect("an object").keys().cloned();
        rooms.collect::<Vec<_>>()
    };
    (0..4).for_each(|room| bind(*first, room));
    (0..5).for_each(|room| bind(*second, room));
    assert_eq!(known(*first), ["3"], "three made room for the other engine");
    assert_eq!(known(*second), ["0", "1", "2", "3", "4"]);
    for (name, evicted) in [("a", 3.0), ("b", 0.0)] {
        let series = format!("ferry_bootstrap_rooms_evicted_total{{namespace=\"{name}\"}}");
        assert_eq!(server.metric(&series), Some(evicted), "{name}");
    }
}
