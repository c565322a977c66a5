//! What is not allowed moves nothing, and disturbs nobody.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};

use common::plan::{RunList, StridedRun};
use common::wire::EngineDesc;
use io_engine::{ByteLen, ByteOffset, Engine, EngineConfig, TransportErrorKind, TransportKind};

use crate::support::{
    BYTES, DEADLINE, Pair, config, contents, kinds, one_run, pair, pair_with, remote_of, write,
};

#[test]
fn what_was_not_registered_is_not_written() {
    for kind in kinds() {
        let pair = pair(kind);
        let before = contents(&pair.target_memory);
        let good = pair.remote.desc();

        let mut forged_key = good.clone();
        forged_key.extra = vec![rmpv::Value::Array(vec![
            "FRY1".into(),
            rmpv::Value::Binary(vec![7; 16]),
        ])];
        let mut longer = good.clone();
        longer.size = 4 * BYTES;
        let mut unknown = good.clone();
        unknown.id = 4711;
        let cases = [
            (forged_key, one_run(0, 0, 64), TransportErrorKind::BadKey),
            (
                longer,
                one_run(0, BYTES - 32, 64),
                TransportErrorKind::OutOfBounds,
            ),
            (
                unknown,
                one_run(0, 0, 64),
                TransportErrorKind::NotRegistered,
            ),
            (
                good.clone(),
                one_run(0, BYTES - 32, 64),
                TransportErrorKind::OutOfBounds,
            ),
            (
                good.clone(),
                one_run(BYTES - 32, 0, 64),
                TransportErrorKind::OutOfBounds,
            ),
        ];
        for (desc, runs, expected) in cases {
            let result = write(&pair.session, &pair.local, remote_of(&desc), runs);
            assert_eq!(result.unwrap_err(), expected, "{kind}");
        }
        assert!(
            contents(&pair.target_memory) == before,
            "{kind}: nothing changed"
        );
        // The session goes on.
        write(
            &pair.session,
            &pair.local,
            remote_of(&good),
            one_run(0, 0, 64),
        )
        .unwrap();

        assert!(pair.target.deregister(&pair.remote, DEADLINE));
        let result = write(
            &pair.session,
            &pair.local,
            remote_of(&good),
            one_run(0, 0, 64),
        );
        assert_eq!(
            result.unwrap_err(),
            TransportErrorKind::NotRegistered,
            "{kind}"
        );
    }
}

#[test]
fn a_descriptor_with_a_pid_and_addresses_is_not_believed() {
    let pair = pair(TransportKind::Cma);
    let mut stock = pair.target.desc();
    stock.extra.clear();
    let refused = pair.source.connect(&stock).unwrap_err();
    assert_eq!(refused.kind(), TransportErrorKind::NoCommonTransport);
    assert!(
        refused.to_string().contains("--cma-trust-descriptors"),
        "{refused}"
    );

    let mut trusting = config("trusting", TransportKind::Cma);
    trusting.cma_trust_descriptors = true;
    let trusting = Engine::start(trusting).unwrap();
    let local = trusting
        .register(&pair.source_memory, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    let session = trusting.connect(&stock).unwrap();
    let mut desc = pair.remote.desc();
    desc.extra.clear();
    write(&session, &local, remote_of(&desc), one_run(0, 100, 5000)).unwrap();
    assert!(contents(&pair.target_memory)[100..5100] == contents(&pair.source_memory)[..5000]);
}

#[test]
fn the_order_of_choice_is_kept_and_shown() {
    let mut both = EngineConfig::new("both", "127.0.0.1");
    both.transports = vec![TransportKind::Tcp, TransportKind::Cma];
    let mut other = EngineConfig::new("other", "127.0.0.1");
    other.transports = vec![TransportKind::Cma, TransportKind::Tcp];
    let chosen = pair_with(both, other).session.transport();
    assert_eq!(chosen, TransportKind::Tcp, "the writer's order counts");
    let refused = Engine::start(config("a", TransportKind::Tcp))
        .unwrap()
        .connect(
            &Engine::start(config("b", TransportKind::Cma))
                .unwrap()
                .desc(),
        );
    assert_eq!(
        refused.unwrap_err().kind(),
        TransportErrorKind::NoCommonTransport
    );
}

#[test]
fn garbage_and_slow_clients_do_not_disturb_the_listener() {
    let pair = pair(TransportKind::Tcp);
    let address = pair.target.tcp_address();
    let mut slow = TcpStream::connect(address).unwrap();
    slow.write_all(b"F").unwrap();
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 100],
        b"FRYT\x09\x00",
        &[0xff; 64],
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(garbage).unwrap();
        // The engine closes without a word (or resets, when it had not read everything), perhaps
        // before this end is closed.
        let _ = stream.shutdown(Shutdown::Write);
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    write(
        &pair.session,
        &pair.local,
        remote_of(&pair.remote.desc()),
        one_run(0, 0, 4096),
    )
    .unwrap();
}

#[test]
fn a_range_outside_keeps_the_whole_batch_from_moving() {
    for kind in kinds() {
        let pair = pair(kind);
        let before = contents(&pair.target_memory);
        let mut longer = pair.remote.desc();
        longer.size = 4 * BYTES;
        let inside = StridedRun::contiguous(ByteOffset(0), ByteOffset(0), ByteLen(4096));
        let outside = StridedRun::contiguous(ByteOffset(0), ByteOffset(BYTES - 1), ByteLen(2));
        let runs = RunList::new(vec![inside, outside]).unwrap();
        let result = write(&pair.session, &pair.local, remote_of(&longer), runs);
        assert_eq!(
            result.unwrap_err(),
            TransportErrorKind::OutOfBounds,
            "{kind}"
        );
        assert!(contents(&pair.target_memory) == before, "{kind}");
    }
}

/// The elements of the capability tag of a descriptor.
fn tag(desc: &EngineDesc) -> Vec<rmpv::Value> {
    desc.extra.first().unwrap().as_array().unwrap().clone()
}

#[test]
fn another_start_of_an_engine_is_not_mistaken_for_it() {
    for kind in kinds() {
        let pair = pair(kind);
        let mut stale = pair.target.desc();
        let mut elements = tag(&stale);
        elements[4] = rmpv::Value::Binary(vec![7; 16]);
        stale.extra = vec![rmpv::Value::Array(elements)];
        let refused = pair.source.connect(&stale).unwrap_err();
        assert_eq!(refused.kind(), TransportErrorKind::NoCommonTransport);
        assert!(refused.is_quiesced());
    }
}

#[test]
fn a_believed_pid_must_be_a_process() {
    let pair = pair(TransportKind::Cma);
    let mut trusting = config("trusting", TransportKind::Cma);
    trusting.cma_trust_descriptors = true;
    let trusting = Engine::start(trusting).unwrap();
    for pid in [0, -1, i64::MAX, i64::from(i32::MAX)] {
        let mut stock = pair.target.desc();
        stock.extra.clear();
        stock.pid = pid;
        assert!(trusting.connect(&stock).is_err(), "pid {pid}");
    }
}

/// A client of the framing, written by hand: what a hostile or broken peer can send.
struct Client(TcpStream);

impl Client {
    fn connect(pair: &Pair) -> Self {
        let mut stream = TcpStream::connect(pair.target.tcp_address()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let elements = tag(&pair.target.desc());
        stream.write_all(b"FRYT\x02\x00").unwrap();
        stream.write_all(elements[4].as_slice().unwrap()).unwrap();
        stream.write_all(&[7; 16]).unwrap();
        let mut welcome = [0; 6];
        stream.read_exact(&mut welcome).unwrap();
        assert_eq!(&welcome, b"FRYT\x02\x00");
        Self(stream)
    }

    /// Sends a piece of one group and returns the code of its answer; `None` when the connection
    /// ends instead.
    fn send(&mut self, key: &[u8], ranges: &[(u64, u64)], payload: u64) -> Option<u8> {
        let mut bytes = vec![1];
        bytes.extend(77u64.to_le_bytes());
        bytes.extend(1u32.to_le_bytes());
        bytes.extend((ranges.len() as u32).to_le_bytes());
        bytes.extend(payload.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(key);
        bytes.extend((ranges.len() as u32).to_le_bytes());
        for (offset, len) in ranges {
            bytes.extend(offset.to_le_bytes());
            bytes.extend(len.to_le_bytes());
        }
        bytes.resize(bytes.len() + payload.min(1 << 20) as usize, b'x');
        // The engine may have closed already; the answer decides.
        let _ = self.0.write_all(&bytes);
        let mut answer = [0; 11];
        self.0.read_exact(&mut answer).ok()?;
        assert_eq!(answer[..8], 77u64.to_le_bytes());
        let mut text = vec![0; usize::from(u16::from_le_bytes([answer[9], answer[10]]))];
        self.0.read_exact(&mut text).unwrap();
        Some(answer[8])
    }
}

#[test]
fn a_hostile_client_of_the_framing_moves_nothing() {
    let pair = pair(TransportKind::Tcp);
    let before = contents(&pair.target_memory);
    let desc = pair.remote.desc();
    let key = desc.extra.first().unwrap().as_array().unwrap()[1].clone();
    let key = key.as_slice().unwrap();

    let mut client = Client::connect(&pair);
    assert_eq!(client.send(&[0; 16], &[(0, 64)], 64), Some(2), "wrong key");
    assert_eq!(
        client.send(key, &[(0, 64), (BYTES - 1, 2)], 66),
        Some(3),
        "out of bounds"
    );
    assert_eq!(client.send(key, &[(u64::MAX, 64)], 64), Some(3), "wraps");
    assert!(contents(&pair.target_memory) == before);
    // Each of these contradicts itself or all limits, so that the stream cannot go on.
    let hostile: [(&[(u64, u64)], u64); 5] = [
        (&[(0, 64)], 63),
        (&[(0, 64)], 65),
        (&[(0, u64::MAX), (0, 65)], 64),
        (&[(0, 1 << 40)], 1 << 40),
        (&[(0, 0); 5000], 0),
    ];
    for (ranges, payload) in hostile {
        let answer = Client::connect(&pair).send(key, ranges, payload);
        assert_eq!(answer, None, "{payload} bytes");
    }
    assert!(contents(&pair.target_memory) == before);
    // The refused client was still being served.
    assert_eq!(client.send(key, &[(10, 3)], 3), Some(0));
    assert_eq!(contents(&pair.target_memory)[9..14], *b"\xEExxx\xEE");
}

#[test]
fn ipv6_addresses_work_with_and_without_brackets() {
    if let Err(error) = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        println!("skipped: this machine has no ipv6 ({error})");
        return;
    }
    for host in ["::1", "[::1]"] {
        let mut target = EngineConfig::new("target", host);
        target.transports = vec![TransportKind::Tcp];
        target.tcp_bind = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
        let pair = pair_with(config("source", TransportKind::Tcp), target);
        write(
            &pair.session,
            &pair.local,
            remote_of(&pair.remote.desc()),
            one_run(0, 0, BYTES),
        )
        .unwrap();
        assert!(contents(&pair.target_memory) == contents(&pair.source_memory));
    }
}
