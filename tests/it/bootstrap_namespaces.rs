//! One process serves several engines, each on a port of its own.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use serde_json::{Value, json};
use tests::http::Request;
use tests::process::{BootstrapServer, program, run_to_end};
use tests::registrations::{route_body, topology_path};

fn start(folder: &std::path::Path, listens: &[&str]) -> BootstrapServer {
    let mut command = Command::new(program("bootstrap-server"));
    for listen in listens {
        command.args(["--listen", listen]);
    }
    command.args(["--admin-listen", "127.0.0.1:0", "--data-dir"]);
    BootstrapServer::spawn(command.arg(folder))
}

fn status(address: SocketAddr, request: &Request) -> u16 {
    request.send(address).expect("an answer").status
}

#[test]
fn engines_on_different_ports_do_not_see_each_other() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let listens = ["127.0.0.1:0=prefill-a", "127.0.0.1:0=prefill-b"];
    let server = start(folder.path(), &listens);
    let [first, second] = server.engines() else {
        panic!("two ports: {:?}", server.engines());
    };
    let put = |address, body: &Value| status(address, &Request::put("/route", body));
    assert_eq!(put(*first, &route_body(1, 0, 41000, 64)), 200);
    assert_eq!(status(*first, &Request::get(&topology_path())), 200);
    assert_eq!(status(*second, &Request::get(&topology_path())), 503);
    // Another shape at the other port is another engine, not a new generation of the first.
    assert_eq!(put(*second, &route_body(2, 0, 41000, 16)), 200);
    assert_eq!(server.json("/v1/engines/prefill-a")["generation"], 1);
    assert_eq!(server.json("/v1/engines/prefill-b")["ranks_expected"], 2);
    let room = json!({ "bootstrap_room": 7, "dp_rank": 3 });
    let bind = Request::new("POST", "/register_dp_rank", Some(room.to_string().into()));
    assert_eq!(status(*first, &bind), 200);
    let rooms = json!({ "bootstrap_rooms": [7] });
    let query = Request::new("POST", "/query_dp_ranks", Some(rooms.to_string().into()));
    assert_eq!(query.send(*first).expect("an answer").text(), "{\"7\": 3}");
    assert_eq!(query.send(*second).expect("an answer").text(), "{}");
    for (name, ranks) in [("prefill-a", 1.0), ("prefill-b", 1.0)] {
        let series = format!("ferry_bootstrap_ranks_current_count{{namespace=\"{name}\"}}");
        assert_eq!(server.metric(&series), Some(ranks), "{name}");
    }
    assert!(server.end_with("TERM").success());
    // Names, not ports, are what is stored.
    let server = start(folder.path(), &["127.0.0.1:0=prefill-b"]);
    assert_eq!(server.json("/v1/engines/prefill-a")["generation"], 1);
    let only = server.engines()[0];
    assert_eq!(
        status(only, &Request::get(&topology_path())),
        503,
        "one of two ranks"
    );
}

#[test]
fn operators_and_ranks_have_different_ports() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = start(folder.path(), &["127.0.0.1:0"]);
    for path in ["/", "/metrics", "/v1/engines"] {
        assert_eq!(status(server.address(), &Request::get(path)), 404, "{path}");
        assert_eq!(status(server.admin(), &Request::get(path)), 200, "{path}");
    }
    for path in [topology_path(), "/query_dp_ranks".to_owned()] {
        assert_eq!(status(server.admin(), &Request::get(&path)), 404, "{path}");
    }
}

#[test]
fn ports_that_contradict_each_other_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (listens, named) in [
        (["127.0.0.1:0=a", "127.0.0.1:0=a"], "both named a"),
        (["127.0.0.1:1=a", "127.0.0.1:1=b"], "127.0.0.1:1"),
        (["127.0.0.1:0=a", "127.0.0.1:0=b c"], "letters"),
    ] {
        let mut command = Command::new(program("bootstrap-server"));
        command.args(["--listen", listens[0], "--listen", listens[1]]);
        command.args(["--admin-listen", "127.0.0.1:0", "--data-dir"]);
        let (ended, stderr) = run_to_end(command.arg(folder.path()));
        assert!(!ended.success() && stderr.contains(named), "{stderr}");
    }
}

#[test]
fn one_port_takes_both_families() {
    if TcpListener::bind("[::]:0").is_err() {
        return tests::process::skip("one_port_takes_both_families", "this machine has no IPv6");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = start(folder.path(), &["[::]:0"]);
    let port = server.address().port();
    for address in ["127.0.0.1", "::1"] {
        let address = SocketAddr::new(address.parse().expect("an address"), port);
        assert_eq!(status(address, &Request::get("/health")), 200, "{address}");
    }
}
