//! MoRI's handshake byte by byte, from both sides: the test is the peer and speaks raw bytes, with
//! the real library's messages (`common/tests/rdma_control.rs` has the same ones) as the pattern.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::wire::{EngineDesc, MemoryDesc, MemoryLocation};
use io_engine::verbs::{
    CompletionChannel, CompletionQueue, Depths, Device, Gid, Link, LinkLayer, MemoryRegion, Mtu,
    ProtectionDomain, QueuePair, RetryPolicy, best_gid, device_names, gid_table,
};
use io_engine::{
    ByteLen, ByteOffset, Engine, Memory, Region, RemoteRegion, TransportErrorKind, TransportKind,
};

use crate::support::{
    BYTES, DEADLINE, begin, config, contents, has_rdma_device, one_run, pair, shuffled_pages, write,
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    let (pairs, _) = digits.as_chunks::<2>();
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16);
    pairs.iter().map(|pair| byte(pair).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A number in msgpack's shortest form.
fn packed(number: u64) -> String {
    match number {
        0..0x80 => format!("{number:02x}"),
        0x80..0x100 => format!("cc{number:02x}"),
        0x100..0x1_0000 => format!("cd{number:04x}"),
        0x1_0000..0x1_0000_0000 => format!("ce{number:08x}"),
        _ => format!("cf{number:016x}"),
    }
}

/// A message: type, length, body.
fn framed(kind: u8, body: &str) -> Vec<u8> {
    let body = bytes(body);
    let mut message = vec![kind];
    message.extend((body.len() as u32).to_be_bytes());
    message.extend(body);
    message
}

fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut message = vec![0; 5];
    match stream.read_exact(&mut message) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return None,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
        other => other.unwrap(),
    }
    let length = u32::from_be_bytes(message[1..5].try_into().unwrap());
    message.resize(5 + length as usize, 0);
    stream.read_exact(&mut message[5..]).unwrap();
    Some(message)
}

fn ask(engine: &Engine, message: &[u8]) -> Option<Vec<u8>> {
    let mut stream = TcpStream::connect(engine.tcp_address()).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    // As MoRI sends it: in three pieces.
    for part in [&message[..1], &message[1..5], &message[5..]] {
        stream.write_all(part).unwrap();
    }
    let reply = receive(&mut stream);
    if reply.is_some() {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "one request each");
    }
    reply
}

/// The number behind `prefix` in a message, in msgpack's form.
fn number_behind(message: &[u8], prefix: &[u8]) -> u64 {
    let at = message
        .windows(prefix.len())
        .position(|window| window == prefix)
        .unwrap_or_else(|| panic!("{} has no {}", hex(message), hex(prefix)));
    let rest = &message[at + prefix.len()..];
    let length = match rest[0] {
        number @ 0..0x80 => return u64::from(number),
        0xcc => 1,
        0xcd => 2,
        0xce => 4,
        0xcf => 8,
        other => panic!("{other:#x} begins no number"),
    };
    rest[1..=length]
        .iter()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The GID that an engine chooses, as the messages carry it.
fn own_gid() -> String {
    let device = &device_names().unwrap()[0];
    let table = gid_table(device, 1).unwrap();
    hex(&best_gid(device, &table, None).unwrap().gid.0)
}

#[test]
fn a_real_initiators_messages_get_moris_answers() {
    if !has_rdma_device() {
        return;
    }
    let pair = pair(TransportKind::Rdma);
    let gid = own_gid();
    // The request of the real library, and what two older releases send in its place.
    let eph = "95 00 cd1000 01 9100 92 c410 00000000000000000000ffff7f000001 c406 000000000000";
    let newest = format!("96 a5656e672d41 92 93ff0100 93ff0100 00 {eph} 00 00");
    let before = format!("95 a5656e672d41 92 93ff0100 93ff0100 00 {eph} 00");
    let oldest = format!("94 a5656e672d41 92 92ff01 92ff01 00 {eph}");
    for (body, numa) in [(newest, "00"), (before, "00"), (oldest, "ff")] {
        let reply = ask(&pair.target, &framed(0, &body)).expect("an answer");
        let number = number_behind(&reply, &bytes("00 95 00"));
        assert!(number > 1, "a queue pair's number");
        let topo = format!("92 93ff01{numa} 93ff01{numa}");
        let expected = format!(
            "96 a6 {} {topo} 00 95 00 {} 01 9100 92 c410 {gid} c406 000000000000 00 00",
            hex(b"target"),
            packed(number)
        );
        assert_eq!(hex(&reply), hex(&framed(0, &expected)));
    }
    // Where a region is, and what of one that is not there.
    let desc = pair.remote.desc();
    let name = hex(b"target");
    let request = |id: u32| {
        let id = packed(u64::from(id));
        framed(1, &format!("94 a6 {name} 00 {id} 94 00000000"))
    };
    let reply = ask(&pair.target, &request(desc.id)).expect("an answer");
    let address = packed(desc.data);
    let local = number_behind(&reply, &bytes(&format!("94 {address}")));
    let local = packed(local);
    let remote = packed(number_behind(
        &reply,
        &bytes(&format!("94 {address} {local}")),
    ));
    let mr = format!("94 {address} {local} {remote} {}", packed(desc.size));
    let id = packed(u64::from(desc.id));
    let expected = framed(1, &format!("94 a6 {name} 00 {id} {mr}"));
    assert_eq!(hex(&reply), hex(&expected));
    let unknown = ask(&pair.target, &request(77)).expect("an answer");
    assert_eq!(hex(&unknown), hex(&request(77)), "all zeros");
}

#[test]
fn clients_that_stall_or_babble_hold_up_nobody() {
    if !has_rdma_device() {
        return;
    }
    let pair = pair(TransportKind::Rdma);
    let stalled: Vec<_> = [0u8, 1, 2]
        .iter()
        .map(|kind| {
            let mut stream = TcpStream::connect(pair.target.tcp_address()).unwrap();
            stream.write_all(&[*kind]).unwrap();
            stream
        })
        .collect();
    let id = packed(u64::from(pair.remote.id()));
    let good = framed(1, &format!("94 a6 {} 00 {id} 94 00000000", hex(b"target")));
    let began = Instant::now();
    assert!(ask(&pair.target, &good).is_some());
    assert!(began.elapsed() < Duration::from_secs(2), "nobody waits");
    for (what, message) in [
        ("no such type", framed(9, "90")),
        ("a body that is too long", bytes("00 00100001 00")),
        ("no array", framed(0, "c0")),
        ("an array that ends early", framed(0, "96 a5656e672d41")),
        (
            "a gid that is too short",
            framed(
                0,
                "94 a141 92 92ff01 92ff01 00 95 00 01 01 9100 92 c402 0000 c406 000000000000",
            ),
        ),
        (
            "a number that is too large",
            framed(1, "94 a6 746172676574 00 cf0000000100000000 94 00000000"),
        ),
        (
            "negative bytes",
            framed(1, "94 a6 746172676574 00 ff 94 00000000"),
        ),
    ] {
        assert_eq!(ask(&pair.target, &message), None, "{what}");
    }
    assert!(ask(&pair.target, &good).is_some(), "it still answers");
    drop(stalled);
}

#[test]
fn a_token_keeps_keys_from_those_who_do_not_have_it() {
    if !has_rdma_device() {
        return;
    }
    let with_token = |key: &str, token: &str| {
        let mut config = config(key, TransportKind::Rdma);
        config.rdma.token = token.to_owned();
        Engine::start(config).unwrap()
    };
    let target = with_token("target", "secret");
    let (good, bad) = (with_token("good", "secret"), with_token("bad", "guess"));
    assert!(good.connect(&target.desc()).is_ok());
    let refused = bad.connect(&target.desc()).unwrap_err();
    assert!(
        refused.to_string().contains("FERRY_RDMA_TOKEN"),
        "{refused}"
    );
    // MoRI has none to show.
    let id = "94 a6 746172676574 00 00 94 00000000";
    let memory = Memory::allocate("kv", ByteLen(BYTES)).unwrap();
    let region = target.register(&memory, ByteOffset(0), ByteLen(BYTES), "kv");
    assert_eq!(region.unwrap().id(), 0);
    let reply = ask(&target, &framed(1, id)).expect("an answer");
    assert_eq!(hex(&reply), hex(&framed(1, id)), "all zeros");
}

/// A MoRI engine in raw bytes over real verbs: one queue pair, and a region whose key it tells
/// rightly under number 0 and wrongly under number 1.
struct RawPeer {
    desc: EngineDesc,
    memory: Memory,
    // Keeps the registrations and queue pairs.
    _verbs: Engine,
    asked: std::sync::mpsc::Receiver<Vec<u8>>,
}

impl RawPeer {
    fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let desc = EngineDesc {
            key: "eng-B".to_owned(),
            node_id: "n0".to_owned(),
            hostname: "h0".to_owned(),
            host: "127.0.0.1".to_owned(),
            port,
            pid: 1,
            extra: Vec::new(),
        };
        let memory = Memory::allocate("raw", ByteLen(BYTES)).unwrap();
        let owner = Engine::start(config("raw", TransportKind::Tcp)).unwrap();
        let region = owner
            .register(&memory, ByteOffset(0), ByteLen(BYTES), "kv")
            .unwrap();
        let name = device_names().unwrap().remove(0);
        let device = Arc::new(Device::open(&name).unwrap());
        let domain = Arc::new(ProtectionDomain::new(&device).unwrap());
        let channel = Arc::new(CompletionChannel::new(&device).unwrap());
        let registered = MemoryRegion::of_host_region(&domain, &region).unwrap();
        let (said, asked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut pairs = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(message) = receive(&mut stream) else {
                    continue;
                };
                let reply = match message[0] {
                    0 => {
                        let (pair, number) = accept(&domain, &channel, &message);
                        pairs.push(pair);
                        let gid = own_gid();
                        framed(
                            0,
                            &format!(
                                "96 a5656e672d42 92 93ff0100 93ff0100 00 95 00 {} 01 9100 92 c410 {gid} c406 8006ff6cd17f 00 00",
                                packed(u64::from(number))
                            ),
                        )
                    }
                    _ => {
                        let id = number_behind(&message, &bytes("a5656e672d42 00"));
                        let wrong = if id == 1 { 0x5555 } else { 0 };
                        let mr = format!(
                            "94 {} {} {} {}",
                            packed(registered.address()),
                            packed(u64::from(registered.local_key())),
                            packed(u64::from(registered.remote_key() ^ wrong)),
                            packed(registered.length())
                        );
                        let id = packed(id);
                        framed(1, &format!("94 a5656e672d42 00 {id} {mr}"))
                    }
                };
                // The test may have ended.
                let _ = said.send(message);
                stream.write_all(&reply).unwrap();
            }
        });
        Self {
            desc,
            memory,
            _verbs: owner,
            asked,
        }
    }

    /// What it would tell of its region.
    fn region(&self, id: u32) -> RemoteRegion {
        let desc = MemoryDesc {
            engine_key: "eng-B".to_owned(),
            id,
            size: BYTES,
            location: MemoryLocation::Host,
            ..MemoryDesc::default()
        };
        RemoteRegion::from_desc(&desc).unwrap()
    }
}

/// Makes the peer's queue pair for a request.
fn accept(
    domain: &Arc<ProtectionDomain>,
    channel: &Arc<CompletionChannel>,
    message: &[u8],
) -> (QueuePair, u32) {
    let completions = CompletionQueue::new(channel, 16, 1).unwrap();
    let depths = Depths {
        sends: 1,
        receives: 4,
        ranges: 1,
        inline_bytes: 0,
    };
    let mut pair = QueuePair::new(domain, completions, depths, 1).unwrap();
    let at = message
        .windows(2)
        .position(|window| window == [0xc4, 0x10])
        .unwrap();
    let gid: [u8; 16] = message[at + 2..at + 18].try_into().unwrap();
    let device = domain.device();
    let table = gid_table(device.name(), 1).unwrap();
    pair.connect(&Link {
        port: 1,
        layer: LinkLayer::Ethernet,
        own: best_gid(device.name(), &table, None).unwrap(),
        peer_number: number_behind(message, &bytes("00 95 00")) as u32,
        peer_gid: Gid(gid),
        peer_lid: 0,
        peer_packet_number: 0,
        mtu: device
            .port(1)
            .map_or(Mtu::Bytes1024, |port| port.active_mtu),
        traffic_class: 0,
        service_level: 0,
        retry: RetryPolicy {
            timeout: 14,
            retries: 6,
            receiver_not_ready_retries: 6,
        },
    })
    .unwrap();
    let number = pair.number();
    (pair, number)
}

/// A region of an engine that is full of sevens.
fn sevens(engine: &Engine) -> Region {
    let memory = Memory::allocate("source", ByteLen(BYTES)).unwrap();
    memory.write(ByteOffset(0), &[7; BYTES as usize]).unwrap();
    let registered = engine.register(&memory, ByteOffset(0), ByteLen(BYTES), "kv");
    registered.unwrap()
}

#[test]
fn to_a_real_acceptor_we_say_what_mori_says_and_write_into_its_memory() {
    if !has_rdma_device() {
        return;
    }
    let peer = RawPeer::start();
    let mut one_pair = config("eng-A", TransportKind::Rdma);
    one_pair.rdma.queue_pairs = 1;
    let source = Engine::start(one_pair).unwrap();
    let local = sevens(&source);
    let session = source.connect(&peer.desc).unwrap();
    write(&session, &local, peer.region(0), one_run(0, 0, BYTES)).unwrap();
    assert!(contents(&peer.memory) == vec![7; BYTES as usize]);

    let first = peer.asked.recv_timeout(DEADLINE).unwrap();
    let number = packed(number_behind(&first, &bytes("00 95 00")));
    let gid = own_gid();
    let expected = format!(
        "96 a5656e672d41 92 93ff0100 93ff0100 00 95 00 {number} 01 9100 92 c410 {gid} c406 000000000000 00 00"
    );
    assert_eq!(hex(&first), hex(&framed(0, &expected)));
    let second = peer.asked.recv_timeout(DEADLINE).unwrap();
    assert_eq!(
        hex(&second),
        "010000000e94a5656e672d42000094 00000000".replace(' ', "")
    );
}

#[test]
fn a_wrong_key_fails_the_batches_that_use_it_and_says_where() {
    if !has_rdma_device() {
        return;
    }
    let peer = RawPeer::start();
    let source = Engine::start(config("eng-A", TransportKind::Rdma)).unwrap();
    let local = sevens(&source);
    let session = source.connect(&peer.desc).unwrap();
    let (good, bad) = (peer.region(0), peer.region(1));
    write(&session, &local, good.clone(), shuffled_pages()).unwrap();
    for _ in 0..5 {
        let handle = begin(&session, &local, &bad, one_run(0, 0, 8192));
        let error = handle.wait(DEADLINE).expect("it ends").unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{error}");
        let text = error.to_string();
        let device = device_names().unwrap().remove(0);
        for part in ["REM_ACCESS_ERR", "eng-B", &device, "::ffff:127.0.0.1"] {
            assert!(text.contains(part), "{text}");
        }
        // MoRI has no word for the end of a queue pair.
        assert!(!error.is_quiesced(), "{error}");
        write(&session, &local, good.clone(), shuffled_pages()).expect("the others go on");
    }
    assert!(session.is_alive());
    assert_eq!(source.rails()[0].failures, 5, "each is counted");
}
