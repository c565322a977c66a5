//! Hostile clients: while they do their worst, `/health` stays 200, memory and log stay bounded,
//! nothing panics, and no registration changes.
//!
//! Each runs for some seconds; `make test-hostile` runs each for a minute (`FERRY_HOSTILE_SECONDS`).

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use tests::http::{Request, exchange_and_hang_up};
use tests::process::{BootstrapServer, skip};
use tests::random::Random;
use tests::registrations::route_body;

const DEFAULT_SECONDS: u64 = 3;
/// Clients at once.
const CLIENTS: usize = 8;
/// What a server may grow by, at most: 16 KiB for each of the 18,000 connections that the limit of
/// open files allows here, and a mebibyte for each body.
const MAX_GROWTH_MIB: u64 = 320;
const MAX_LOG_BYTES: u64 = 64 << 10;
/// Each attack is refused in one line of the audit log at most.
const MAX_LINE_BYTES: u64 = 1 << 10;
const IDLE_CONNECTIONS: usize = 10_000;

fn seconds() -> u64 {
    let given = std::env::var("FERRY_HOSTILE_SECONDS").ok();
    given
        .and_then(|given| given.parse().ok())
        .unwrap_or(DEFAULT_SECONDS)
}

fn engine(server: &BootstrapServer) -> Value {
    server.json("/v1/engines")["engines"].clone()
}

/// Lets clients attack for some seconds, each with random numbers of its own, and looks after the
/// server meanwhile.
fn besiege(clients: usize, attack: impl Fn(SocketAddr, &mut Random) + Sync) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let log = folder.path().join("log");
    let data = folder.path().join("data");
    let server = BootstrapServer::start_logged(&data, &["--probe-interval", "0"], &log);
    let put = server.send(&Request::put("/route", &route_body(1, 0, 41000, 64)));
    assert_eq!(put.status, 200);
    let (before, resident) = (engine(&server), server.resident_mib());
    let (is_over, attacks) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut looks = 0;
    let (mut slowest, mut most) = (Duration::ZERO, resident);
    std::thread::scope(|scope| {
        for _ in 0..clients {
            let mut random = Random::new();
            let (is_over, attacks) = (&is_over, &attacks);
            let (attack, address) = (&attack, server.address());
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    attack(address, &mut random);
                    attacks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(seconds());
        while Instant::now() < end {
            let begun = Instant::now();
            let health = server.try_send(&Request::get("/health"));
            slowest = slowest.max(begun.elapsed());
            if !health.as_ref().is_ok_and(|reply| reply.status == 200) {
                is_over.store(true, Ordering::Relaxed);
                panic!("/health under attack: {health:?}");
            }
            most = most.max(server.resident_mib());
            looks += 1;
            std::thread::park_timeout(Duration::from_millis(50));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(engine(&server), before, "the table is unchanged");
    let log = std::fs::read_to_string(&log).expect("the log");
    let attacks = attacks.into_inner();
    println!(
        "{attacks} attacks, {looks} looks, the slowest took {slowest:?}, {resident} MiB before and {most} at most, {} bytes of log",
        log.len()
    );
    assert!(!log.contains("panicked"), "{log}");
    assert!(
        log.len() as u64 <= MAX_LOG_BYTES + attacks * MAX_LINE_BYTES,
        "{} bytes of log",
        log.len()
    );
    assert!(
        most <= resident + MAX_GROWTH_MIB,
        "{resident} MiB grew to {most}"
    );
    assert!(slowest < Duration::from_secs(5), "/health took {slowest:?}");
}

/// Sends bytes and reads what comes, however it ends.
fn send(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    exchange_and_hang_up(address, bytes).unwrap_or_default()
}

/// Sends a request that must be answered, but not with a success or an error of the server.
fn send_refused(address: SocketAddr, method: &str, path: &str, body: Vec<u8>) {
    let reply = Request::new(method, path, Some(body)).send(address);
    if let Ok(reply) = reply {
        assert!(
            (400..500).contains(&reply.status),
            "{method} {path}: {reply:?}"
        );
    }
}

const WRITES: [(&str, &str); 4] = [
    ("PUT", "/route"),
    ("POST", "/register_dp_rank"),
    ("POST", "/query_dp_ranks"),
    ("PUT", "/v1/registrations/engine"),
];

#[test]
fn random_bytes() {
    besiege(CLIENTS, |address, random| {
        let length = random.below(4096);
        send(address, &random.bytes(length));
    });
}

#[test]
fn slow_headers() {
    besiege(200, |address, random| {
        let Ok(mut stream) = TcpStream::connect(address) else {
            return;
        };
        for byte in b"GET /health HTTP/1.1\r\nHost: a\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaa" {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(random.below(60) as u64));
        }
    });
}

#[test]
fn http2_prefaces() {
    besiege(CLIENTS, |address, random| {
        let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        for _ in 0..random.below(20) {
            let length = random.below(200);
            bytes.extend([0, 0, length as u8, random.below(12) as u8]);
            bytes.extend(random.bytes(5 + length));
        }
        send(address, &bytes);
    });
}

#[test]
fn bodies_of_a_hundred_megabytes() {
    const LENGTH: usize = 100_000_000;
    let chunk = vec![b'['; 1 << 16];
    besiege(4, |address, random| {
        let (_, path) = WRITES[random.below(WRITES.len())];
        let is_chunked = random.below(2) == 0;
        let framing = match is_chunked {
            true => "Transfer-Encoding: chunked".to_owned(),
            false => format!("Content-Length: {LENGTH}"),
        };
        let head = format!("PUT {path} HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n");
        let Ok(mut stream) = TcpStream::connect(address) else {
            return;
        };
        let timeout = Some(Duration::from_secs(5));
        let _ = stream.set_write_timeout(timeout);
        let _ = stream.set_read_timeout(timeout);
        let mut sent = stream.write_all(head.as_bytes());
        for _ in 0..LENGTH / chunk.len() {
            if sent.is_err() {
                break;
            }
            if is_chunked {
                sent = stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes());
            }
            sent = sent.and_then(|()| stream.write_all(&chunk));
            if is_chunked {
                sent = sent.and_then(|()| stream.write_all(b"\r\n"));
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(
            !answer.starts_with(b"HTTP/1.1 2"),
            "{}",
            String::from_utf8_lossy(&answer)
        );
    });
}

#[test]
fn ten_thousand_idle_connections() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let raised = setrlimit(Resource::Nofile, limit);
    let needed = IDLE_CONNECTIONS as u64 + 500;
    // The server needs more than that, beside its other files.
    if raised.is_err() || limit.maximum.is_some_and(|maximum| maximum < needed + 2048) {
        let reason = format!("{needed} files cannot be open here: {limit:?}");
        return skip("ten_thousand_idle_connections", &reason);
    }
    besiege(1, |address, _| {
        let idle = (0..IDLE_CONNECTIONS).map_while(|_| TcpStream::connect(address).ok());
        let idle: Vec<TcpStream> = idle.collect();
        assert_eq!(idle.len(), IDLE_CONNECTIONS);
        std::thread::park_timeout(Duration::from_secs(1));
    });
}

#[test]
fn deep_json() {
    besiege(CLIENTS, |address, random| {
        let (method, path) = WRITES[random.below(WRITES.len())];
        let depth = 2 << random.below(17);
        let (open, close) = [("[", "]"), ("{\"a\":", "}")][random.below(2)];
        let inner = format!("{}1{}", open.repeat(depth), close.repeat(depth));
        let body = match random.below(2) {
            0 => inner,
            _ => format!("{{\"bootstrap_rooms\": {inner}, \"rank_ip\": {inner}}}"),
        };
        send_refused(address, method, path, body.into_bytes());
    });
}

#[test]
fn huge_numbers() {
    besiege(CLIENTS, |address, random| {
        let (method, path) = WRITES[random.below(WRITES.len())];
        // Twenty digits are the least that no integer field of a body holds.
        let digits = "9".repeat(20 + random.below(100_000));
        let number = match random.below(5) {
            0 => digits,
            1 => format!("-{digits}"),
            2 => format!("1e{digits}"),
            3 => format!("0.{digits}"),
            _ => format!("\"{digits}\""),
        };
        let mut body = route_body(1, 0, 41000, 64).to_string();
        body = body.replace("\"page_size\":64", &format!("\"page_size\":{number}"));
        body = body.replacen(
            '{',
            &format!("{{\"bootstrap_rooms\":[{number}],\"bootstrap_room\":{number},\"dp_rank\":0,"),
            1,
        );
        send_refused(address, method, path, body.into_bytes());
    });
}

#[test]
fn duplicate_keys() {
    besiege(CLIENTS, |address, random| {
        let (method, path) = WRITES[random.below(WRITES.len())];
        let number = 1 + random.below(20_000);
        let mut body = "{".to_owned();
        for _ in 0..number {
            body.push_str("\"attn_tp_size\":1,\"bootstrap_room\":5,\"bootstrap_rooms\":[1],");
        }
        // The last one counts, and it is wrong.
        body.push_str("\"attn_tp_size\":-1,\"bootstrap_room\":-1,\"bootstrap_rooms\":-1}");
        send_refused(address, method, path, body.into_bytes());
    });
}
