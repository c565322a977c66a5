//! Between two machines: `tests/rdma-vm/run-two.sh` starts these tests on `a` and on `b`, at the
//! same time. `b` is the target; its address is known, and its descriptors come over TCP.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use common::wire::{EngineDesc, MemoryDesc};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, EngineConfig, Memory, Region, RemoteRegion, Session,
    TransportErrorKind, TransportKind, WriteBatch, WritePair,
};

use crate::support::{
    BYTES, DEADLINE, begin, contents, eventually, one_run, shuffled_pages, write,
};

const A: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
/// Where `b` tells its descriptors; the machines are the test's own.
const PORT: u16 = 4000;
/// The other machine may still be starting.
const BOOT_DEADLINE: Duration = Duration::from_secs(60);

struct Host {
    engine: Engine,
    memory: Memory,
    region: Region,
}

fn host(key: &str, address: Ipv4Addr, bytes: impl Fn(u64) -> u8) -> Host {
    let mut config = EngineConfig::new(key, address.to_string());
    config.tcp_bind = (address, 0).into();
    config.transports = vec![TransportKind::Rdma];
    let engine = Engine::start(config).unwrap();
    let memory = Memory::allocate(key, ByteLen(BYTES)).unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(bytes).collect();
    memory.write(ByteOffset(0), &bytes).unwrap();
    let region = engine
        .register(&memory, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    Host {
        engine,
        memory,
        region,
    }
}

fn pattern(at: u64) -> u8 {
    (at * 31 + at / 251) as u8
}

/// Takes a connection of `a`'s, and tells it the engine and the region.
fn tell(host: &Host) -> TcpStream {
    let listener = TcpListener::bind((B, PORT)).unwrap();
    let (mut stream, peer) = listener.accept().unwrap();
    assert_eq!(peer.ip(), A);
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    for part in [host.engine.desc().pack(), host.region.desc().pack()] {
        let part = part.unwrap();
        stream
            .write_all(&(part.len() as u32).to_be_bytes())
            .unwrap();
        stream.write_all(&part).unwrap();
    }
    stream
}

fn ask() -> (EngineDesc, RemoteRegion, TcpStream) {
    let deadline = Instant::now() + BOOT_DEADLINE;
    let mut stream = loop {
        match TcpStream::connect_timeout(&(B, PORT).into(), Duration::from_secs(1)) {
            Ok(stream) => break stream,
            // The pace of a machine that starts.
            Err(error) if Instant::now() < deadline => {
                drop(error);
                std::thread::yield_now();
            }
            Err(error) => panic!("b does not answer: {error}"),
        }
    };
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut part = || {
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut bytes).unwrap();
        bytes
    };
    let engine = EngineDesc::unpack(&part()).unwrap();
    let region = RemoteRegion::from_desc(&MemoryDesc::unpack(&part()).unwrap()).unwrap();
    (engine, region, stream)
}

fn read_back(session: &Session, scratch: &Region, remote: &RemoteRegion) {
    let batch = WriteBatch {
        pairs: vec![WritePair {
            local: scratch.clone(),
            remote: remote.clone(),
            runs: one_run(0, 0, BYTES),
        }],
    };
    session.transfer(Direction::Read, batch, DEADLINE).unwrap();
}

#[test]
#[ignore = "one side of two machines; make test-rdma has them"]
fn pages_cross_from_one_machine_to_the_other_and_back() {
    if std::env::var("FERRY_TEST_HOST").unwrap() == "b" {
        let host = host("b", B, |_| 0xEE);
        let mut stream = tell(&host);
        // Ends when `a` is done; the notification says that the pages are in place.
        eventually("a has written", || host.engine.take_notification("a", 7));
        let (own, pages) = (contents(&host.memory), BYTES as usize / 4096);
        let expected: Vec<u8> = (0..BYTES).map(pattern).collect();
        for page in 0..pages {
            let (src, dst) = (page * 4096, page * 37 % pages * 4096);
            assert!(own[dst..dst + 4096] == expected[src..src + 4096], "{page}");
        }
        stream.write_all(b"!").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "a has read, too");
        return;
    }
    let host = host("a", A, pattern);
    let (engine, remote, mut stream) = ask();
    let session = host.engine.connect(&engine).unwrap();
    assert_eq!(session.transport(), TransportKind::Rdma);
    write(&session, &host.region, remote.clone(), shuffled_pages()).unwrap();
    session.notify(7).wait(DEADLINE).expect("it ends").unwrap();
    stream.read_exact(&mut [0]).expect("b has seen every page");
    let scratch = Memory::allocate("scratch", ByteLen(BYTES)).unwrap();
    let whole = host
        .engine
        .register(&scratch, ByteOffset(0), ByteLen(BYTES), "kv")
        .unwrap();
    read_back(&session, &whole, &remote);
    let (own, back, pages) = (
        contents(&host.memory),
        contents(&scratch),
        BYTES as usize / 4096,
    );
    for page in 0..pages {
        let (src, dst) = (page * 4096, page * 37 % pages * 4096);
        assert!(back[dst..dst + 4096] == own[src..src + 4096], "{page}");
    }
    stream.shutdown(Shutdown::Both).unwrap();
}

/// `run-two.sh` takes the power of machine `b` away when it says that it is written into.
#[test]
#[ignore = "one side of two machines; make test-rdma has them"]
fn a_peer_that_loses_its_power_fails_what_is_under_way_without_a_proof() {
    if std::env::var("FERRY_TEST_HOST").unwrap() == "b" {
        let host = host("b", B, |_| 0xEE);
        let _stream = tell(&host);
        eventually("a writes", || contents(&host.memory)[0] == pattern(0));
        println!("cut the power");
        std::thread::sleep(BOOT_DEADLINE);
        panic!("the power is still on");
    }
    let host = host("a", A, pattern);
    let (engine, remote, _stream) = ask();
    let session = host.engine.connect(&engine).unwrap();
    let began = Instant::now();
    let error = loop {
        assert!(began.elapsed() < BOOT_DEADLINE, "b goes on");
        let batch = begin(&session, &host.region, &remote, shuffled_pages());
        let ended = batch.wait(DEADLINE).expect("a batch ends");
        if let Err(error) = ended {
            break error;
        }
    };
    assert_eq!(error.kind(), TransportErrorKind::PeerDead, "{error}");
    assert!(error.to_string().contains("RETRY_EXC_ERR"), "{error}");
    assert!(
        !error.is_quiesced(),
        "b cannot say that nothing comes in any more: {error}"
    );
    eventually("the session is given up", || !session.is_alive());
    let refused = begin(&session, &host.region, &remote, shuffled_pages());
    let refused = refused.wait(DEADLINE).expect("at once").unwrap_err();
    assert!(refused.is_quiesced(), "nothing was begun: {refused}");
}
