//! Batches, regions, sessions and engines end as they say, and leave nothing behind.

use std::net::TcpStream;
use std::time::Duration;

use io_engine::{
    Direction, Engine, FaultSpec, TransportErrorKind, TransportKind, WriteBatch, WritePair,
};

use crate::support::{
    BYTES, DEADLINE, assert_passes_alone, begin, config, contents, eventually, kinds, one_run,
    pair, pair_with, remote_of, shuffled_pages, shuffled_pages_from, write,
};

#[test]
fn a_cancelled_batch_ends_and_says_that_it_has_stopped() {
    for kind in kinds() {
        let mut source = config("source", kind);
        source.fault_opt = Some("stall:kv:1".parse::<FaultSpec>().unwrap());
        let pair = pair_with(source, config("target", kind));
        let remote = remote_of(&pair.remote.desc());
        write(
            &pair.session,
            &pair.local,
            remote.clone(),
            one_run(0, 0, 64),
        )
        .unwrap();
        let batch = WritePair {
            local: pair.local.clone(),
            remote,
            runs: one_run(0, 64, 64),
        };
        let handle = pair.session.write(WriteBatch { pairs: vec![batch] });
        assert!(
            handle.wait(Duration::from_millis(20)).is_none(),
            "it stalls"
        );
        handle.cancel();
        let error = handle.wait(DEADLINE).expect("ends").unwrap_err();
        assert_eq!(
            (error.kind(), error.is_quiesced()),
            (TransportErrorKind::Cancelled, true)
        );
    }
}

#[test]
fn injected_faults_do_what_they_say() {
    for kind in kinds() {
        for (spec, differs) in [
            ("drop-write:kv", true),
            ("misdirect:kv", true),
            ("drop-write:other", false),
        ] {
            let mut source = config("source", kind);
            source.fault_opt = Some(spec.parse().unwrap());
            let pair = pair_with(source, config("target", kind));
            write(
                &pair.session,
                &pair.local,
                remote_of(&pair.remote.desc()),
                one_run(0, 0, 4096),
            )
            .unwrap();
            let arrived =
                contents(&pair.target_memory)[..4096] == contents(&pair.source_memory)[..4096];
            assert_eq!(arrived, !differs, "{kind} {spec}");
        }
    }
}

#[test]
fn after_a_deregistration_nothing_is_written() {
    for kind in kinds() {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        let handles: Vec<_> = (0..100)
            .map(|_| begin(&pair.session, &pair.local, &remote, shuffled_pages()))
            .collect();
        // Some are over, some under way, most not begun.
        handles[1].wait(DEADLINE).expect("ends").unwrap();
        assert!(pair.target.deregister(&pair.remote, DEADLINE), "{kind}");
        pair.target_memory
            .write(io_engine::ByteOffset(0), &vec![0xAA; BYTES as usize])
            .unwrap();
        let mut refused = 0;
        for handle in handles {
            match handle.wait(DEADLINE).expect("ends") {
                Ok(moved) => assert_eq!(moved.bytes, BYTES),
                Err(error) => {
                    assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{kind}");
                    assert!(error.is_quiesced(), "{kind}");
                    refused += 1;
                }
            }
        }
        println!("{kind}: {refused} of 100 batches were refused");
        assert!(
            contents(&pair.target_memory)
                .iter()
                .all(|byte| *byte == 0xAA)
        );
        let error = write(&pair.session, &pair.local, remote, one_run(0, 0, 1)).unwrap_err();
        assert_eq!(error, TransportErrorKind::NotRegistered, "{kind}");
    }
}

#[test]
fn an_engine_deregisters_only_its_own_regions() {
    let pair = pair(TransportKind::Local);
    assert_eq!(
        pair.local.id(),
        pair.remote.id(),
        "the numbers are the same"
    );
    assert!(!pair.source.deregister(&pair.remote, DEADLINE));
    assert!(!pair.target.deregister(&pair.local, DEADLINE));
    let remote = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, remote, one_run(0, 0, 64)).unwrap();
    assert!(pair.target.deregister(&pair.remote, Duration::MAX));
    assert!(
        pair.target.deregister(&pair.remote, Duration::MAX),
        "twice is fine"
    );
}

#[test]
fn what_is_closed_stays_closed_and_writes_nothing() {
    for kind in kinds() {
        type End = fn(&crate::support::Pair);
        let ends: [(&str, End); 3] = [
            ("session", |pair| pair.session.close()),
            ("source", |pair| pair.source.shutdown()),
            ("target", |pair| pair.target.shutdown()),
        ];
        for (what, end) in ends {
            let pair = pair(kind);
            let remote = remote_of(&pair.remote.desc());
            let handles: Vec<_> = (0..50)
                .map(|_| begin(&pair.session, &pair.local, &remote, shuffled_pages_from(1)))
                .collect();
            end(&pair);
            eventually("the session knows", || !pair.session.is_alive());
            for handle in handles {
                let _ = handle.wait(DEADLINE).expect("a batch ends");
            }
            // What a closed stream had taken may still arrive, but only where those batches wrote.
            let late = begin(&pair.session, &pair.local, &remote, one_run(7, 0, 4096));
            let error = late.wait(DEADLINE).expect("ends").unwrap_err();
            assert!(
                matches!(
                    error.kind(),
                    TransportErrorKind::Closed | TransportErrorKind::PeerDead
                ),
                "{kind} {what}: {error:?}"
            );
            assert!(error.is_quiesced(), "{kind} {what}: it was never begun");
            let first_page = &contents(&pair.target_memory)[..4096];
            assert!(first_page.iter().all(|byte| *byte == 0xEE), "{kind} {what}");
        }
    }
}

/// Run by the test below in a process of its own, because it counts threads.
#[test]
#[ignore = "started by another test as a process of its own"]
fn nothing_is_left_behind_here() {
    let count = |what: &str| {
        std::fs::read_dir(format!("/proc/self/{what}"))
            .unwrap()
            .count()
    };
    let use_each_transport = || {
        for kind in kinds() {
            let pair = pair(kind);
            let remote = remote_of(&pair.remote.desc());
            write(&pair.session, &pair.local, remote, one_run(0, 0, BYTES)).unwrap();
            let peers = TcpStream::connect(pair.target.tcp_address());
            let listens = matches!(kind, TransportKind::Rdma | TransportKind::Tcp);
            assert_eq!(peers.is_ok(), listens, "{kind}");
        }
    };
    let before = (count("task"), count("fd"));
    for _ in 0..3 {
        use_each_transport();
    }
    eventually("threads and descriptors end with the last handles", || {
        (count("task"), count("fd")) == before
    });
    for kind in kinds() {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        write(
            &pair.session,
            &pair.local,
            remote.clone(),
            one_run(0, 0, 64),
        )
        .unwrap();
        let open = (count("task"), count("fd"));
        for at in 0..30_000 {
            let runs = one_run(at % 4096, at % 8192, 512);
            write(&pair.session, &pair.local, remote.clone(), runs).unwrap();
        }
        // Threads that fill page tables may have ended meanwhile.
        let (tasks, descriptors) = (count("task"), count("fd"));
        assert!(tasks <= open.0 && descriptors == open.1, "{kind}");
    }
    let pair = pair(TransportKind::Cma);
    let clone: Engine = pair.target.clone();
    drop(pair.target);
    let remote = remote_of(&pair.remote.desc());
    write(&pair.session, &pair.local, remote, one_run(0, 0, 64)).expect("a clone keeps it");
    drop(clone);
    eventually("the last clone ends it", || !pair.session.is_alive());
}

#[test]
fn the_last_handles_end_all_threads_and_close_all_descriptors() {
    assert_passes_alone("lifetimes::nothing_is_left_behind_here");
}

#[test]
fn a_batch_ends_at_its_timeout() {
    for kind in kinds() {
        let mut source = config("source", kind);
        source.fault_opt = Some("stall:kv:0".parse::<FaultSpec>().unwrap());
        let pair = pair_with(source, config("target", kind));
        let batch = || WriteBatch {
            pairs: vec![WritePair {
                local: pair.local.clone(),
                remote: remote_of(&pair.remote.desc()),
                runs: one_run(0, 0, BYTES),
            }],
        };
        let timeout = Duration::from_millis(30);
        let stalled = pair
            .session
            .submit(Direction::Write, batch(), Some(timeout));
        let error = stalled.wait(DEADLINE).expect("ends").unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::Timeout, "{kind}");
        assert!(error.is_quiesced(), "{kind}: nobody held it");
        let in_time = pair
            .session
            .submit(Direction::Write, batch(), Some(DEADLINE));
        in_time.wait(DEADLINE).expect("ends").unwrap();
    }
}

#[test]
fn memory_that_is_read_by_a_batch_is_not_let_go_before_its_end() {
    for kind in kinds() {
        let pair = pair(kind);
        let remote = remote_of(&pair.remote.desc());
        let handles: Vec<_> = (0..50)
            .map(|_| begin(&pair.session, &pair.local, &remote, shuffled_pages()))
            .collect();
        assert!(pair.source.deregister(&pair.local, DEADLINE), "{kind}");
        for handle in handles {
            let done = handle.wait(Duration::from_secs(1)).expect("all have ended");
            done.unwrap();
        }
        let late = begin(&pair.session, &pair.local, &remote, one_run(0, 0, 64));
        let error = late.wait(DEADLINE).expect("ends").unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::NotRegistered, "{kind}");
    }
}
