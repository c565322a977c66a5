//! `rdma` in and out of device memory, over real verbs and the stand-in for a driver. soft-RoCE
//! takes no dma-bufs, so what it is let in by here is the address (the stand-in then lets the
//! kernel reach it, as a module of a real driver does); which range of which dma-buf a network
//! device gets is tested without one, in `device::nic`.

use common::plan::{RunList, StridedRun};
use io_engine::{
    ByteLen, ByteOffset, DeviceMemory, DeviceRuntime, Direction, Engine, NicPath, RdmaOptions,
    RemoteRegion, TransportErrorKind, TransportKind, WriteBatch, WritePair, rdma_devices,
};

use crate::devices::{Bytes, Sides, Turn, check_both_directions};
use crate::support::{
    BYTES, DEADLINE, Random, config, has_rdma_device, one_run, random_runs, through_the_wire,
};

const UNIT: u64 = 2 << 20;

/// Takes device memory from the processor again; network devices have it since it was registered.
fn hide(bytes: &Bytes) {
    let Bytes::Device(memory) = bytes else { return };
    let address = std::ptr::without_provenance_mut(memory.address() as usize);
    // SAFETY: these are the stand-in's pages, which it copies by another address.
    let code = unsafe { libc::mprotect(address, BYTES as usize, libc::PROT_NONE) };
    assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_network_device_reaches_device_memory_both_ways() {
    if !has_rdma_device() {
        return;
    }
    let turn = Turn::take();
    turn.set("peer_memory", 1);
    let seed = std::env::var("FERRY_SEED").ok();
    let seed = seed.and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| std::process::id().into());
    println!("FERRY_SEED={seed}");
    let mut random = Random(seed);
    // With a read after the writes, and without; HIP's driver does not say, so there always is one.
    for (runtime, unordered) in [
        (DeviceRuntime::Cuda, 0),
        (DeviceRuntime::Cuda, 1),
        (DeviceRuntime::Hip, 0),
    ] {
        turn.set("unordered_writes", unordered);
        for places in [
            (Some(runtime), Some(runtime)),
            (Some(runtime), None),
            (None, Some(runtime)),
        ] {
            let own = Bytes::allocate(places.0, 0);
            let theirs = Bytes::allocate(places.1, 1);
            let sides = Sides::open(TransportKind::Rdma, &own, &theirs);
            hide(&own);
            hide(&theirs);
            let case = format!("{places:?}, unordered {unordered}");
            check_both_directions(&sides, &own, &theirs, &random_runs(&mut random), &case);
            check_both_directions(&sides, &own, &theirs, &one_run(0, 0, BYTES), &case);
            // Few enough bytes to be sent inline, which the processor would have to read: a fault.
            check_both_directions(&sides, &own, &theirs, &one_run(5, 70_001, 3), &case);
        }
    }
}

/// Each handle is registered on its own and has a key of its own: ranges are cut where they end, on
/// either side.
#[test]
fn a_pool_of_several_handles_is_written_through_several_keys() {
    if !has_rdma_device() {
        return;
    }
    const LEN: u64 = 3 * UNIT - 4096;
    let turn = Turn::take();
    turn.set("peer_memory", 1);
    let allocate = |number, unit| {
        let (len, unit) = (ByteLen(LEN), ByteLen(unit));
        DeviceMemory::allocate_in_parts(DeviceRuntime::Cuda, number, len, unit).unwrap()
    };
    // The seams are in different places.
    let (own, theirs) = (allocate(0, UNIT), allocate(1, 2 * UNIT));
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 + at / 65_521) as u8).collect();
    own.write(ByteOffset(0), &bytes).unwrap();
    theirs
        .write(ByteOffset(0), &vec![0xAB; LEN as usize])
        .unwrap();
    let engine = |key| Engine::start(config(key, TransportKind::Rdma)).unwrap();
    let (source, target) = (engine("source"), engine("target"));
    // The region begins inside its pool, too.
    const LEAD: u64 = 512;
    let whole = (ByteOffset(LEAD), ByteLen(LEN - LEAD));
    let region = source.register(&own, whole.0, whole.1, "kv").unwrap();
    let remote = target.register(&theirs, whole.0, whole.1, "kv").unwrap();
    let session = source.connect(&through_the_wire(&target.desc())).unwrap();
    let moved = LEN - LEAD - 3000;
    let runs = RunList::new(vec![StridedRun::contiguous(
        ByteOffset(1000),
        ByteOffset(2000),
        ByteLen(moved),
    )]);
    let pair = WritePair {
        local: region,
        remote: RemoteRegion::from_desc(&remote.desc()).unwrap(),
        runs: runs.unwrap(),
    };
    let batch = WriteBatch { pairs: vec![pair] };
    session.transfer(Direction::Write, batch, DEADLINE).unwrap();
    let mut seen = vec![0; LEN as usize];
    theirs.read(ByteOffset(0), &mut seen).unwrap();
    let (from, to) = ((LEAD + 1000) as usize, (LEAD + 2000) as usize);
    let end = to + moved as usize;
    assert!(
        seen[to..end] == bytes[from..from + moved as usize],
        "what was written"
    );
    let others = seen[..to].iter().chain(&seen[end..]);
    assert!(others.into_iter().all(|byte| *byte == 0xAB), "what was not");
    drop((session, source, target));
}

/// Neither way leads there: the region says so, and its bytes are staged over the next transport.
#[test]
fn device_memory_that_no_network_device_reaches_goes_by_the_next_transport_loudly() {
    if !has_rdma_device() {
        return;
    }
    let _turn = Turn::take();
    let order = [TransportKind::Rdma, TransportKind::Tcp];
    let allocate = |number| Bytes::allocate(Some(DeviceRuntime::Cuda), number);
    let host = Bytes::allocate(None, 0);
    for (own, theirs) in [
        (allocate(0), allocate(1)),
        (allocate(0), host.clone()),
        (host, allocate(1)),
    ] {
        let sides = Sides::with_order(&order, &own, &theirs);
        assert_eq!(sides.session.transport(), TransportKind::Tcp);
        let passed_over = format!("{:?}", sides.session.passed_over());
        for words in ["dma-buf: ", "peer-memory: ", &rdma_devices().unwrap()[0]] {
            assert!(passed_over.contains(words), "{passed_over}");
        }
        check_both_directions(&sides, &own, &theirs, &one_run(0, 0, BYTES), "staged");
    }
    // Nobody offers anything else: the session is refused, not opened to fail.
    let engine = |key| Engine::start(config(key, TransportKind::Rdma)).unwrap();
    let (source, target) = (engine("source"), engine("target"));
    let _region = allocate(1).register(&target);
    let error = source
        .connect(&through_the_wire(&target.desc()))
        .unwrap_err();
    assert_eq!(error.kind(), TransportErrorKind::NoCommonTransport);
    assert!(error.to_string().contains("peer-memory: "), "{error}");
}

/// Only the configured way is tried.
#[test]
fn the_way_into_device_memory_is_the_configured_one() {
    if !has_rdma_device() {
        return;
    }
    let turn = Turn::take();
    turn.set("peer_memory", 1);
    let memory = Bytes::allocate(Some(DeviceRuntime::Cuda), 0);
    for (path, is_reached) in [(NicPath::PeerMemory, true), (NicPath::DmaBuf, false)] {
        let mut config = config("one", TransportKind::Rdma);
        config.rdma = RdmaOptions {
            device_memory: vec![path],
            ..config.rdma
        };
        let engine = Engine::start(config).unwrap();
        let _region = memory.register(&engine);
        let peer = Engine::start(crate::support::config("two", TransportKind::Rdma)).unwrap();
        let opened = peer.connect(&through_the_wire(&engine.desc()));
        assert_eq!(opened.is_ok(), is_reached, "{path}: {opened:?}");
    }
}
