//! How the service starts and ends.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use serde_json::json;
use tests::http::Request;
use tests::process::{run_to_end, wait_for};
use tests::registrations::route_body;
use tests::service::{TransferService, memfd};
use transfer_actor::api::RoomStatus;

use super::{
    POOL_BYTES, Pair, SmallEngine, attach_raw, attach_request, begin, bootstrap, lend, refusal,
};

/// Well below the ten seconds for which a rank waits for its last writes and messages.
const QUICK: Duration = Duration::from_secs(6);

/// Starts a service that is to fail, and returns what it says.
fn fails(folder: &std::path::Path, arguments: &[&str]) -> String {
    let (status, text) = run_to_end(&mut TransferService::command(folder, arguments));
    assert!(!status.success(), "{arguments:?} started: {text}");
    text
}

#[test]
fn a_bad_flag_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (flag, value) in [
        ("--control-ports", "9-5"),
        ("--control-ports", "0-5"),
        ("--control-ports", "5"),
        ("--transports", "pigeon"),
        ("--bind", "localhost"),
        ("--metrics-listen", "9401"),
        ("--bootstrap-timeout", "soon"),
        ("--log-format", "xml"),
        ("--inject-fault", "explode:kv"),
        ("--no-such-flag", "1"),
    ] {
        let text = fails(folder.path(), &[flag, value]);
        assert!(text.contains(flag), "{text} names {flag}");
        assert!(
            flag == "--no-such-flag" || text.contains(value),
            "{text} shows {value}"
        );
    }
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        0
    );
}

#[test]
fn a_busy_metrics_port_is_named_and_no_socket_is_left() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let other = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = other.local_addr().expect("an address").to_string();
    let text = fails(folder.path(), &["--metrics-listen", &address]);
    assert!(
        text.contains(&format!("binding the metrics port {address}")),
        "{text}"
    );
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        0
    );
}

#[test]
fn the_socket_of_a_dead_process_is_replaced_and_that_of_a_live_one_is_not() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_owned();
    for name in ["attach.sock", "api.sock"] {
        // A listener that is dropped leaves its file behind, as a crash does.
        drop(UnixListener::bind(path.join(name)).expect("it binds"));
    }
    let service = TransferService::start_in(folder, &[]);
    assert_eq!(service.ranks(), [0; 0]);
    let text = fails(&path, &[]);
    assert!(
        text.contains("attach.sock is in use by another process"),
        "{text}"
    );
    let elsewhere = tempfile::tempdir().expect("a temporary folder");
    let api = path.join("api.sock");
    let text = fails(
        elsewhere.path(),
        &["--api-socket", api.to_str().expect("text")],
    );
    assert!(
        text.contains("api.sock is in use by another process"),
        "{text}"
    );
    assert_eq!(
        std::fs::read_dir(elsewhere.path())
            .expect("a folder")
            .count(),
        0,
        "the other socket was removed again"
    );
    let pool = memfd(POOL_BYTES);
    let (reply, _stream) = attach_raw(&service, &attach_request("decode", None), &lend(&pool));
    assert!(
        reply["attached"]["rank"].is_u64(),
        "the live one took no harm: {reply}"
    );
    assert_eq!(service.ranks(), [0]);
}

#[test]
fn a_path_that_cannot_be_a_socket_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let precious = folder.path().join("attach.sock");
    std::fs::write(&precious, "precious").expect("it is written");
    let text = fails(folder.path(), &[]);
    assert!(
        text.contains("attach.sock exists and is no socket"),
        "{text}"
    );
    assert_eq!(
        std::fs::read_to_string(&precious).expect("it is there"),
        "precious"
    );
    let missing = folder.path().join("missing").join("attach.sock");
    let missing = missing.to_str().expect("text");
    let text = fails(folder.path(), &["--attach-socket", missing]);
    assert!(text.contains(missing), "{text}");
}

/// Ports that nobody uses now, outside the range from which the kernel takes ephemeral ones.
fn free_ports(count: u16) -> (u16, u16) {
    let pid = std::process::id();
    let candidates =
        (0..1000).map(|step| 20_000 + ((pid.wrapping_mul(8) + step * 8) % 10_000) as u16);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let first = candidates
        .into_iter()
        .find(|first| (*first..first + count).all(is_free))
        .expect("some ports are free");
    (first, first + count - 1)
}

#[test]
fn control_sockets_lie_in_their_range_and_an_exhausted_range_says_so() {
    let (first, last) = free_ports(2);
    let range = format!("{first}-{last}");
    let service = TransferService::start(&["--control-ports", &range]);
    let attach = || {
        let pool = memfd(POOL_BYTES);
        attach_raw(&service, &attach_request("decode", None), &lend(&pool))
    };
    let (one, one_stream) = attach();
    let (other, _other_stream) = attach();
    let control = |reply: &serde_json::Value| {
        reply["attached"]["control"]
            .as_str()
            .expect("it is attached")
            .to_owned()
    };
    let mut controls = [control(&one), control(&other)];
    controls.sort();
    assert_eq!(
        controls,
        [first, last].map(|port| format!("127.0.0.1:{port}"))
    );
    let (refused, _refused_stream) = attach();
    let message = refusal(&refused);
    let expected = format!("ports {first} to {last}");
    assert!(message.contains(&expected), "{message:?} says {expected:?}");
    assert!(
        message.contains("--control-ports"),
        "{message:?} says what to do"
    );
    assert_eq!(service.ranks().len(), 2);
    drop(one_stream);
    let (again, _again_stream) = wait_for("the port to be free again", || {
        let (reply, stream) = attach();
        reply["attached"].is_object().then_some((reply, stream))
    });
    assert_eq!(control(&again), control(&one));
}

#[test]
fn an_address_that_the_host_does_not_have_is_named() {
    // Set aside for documentation, so no host has it.
    let service = TransferService::start(&["--bind", "192.0.2.1"]);
    let pool = memfd(POOL_BYTES);
    let (reply, _stream) = attach_raw(&service, &attach_request("decode", None), &lend(&pool));
    assert!(refusal(&reply).contains("192.0.2.1"), "{reply}");
}

#[test]
fn a_signal_ends_the_service_with_engines_attached_and_polls_waiting() {
    for name in ["TERM", "INT"] {
        let mut pair = Pair::start(&["--drain-timeout", "0"]);
        begin(&pair.prefill, &pair.decode, 1);
        let path = format!(
            "/v1/ranks/{}/rooms/1?wait_for=success&timeout_ms=60000",
            pair.prefill.client.rank()
        );
        let api = pair.prefill_service.api_socket();
        std::thread::scope(|scope| {
            let polled = scope.spawn(|| Request::get(&path).send_unix(&api));
            let begun = Instant::now();
            pair.prefill_service.signal(name);
            let status = pair.prefill_service.wait();
            assert!(
                begun.elapsed() < QUICK,
                "SIG{name} took {:?}",
                begun.elapsed()
            );
            assert_eq!(status.code(), Some(0), "after SIG{name}");
            // It may have come too late to be taken; one that was taken is answered.
            if let Ok(reply) = polled.join().expect("it ends")
                && reply.status == 200
            {
                assert!(reply.text().contains("shutting down"), "{}", reply.text());
            }
        });
        for socket in [pair.prefill_service.attach_socket(), api] {
            assert!(!socket.exists(), "{} is left", socket.display());
        }
        let told = pair.decode.wait(1, RoomStatus::Success);
        let reason = told.reason.unwrap_or_default();
        assert_eq!(
            reason,
            "prefill rank 0: the transfer service is shutting down"
        );
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    // A prefill that takes a connection and says nothing: the end waits for a message to it.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let port = silent.local_addr().expect("an address").port();
    let (server, _folder) = bootstrap(&["--probe-interval", "0"]);
    let put = server.send(&Request::put("/route", &route_body(1, 0, port, 4)));
    assert_eq!(put.status, 200, "{}", put.text());
    let mut service = TransferService::start(&["--send-timeout", "60", "--drain-timeout", "0"]);
    let decode = SmallEngine::decode(&service, &server);
    decode.open(1);
    let room = decode.wait(1, RoomStatus::WaitingForInput);
    assert_eq!(room.status, RoomStatus::WaitingForInput);
    service.signal("TERM");
    wait_for("the end to begin", || {
        let health = service.send_to_metrics_port(&Request::get("/health"));
        let body: serde_json::Value = serde_json::from_slice(&health.body).ok()?;
        (body["shutting_down"] == json!(true)).then_some(())
    });
    assert!(service.ended().is_none(), "it waits for its last message");
    let begun = Instant::now();
    service.signal("TERM");
    let status = service.wait();
    assert!(begun.elapsed() < QUICK, "it took {:?}", begun.elapsed());
    assert_eq!(status.code(), Some(0));
    assert!(!service.attach_socket().exists() && !service.api_socket().exists());
}
