//! Memory of others: reached by every transport that needs no descriptor, kept while it is used.

use std::sync::Arc;
use std::time::Duration;

use common::wire::MemoryLocation;
use io_engine::{
    ByteLen, ByteOffset, Engine, ForeignMemory, Location, Region, RemoteRegion, TransportErrorKind,
    TransportKind,
};

use crate::support::{config, one_run, remote_of, through_the_wire, write};

const LEN: usize = 300_000;

/// Bytes on the heap of which only the keeper is left.
fn foreign(fill: u8) -> (ForeignMemory, Arc<Box<[u8]>>) {
    let mut bytes = vec![fill; LEN].into_boxed_slice();
    let address = bytes.as_mut_ptr().expose_provenance() as u64;
    let keeper = Arc::new(bytes);
    // SAFETY: the keeper owns the bytes, and the test looks at them through regions only.
    let memory = unsafe { ForeignMemory::new(address, ByteLen(LEN as u64), Arc::clone(&keeper)) };
    (memory.unwrap(), keeper)
}

fn register(engine: &Engine, memory: &ForeignMemory) -> Region {
    engine
        .register(memory, ByteOffset(0), memory.len(), "kv")
        .unwrap()
}

#[test]
fn bytes_move_between_memory_of_others_without_a_descriptor() {
    for kind in [
        TransportKind::Local,
        TransportKind::Cma,
        TransportKind::Tcp,
        TransportKind::Shm,
    ] {
        let source = Engine::start(config("source", kind)).unwrap();
        let target = Engine::start(config("target", kind)).unwrap();
        let ((from, _from_keeper), (into, into_keeper)) = (foreign(3), foreign(9));
        let (local, remote) = (register(&source, &from), register(&target, &into));
        drop(into);
        let session = source.connect(&through_the_wire(&target.desc())).unwrap();
        let far = remote_of(&remote.desc());
        let written = write(&session, &local, far.clone(), one_run(10, 20, 200_000));
        if kind == TransportKind::Shm {
            assert_eq!(written, Err(TransportErrorKind::NotRegistered));
            continue;
        }
        assert_eq!(written.map(|moved| moved.bytes), Ok(200_000), "{kind}");
        let mut seen = vec![0; LEN];
        remote.read(ByteOffset(0), &mut seen).unwrap();
        let wanted = |at| match (20..200_020).contains(&at) {
            true => 3,
            false => 9,
        };
        assert!(
            seen.iter()
                .enumerate()
                .all(|(at, byte)| *byte == wanted(at))
        );
        let past_the_end = write(&session, &local, far.clone(), one_run(0, 200_000, 100_001));
        assert_eq!(past_the_end, Err(TransportErrorKind::OutOfBounds), "{kind}");

        assert!(
            target.deregister(&remote, Duration::from_secs(10)),
            "{kind}"
        );
        let late = write(&session, &local, far, one_run(0, 0, 10));
        assert_eq!(late, Err(TransportErrorKind::NotRegistered), "{kind}");
        drop(remote);
        assert_eq!(Arc::strong_count(&into_keeper), 1, "{kind}: it is let go");
    }
}

#[test]
fn host_memory_that_is_called_a_devices_is_still_host_memory_to_us() {
    let engine = Engine::start(config("engine", TransportKind::Local)).unwrap();
    let (memory, _keeper) = foreign(0);
    let region = register(&engine, &memory);
    let called = region.desc_as(MemoryLocation::Device, 3);
    assert_eq!(
        (called.location, called.device_id),
        (MemoryLocation::Device, 3)
    );
    assert_eq!(remote_of(&called).location(), Location::Host);
    let mut bare = called;
    bare.extra.clear();
    assert!(matches!(
        RemoteRegion::from_desc(&bare).unwrap().location(),
        Location::Device { number: 3, .. }
    ));
    let plain = region.desc_as(MemoryLocation::Host, -1);
    assert_eq!(plain, region.desc());
}
