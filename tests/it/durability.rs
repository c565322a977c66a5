//! What was acknowledged is on the disk: a server that is killed knows it again.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tests::http::Request;
use tests::process::{BootstrapServer, children, program, skip};
use tests::registrations::{
    registration_body, registration_path, route_body, route_path, topology_path,
};

/// What clients and operators see, without ages.
fn seen(server: &BootstrapServer) -> Vec<Value> {
    let mut engine = server.json("/v1/engines/default");
    for list in ["ranks_present", "registrations"] {
        for entry in engine[list].as_array_mut().into_iter().flatten() {
            if let Some(entry) = entry.as_object_mut() {
                entry.remove("age_seconds");
                entry.remove("reachable");
            }
        }
    }
    let replies = [
        topology_path(),
        route_path(0, 0, 0, 0),
        route_path(0, 0, 1, 0),
    ];
    let mut all: Vec<Value> = replies.iter().map(|path| server.json(path)).collect();
    all.push(engine);
    all
}

fn put(server: &BootstrapServer, path: &str, body: &Value) {
    let reply = server.send(&Request::put(path, body));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn a_killed_server_serves_what_it_acknowledged() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    put(
        &server,
        &registration_path("engine-a"),
        &registration_body("engine-a", 40001),
    );
    put(&server, "/route", &route_body(2, 0, 41000, 64));
    put(&server, "/route", &route_body(2, 1, 41001, 64));
    let before = seen(&server);
    server.kill();
    let server = BootstrapServer::start(folder.path(), &[]);
    assert_eq!(seen(&server), before);
    assert_eq!(
        before[2],
        json!({ "rank_ip": "127.0.0.1", "rank_port": 41001 })
    );
}

/// Each acknowledgement is followed by a kill at once; nothing else could have written it.
#[test]
fn every_single_acknowledgement_survives_a_kill() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    const RANKS: u32 = 8;
    for rank in 0..RANKS {
        let server = BootstrapServer::start(folder.path(), &[]);
        assert_eq!(present(&server), u64::from(rank), "before rank {rank}");
        let port = 41000 + u16::try_from(rank).expect("a small number");
        put(&server, "/route", &route_body(RANKS, rank, port, 64));
        server.kill();
    }
    let server = BootstrapServer::start(folder.path(), &[]);
    assert_eq!(server.json(&topology_path())["attn_tp_size"], RANKS);
}

fn present(server: &BootstrapServer) -> u64 {
    let engines = server.json("/v1/engines");
    engines["engines"][0]["ranks_present"]
        .as_u64()
        .unwrap_or_default()
}

/// A generation that began, the retired instances and a deletion are as durable as ranks.
#[test]
fn generations_and_deletions_survive_a_kill() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    put(&server, "/route", &route_body(1, 0, 41000, 64));
    put(&server, "/route", &route_body(1, 0, 41001, 32));
    server.kill();
    let server = BootstrapServer::start(folder.path(), &[]);
    assert_eq!(server.json("/v1/engines/default")["generation"], 2);
    let retired = server.send(&Request::put("/route", &route_body(1, 0, 41000, 64)));
    assert_eq!(retired.status, 409, "{}", retired.text());
    let deleted = server.send(&Request::new("DELETE", "/v1/engines/default", None));
    assert_eq!(deleted.status, 204);
    server.kill();
    let server = BootstrapServer::start(folder.path(), &[]);
    assert_eq!(server.json("/v1/engines")["engines"], json!([]));
}

/// Clients that register at once share synchronisations, and each is durable.
#[test]
fn concurrent_registrations_are_all_durable() {
    const RANKS: u32 = 64;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let server = &server;
            let port = 41000 + u16::try_from(rank).expect("a small number");
            scope.spawn(move || put(server, "/route", &route_body(RANKS, rank, port, 64)));
        }
    });
    let groups = server.metric("ferry_bootstrap_store_commit_seconds_count");
    let groups = groups.expect("commits are counted");
    assert!(
        (1.0..=f64::from(RANKS)).contains(&groups),
        "{groups} commits for {RANKS} changes"
    );
    println!("{RANKS} concurrent registrations took {groups} synchronisations");
    server.kill();
    let server = BootstrapServer::start(folder.path(), &[]);
    for rank in 0..RANKS {
        let address = server.json(&route_path(0, 0, i64::from(rank), 0));
        assert_eq!(address["rank_port"], 41000 + rank);
    }
}

/// One system call of the trace that matters here, in the order of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    PutArrived,
    Synchronised,
    Acknowledged,
}

/// Reads a trace. A call that another thread interrupted is written in two lines; the second one,
/// with the result, counts for synchronisations, and arguments are where the call began or, for
/// reads, where it ended.
fn calls(trace: &str) -> Vec<Call> {
    trace
        .lines()
        .filter_map(|line| {
            let is_sync = line.contains("fdatasync(") || line.contains("fdatasync resumed");
            if is_sync && line.trim_end().ends_with("= 0") {
                return Some(Call::Synchronised);
            }
            if line.contains("\"PUT /") {
                return Some(Call::PutArrived);
            }
            line.contains("\"HTTP/1.1 200")
                .then_some(Call::Acknowledged)
        })
        .collect()
}

#[test]
fn an_fdatasync_stands_between_each_put_and_its_200() {
    const TEST: &str = "an_fdatasync_stands_between_each_put_and_its_200";
    let folder = tempfile::tempdir().expect("a temporary folder");
    let trace = folder.path().join("trace");
    if let Err(reason) = strace_works(&trace) {
        return skip(TEST, &reason);
    }
    let mut command = Command::new("strace");
    command
        .args(["-f", "-s", "32", "-e"])
        .arg("trace=fdatasync,read,readv,recvfrom,recvmsg,write,writev,sendto,sendmsg")
        .arg("-o")
        .arg(&trace)
        .arg(program("bootstrap-server"));
    BootstrapServer::command(&mut command, &folder.path().join("data"), &[]);
    let server = BootstrapServer::spawn(&mut command);
    let puts = [
        ("/route".to_owned(), route_body(2, 0, 41000, 64)),
        ("/route".to_owned(), route_body(2, 1, 41001, 64)),
        (
            registration_path("engine-a"),
            registration_body("engine-a", 40001),
        ),
        ("/route".to_owned(), route_body(2, 0, 41002, 64)),
    ];
    for (path, body) in &puts {
        put(&server, path, body);
    }
    // strace passes the signal's effect on: it ends when the traced server does.
    let traced = children(server.pid());
    traced
        .iter()
        .for_each(|pid| tests::process::signal(*pid, "TERM"));
    server.wait();
    let calls = calls(&std::fs::read_to_string(&trace).expect("the trace"));
    let first = calls
        .iter()
        .position(|call| *call == Call::PutArrived)
        .expect("a PUT arrived");
    let mut found = 0;
    let mut synchronised = false;
    for call in &calls[first..] {
        match call {
            Call::PutArrived => synchronised = false,
            Call::Synchronised => synchronised = true,
            Call::Acknowledged if found < puts.len() => {
                assert!(
                    synchronised,
                    "200 number {found} without fdatasync: {calls:?}"
                );
                found += 1;
            }
            Call::Acknowledged => {}
        }
    }
    assert_eq!(found, puts.len(), "{calls:?}");
}

/// Whether strace is there and may trace.
pub(crate) fn strace_works(trace: &Path) -> Result<(), String> {
    let tried = Command::new("strace")
        .arg("-f")
        .arg("-o")
        .arg(trace)
        .arg("true")
        .output();
    match tried {
        Err(error) => Err(format!("strace cannot be started: {error}")),
        Ok(output) if !output.status.success() => {
            let reason = String::from_utf8_lossy(&output.stderr)
                .trim()
                .replace('\n', " ");
            Err(format!("strace cannot trace: {reason}"))
        }
        Ok(_) => Ok(()),
    }
}
