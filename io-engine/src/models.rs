//! The engine's own locks, flags and wake-ups under loom, which tries every order in which threads
//! can meet in them (`make test-loom`). A wake-up that is lost shows as a deadlock: a wait with a
//! timeout never times out there.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::ids::{ByteLen, ByteOffset};
use common::plan::{RunList, StridedRun};
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::AnyMemory;
use crate::memory::Memory;
use crate::region::{Region, RegionKey, RemoteRegion};
use crate::session::{Job, WritePair};
use crate::status::{Status, TransferHandle};
use crate::sync::SleepFlag;
use crate::timer::{GRACE, Timer};
use crate::transport::queue::{BatchQueue, Piece, Taken};

/// Further away than a model lasts.
const FAR: Duration = Duration::from_secs(3600);
const POOL: u64 = 4096;
/// Bytes of a piece; the jobs here have two.
const PIECE: u64 = 64;
/// How often one thread may interrupt another where every way would be too many.
const PREEMPTIONS: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(model);
}

fn error(kind: TransportErrorKind) -> TransportError {
    TransportError::quiesced(kind, "of a model")
}

fn region() -> Region {
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| Memory::allocate("model", ByteLen(POOL)).unwrap());
    Region::new(
        AnyMemory::Pool(memory.clone()),
        (ByteOffset(0), ByteLen(POOL)),
        1,
        RegionKey([7; 16]),
        "model",
        (&"engine".into(), [1; 16]),
    )
    .unwrap()
}

/// A job of two pieces. Nothing is copied by it.
fn job() -> Job {
    let local = region();
    let remote = RemoteRegion::from_desc(&local.desc()).unwrap();
    let run = StridedRun {
        src: ByteOffset(0),
        dst: ByteOffset(0),
        len: ByteLen(2 * PIECE),
        count: 1,
        src_stride: 0,
        dst_stride: 0,
    };
    let runs = RunList::new(vec![run]).unwrap();
    Job::unchecked(vec![WritePair {
        local,
        remote,
        runs,
    }])
}

/// Takes a piece and gives it back; `inside` counts those that are out.
fn work(status: &Status, inside: &AtomicUsize, result: Result<(), TransportError>) -> bool {
    let taken = status.take_piece();
    if taken {
        inside.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
        inside.fetch_sub(1, Ordering::Relaxed);
        status.piece_done(result);
    }
    taken
}

#[test]
fn a_batch_ends_once_all_its_pieces_are_back_and_whoever_waits_is_woken() {
    check(|| {
        let status = Status::new(2, 1);
        let inside = Arc::new(AtomicUsize::new(0));
        let worker = {
            let (status, inside) = (Arc::clone(&status), Arc::clone(&inside));
            thread::spawn(move || work(&status, &inside, Ok(())))
        };
        let submitter = {
            let status = Arc::clone(&status);
            thread::spawn(move || status.exhausted())
        };
        let result = TransferHandle(Arc::clone(&status)).wait(FAR).unwrap();
        assert_eq!(inside.load(Ordering::Relaxed), 0, "a piece is out");
        assert_eq!(result.unwrap().bytes, 2);
        submitter.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn after_a_cancelled_batch_has_ended_nothing_is_written() {
    check(|| {
        let status = Status::new(2, 1);
        let inside = Arc::new(AtomicUsize::new(0));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let (status, inside) = (Arc::clone(&status), Arc::clone(&inside));
                thread::spawn(move || work(&status, &inside, Ok(())))
            })
            .collect();
        let handle = TransferHandle(Arc::clone(&status));
        handle.cancel();
        let ended = handle.wait(FAR).unwrap().unwrap_err();
        assert_eq!(inside.load(Ordering::Relaxed), 0, "a piece is out");
        assert!(ended.is_quiesced() && ended.kind() == TransportErrorKind::Cancelled);
        assert!(!status.take_piece(), "it has stopped");
        workers.into_iter().for_each(|worker| {
            worker.join().unwrap();
        });
    });
}

#[test]
fn a_failure_without_proof_is_never_lost_behind_another() {
    check(|| {
        let status = Status::new(2, 1);
        assert!(status.take_piece() && status.take_piece());
        let unproved = {
            let status = Arc::clone(&status);
            thread::spawn(move || {
                let error = error(TransportErrorKind::PeerDead).without_proof();
                status.piece_done(Err(error));
            })
        };
        let proved = {
            let status = Arc::clone(&status);
            thread::spawn(move || status.piece_done(Err(error(TransportErrorKind::Timeout))))
        };
        let ended = TransferHandle(status).wait(FAR).unwrap().unwrap_err();
        assert!(!ended.is_quiesced());
        unproved.join().unwrap();
        proved.join().unwrap();
    });
}

#[test]
fn a_batch_that_is_given_up_is_proved_only_if_its_piece_came_back() {
    check(|| {
        let status = Status::new(2, 1);
        assert!(status.take_piece());
        status.fail(error(TransportErrorKind::Timeout));
        let is_back = Arc::new(AtomicUsize::new(0));
        let worker = {
            let (status, is_back) = (Arc::clone(&status), Arc::clone(&is_back));
            thread::spawn(move || {
                is_back.store(1, Ordering::Release);
                status.piece_done(Ok(()));
            })
        };
        status.give_up();
        let ended = TransferHandle(Arc::clone(&status)).wait(FAR).unwrap();
        let is_proved = ended.unwrap_err().is_quiesced();
        assert!(!is_proved || is_back.load(Ordering::Acquire) == 1);
        worker.join().unwrap();
    });
}

#[test]
fn a_task_that_awaits_a_batch_is_woken() {
    check(|| {
        let status = Status::new(2, 1);
        let ending = {
            let status = Arc::clone(&status);
            thread::spawn(move || status.exhausted())
        };
        let result = loom::future::block_on(TransferHandle(status));
        assert_eq!(result.unwrap().ranges, 1);
        ending.join().unwrap();
    });
}

/// A worker of a queue, until it is closed; the bytes that it took.
fn serve(queue: &BatchQueue<()>) -> u64 {
    let mut piece = Piece::default();
    let mut bytes = 0;
    loop {
        match queue.take(&mut piece, None) {
            Taken::Piece { status, .. } => {
                bytes += piece.bytes;
                status.piece_done(Ok(()));
            }
            Taken::Nothing => unreachable!("it waits for ever"),
            Taken::Closed => return bytes,
        }
    }
}

#[test]
fn two_workers_share_a_batch_and_neither_sleeps_through_it_or_the_end() {
    check(|| {
        let queue = Arc::new(BatchQueue::<()>::default());
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || serve(&queue))
            })
            .collect();
        let status = Status::new(2 * PIECE, 1);
        queue.push(job(), Arc::clone(&status), (), PIECE);
        let result = TransferHandle(status).wait(FAR).unwrap();
        assert_eq!(result.unwrap().bytes, 2 * PIECE);
        queue.close(&error(TransportErrorKind::Closed));
        let bytes = workers.into_iter().map(|worker| worker.join().unwrap());
        assert_eq!(bytes.sum::<u64>(), 2 * PIECE, "each byte is taken once");
    });
}

#[test]
fn a_batch_that_meets_the_end_of_its_queue_ends() {
    check(|| {
        let queue = Arc::new(BatchQueue::<()>::default());
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || serve(&queue))
        };
        let closing = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || queue.close(&error(TransportErrorKind::PeerDead)))
        };
        let status = Status::new(2 * PIECE, 1);
        queue.push(job(), Arc::clone(&status), (), PIECE);
        match TransferHandle(status).wait(FAR).unwrap() {
            Ok(moved) => assert_eq!(moved.bytes, 2 * PIECE),
            Err(ended) => assert!(ended.is_quiesced(), "{ended}"),
        }
        closing.join().unwrap();
        worker.join().unwrap();
    });
}

/// An eventfd, as far as a sleeper of a lane uses it.
#[derive(Default)]
struct Event(Mutex<bool>, Condvar);

#[test]
fn a_thread_that_sleeps_on_a_descriptor_never_sleeps_through_a_batch() {
    check(|| {
        let shared = Arc::new((
            BatchQueue::<()>::default(),
            SleepFlag::new(),
            Event(Mutex::new(false), Condvar::new()),
        ));
        let sleeper = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (queue, flag, event) = &*shared;
                let mut piece = Piece::default();
                loop {
                    match queue.take(&mut piece, Some(Duration::ZERO)) {
                        Taken::Piece { status, .. } => return status.piece_done(Ok(())),
                        Taken::Nothing => {}
                        Taken::Closed => unreachable!("nobody closes it"),
                    }
                    flag.raise();
                    if !queue.has_work() {
                        let mut is_rung = event.0.lock().unwrap();
                        while !std::mem::take(&mut *is_rung) {
                            is_rung = event.1.wait(is_rung).unwrap();
                        }
                    }
                    flag.lower();
                }
            })
        };
        let (queue, flag, event) = &*shared;
        let status = Status::new(2 * PIECE, 1);
        queue.push(job(), Arc::clone(&status), (), 2 * PIECE);
        if flag.is_up() {
            *event.0.lock().unwrap() = true;
            event.1.notify_one();
        }
        sleeper.join().unwrap();
    });
}

#[test]
fn a_region_that_is_closed_has_nobody_inside_and_lets_nobody_in() {
    check(|| {
        let region = region();
        let inside = Arc::new(AtomicUsize::new(0));
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (region, inside) = (region.clone(), Arc::clone(&inside));
                thread::spawn(move || {
                    if let Ok(guard) = region.enter() {
                        inside.fetch_add(1, Ordering::Relaxed);
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::Relaxed);
                        drop(guard);
                    }
                })
            })
            .collect();
        assert!(region.close(Instant::now() + FAR));
        assert_eq!(inside.load(Ordering::Relaxed), 0);
        assert!(region.enter().is_err());
        users.into_iter().for_each(|user| user.join().unwrap());
    });
}

#[test]
fn a_batch_that_meets_the_end_of_the_timer_ends() {
    check(|| {
        let timer = Arc::new(Timer::default());
        let running = {
            let timer = Arc::clone(&timer);
            thread::spawn(move || timer.run())
        };
        let ending = {
            let timer = Arc::clone(&timer);
            thread::spawn(move || timer.end())
        };
        let status = Status::new(1, 1);
        timer.watch(&status, Instant::now() + FAR, FAR, GRACE);
        let ended = TransferHandle(status).wait(FAR).unwrap().unwrap_err();
        assert!(ended.is_quiesced() && ended.kind() == TransportErrorKind::Closed);
        ending.join().unwrap();
        running.join().unwrap();
    });
}
