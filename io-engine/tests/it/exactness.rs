//! Bytes arrive where they must, and nothing else changes.

use common::plan::{RunList, StridedRun};
use io_engine::{ByteLen, ByteOffset, TransportKind, WriteBatch, WritePair};

use crate::support::{
    BYTES, DEADLINE, Random, contents, kinds, one_run, pair, random_runs, remote_of, write,
};

#[test]
fn random_runs_arrive_and_nothing_else_changes() {
    let seed = std::env::var("FERRY_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) * 7919);
    println!("seed {seed} (FERRY_SEED={seed} runs it again)");
    for kind in kinds() {
        let pair = pair(kind);
        assert_eq!(pair.session.transport(), kind);
        let mut random = Random(seed);
        let source = contents(&pair.source_memory);
        for round in 0..20 {
            let runs = random_runs(&mut random);
            let mut expected = contents(&pair.target_memory);
            for range in runs.iter_ranges() {
                let (src, dst, len) = (
                    range.src.get() as usize,
                    range.dst.get() as usize,
                    range.len.get() as usize,
                );
                expected[dst..dst + len].copy_from_slice(&source[src..src + len]);
            }
            let (bytes, ranges) = (runs.bytes().get(), runs.ranges());
            let moved = write(
                &pair.session,
                &pair.local,
                remote_of(&pair.remote.desc()),
                runs,
            )
            .unwrap();
            assert_eq!((moved.bytes, moved.ranges), (bytes, ranges));
            assert!(
                contents(&pair.target_memory) == expected,
                "{kind}: seed {seed} round {round}"
            );
        }
    }
}

#[test]
fn many_batches_share_a_session() {
    for kind in kinds() {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        let handles: Vec<_> = (0..200u64)
            .map(|slot| {
                let run = StridedRun::contiguous(
                    ByteOffset(slot * 5000),
                    ByteOffset(slot * 5000),
                    ByteLen(5000),
                );
                let runs = RunList::new(vec![run]).unwrap();
                let batch = WritePair {
                    local: pair.local.clone(),
                    remote: remote.clone(),
                    runs,
                };
                pair.session.write(WriteBatch { pairs: vec![batch] })
            })
            .collect();
        for handle in handles {
            handle.wait(DEADLINE).expect("ends").unwrap();
        }
        assert!(
            contents(&pair.target_memory)[..1_000_000]
                == contents(&pair.source_memory)[..1_000_000]
        );
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_handle_can_be_awaited() {
    let pair = pair(TransportKind::Tcp);
    let batch = WritePair {
        local: pair.local.clone(),
        remote: remote_of(&pair.remote.desc()),
        runs: one_run(0, 0, BYTES),
    };
    let moved = pair
        .session
        .write(WriteBatch { pairs: vec![batch] })
        .await
        .unwrap();
    assert_eq!(moved.bytes, BYTES);
    assert!(contents(&pair.target_memory) == contents(&pair.source_memory));
    pair.session.close();
    assert!(!pair.session.is_alive());
    let batch = WritePair {
        local: pair.local.clone(),
        remote: remote_of(&pair.remote.desc()),
        runs: one_run(0, 0, 1),
    };
    assert!(
        pair.session
            .write(WriteBatch { pairs: vec![batch] })
            .await
            .is_err()
    );
}

#[test]
fn reads_bring_bytes_the_other_way_and_change_nothing_there() {
    let seed = 20_261_201;
    for kind in kinds() {
        let pair = pair(kind);
        let mut random = Random(seed);
        let peers = contents(&pair.target_memory)
            .iter()
            .enumerate()
            .map(|(at, byte)| byte ^ (at * 7) as u8)
            .collect::<Vec<_>>();
        pair.target_memory.write(ByteOffset(0), &peers).unwrap();
        for round in 0..20 {
            let runs = random_runs(&mut random);
            let mut expected = contents(&pair.source_memory);
            for range in runs.iter_ranges() {
                let (src, dst, len) = (
                    range.src.get() as usize,
                    range.dst.get() as usize,
                    range.len.get() as usize,
                );
                expected[dst..dst + len].copy_from_slice(&peers[src..src + len]);
            }
            let (bytes, ranges) = (runs.bytes().get(), runs.ranges());
            let batch = WritePair {
                local: pair.local.clone(),
                remote: remote_of(&pair.remote.desc()),
                runs,
            };
            let handle = pair.session.read(WriteBatch { pairs: vec![batch] });
            let moved = handle.wait(DEADLINE).expect("ends").unwrap();
            assert_eq!((moved.bytes, moved.ranges), (bytes, ranges));
            assert!(
                contents(&pair.source_memory) == expected,
                "{kind}: seed {seed} round {round}"
            );
        }
        assert!(contents(&pair.target_memory) == peers, "{kind}");
    }
}

#[test]
fn reads_and_writes_of_any_size_share_a_session() {
    for kind in kinds() {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        // The upper half goes over, the lower half of the peer comes back to where it was not.
        let half = BYTES / 2;
        let handles: Vec<_> = [1, 16 << 10, (16 << 10) + 1, 300_000]
            .into_iter()
            .flat_map(|len| {
                let pair_of = |src, dst| WritePair {
                    local: pair.local.clone(),
                    remote: remote.clone(),
                    runs: one_run(src, dst, len),
                };
                let write = WriteBatch {
                    pairs: vec![pair_of(half, half)],
                };
                let read = WriteBatch {
                    pairs: vec![pair_of(0, 0)],
                };
                [pair.session.write(write), pair.session.read(read)]
            })
            .collect();
        for handle in handles {
            handle.wait(DEADLINE).expect("ends").unwrap();
        }
        let (here, there) = (contents(&pair.source_memory), contents(&pair.target_memory));
        let (half, len) = (half as usize, 300_000);
        assert!(here[half..half + len] == there[half..half + len], "{kind}");
        assert!(here[..len].iter().all(|byte| *byte == 0xEE), "{kind}");
    }
}
