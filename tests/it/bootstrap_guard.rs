//! Who may write, who may look, and what a peer may ask for at once.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, program, run_to_end, wait_for};
use tests::registrations::{registration_body, registration_path, route_body, topology_path};

use crate::certificates::Authority;

const RANK: &str = "rank-secret";
const ADMIN: &str = "admin-secret";

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let file = folder.join(name);
    std::fs::write(&file, text).expect("a file is written");
    file
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn guarded(folder: &Path) -> BootstrapServer {
    let rank = write(folder, "rank-token", RANK);
    let admin = write(folder, "admin-token", ADMIN);
    let arguments = [
        "--auth-token-file",
        text(&rank),
        "--admin-token-file",
        text(&admin),
    ];
    BootstrapServer::start_logged(&folder.join("data"), &arguments, &folder.join("log"))
}

fn with_token(mut request: Request, token_opt: Option<&str>) -> Request {
    if let Some(token) = token_opt {
        request
            .headers
            .push(("Authorization".to_owned(), format!("Bearer {token}")));
    }
    request
}

fn log(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("log")).expect("the log can be read")
}

#[test]
fn writes_need_the_ranks_token_and_what_stock_decodes_read_does_not() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = guarded(folder.path());
    let room = json!({ "bootstrap_room": 7, "dp_rank": 0 }).to_string();
    let writes = [
        Request::put("/route", &route_body(1, 0, 41000, 64)),
        Request::new("POST", "/register_dp_rank", Some(room.into())),
        Request::put(
            &registration_path("engine-a"),
            &registration_body("engine-a", 40001),
        ),
        Request::new("DELETE", &registration_path("engine-a"), None),
    ];
    for request in &writes {
        for token_opt in [None, Some("wrong"), Some(""), Some(ADMIN)] {
            let reply = server.send(&with_token(request.clone(), token_opt));
            let what = format!("{} {} with {token_opt:?}", request.method, request.path);
            assert_eq!(reply.status, 401, "{what}: {}", reply.text());
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{what}");
        }
    }
    let engines = || server.send(&with_token(Request::get("/v1/engines"), Some(ADMIN)));
    assert_eq!(
        engines().json(),
        json!({ "engines": [], "next": null }),
        "nothing changed"
    );
    let refused = log(folder.path());
    let refused = refused.lines().filter(|line| {
        let parts = ["audit", "write refused", "status=401", "127.0.0.1"];
        parts.iter().all(|part| line.contains(part))
    });
    assert_eq!(refused.count(), 4 * writes.len());
    for request in &writes {
        let reply = server.send(&with_token(request.clone(), Some(RANK)));
        assert!(reply.status < 300, "{}: {}", request.path, reply.text());
    }
    let query = json!({ "bootstrap_rooms": [7] }).to_string();
    for request in [
        Request::get(&topology_path()),
        Request::get("/health"),
        Request::new("POST", "/query_dp_ranks", Some(query.into())),
    ] {
        assert_eq!(server.send(&request).status, 200, "{}", request.path);
    }
    let written = log(folder.path());
    let line = written
        .lines()
        .find(|line| line.contains("first rank registered"));
    let line = line.expect("an audit line");
    for part in [
        "with the rank token",
        "before=\"nothing\"",
        "127.0.0.1:41000 in generation 1",
    ] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}

#[test]
fn the_admin_api_needs_its_own_token_and_health_none() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = guarded(folder.path());
    for (path, token_opt, status) in [
        ("/v1/engines", None, 401),
        ("/v1/engines", Some(RANK), 401),
        ("/v1/engines", Some(ADMIN), 200),
        ("/v1/health/live", None, 200),
        ("/v1/health/ready", None, 200),
        ("/metrics", None, 200),
        ("/", None, 200),
        ("/page/page.js", None, 200),
        ("/page/absent.js", None, 401),
    ] {
        let reply = server.send(&with_token(Request::get(path), token_opt));
        assert_eq!(reply.status, status, "{path} with {token_opt:?}");
    }
    let refused = server.send(&Request::get("/v1/engines")).json();
    assert_eq!(refused["code"], "no_token");
}

#[test]
fn a_token_is_replaced_while_the_server_runs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = guarded(folder.path());
    let put = |token| {
        let request = Request::put("/route", &route_body(1, 0, 41000, 64));
        server.send(&with_token(request, Some(token))).status
    };
    assert_eq!(put(RANK), 200);
    // Both count while ranks that know only the old one are still there.
    let both = format!("{RANK}\nnew-ranks another-secret\n");
    write(folder.path(), "rank-token", &both);
    wait_for("the new token", || {
        (put("another-secret") == 200).then_some(())
    });
    assert_eq!(put(RANK), 200);
    assert!(log(folder.path()).contains("with the new-ranks token"));
    write(folder.path(), "rank-token", "new-ranks another-secret\n");
    wait_for("the old token to end", || (put(RANK) == 401).then_some(()));
    assert_eq!(put("another-secret"), 200);
    // A mistake changes nothing, and is told.
    write(folder.path(), "rank-token", "");
    let warned = wait_for("the warning", || {
        let warnings = server.json("/v1/health/ready")["warnings"].clone();
        warnings
            .as_array()
            .is_some_and(|warnings| !warnings.is_empty())
            .then_some(warnings)
    });
    assert!(warned[0].as_str().expect("text").contains("rank-token"));
    assert_eq!(put("another-secret"), 200);
}

/// The router takes an escaped letter for the letter, so what guards must not be fooled by it.
#[test]
fn an_escaped_path_is_no_way_in() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = guarded(folder.path());
    let put = Request::put("/route", &route_body(1, 0, 41000, 64));
    assert_eq!(server.send(&with_token(put, Some(RANK))).status, 200);
    for path in [
        "/%76%31/engines",
        "/v%31/engines/default",
        "/%2fv1/engines",
        "//v1/engines",
        "/v1/health/%2e%2e/engines",
        "/v1/health/live/../../engines",
        "/v1%2fengines",
        "/v1/engines?/v1/health/live",
    ] {
        for method in ["GET", "HEAD", "DELETE", "OPTIONS", "PATCH"] {
            let request = Request::new(method, path, None);
            let status = request.send(server.admin()).expect("an answer").status;
            assert_eq!(status, 401, "{method} {path}");
        }
    }
    for path in [
        "/%72oute",
        "/regist%65r_dp_rank",
        "/%76%31/registrations/engine-a",
    ] {
        for method in ["PUT", "POST", "DELETE", "PATCH"] {
            let body = route_body(2, 0, 41001, 64).to_string().into_bytes();
            let request = Request::new(method, path, Some(body));
            let status = request.send(server.address()).expect("an answer").status;
            assert_eq!(status, 401, "{method} {path}");
        }
    }
    let engine = with_token(Request::get("/v1/engines/default"), Some(ADMIN));
    assert_eq!(server.send(&engine).json()["ranks_expected"], 1);
}

#[test]
fn every_write_that_is_refused_is_in_the_audit_log() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let log_file = folder.path().join("log");
    let server = BootstrapServer::start_logged(&folder.path().join("data"), &[], &log_file);
    let bad_rank = route_body(2, 7, 41000, 64);
    let long = vec![b' '; (1 << 20) + 1];
    for (request, status, reason) in [
        (Request::put("/route", &bad_rank), 400, "attn_tp_rank"),
        (Request::new("PUT", "/route", Some(long)), 413, "status=413"),
        (
            Request::post("/register_dp_rank", &json!({ "bootstrap_room": -1 })),
            400,
            "bootstrap_room",
        ),
        (
            Request::put(
                "/v1/registrations/engine-b",
                &registration_body("engine-a", 1),
            ),
            400,
            "the path names engine engine-b",
        ),
        (
            Request::new("DELETE", "/v1/registrations/engine-c", None),
            404,
            "engine-c",
        ),
        (
            Request::new("DELETE", "/v1/engines/absent", None),
            404,
            "absent",
        ),
    ] {
        let reply = server.send(&request);
        assert_eq!(reply.status, status, "{}: {}", request.path, reply.text());
        let audited = log(folder.path());
        let last = audited.lines().rfind(|line| line.contains("audit"));
        let last = last.unwrap_or_default();
        for part in ["write refused", request.path.as_str(), reason] {
            assert!(last.contains(part), "{part} is not in {last:?}");
        }
    }
    assert_eq!(server.json("/v1/engines")["engines"], json!([]));
}

#[test]
fn one_peer_has_a_bounded_number_of_connections() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let limits = ["--max-connections-per-peer", "20"];
    let server = BootstrapServer::start(folder.path(), &limits);
    let health = || Request::get("/health").send(server.address());
    let mut open = Vec::new();
    wait_for("a connection that is refused", || {
        open.push(TcpStream::connect(server.address()).expect("a connection"));
        health().is_err().then_some(())
    });
    assert!((20..100).contains(&open.len()), "{} are open", open.len());
    let refused = "ferry_bootstrap_connections_refused_total{reason=\"too_many_of_peer\"}";
    assert!(server.metric(refused) >= Some(1.0), "operators get through");
    drop(open);
    wait_for("room for others", || health().ok());
}

#[test]
fn sglangs_variable_guards_both_ports() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(program("bootstrap-server"));
    command.env("SGLANG_DISAGGREGATION_BOOTSTRAP_AUTH_TOKEN", RANK);
    BootstrapServer::command(&mut command, folder.path(), &[]);
    let server = BootstrapServer::spawn(&mut command);
    let put = Request::put("/route", &route_body(1, 0, 41000, 64));
    assert_eq!(server.send(&put).status, 401);
    assert_eq!(server.send(&with_token(put, Some(RANK))).status, 200);
    let engines = Request::get("/v1/engines");
    assert_eq!(server.send(&engines).status, 401);
    assert_eq!(server.send(&with_token(engines, Some(RANK))).status, 200);
}

#[test]
fn an_open_admin_port_must_be_wanted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let command = |more: &[&str]| {
        let mut command = Command::new(program("bootstrap-server"));
        command.args(["--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0"]);
        command.args(more).arg("--data-dir").arg(folder.path());
        command
    };
    let (ended, stderr) = run_to_end(&mut command(&[]));
    assert!(
        !ended.success() && stderr.contains("--admin-token-file"),
        "{stderr}"
    );
    let server = BootstrapServer::spawn(&mut command(&["--admin-without-token"]));
    assert!(server.end_with("TERM").success());
}

#[test]
fn a_peer_that_asks_too_much_is_told_to_wait() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &["--max-requests-per-peer", "20"]);
    let health = || server.send(&Request::get("/health"));
    let replies: Vec<Reply> = (0..60).map(|_| health()).collect();
    let refused: Vec<&Reply> = replies.iter().filter(|reply| reply.status == 429).collect();
    assert!((1..60).contains(&refused.len()), "{} of 60", refused.len());
    assert_eq!(refused[0].header("retry-after"), Some("1"));
    wait_for("the rate to recover", || {
        (health().status == 200).then_some(())
    });
}

#[test]
fn a_body_that_is_too_long_is_413_and_changes_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    let long = json!({ "rank_ip": "x".repeat(2 << 20) });
    for path in ["/route", "/v1/registrations/engine-a"] {
        let reply = server.send(&Request::put(path, &long));
        assert_eq!(reply.status, 413, "{path}: {}", reply.text());
    }
    assert_eq!(server.json("/v1/engines")["engines"], json!([]));
}

/// Sends a request over TLS, as a client that believes one authority.
fn send_tls(
    address: SocketAddr,
    authority: &Authority,
    identity_opt: Option<&(String, String)>,
    request: &Request,
) -> std::io::Result<Reply> {
    let certificate = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("pem");
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(certificate(&authority.certificate))
        .expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match identity_opt {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("pem");
            let builder = builder.with_client_auth_cert(vec![certificate(chain)], key);
            builder.expect("an identity")
        }
    };
    let name = "127.0.0.1".try_into().expect("a name");
    let session = rustls::ClientConnection::new(Arc::new(config), name).expect("a session");
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    request.send_over(rustls::StreamOwned::new(session, stream))
}

#[test]
fn only_clients_with_a_good_certificate_get_through_tls() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (authority, stranger) = (Authority::new("fleet"), Authority::new("stranger"));
    let (certificate, key) = authority.sign("server.fleet", 2100);
    let certificate = write(folder.path(), "cert.pem", &certificate);
    let key = write(folder.path(), "key.pem", &key);
    let authorities = write(folder.path(), "ca.pem", &authority.certificate);
    let mut command = Command::new(program("bootstrap-server"));
    command.args([
        "--listen",
        "https://127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    command
        .arg("--tls-cert")
        .arg(&certificate)
        .arg("--tls-key")
        .arg(&key);
    command.arg("--tls-client-ca").arg(&authorities);
    command.arg("--data-dir").arg(folder.path().join("data"));
    BootstrapServer::log_to(&mut command, &folder.path().join("log"));
    let server = BootstrapServer::spawn(&mut command);
    let request = Request::put("/route", &route_body(1, 0, 41000, 64));
    let put = |identity_opt: Option<&(String, String)>| {
        send_tls(server.address(), &authority, identity_opt, &request).map(|reply| reply.status)
    };
    for (what, identity_opt) in [
        ("no certificate", None),
        (
            "an expired certificate",
            Some(authority.sign("rank.fleet", 2021)),
        ),
        (
            "a stranger's certificate",
            Some(stranger.sign("rank.stranger", 2100)),
        ),
    ] {
        let refused = put(identity_opt.as_ref());
        assert!(refused.is_err(), "{what}: {refused:?}");
        assert_eq!(server.json("/v1/engines")["engines"], json!([]), "{what}");
    }
    for parts in [
        ["who=127.0.0.1:", "rank.fleet", "expired"],
        [
            "who=127.0.0.1:",
            "rank.stranger",
            "invalid peer certificate",
        ],
        ["who=127.0.0.1:", "no certificates", "default"],
    ] {
        let is_whole = |line: &str| {
            line.contains("client certificate refused")
                && parts.iter().all(|part| line.contains(part))
        };
        // The client is told before the log is.
        wait_for(&format!("a line of {parts:?}"), || {
            log(folder.path()).lines().any(is_whole).then_some(())
        });
    }
    let good = authority.sign("rank.fleet", 2100);
    assert_eq!(put(Some(&good)).expect("an answer"), 200);
    let done = log(folder.path());
    let line = done
        .lines()
        .find(|line| line.contains("first rank registered"));
    let line = line.expect("an audit line");
    assert!(
        line.contains("certified as ") && line.contains("rank.fleet"),
        "{line}"
    );

    // The server's own certificate is replaced: new connections see the new one.
    let other = Authority::new("other");
    let (renewed, renewed_key) = other.sign("server.other", 2100);
    std::fs::write(&key, renewed_key).expect("the key is written");
    std::fs::write(&certificate, renewed).expect("the certificate is written");
    wait_for("the new certificate", || {
        let sent = send_tls(server.address(), &other, Some(&good), &request);
        sent.ok().filter(|reply| reply.status == 200)
    });
    assert!(
        put(Some(&good)).is_err(),
        "the old authority's server is gone"
    );

    // So is the authority of clients, without a restart.
    write(folder.path(), "ca.pem", &stranger.certificate);
    let other_good = stranger.sign("rank.stranger", 2100);
    wait_for("the new authority", || {
        let sent = send_tls(server.address(), &other, Some(&other_good), &request);
        sent.ok().filter(|reply| reply.status == 200)
    });
    let refused = send_tls(server.address(), &other, Some(&good), &request);
    assert!(refused.is_err(), "{refused:?}");
}
