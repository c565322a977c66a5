//! The state of one batch, shared by its submitter, its workers and whoever waits for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::error::{TransportError, TransportErrorKind};

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
    cancelled: AtomicBool,
    inner: Mutex<Inner>,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    /// Pieces that a worker has taken and not reported.
    outstanding: usize,
    /// Whether no more pieces will be taken.
    exhausted: bool,
    /// Whether no worker holds the batch, so that a cancellation must end it itself.
    stalled: bool,
    /// The first failure.
    failure: Option<TransportError>,
    result: Option<TransferResult>,
    wakers: Vec<Waker>,
}

impl Status {
    pub(crate) fn new(bytes: u64, ranges: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes,
            ranges,
            submitted: Instant::now(),
            cancelled: AtomicBool::new(false),
            inner: Mutex::default(),
            finished: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether workers should take no more pieces: cancelled, or failed already.
    pub(crate) fn is_stopping(&self) -> bool {
        self.cancelled.load(Ordering::Acquire) || self.lock().failure.is_some()
    }

    /// A worker takes a piece; every call is followed by one of [`Status::piece_done`].
    pub(crate) fn piece_taken(&self) {
        self.lock().outstanding += 1;
    }

    /// A worker reports a piece. A failure without proof of quiescence outweighs one with it.
    pub(crate) fn piece_done(&self, result: Result<(), TransportError>) {
        let mut inner = self.lock();
        inner.outstanding = inner.outstanding.saturating_sub(1);
        if let Err(error) = result {
            Self::record(&mut inner, error);
        }
        self.conclude(inner);
    }

    /// No more pieces will be taken.
    pub(crate) fn exhausted(&self) {
        let mut inner = self.lock();
        inner.exhausted = true;
        self.conclude(inner);
    }

    /// The batch is held by nobody: only a cancellation ends it (an injected fault).
    pub(crate) fn stall(&self) {
        self.lock().stalled = true;
        if self.cancelled.load(Ordering::Acquire) {
            self.exhausted();
        }
    }

    /// The batch fails as a whole, and no more pieces will be taken.
    pub(crate) fn fail(&self, error: TransportError) {
        let mut inner = self.lock();
        Self::record(&mut inner, error);
        inner.exhausted = true;
        self.conclude(inner);
    }

    fn record(inner: &mut Inner, error: TransportError) {
        match &inner.failure {
            // The first cause is kept, but a later failure can take the proof away.
            Some(first) if !error.is_quiesced() && first.is_quiesced() => {
                inner.failure = inner.failure.take().map(TransportError::without_proof);
            }
            Some(_) => {}
            None => inner.failure = Some(error),
        }
    }

    fn conclude(&self, mut inner: MutexGuard<'_, Inner>) {
        if inner.result.is_some() || inner.outstanding > 0 || !inner.exhausted {
            return;
        }
        let result = match inner.failure.take() {
            Some(error) => Err(error),
            None if self.cancelled.load(Ordering::Acquire) => Err(TransportError::quiesced(
                TransportErrorKind::Cancelled,
                "the batch was cancelled and its writes have stopped",
            )),
            None => Ok(Transferred {
                bytes: self.bytes,
                ranges: self.ranges,
                elapsed: self.submitted.elapsed(),
            }),
        };
        inner.result = Some(result);
        let wakers = std::mem::take(&mut inner.wakers);
        drop(inner);
        self.finished.notify_all();
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
            let waited = self.0.finished.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Begins no more writes of this batch. The handle ends with
    /// [`TransportErrorKind::Cancelled`] once those that were begun are over.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        let stalled = std::mem::take(&mut self.0.lock().stalled);
        if stalled {
            self.0.exhausted();
        }
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
