//! Ends batches whose time is over.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::{TransportError, TransportErrorKind};
use crate::status::Status;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// How long pieces that were begun may take to come back once the batch's time is over, unless the
/// transport says otherwise. Copies do within milliseconds, and then it is proved that nothing is
/// written any more.
pub(crate) const GRACE: Duration = Duration::from_millis(250);

/// The deadlines of an engine's batches; one thread waits for the earliest.
#[derive(Default)]
pub(crate) struct Timer {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    entries: BinaryHeap<Reverse<Entry>>,
    next: u64,
    is_over: bool,
}

struct Entry {
    due: Instant,
    /// Tells entries with one instant apart.
    number: u64,
    status: Weak<Status>,
    timeout: Duration,
    grace: Duration,
    is_last: bool,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.number) == (other.due, other.number)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl Timer {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails a batch that has not ended when it is due, `timeout` after it began. Pieces that were
    /// begun may take `grace` longer to come back.
    pub(crate) fn watch(
        &self,
        status: &Arc<Status>,
        due: Instant,
        timeout: Duration,
        grace: Duration,
    ) {
        let mut waiting = self.lock();
        if waiting.is_over {
            drop(waiting);
            return status.fail(ended());
        }
        let number = waiting.next;
        waiting.next += 1;
        waiting.entries.push(Reverse(Entry {
            due,
            number,
            status: Arc::downgrade(status),
            timeout,
            grace,
            is_last: false,
        }));
        drop(waiting);
        self.changed.notify_one();
    }

    /// Ends the thread. What it watched fails; nobody else would end a batch that stalls.
    pub(crate) fn end(&self) {
        let mut waiting = self.lock();
        waiting.is_over = true;
        let entries = std::mem::take(&mut waiting.entries);
        drop(waiting);
        self.changed.notify_one();
        for Reverse(entry) in entries {
            if let Some(status) = entry.status.upgrade() {
                status.fail(ended());
            }
        }
    }

    /// Runs on a thread of its own until [`Timer::end`].
    pub(crate) fn run(&self) {
        let mut waiting = self.lock();
        while !waiting.is_over {
            let now = Instant::now();
            let due_opt = waiting.entries.peek().map(|Reverse(entry)| entry.due);
            waiting = match due_opt {
                None => {
                    let waited = self.changed.wait(waiting);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
                Some(due) if due > now => {
                    let waited = self.changed.wait_timeout(waiting, due - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                Some(_) => {
                    let entry_opt = waiting.entries.pop();
                    // The end of a batch wakes its waiters: not under the lock.
                    drop(waiting);
                    let again_opt = entry_opt.and_then(|Reverse(entry)| entry.ring());
                    let mut waiting = self.lock();
                    waiting.entries.extend(again_opt.map(Reverse));
                    waiting
                }
            };
        }
    }
}

fn ended() -> TransportError {
    TransportError::quiesced(TransportErrorKind::Closed, "the engine was shut down")
}

impl Entry {
    /// Ends the batch, or stops it and gives its pieces a moment; then this is to ring again.
    fn ring(mut self) -> Option<Self> {
        let status = self.status.upgrade()?;
        if self.is_last {
            status.give_up();
            return None;
        }
        if status.is_concluded() {
            return None;
        }
        status.fail(TransportError::quiesced(
            TransportErrorKind::Timeout,
            format!("the batch did not end within {:?}", self.timeout),
        ));
        if status.is_concluded() {
            return None;
        }
        self.due += self.grace;
        self.is_last = true;
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::TransferHandle;

    fn running() -> (Arc<Timer>, std::thread::JoinHandle<()>) {
        let timer = Arc::new(Timer::default());
        let thread = Arc::clone(&timer);
        (timer, std::thread::spawn(move || thread.run()))
    }

    fn watched(timer: &Timer, timeout: Duration) -> Arc<Status> {
        let status = Status::new(8, 1);
        timer.watch(&status, Instant::now() + timeout, timeout, GRACE);
        status
    }

    #[test]
    fn late_batches_fail_each_at_its_time_and_with_the_proof_that_there_is() {
        let (timer, thread) = running();
        let in_time = watched(&timer, Duration::from_secs(60));
        let idle = watched(&timer, Duration::from_millis(20));
        let returning = watched(&timer, Duration::from_millis(10));
        let stuck = watched(&timer, Duration::from_millis(1));
        assert!(returning.take_piece() && stuck.take_piece());
        let end = |status: &Arc<Status>| {
            let handle = TransferHandle(Arc::clone(status));
            let error = handle.wait(Duration::from_secs(20)).unwrap().unwrap_err();
            assert_eq!(error.kind(), TransportErrorKind::Timeout);
            error.is_quiesced()
        };
        assert!(end(&idle), "nothing was out");
        assert!(!returning.take_piece(), "it has stopped");
        returning.piece_done(Ok(()));
        assert!(end(&returning), "its piece came back in the grace time");
        assert!(!end(&stuck), "its piece did not");
        stuck.piece_done(Ok(()));
        assert!(!in_time.is_concluded());
        in_time.exhausted();
        assert!(
            TransferHandle(in_time)
                .wait(Duration::ZERO)
                .unwrap()
                .is_ok()
        );
        timer.end();
        thread.join().unwrap();
    }
}
