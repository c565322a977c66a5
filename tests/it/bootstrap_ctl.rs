//! The command-line client against a running server.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;

use serde_json::{Value, json};
use tests::http::Request;
use tests::process::{BootstrapServer, PATIENCE, program, signal, wait_for};
use tests::registrations::{registration_body, registration_path, route_body};

use crate::certificates::Authority;

fn ctl(admin: SocketAddr, arguments: &[&str]) -> Command {
    let mut command = Command::new(program("bootstrap-server"));
    command
        .env("FERRY_BOOTSTRAP_URL", format!("http://{admin}"))
        .arg("ctl")
        .args(arguments)
        .stdin(Stdio::null());
    command
}

fn run(admin: SocketAddr, arguments: &[&str]) -> Output {
    ctl(admin, arguments).output().expect("the client starts")
}

/// What a command prints; it must succeed.
fn printed(admin: SocketAddr, arguments: &[&str]) -> String {
    let output = run(admin, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    assert_eq!(errors, "", "{arguments:?}");
    String::from_utf8(output.stdout).expect("it is text")
}

fn json_of(admin: SocketAddr, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--json"]].concat();
    serde_json::from_str(&printed(admin, &arguments)).expect("it is JSON")
}

/// The exit status of a command that must fail, and what it says.
fn refused(admin: SocketAddr, arguments: &[&str]) -> (i32, String) {
    let output = run(admin, arguments);
    assert!(output.stdout.is_empty(), "{arguments:?}");
    let code = output.status.code().expect("it was not killed");
    (code, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Words of each line.
fn words(text: &str) -> Vec<Vec<&str>> {
    text.lines()
        .map(|line| line.split_whitespace().collect())
        .collect()
}

/// A server with two of three ranks, an io engine and a room in engine `a`; `b` is empty.
fn fleet(folder: &Path, options: &[&str]) -> BootstrapServer {
    let listens = ["--listen", "127.0.0.1:0=a", "--listen", "127.0.0.1:0=b"];
    let quiet = ["--probe-interval", "0"];
    let options = [&listens[..], &quiet, options].concat();
    let server = BootstrapServer::start(folder, &options);
    for (rank, port) in [(0, 41000), (1, 41001)] {
        let put = Request::put("/route", &route_body(3, rank, port, 64));
        assert_eq!(server.send(&put).status, 200);
    }
    let body = registration_body("io-engine/1", 41002);
    let put = Request::put(&registration_path("io-engine%2F1"), &body);
    assert_eq!(server.send(&put).status, 200);
    assert_eq!(bind(&server, 7), 200);
    server
}

fn bind(server: &BootstrapServer, room: u64) -> u16 {
    let body = json!({ "bootstrap_room": room, "dp_rank": 0 });
    let post = Request::post("/register_dp_rank", &body);
    server.send(&post).status
}

#[test]
fn tables_show_what_is_there_and_what_is_missing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = fleet(folder.path(), &[]);
    let admin = server.admin();
    let engines = printed(admin, &["engines"]);
    let engines = words(&engines);
    assert_eq!(engines[1][..5], ["a", "incomplete", "2/3", "1", "1"]);
    let ranks = printed(admin, &["ranks", "a"]);
    let columns: Vec<_> = ranks
        .lines()
        .map(|line| {
            line.find("STATE")
                .or(line.find("not probed"))
                .or(line.find("missing"))
        })
        .collect();
    assert!(
        columns.iter().all(|column| *column == columns[0]),
        "{ranks}"
    );
    assert!(ranks.contains("dp0 cp0 tp2 pp0  missing"), "{ranks}");
    let known = printed(admin, &["registrations", "a"]);
    assert!(
        known.contains("io-engine/1") && known.contains("kv,mamba,aux"),
        "{known}"
    );
    let known = printed(admin, &["registrations", "a", "io-engine/1"]);
    assert!(known.contains("0x7f0000000000"), "{known}");
    let rooms = printed(admin, &["rooms", "a"]);
    assert_eq!(words(&rooms)[1][..2], ["7", "0"]);
    let events = printed(admin, &["events", "--engine", "a"]);
    assert_eq!(events.lines().count(), 3, "{events}");
    assert_eq!(printed(admin, &["events", "--engine", "b"]), "");
    let one = json_of(admin, &["registrations", "a", "--limit", "1"]);
    assert_eq!(one["registrations"][0]["engine_key"], "io-engine/1");
}

#[test]
fn every_entry_of_a_long_list_is_shown() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = fleet(folder.path(), &[]);
    for room in 0..2500 {
        assert_eq!(bind(&server, room), 200);
    }
    let listed = json_of(server.admin(), &["rooms", "a"]);
    let rooms = listed["rooms"].as_array().expect("a list");
    let numbers: Vec<u64> = rooms
        .iter()
        .map(|room| room["room"].as_u64().expect("a number"))
        .collect();
    assert_eq!(numbers, (0..2500).collect::<Vec<_>>());
    let some = json_of(server.admin(), &["rooms", "a", "--limit", "1500"]);
    assert_eq!(some["rooms"].as_array().expect("a list").len(), 1500);
}

#[test]
fn an_engine_is_drained_evicted_and_brought_back_from_an_export() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = fleet(&folder.path().join("data"), &[]);
    let admin = server.admin();
    assert!(printed(admin, &["drain", "a"]).contains("draining"));
    assert_eq!(bind(&server, 8), 503, "a new room");
    assert_eq!(bind(&server, 7), 200, "a known one");
    assert!(printed(admin, &["undrain", "a"]).contains("incomplete"));
    assert_eq!(bind(&server, 8), 200);

    let backup = folder.path().join("backup.json");
    let backup_path = backup.to_str().expect("a plain path");
    printed(admin, &["export", backup_path]);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&backup)
            .expect("it is written")
            .permissions(),
    );
    assert_eq!(mode & 0o777, 0o600, "it holds keys of memory");
    let exported: Value =
        serde_json::from_slice(&std::fs::read(&backup).expect("it is there")).expect("JSON");

    let rank = ["evict", "a", "--rank", "dp0-cp0-tp1-pp0"];
    assert_eq!(printed(admin, &rank), "");
    let (code, text) = refused(admin, &rank);
    assert!(code == 1 && text.contains("unknown_rank"), "{text}");
    printed(admin, &["evict", "a", "--registration", "io-engine/1"]);
    let engine = &json_of(admin, &["engines"])["engines"][0];
    assert_eq!(
        (&engine["ranks_present"], &engine["registrations"]),
        (&json!(1), &json!(0))
    );
    printed(admin, &["evict", "a"]);
    assert_eq!(json_of(admin, &["ranks", "a"])["ranks_expected"], 0);

    let mut broken = exported.clone();
    broken["engines"]["a"]["registrations"]["io-engine/1"]["body"]["register_frames"] = json!([]);
    broken["engines"]["c"] = exported["engines"]["a"].clone();
    let broken_file = folder.path().join("broken.json");
    std::fs::write(&broken_file, broken.to_string()).expect("it is written");
    let (code, text) = refused(admin, &["import", broken_file.to_str().expect("a path")]);
    assert!(code == 1 && text.contains("bad_import"), "{text}");
    assert_eq!(
        json_of(admin, &["ranks", "a"])["ranks_expected"],
        0,
        "nothing of it"
    );

    assert!(printed(admin, &["import", "--replace", backup_path]).contains("imported"));
    let again: Value = serde_json::from_str(&printed(admin, &["export"])).expect("JSON");
    assert_eq!(again["engines"], exported["engines"]);
    let only_b = run(admin, &["export", "--engine", "b"]);
    assert_eq!(only_b.status.code(), Some(1), "nothing of it is registered");

    // Another server takes it too, and what it does not know it keeps only when it merges.
    let other = BootstrapServer::start(&folder.path().join("other"), &["--probe-interval", "0"]);
    let put = Request::put("/route", &route_body(1, 0, 41009, 64));
    assert_eq!(other.send(&put).status, 200);
    printed(other.admin(), &["import", backup_path]);
    let names = |server: &BootstrapServer| {
        let listed = json_of(server.admin(), &["engines"]);
        let engines = listed["engines"].as_array().expect("a list").clone();
        let names = engines.iter().map(|engine| engine["namespace"].to_string());
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(&other), ["\"a\"", "\"default\""]);
    let replaced = printed(other.admin(), &["import", "--replace", backup_path]);
    assert!(replaced.contains("removed"), "{replaced}");
    let moved: Value = serde_json::from_str(&printed(other.admin(), &["export"])).expect("JSON");
    assert_eq!(moved["engines"], exported["engines"]);
}

#[test]
fn failures_are_told_plainly_and_by_the_exit_status() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tokens = folder.path().join("tokens");
    std::fs::write(
        &tokens,
        "# whose it is, and the token\noperator  open-sesame\n",
    )
    .expect("it is written");
    let tokens = tokens.to_str().expect("a plain path");
    let server = fleet(&folder.path().join("data"), &["--admin-token-file", tokens]);
    let admin = server.admin();
    let (code, text) = refused(admin, &["engines"]);
    assert_eq!((code, text.lines().count()), (1, 1), "{text}");
    assert!(text.contains("no_token"), "{text}");
    printed(admin, &["engines", "--token-file", tokens]);
    let (code, text) = refused(admin, &["--token-file", tokens, "ranks", "nope"]);
    assert!(
        code == 1 && text.contains("there is no engine \"nope\""),
        "{text}"
    );
    assert_eq!(refused(admin, &["rank", "a"]).0, 2);
    assert_eq!(
        refused(admin, &["engines", "--token-file", "/nowhere"]).0,
        2
    );
    assert_eq!(refused(admin, &["engines", "--url", "nonsense"]).0, 2);
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = nobody.local_addr().expect("it is bound");
    drop(nobody);
    let (code, text) = refused(address, &["engines"]);
    assert!(code == 3 && text.contains("Connection refused"), "{text}");
    // An engine's port is no admin port.
    let (code, text) = refused(server.address(), &["engines"]);
    assert!(code == 3 && text.contains("no admin port"), "{text}");
}

/// Lines of a command that goes on.
struct Following {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Following {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The test may have ended.
                let _ = sender.send(line);
            }
        });
        Self { child, lines }
    }

    fn next(&self) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).expect("an event comes");
        serde_json::from_str(&line).expect("it is JSON")
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn events_are_followed_over_a_restart_of_the_server_and_end_with_an_interrupt() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = fleet(folder.path(), &[]);
    let admin = server.admin();
    let all = ["events", "--follow", "--since", "0", "--json"];
    let mut following = Following::start(ctl(admin, &all));
    let first = following.next();
    assert_eq!(
        (&first["kind"], &first["namespace"]),
        (&json!("registration"), &json!("a"))
    );
    following.next();
    following.next();
    printed(admin, &["drain", "a"]);
    let drained = following.next();
    assert_eq!(drained["kind"], "operator");
    server.kill();
    let mut command = Command::new(program("bootstrap-server"));
    command.args([
        "--listen",
        "127.0.0.1:0=a",
        "--probe-interval",
        "0",
        "--data-dir",
    ]);
    command.arg(folder.path());
    command.args(["--admin-listen", &admin.to_string()]);
    let again = BootstrapServer::spawn(command.stdin(Stdio::null()));
    assert_eq!(bind(&again, 9), 503, "it still drains");
    printed(admin, &["undrain", "a"]);
    let undrained = following.next();
    assert_eq!(undrained["kind"], "operator", "nothing is missed");
    let id = |event: &Value| event["id"].as_u64().expect("a number");
    assert!(id(&undrained) > id(&drained));
    signal(following.child.id(), "INT");
    wait_for("the end of the client", || {
        following.child.try_wait().expect("it can be waited for")
    });
}

#[test]
fn it_shows_a_token_and_a_certificate_over_tls() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let authority = Authority::new("fleet");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path.into_os_string().into_string().expect("text")
    };
    let (certificate, key) = authority.sign("server.fleet", 2100);
    let (certificate, key) = (write("server.pem", &certificate), write("server.key", &key));
    let (shown, shown_key) = authority.sign("operator.fleet", 2100);
    let (shown, shown_key) = (write("own.pem", &shown), write("own.key", &shown_key));
    let trusted = write("ca.pem", &authority.certificate);
    let other = write("other.pem", &Authority::new("other").certificate);
    let token = write("token", "a-secret-of-operators\n");
    let mut command = Command::new(program("bootstrap-server"));
    command.args(["--listen", "127.0.0.1:0=a"]);
    command.args(["--admin-listen", "https://127.0.0.1:0"]);
    command.args(["--admin-token-file", &token, "--tls-client-ca", &trusted]);
    command.args(["--tls-cert", &certificate, "--tls-key", &key]);
    command.arg("--data-dir").arg(folder.path().join("data"));
    let server = BootstrapServer::spawn_tls(&mut command);
    let put = Request::put("/route", &route_body(1, 0, 41000, 64));
    assert_eq!(server.send(&put).status, 200);
    let url = format!("https://{}", server.admin());
    let run = |arguments: &[&str]| {
        let mut command = ctl(server.admin(), &["engines"]);
        let output = command.args(["--url", &url]).args(arguments).output();
        let output = output.expect("the client starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        let code = output.status.code().expect("it was not killed");
        (code, text(output.stdout), text(output.stderr))
    };
    let identity = ["--cert-file", &shown, "--key-file", &shown_key];
    let whole = [
        &["--ca-file", &trusted, "--token-file", &token],
        &identity[..],
    ]
    .concat();
    let (code, engines, errors) = run(&whole);
    assert_eq!((code, errors.as_str()), (0, ""));
    assert_eq!(
        words(&engines)[1][..3],
        ["a", "serving", "1/1"],
        "{engines}"
    );

    let no_token = [&["--ca-file", &trusted], &identity[..]].concat();
    let stranger = [
        &["--ca-file", &other, "--token-file", &token],
        &identity[..],
    ]
    .concat();
    for (what, arguments, code, told) in [
        ("no token", no_token, 1, "token"),
        ("a stranger's server", stranger, 3, "certificate"),
        (
            "no certificate",
            vec!["--ca-file", &trusted, "--token-file", &token],
            3,
            "ertificate",
        ),
        ("no authority", vec!["--token-file", &token], 2, "--ca-file"),
    ] {
        let (ended, output, errors) = run(&arguments);
        assert_eq!((ended, output.as_str()), (code, ""), "{what}: {errors}");
        assert!(errors.contains(told), "{what}: {errors}");
    }
}
