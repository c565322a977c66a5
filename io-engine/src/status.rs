//! The state of one batch, shared by its submitter, its workers and whoever waits for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::error::{TransportError, TransportErrorKind};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Longer waits are cut to this, so that no caller's duration overflows an instant.
const LONGEST_WAIT: Duration = Duration::from_secs(u32::MAX as u64);

/// The instant at which a wait ends.
pub(crate) fn deadline_after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(LONGEST_WAIT)
}

/// What a completed batch moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Bytes, all of them in the remote memory.
    pub bytes: u64,
    /// Contiguous ranges.
    pub ranges: u64,
    /// From submission to completion.
    pub elapsed: Duration,
}

/// The result of a batch.
pub type TransferResult = Result<Transferred, TransportError>;

/// A batch in flight. It can be awaited, or waited for by a thread; dropping it does not stop the
/// batch.
#[derive(Clone, Debug)]
pub struct TransferHandle(pub(crate) Arc<Status>);

#[derive(Debug)]
pub(crate) struct Status {
    bytes: u64,
    ranges: u64,
    submitted: Instant,
    /// Whether workers should begin nothing more; read without the lock.
    is_stopping: AtomicBool,
    inner: Mutex<Inner>,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    /// Pieces that a worker has taken and not reported.
    outstanding: usize,
    /// Whether no more pieces will be taken.
    exhausted: bool,
    /// The first failure.
    failure: Option<TransportError>,
    result: Option<TransferResult>,
    wakers: Vec<Waker>,
    /// Threads that wait: nobody is woken, which is a system call, when there are none.
    waiters: usize,
}

impl Status {
    pub(crate) fn new(bytes: u64, ranges: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes,
            ranges,
            submitted: Instant::now(),
            is_stopping: AtomicBool::new(false),
            inner: Mutex::default(),
            finished: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether workers should take no more pieces: cancelled, late, or failed already.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Whether the batch has its result.
    pub(crate) fn is_concluded(&self) -> bool {
        self.lock().result.is_some()
    }

    /// A worker takes a piece, unless the batch has stopped. Every call that says true is followed
    /// by one of [`Status::piece_done`].
    pub(crate) fn take_piece(&self) -> bool {
        let mut inner = self.lock();
        if self.is_stopping() {
            return false;
        }
        inner.outstanding += 1;
        true
    }

    /// A worker reports a piece. A failure without proof of quiescence outweighs one with it.
    pub(crate) fn piece_done(&self, result: Result<(), TransportError>) {
        let mut inner = self.lock();
        inner.outstanding = inner.outstanding.saturating_sub(1);
        if let Err(error) = result {
            self.record(&mut inner, error);
        }
        self.conclude(inner);
    }

    /// No more pieces will be taken.
    pub(crate) fn exhausted(&self) {
        let mut inner = self.lock();
        inner.exhausted = true;
        self.conclude(inner);
    }

    /// The batch fails as a whole, and no more pieces will be taken. It ends when those that were
    /// taken are back.
    pub(crate) fn fail(&self, error: TransportError) {
        let mut inner = self.lock();
        self.record(&mut inner, error);
        self.conclude(inner);
    }

    /// The batch ends although pieces are out: what they write is not proved to have stopped.
    pub(crate) fn give_up(&self) {
        let mut inner = self.lock();
        if inner.outstanding > 0 {
            inner.failure = inner.failure.take().map(TransportError::without_proof);
            inner.outstanding = 0;
        }
        self.conclude(inner);
    }

    fn record(&self, inner: &mut Inner, error: TransportError) {
        // Under the lock, so that no piece is taken after this.
        self.is_stopping.store(true, Ordering::Release);
        inner.exhausted = true;
        match &inner.failure {
            // The first cause is kept, but a later failure can take its proof away.
            Some(first) => inner.failure = Some(first.clone().proving_no_more_than(&error)),
            None => inner.failure = Some(error),
        }
    }

    fn conclude(&self, mut inner: MutexGuard<'_, Inner>) {
        if inner.result.is_some() || inner.outstanding > 0 || !inner.exhausted {
            return;
        }
        self.is_stopping.store(true, Ordering::Release);
        let moved = Transferred {
            bytes: self.bytes,
            ranges: self.ranges,
            elapsed: self.submitted.elapsed(),
        };
        inner.result = Some(inner.failure.take().map_or(Ok(moved), Err));
        let wakers = std::mem::take(&mut inner.wakers);
        let has_waiters = inner.waiters > 0;
        drop(inner);
        if has_waiters {
            self.finished.notify_all();
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl TransferHandle {
    /// Waits for the end at most this long; `None` when the batch is still in flight.
    pub fn wait(&self, timeout: Duration) -> Option<TransferResult> {
        let deadline = deadline_after(timeout);
        let mut inner = self.0.lock();
        loop {
            if let Some(result) = &inner.result {
                return Some(result.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            inner.waiters += 1;
            let waited = self.0.finished.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
            inner.waiters -= 1;
        }
    }

    /// Begins no more writes of this batch. The handle ends with
    /// [`TransportErrorKind::Cancelled`] once those that were begun are over.
    pub fn cancel(&self) {
        self.0.fail(TransportError::quiesced(
            TransportErrorKind::Cancelled,
            "the batch was cancelled and its writes have stopped",
        ));
    }
}

impl Future for TransferHandle {
    type Output = TransferResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<TransferResult> {
        let mut inner = self.0.lock();
        if let Some(result) = &inner.result {
            return Poll::Ready(result.clone());
        }
        if !inner
            .wakers
            .iter()
            .any(|waker| waker.will_wake(context.waker()))
        {
            inner.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}
