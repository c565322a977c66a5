//! Who may write, who may look, and what a peer may ask for at once.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tests::http::{Reply, Request};
use tests::process::{BootstrapServer, program, run_to_end, wait_for};
use tests::registrations::{registration_body, registration_path, route_body, topology_path};

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
        json!({ "engines": [] }),
        "nothing changed"
    );
    let refused = log(folder.path());
    let refused = refused
        .lines()
        .filter(|line| line.contains("unauthorized") && line.contains("audit"));
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
    write(folder.path(), "rank-token", "another secret");
    wait_for("the new token", || {
        (put("another secret") == 200).then_some(())
    });
    assert_eq!(put(RANK), 401);
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
    assert_eq!(server.json("/v1/engines"), json!({ "engines": [] }));
}

/// An authority, and what it signs.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("a certificate").pem();
        let issuer = Issuer::new(params, key);
        Self {
            issuer,
            certificate,
        }
    }

    /// A certificate and its key, in PEM.
    fn sign(&self, name: &str, last_year: i32) -> (String, String) {
        let names = vec![name.to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        (signed.pem(), key.serialize_pem())
    }
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
        assert_eq!(
            server.json("/v1/engines"),
            json!({ "engines": [] }),
            "{what}"
        );
    }
    let refused = log(folder.path());
    for part in [
        "certificate=\"rank.fleet\"",
        "certificate=\"rank.stranger\"",
        "client certificate refused",
    ] {
        assert!(refused.contains(part), "{part} is not in {refused}");
    }
    let good = authority.sign("rank.fleet", 2100);
    assert_eq!(put(Some(&good)).expect("an answer"), 200);
    assert!(log(folder.path()).contains("certified as rank.fleet"));

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
}
