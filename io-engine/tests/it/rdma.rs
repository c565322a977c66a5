//! What only `rdma` does, on one device: pages of the sizes of KV caches, many sessions, and
//! nothing left behind. `make test-rdma` runs it in a virtual machine.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::plan::{RunList, StridedRun};
use io_engine::verbs::{
    CompletionChannel, CompletionQueue, Depths, Device, MemoryRegion, ProtectionDomain, QueuePair,
    device_names,
};
use io_engine::{
    ByteLen, ByteOffset, Direction, Engine, Memory, Region, TransportKind, WriteBatch, WritePair,
};

use crate::support::{
    BYTES, DEADLINE, Random, begin, config, contents, eventually, has_rdma_device, one_run, pair,
    pair_with, remote_of, through_the_wire, write,
};

const POOL: u64 = 8 << 20;

/// An engine with a pool of random bytes.
fn filled(key: &str, random: &mut Random) -> (Engine, Memory, Region) {
    let engine = Engine::start(config(key, TransportKind::Rdma)).unwrap();
    let memory = Memory::allocate(key, ByteLen(POOL)).unwrap();
    let bytes: Vec<u8> = (0..POOL).map(|_| random.below(256) as u8).collect();
    memory.write(ByteOffset(0), &bytes).unwrap();
    let region = engine
        .register(&memory, ByteOffset(0), ByteLen(POOL), "kv")
        .unwrap();
    (engine, memory, region)
}

/// Half of the pages, none adjacent on both sides, each to the place of another.
fn scattered(page: u64, random: &mut Random) -> Vec<(u64, u64)> {
    let pages = POOL / page;
    let mut places: Vec<u64> = (0..pages).collect();
    for at in (1..places.len()).rev() {
        places.swap(at, random.below(at as u64 + 1) as usize);
    }
    let sources = (0..pages).step_by(2);
    sources
        .zip(places)
        .map(|(src, dst)| (src * page, dst * page))
        .collect()
}

fn runs_of(pages: &[(u64, u64)], page: u64) -> RunList {
    let run = |(src, dst): &(u64, u64)| {
        StridedRun::contiguous(ByteOffset(*src), ByteOffset(*dst), ByteLen(page))
    };
    RunList::new(pages.iter().map(run).collect()).unwrap()
}

#[test]
fn scattered_pages_arrive_where_they_belong_both_ways() {
    if !has_rdma_device() {
        return;
    }
    let seed = Instant::now().elapsed().as_nanos() as u64 ^ u64::from(std::process::id());
    println!("seed {seed}");
    let mut random = Random(seed);
    for page in [4096, 16 << 10, 64 << 10] {
        let (source, source_memory, local) = filled("source", &mut random);
        let (target, target_memory, remote) = filled("target", &mut random);
        let session = source.connect(&through_the_wire(&target.desc())).unwrap();
        for direction in [Direction::Write, Direction::Read] {
            let pages = scattered(page, &mut random);
            let batch = WriteBatch {
                pairs: vec![WritePair {
                    local: local.clone(),
                    remote: remote_of(&remote.desc()),
                    runs: runs_of(&pages, page),
                }],
            };
            let (from, to) = match direction {
                Direction::Write => (&source_memory, &target_memory),
                Direction::Read => (&target_memory, &source_memory),
            };
            let read = contents(from);
            let mut expected = contents(to);
            for (src, dst) in &pages {
                let (src, dst, page) = (*src as usize, *dst as usize, page as usize);
                expected[dst..dst + page].copy_from_slice(&read[src..src + page]);
            }
            let moved = session.transfer(direction, batch, DEADLINE).unwrap();
            assert_eq!(moved.bytes, POOL / 2, "{direction:?} {page}");
            assert!(contents(from) == read, "{direction:?} {page}: what is read");
            assert!(contents(to) == expected, "{direction:?} {page}: all of it");
        }
        let counted: u64 = source.rails().iter().map(|rail| rail.bytes).sum();
        assert_eq!(counted, POOL, "each byte went over a network device once");
    }
}

#[test]
fn a_send_queue_that_is_full_is_waited_for() {
    if !has_rdma_device() {
        return;
    }
    let mut small = config("source", TransportKind::Rdma);
    small.rdma.queue_pairs = 1;
    small.rdma.send_depth = 2;
    small.rdma.ranges_per_request = 1;
    let pair = pair_with(small, config("target", TransportKind::Rdma));
    let remote = remote_of(&pair.remote.desc());
    // Pages whose source goes backwards: no two of them make one request.
    let pages: Vec<(u64, u64)> = (0..BYTES / 4096)
        .map(|page| (BYTES - (page + 1) * 4096, page * 4096))
        .collect();
    let handles: Vec<_> = (0..8)
        .map(|_| begin(&pair.session, &pair.local, &remote, runs_of(&pages, 4096)))
        .collect();
    for handle in handles {
        let moved = handle.wait(DEADLINE).expect("a batch ends").unwrap();
        assert_eq!((moved.bytes, moved.ranges), (BYTES, BYTES / 4096));
    }
    let (source, target) = (contents(&pair.source_memory), contents(&pair.target_memory));
    for (src, dst) in pages {
        let (src, dst) = (src as usize, dst as usize);
        assert!(target[dst..dst + 4096] == source[src..src + 4096], "{dst}");
    }
}

#[test]
fn a_hundred_sessions_share_a_device() {
    const SESSIONS: u64 = 100;
    const SHARE: u64 = BYTES / SESSIONS;
    if !has_rdma_device() {
        return;
    }
    let pair = pair(TransportKind::Rdma);
    let desc = through_the_wire(&pair.target.desc());
    let remote = remote_of(&pair.remote.desc());
    let sessions: Vec<_> = (0..SESSIONS)
        .map(|_| pair.source.connect(&desc).unwrap())
        .collect();
    let handles: Vec<_> = (0..)
        .zip(&sessions)
        .map(|(number, session)| {
            let at = number * SHARE;
            begin(session, &pair.local, &remote, one_run(at, at, SHARE))
        })
        .collect();
    for handle in handles {
        handle.wait(DEADLINE).expect("a batch ends").unwrap();
    }
    let (source, target) = (contents(&pair.source_memory), contents(&pair.target_memory));
    let moved = (SESSIONS * SHARE) as usize;
    assert!(target[..moved] == source[..moved]);
    assert!(target[moved..].iter().all(|byte| *byte == 0xEE));
    drop(sessions);
    write(&pair.session, &pair.local, remote, one_run(0, 0, 64)).expect("the first one goes on");
}

#[test]
fn notifications_are_counted_over_all_queue_pairs_of_a_session() {
    if !has_rdma_device() {
        return;
    }
    let pair = pair(TransportKind::Rdma);
    let remote = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, remote, one_run(0, 0, BYTES)).unwrap();
    assert!(!pair.target.take_notification("source", 7));
    let told = pair.session.notify(7).wait(DEADLINE).expect("it ends");
    told.unwrap();
    eventually("the peer hears of it", || {
        pair.target.take_notification("source", 7)
    });
    assert!(!pair.target.take_notification("source", 7), "once");
    // More than there are receives posted: each is posted again.
    for number in 1000..1300 {
        let told = pair.session.notify(number).wait(DEADLINE);
        told.expect("it ends").unwrap();
    }
    eventually("the last one is heard", || {
        pair.target.take_notification("source", 1299)
    });
}

/// Memory regions that the kernel counts.
fn kernel_regions() -> u64 {
    let counted = objects();
    let mut words = counted.split_whitespace();
    words.find(|word| *word == "mr");
    let number = words.next().and_then(|number| number.parse().ok());
    number.expect("rdma resource show counts memory regions")
}

#[test]
#[ignore = "alone on a machine, because it counts the machine's objects; make test-rdma does that"]
fn a_region_beyond_a_limit_is_registered_in_slices_and_written_across_their_seams() {
    let limited = |key: &str, bytes| {
        let mut limited = config(key, TransportKind::Rdma);
        limited.rdma.most_region_bytes = bytes;
        limited.rdma.registers_eagerly = true;
        limited.rdma.completion_threads = 3;
        limited
    };
    let none = kernel_regions();
    let whole = {
        let pair = pair(TransportKind::Rdma);
        write(
            &pair.session,
            &pair.local,
            remote_of(&pair.remote.desc()),
            one_run(0, 0, BYTES),
        )
        .unwrap();
        kernel_regions()
    };
    // The seams are in different places on both sides, and in no page of their own.
    let (own, theirs) = (BYTES / 3 + 100, BYTES / 5 + 7);
    let slices = BYTES.div_ceil(own) + BYTES.div_ceil(theirs);
    eventually("engines leave nothing", || kernel_regions() == none);
    let pair = pair_with(limited("source", own), limited("target", theirs));
    // Registered eagerly: nothing was written yet.
    assert!(kernel_regions() >= none + slices);
    let remote = remote_of(&pair.remote.desc());
    let shift = 12_345;
    for direction in [Direction::Write, Direction::Read] {
        let runs = one_run(0, shift, BYTES - shift);
        let pairs = vec![WritePair {
            local: pair.local.clone(),
            remote: remote.clone(),
            runs,
        }];
        let moved = pair
            .session
            .transfer(direction, WriteBatch { pairs }, DEADLINE);
        assert_eq!(moved.unwrap().bytes, BYTES - shift);
        let (source, target) = (contents(&pair.source_memory), contents(&pair.target_memory));
        let (len, shift) = ((BYTES - shift) as usize, shift as usize);
        match direction {
            Direction::Write => {
                assert!(target[shift..] == source[..len]);
                // What is read is none of what is there.
                let cleared = vec![0; BYTES as usize];
                pair.source_memory.write(ByteOffset(0), &cleared).unwrap();
            }
            Direction::Read => assert!(source[shift..] == target[..len]),
        }
    }
    assert_eq!(kernel_regions(), whole + slices - 2);
}

/// Objects of each kind that the kernel counts: `pd 1 cq 2 qp 3 ...`.
fn objects() -> String {
    let output = Command::new("rdma").args(["resource", "show"]).output();
    let output = output.expect("iproute2's rdma");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "alone on a machine, because it counts the machine's objects; make test-rdma does that"]
fn ten_thousand_cycles_leave_no_verbs_object() {
    let before = objects();
    let device = Arc::new(Device::open(&device_names().unwrap()[0]).unwrap());
    let domain = Arc::new(ProtectionDomain::new(&device).unwrap());
    let channel = Arc::new(CompletionChannel::new(&device).unwrap());
    let depths = Depths {
        sends: 4,
        receives: 4,
        ranges: 1,
        inline_bytes: 16,
    };
    let opened = objects();
    assert_ne!(before, opened, "{opened}: the count sees what is open");
    for number in 0..10_000 {
        let region = MemoryRegion::of_own_bytes(&domain, 4096).unwrap();
        let completions = CompletionQueue::new(&channel, 16, number).unwrap();
        let pair = QueuePair::new(&domain, completions, depths, 1).unwrap();
        drop((region, pair));
    }
    assert_eq!(objects(), opened, "after 10,000 of each kind");
    drop((channel, domain, device));
    assert_eq!(objects(), before);

    let source = Engine::start(config("source", TransportKind::Rdma)).unwrap();
    let target = Engine::start(config("target", TransportKind::Rdma)).unwrap();
    let desc = through_the_wire(&target.desc());
    let opened = objects();
    for _ in 0..300 {
        let memory = Memory::allocate("kv", ByteLen(BYTES)).unwrap();
        let whole = (ByteOffset(0), ByteLen(BYTES));
        let local = source.register(&memory, whole.0, whole.1, "kv").unwrap();
        let remote = target.register(&memory, whole.0, whole.1, "kv").unwrap();
        let session = source.connect(&desc).unwrap();
        let desc = remote_of(&remote.desc());
        write(&session, &local, desc, one_run(0, 4096, 64)).unwrap();
        session.close();
        assert!(source.deregister(&local, DEADLINE) && target.deregister(&remote, DEADLINE));
    }
    eventually("sessions and regions leave nothing", || objects() == opened);
    drop((source, target));
    eventually("engines leave nothing", || objects() == before);
}
