//! What the bootstrap server does with bytes that are wrong, too many, or slow.

use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};
use tests::http::{Reply, Request, exchange_and_hang_up};
use tests::process::BootstrapServer;
use tests::random::Random;
use tests::registrations::{route_body, route_path, topology_path, with};

fn put(server: &BootstrapServer, body: &Value) -> Reply {
    server.send(&Request::put("/route", body))
}

fn status(server: &BootstrapServer, path: &str) -> u16 {
    server.send(&Request::get(path)).status
}

fn start() -> (BootstrapServer, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    (BootstrapServer::start(folder.path(), &[]), folder)
}

#[test]
fn random_and_damaged_requests_never_end_the_server() {
    let (server, _folder) = start();
    put(&server, &route_body(2, 0, 41000, 64));
    let mut random = Random::new();
    let good = Request::put("/route", &route_body(2, 0, 41000, 64)).bytes(server.address());
    for _ in 0..300 {
        let mut bytes = good.clone();
        if random.below(4) == 0 {
            bytes = (0..random.below(2000))
                .map(|_| random.below(256) as u8)
                .collect();
        } else {
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
        }
        exchange_and_hang_up(server.address(), &bytes).expect("a connection");
    }
    // A damaged digit may still make a registration; whatever is there can be read and replaced.
    assert_eq!(put(&server, &route_body(1, 0, 42000, 128)).status, 200);
    assert_eq!(server.json(&topology_path())["page_size"], 128);
    assert_eq!(server.json(&route_path(0, 0, 0, 0))["rank_port"], 42000);
}

/// Every field of a registration in turn gets values of a wrong kind; each is a 400 that names the
/// field, and the table stays as it was.
#[test]
fn wrong_kinds_are_400_and_name_the_field() {
    let (server, _folder) = start();
    put(&server, &route_body(2, 0, 41000, 64));
    let before = server.json("/v1/engines")["engines"].clone();
    let good = route_body(2, 1, 41001, 64);
    let integers: Vec<&String> = good
        .as_object()
        .expect("an object")
        .iter()
        .filter(|(_, value)| value.is_u64())
        .map(|(name, _)| name)
        .collect();
    for name in integers {
        for wrong in [
            json!(true),
            json!(1.0),
            json!(1.5),
            json!("one"),
            json!("\u{661}"),
            json!("1_0"),
            json!(" 1"),
            json!([1]),
            json!({}),
            json!(-1),
            json!(u64::MAX),
        ] {
            let reply = put(&server, &with(&good, name, wrong.clone()));
            assert_eq!(reply.status, 400, "{name} as {wrong}: {}", reply.text());
            assert!(
                reply.text().contains(name.as_str()),
                "{name} as {wrong}: {}",
                reply.text()
            );
        }
    }
    for (name, wrong) in [
        ("rank_ip", json!(5)),
        ("rank_ip", json!("")),
        ("kv_cache_dtype", json!(null)),
        ("kv_layout", json!(1)),
        ("enable_kv_cache_sharding", json!("yes")),
        ("decode_allocation_policy", json!([])),
    ] {
        let reply = put(&server, &with(&good, name, wrong));
        assert_eq!(reply.status, 400);
        assert!(reply.text().contains(name), "{name}: {}", reply.text());
    }
    assert_eq!(server.json("/v1/engines")["engines"], before);
}

#[test]
fn slow_clients_do_not_keep_others_waiting() {
    let (server, _folder) = start();
    let slow: Vec<TcpStream> = (0..200)
        .map(|at| {
            let mut stream = TcpStream::connect(server.address()).expect("a connection");
            let begun: &[u8] = match at % 2 {
                0 => b"GET /hea",
                _ => b"PUT /route HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{\"attn",
            };
            stream.write_all(begun).expect("it can be written");
            stream
        })
        .collect();
    assert_eq!(status(&server, "/health"), 200);
    assert_eq!(put(&server, &route_body(1, 0, 41000, 64)).status, 200);
    drop(slow);
}

#[test]
fn a_body_of_a_mebibyte_is_read_and_one_byte_more_is_413() {
    let (server, _folder) = start();
    let size = 1 << 20;
    for (length, expected) in [(size, 400), (size + 1, 413)] {
        let request = Request::new("PUT", "/route", Some(vec![b' '; length]));
        assert_eq!(server.send(&request).status, expected, "{length} bytes");
    }
}
