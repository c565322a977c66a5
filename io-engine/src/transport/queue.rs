//! Batches waiting for workers, handed out in pieces.
//!
//! A piece is bounded in ranges and bytes, and a batch goes to the back of the queue after each,
//! so that a small batch is not stuck behind a large one and several workers share a large one.
//! Run lists are expanded here, range by range, into the worker's own buffer.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::TransportError;
use crate::session::WritePair;
use crate::status::Status;
use crate::sys::MAX_VECTORS;

/// Bytes of one piece at most, unless a single range is cut exactly there.
const PIECE_BYTES: u64 = 2 << 20;

/// One range of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceRange {
    /// Position of its pair in the batch.
    pub pair: usize,
    /// Offset in the local region.
    pub src: u64,
    /// Offset in the remote region.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
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
    pairs: Arc<[WritePair]>,
    status: Arc<Status>,
    work: W,
    cursor: Cursor,
}

impl<W> Batch<W> {
    /// Fills a piece from where the last one ended. Empty: nothing is left.
    fn next_piece(&mut self, piece: &mut Piece) {
        piece.ranges.clear();
        piece.bytes = 0;
        let cursor = &mut self.cursor;
        while let Some(pair) = self.pairs.get(cursor.pair) {
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
            if piece.ranges.len() >= MAX_VECTORS || piece.bytes >= PIECE_BYTES {
                return;
            }
            let len = (run.len.get() - cursor.within).min(PIECE_BYTES - piece.bytes);
            // The list's constructor checked that the end of every run fits 64 bits.
            let step = u64::from(cursor.step);
            piece.ranges.push(PieceRange {
                pair: cursor.pair,
                src: run.src.get() + step * run.src_stride + cursor.within,
                dst: run.dst.get() + step * run.dst_stride + cursor.within,
                len,
            });
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
        pairs: Arc<[WritePair]>,
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
    pub(crate) fn push(&self, pairs: Vec<WritePair>, status: Arc<Status>, work: W) {
        let mut waiting = self.lock();
        if let Some(error) = waiting.closed_opt.clone() {
            drop(waiting);
            return status.fail(error);
        }
        let batch = Batch {
            pairs: pairs.into(),
            status,
            work,
            cursor: Cursor::default(),
        };
        waiting.batches.push_back(batch);
        drop(waiting);
        self.arrived.notify_all();
    }

    /// Takes the next piece, waiting for one at most this long (for ever if `None`).
    pub(crate) fn take(&self, piece: &mut Piece, timeout: Option<Duration>) -> Taken<W> {
        let mut waiting = self.lock();
        loop {
            while let Some(mut batch) = waiting.batches.pop_front() {
                let stops = batch.status.is_stopping();
                if !stops {
                    batch.next_piece(piece);
                }
                if stops || piece.ranges.is_empty() {
                    // The end of a batch wakes its waiters and may unmap memory: not under the lock.
                    drop(waiting);
                    batch.status.exhausted();
                    drop(batch);
                    waiting = self.lock();
                    continue;
                }
                batch.status.piece_taken();
                let taken = Taken::Piece {
                    pairs: Arc::clone(&batch.pairs),
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
