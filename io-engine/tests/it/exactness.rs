//! Bytes arrive where they must, and nothing else changes.

use common::plan::{RunList, StridedRun};
use io_engine::{ByteLen, ByteOffset, TransportKind, WriteBatch, WritePair};

use crate::support::{
    BYTES, DEADLINE, Random, contents, one_run, pair, random_runs, remote_of, write,
};

#[test]
fn random_runs_arrive_and_nothing_else_changes() {
    let seed = std::env::var("FERRY_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) * 7919);
    println!("seed {seed} (FERRY_SEED={seed} runs it again)");
    for kind in TransportKind::ALL {
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
    for kind in TransportKind::ALL {
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
