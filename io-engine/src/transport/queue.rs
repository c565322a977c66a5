//! Batches waiting for workers, handed out in pieces.
//!
//! A piece is bounded in ranges and bytes, and a batch goes to the back of the queue after each,
//! so that a small batch is not stuck behind a large one and several workers share a large one.
//! Run lists are expanded here, range by range, into the worker's own buffer.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::error::TransportError;
use crate::session::Job;
use crate::status::Status;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::sys::MAX_VECTORS;

/// Bytes of one piece at most; a longer range is cut exactly there. Small, so that workers finish a
/// batch together and a small batch waits for little.
pub(crate) const PIECE_BYTES: u64 = 512 << 10;
/// The same for work that costs a long system call for each piece: an eighth of the batch, so that
/// workers still share it, within these bounds.
const CALL_PIECE_BYTES: (u64, u64) = (PIECE_BYTES, 16 << 20);

/// Bytes of one piece of a batch that is moved by system calls.
pub(crate) fn call_piece_bytes(batch_bytes: u64) -> u64 {
    let (least, most) = CALL_PIECE_BYTES;
    (batch_bytes / 8).clamp(least, most)
}

/// One range of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceRange {
    /// Position of its pair in the batch.
    pub pair: usize,
    /// Offset in the region that is read.
    pub src: u64,
    /// Offset in the region that is written.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

impl PieceRange {
    /// Whether a range that begins there is adjacent to this one on both sides.
    const fn continues_at(&self, pair: usize, src: u64, dst: u64) -> bool {
        self.pair == pair && self.src + self.len == src && self.dst + self.len == dst
    }
}

/// A part of a batch that one worker moves at once. The buffer is reused.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    /// The ranges; at most [`MAX_VECTORS`].
    pub ranges: Vec<PieceRange>,
    /// Their bytes.
    pub bytes: u64,
}

/// Where the expansion of a batch stands.
#[derive(Debug, Default)]
struct Cursor {
    pair: usize,
    run: usize,
    step: u32,
    within: u64,
}

/// A batch and the rest of it that nobody has taken.
struct Batch<W> {
    job: Arc<Job>,
    status: Arc<Status>,
    work: W,
    piece_bytes: u64,
    cursor: Cursor,
}

impl Cursor {
    /// Fills a piece from where the last one ended. Empty: nothing is left.
    fn next_piece(&mut self, job: &Job, piece_bytes: u64, piece: &mut Piece) {
        piece.ranges.clear();
        piece.bytes = 0;
        let cursor = self;
        while let Some(pair) = job.pairs.get(cursor.pair) {
            let Some(run) = pair.runs.runs().get(cursor.run) else {
                *cursor = Cursor {
                    pair: cursor.pair + 1,
                    ..Cursor::default()
                };
                continue;
            };
            if cursor.step >= run.count || run.len.get() == 0 {
                *cursor = Cursor {
                    pair: cursor.pair,
                    run: cursor.run + 1,
                    ..Cursor::default()
                };
                continue;
            }
            if piece.ranges.len() >= MAX_VECTORS || piece.bytes >= piece_bytes {
                return;
            }
            let len = (run.len.get() - cursor.within).min(piece_bytes - piece.bytes);
            // The list's constructor checked that the end of every run fits 64 bits.
            let step = u64::from(cursor.step);
            let (src, dst) = (
                run.src.get() + step * run.src_stride + cursor.within,
                run.dst.get() + step * run.dst_stride + cursor.within,
            );
            let before = piece.ranges.last_mut();
            match before.filter(|before| before.continues_at(cursor.pair, src, dst)) {
                Some(before) => before.len += len,
                None => piece.ranges.push(PieceRange {
                    pair: cursor.pair,
                    src,
                    dst,
                    len,
                }),
            }
            piece.bytes += len;
            cursor.within += len;
            if cursor.within == run.len.get() {
                cursor.within = 0;
                cursor.step += 1;
            }
        }
    }
}

struct Waiting<W> {
    batches: VecDeque<Batch<W>>,
    closed_opt: Option<TransportError>,
}

/// The queue of one session or engine. `W` is what a worker needs beside the pairs.
pub(crate) struct BatchQueue<W> {
    waiting: Mutex<Waiting<W>>,
    arrived: Condvar,
}

impl<W> Default for BatchQueue<W> {
    fn default() -> Self {
        let waiting = Waiting {
            batches: VecDeque::new(),
            closed_opt: None,
        };
        Self {
            waiting: Mutex::new(waiting),
            arrived: Condvar::new(),
        }
    }
}

/// What a worker got.
pub(crate) enum Taken<W> {
    /// A piece, filled into the worker's buffer; [`Status::piece_done`] is owed.
    Piece {
        job: Arc<Job>,
        status: Arc<Status>,
        work: W,
    },
    /// Nothing came in the given time.
    Nothing,
    /// The queue is closed.
    Closed,
}

impl<W: Clone> BatchQueue<W> {
    fn lock(&self) -> MutexGuard<'_, Waiting<W>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a batch, or fails it when the queue is closed.
    pub(crate) fn push(&self, job: Job, status: Arc<Status>, work: W, piece_bytes: u64) {
        let mut waiting = self.lock();
        if let Some(error) = waiting.closed_opt.clone() {
            drop(waiting);
            return status.fail(error);
        }
        let batch = Batch {
            job: Arc::new(job),
            status,
            work,
            piece_bytes,
            cursor: Cursor::default(),
        };
        waiting.batches.push_back(batch);
        drop(waiting);
        self.arrived.notify_all();
    }

    /// Moves a whole batch on the calling thread, piece by piece; for batches so small that
    /// waking a worker costs more. `work` owes [`Status::piece_done`] for each piece. Its error
    /// ends the batch's expansion; it is for the caller to deal with.
    pub(crate) fn run_here<E>(
        &self,
        job: Job,
        status: &Arc<Status>,
        mut work: impl FnMut(&Arc<Job>, &Arc<Status>, &Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some(error) = self.closed_reason() {
            status.fail(error);
            return Ok(());
        }
        let job = Arc::new(job);
        let mut cursor = Cursor::default();
        let mut piece = Piece::default();
        let mut outcome = Ok(());
        while outcome.is_ok() {
            cursor.next_piece(&job, PIECE_BYTES, &mut piece);
            if piece.ranges.is_empty() || !status.take_piece() {
                break;
            }
            outcome = work(&job, status, &piece);
        }
        // What the batch holds is let go before anybody who waits for its end goes on.
        drop(job);
        status.exhausted();
        outcome
    }

    /// Whether a batch waits, or the end.
    pub(crate) fn has_work(&self) -> bool {
        let waiting = self.lock();
        !waiting.batches.is_empty() || waiting.closed_opt.is_some()
    }

    /// Takes the next piece, waiting for one at most this long (for ever if `None`).
    pub(crate) fn take(&self, piece: &mut Piece, timeout: Option<Duration>) -> Taken<W> {
        let mut waiting = self.lock();
        loop {
            while let Some(mut batch) = waiting.batches.pop_front() {
                let mut goes_on = !batch.status.is_stopping();
                if goes_on {
                    batch
                        .cursor
                        .next_piece(&batch.job, batch.piece_bytes, piece);
                    goes_on = !piece.ranges.is_empty() && batch.status.take_piece();
                }
                if !goes_on {
                    // The end of a batch wakes its waiters and may unmap memory: not under the lock.
                    drop(waiting);
                    let status = Arc::clone(&batch.status);
                    drop(batch);
                    status.exhausted();
                    waiting = self.lock();
                    continue;
                }
                let taken = Taken::Piece {
                    job: Arc::clone(&batch.job),
                    status: Arc::clone(&batch.status),
                    work: batch.work.clone(),
                };
                waiting.batches.push_back(batch);
                drop(waiting);
                self.arrived.notify_one();
                return taken;
            }
            if waiting.closed_opt.is_some() {
                return Taken::Closed;
            }
            match timeout {
                None => {
                    let waited = self.arrived.wait(waiting);
                    waiting = waited.unwrap_or_else(PoisonError::into_inner);
                }
                Some(timeout) => {
                    if timeout.is_zero() {
                        return Taken::Nothing;
                    }
                    let waited = self.arrived.wait_timeout(waiting, timeout);
                    let (again, result) = waited.unwrap_or_else(PoisonError::into_inner);
                    waiting = again;
                    if result.timed_out()
                        && waiting.batches.is_empty()
                        && waiting.closed_opt.is_none()
                    {
                        return Taken::Nothing;
                    }
                }
            }
        }
    }

    /// Fails what waits and everything that comes later. The first reason stays. What nobody has
    /// taken is proved not to be written; pieces that were taken are reported by who took them,
    /// and such a report takes the proof away where it must.
    pub(crate) fn close(&self, error: &TransportError) {
        let mut waiting = self.lock();
        let reason = waiting
            .closed_opt
            .get_or_insert_with(|| error.clone().with_proof())
            .clone();
        let batches = std::mem::take(&mut waiting.batches);
        drop(waiting);
        self.arrived.notify_all();
        batches
            .into_iter()
            .for_each(|batch| batch.status.fail(reason.clone()));
    }

    /// Why the queue takes no batches; `None` while it does.
    pub(crate) fn closed_reason(&self) -> Option<TransportError> {
        self.lock().closed_opt.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use common::ids::{ByteLen, ByteOffset};
    use common::plan::{RunList, StridedRun};

    use super::*;
    use crate::engine::{Engine, EngineConfig};
    use crate::error::TransportErrorKind;
    use crate::memory::Memory;
    use crate::region::RemoteRegion;
    use crate::session::WritePair;
    use crate::status::TransferHandle;
    use crate::transport::TransportKind;

    const POOL: u64 = 4096;

    /// Pairs between regions of which nothing is ever read or written here.
    fn pairs(lists: &[Vec<StridedRun>]) -> Vec<WritePair> {
        let mut config = EngineConfig::new("queue", "127.0.0.1");
        config.transports = vec![TransportKind::Local];
        let engine = Engine::start(config).unwrap();
        let memory = Memory::allocate("queue", ByteLen(POOL)).unwrap();
        let region = engine
            .register(&memory, ByteOffset(0), ByteLen(POOL), "kv")
            .unwrap();
        let remote = RemoteRegion::from_desc(&region.desc()).unwrap();
        let pair = |runs: &Vec<StridedRun>| WritePair {
            local: region.clone(),
            remote: remote.clone(),
            runs: RunList::new(runs.clone()).unwrap(),
        };
        lists.iter().map(pair).collect()
    }

    fn strided(src: u64, dst: u64, len: u64, count: u32) -> StridedRun {
        StridedRun {
            src: ByteOffset(src),
            dst: ByteOffset(dst),
            len: ByteLen(len),
            count,
            src_stride: len + 3,
            dst_stride: len + 5,
        }
    }

    fn job(pairs: &[WritePair]) -> Job {
        Job::unchecked(pairs.to_vec())
    }

    fn status(pairs: &[WritePair]) -> Arc<Status> {
        Status::new(
            pairs.iter().map(|pair| pair.runs.bytes().get()).sum(),
            pairs.iter().map(|pair| pair.runs.ranges()).sum(),
        )
    }

    fn take(queue: &BatchQueue<char>, piece: &mut Piece) -> Option<(char, Arc<Status>)> {
        match queue.take(piece, Some(Duration::ZERO)) {
            Taken::Piece { work, status, .. } => Some((work, status)),
            Taken::Nothing => None,
            Taken::Closed => panic!("the queue is open"),
        }
    }

    #[test]
    fn pieces_cover_every_byte_once_and_stay_small() {
        let lists = [
            vec![
                strided(7, 9, 10, 2000),
                strided(0, 0, 0, 5),
                strided(1, 2, 3, 0),
            ],
            vec![],
            vec![
                strided(0, 0, PIECE_BYTES * 2 + 17, 2),
                strided(5, 5, PIECE_BYTES, 1),
            ],
        ];
        let pairs = pairs(&lists);
        let (queue, status) = (BatchQueue::default(), status(&pairs));
        // Ranges that were cut are put together again where one continues the other.
        let mut seen: Vec<PieceRange> = Vec::new();
        queue.push(job(&pairs), Arc::clone(&status), 'a', PIECE_BYTES);
        let mut piece = Piece::default();
        while let Some((_, status)) = take(&queue, &mut piece) {
            assert!(!piece.ranges.is_empty() && piece.ranges.len() <= MAX_VECTORS);
            assert!(piece.bytes <= PIECE_BYTES);
            let sum: u64 = piece.ranges.iter().map(|range| range.len).sum();
            assert_eq!(sum, piece.bytes);
            for range in &piece.ranges {
                match seen.last_mut() {
                    Some(last)
                        if last.pair == range.pair
                            && last.src + last.len == range.src
                            && last.dst + last.len == range.dst =>
                    {
                        last.len += range.len;
                    }
                    _ => seen.push(*range),
                }
            }
            status.piece_done(Ok(()));
        }
        let expected: Vec<_> = pairs
            .iter()
            .enumerate()
            .flat_map(|(place, pair)| pair.runs.iter_ranges().map(move |range| (place, range)))
            .filter(|(_, range)| range.len.get() > 0)
            .map(|(place, range)| (place, range.src.get(), range.dst.get(), range.len.get()))
            .collect();
        let seen: Vec<_> = seen
            .iter()
            .map(|range| (range.pair, range.src, range.dst, range.len))
            .collect();
        assert_eq!(seen, expected);
        let moved = TransferHandle(status).wait(Duration::ZERO);
        assert_eq!(moved.unwrap().unwrap().ranges, 2000 + 5 + 2 + 1);
    }

    #[test]
    fn ranges_that_are_adjacent_on_both_sides_are_one() {
        let run = |src, dst| StridedRun::contiguous(ByteOffset(src), ByteOffset(dst), ByteLen(8));
        let dense = StridedRun {
            count: 10,
            src_stride: 8,
            dst_stride: 8,
            ..run(100, 200)
        };
        let lists = [
            vec![run(0, 0), run(8, 8), run(16, 40), dense],
            vec![run(180, 280)],
        ];
        let pairs = pairs(&lists);
        let (queue, status) = (BatchQueue::default(), status(&pairs));
        queue.push(job(&pairs), status, 'a', PIECE_BYTES);
        let mut piece = Piece::default();
        take(&queue, &mut piece).unwrap();
        let found: Vec<_> = piece
            .ranges
            .iter()
            .map(|range| (range.pair, range.src, range.dst, range.len))
            .collect();
        let expected = [
            (0, 0, 0, 16),
            (0, 16, 40, 8),
            (0, 100, 200, 80),
            (1, 180, 280, 8),
        ];
        assert_eq!(found, expected, "and never across pairs");
    }

    #[test]
    fn a_small_batch_is_not_stuck_behind_a_large_one() {
        let large = pairs(&[vec![strided(0, 0, PIECE_BYTES * 100, 1)]]);
        let small = pairs(&[vec![strided(0, 0, 8, 1)]]);
        let queue = BatchQueue::default();
        queue.push(job(&large), status(&large), 'l', PIECE_BYTES);
        queue.push(job(&small), status(&small), 's', PIECE_BYTES);
        let mut piece = Piece::default();
        let order: String = (0..4)
            .map(|_| take(&queue, &mut piece).unwrap().0)
            .collect();
        assert_eq!(order, "lsll");
    }

    #[test]
    fn a_cancelled_batch_ends_when_its_pieces_are_back() {
        let large = pairs(&[vec![strided(0, 0, PIECE_BYTES * 100, 1)]]);
        let (queue, status) = (BatchQueue::default(), status(&large));
        queue.push(job(&large), Arc::clone(&status), 'l', PIECE_BYTES);
        let mut piece = Piece::default();
        let (_, taken) = take(&queue, &mut piece).unwrap();
        let handle = TransferHandle(status);
        handle.cancel();
        assert!(take(&queue, &mut piece).is_none(), "no more is taken");
        assert!(handle.wait(Duration::ZERO).is_none(), "a piece is out");
        taken.piece_done(Ok(()));
        let error = handle.wait(Duration::ZERO).unwrap().unwrap_err();
        assert_eq!(error.kind(), TransportErrorKind::Cancelled);
        assert!(error.is_quiesced());
    }

    #[test]
    fn closing_fails_what_waits_and_keeps_the_proof_where_there_is_one() {
        let one = pairs(&[vec![strided(0, 0, PIECE_BYTES * 3, 1)]]);
        let (begun, fresh, late) = (status(&one), status(&one), status(&one));
        let queue = BatchQueue::default();
        queue.push(job(&one), Arc::clone(&begun), 'b', PIECE_BYTES);
        let mut piece = Piece::default();
        let (_, taken) = take(&queue, &mut piece).unwrap();
        queue.push(job(&one), Arc::clone(&fresh), 'f', PIECE_BYTES);
        let lost = TransportError::unproved(TransportErrorKind::Timeout, "first");
        queue.close(&lost);
        queue.close(&TransportError::unproved(
            TransportErrorKind::Closed,
            "second",
        ));
        queue.push(job(&one), Arc::clone(&late), 'n', PIECE_BYTES);
        let begun = TransferHandle(begun);
        assert!(begun.wait(Duration::ZERO).is_none(), "a piece is out");
        taken.piece_done(Err(lost));
        for (handle, is_quiesced) in [
            (begun, false),
            (TransferHandle(fresh), true),
            (TransferHandle(late), true),
        ] {
            let error = handle.wait(Duration::ZERO).unwrap().unwrap_err();
            assert_eq!(error.kind(), TransportErrorKind::Timeout, "the first cause");
            assert_eq!(error.is_quiesced(), is_quiesced);
        }
        assert!(matches!(queue.take(&mut piece, None), Taken::Closed));
    }

    #[test]
    fn a_waiting_worker_is_woken_by_a_batch_and_by_the_end() {
        let queue = Arc::new(BatchQueue::<char>::default());
        let worker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                let mut piece = Piece::default();
                let mut pieces = 0;
                while let Taken::Piece { status, .. } = queue.take(&mut piece, None) {
                    pieces += 1;
                    status.piece_done(Ok(()));
                }
                pieces
            })
        };
        let one = pairs(&[vec![strided(0, 0, PIECE_BYTES * 3, 1)]]);
        let status = status(&one);
        queue.push(job(&one), Arc::clone(&status), 'o', PIECE_BYTES);
        let moved = TransferHandle(status).wait(Duration::MAX).unwrap();
        assert_eq!(moved.unwrap().bytes, PIECE_BYTES * 3);
        queue.close(&TransportError::quiesced(TransportErrorKind::Closed, "end"));
        assert_eq!(worker.join().unwrap(), 3);
    }
}
