//! Transfers between their call and their session.
//!
//! A call only notes what it asks for, which takes about a microsecond and needs no lock of the
//! interpreter to be given up: whoever gives it up beside a thread that computes waits for
//! milliseconds until it is back. A thread of its own hands the transfers on, and so do the threads
//! that wait for them; small ones are copied on the way.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::plan::RunList;
use io_engine::{Direction, Engine, Session};
use transfer_actor::metrics::TransferMetrics;

use crate::mori::status::{StatusCell, code};
use crate::mori::transfer::{Route, begin};

/// How long the thread looks out for the next transfer before it sleeps. Callers that submit layer
/// by layer come back within a few microseconds, and waking a thread costs them more than that.
const LOOK_OUT: Duration = Duration::from_micros(40);
/// Looks at the clock after so many turns.
const TURNS: u32 = 64;
/// Transfers that wait together are handed on together while they have at most so many ranges and
/// bytes: each batch costs a system call or two, and one of this size is copied at once.
const TOGETHER_RANGES: u64 = 80;
const TOGETHER_BYTES: u64 = 160 << 10;

/// A transfer that was asked for.
pub(crate) struct Asked {
    pub(crate) route: Arc<Route>,
    /// The one to use; none: the peer's.
    pub(crate) session_opt: Option<Session>,
    pub(crate) direction: Direction,
    pub(crate) runs: RunList,
    pub(crate) number: u64,
    pub(crate) status: Arc<StatusCell>,
    /// Whether no other may be handed on with it.
    pub(crate) is_alone: bool,
}

impl Asked {
    fn goes_with(&self, first: &Self) -> bool {
        !self.is_alone
            && !first.is_alone
            && self.session_opt.is_none()
            && first.session_opt.is_none()
            && self.direction == first.direction
            && Arc::ptr_eq(&self.route.remote, &first.route.remote)
            && self.route.reach == first.route.reach
    }
}

#[derive(Default)]
struct Waiting {
    asked: VecDeque<Asked>,
    sleeps: bool,
    is_closed: bool,
}

/// The transfers of an engine that nobody has begun, in order.
pub(crate) struct Outbox {
    engine: Engine,
    metrics: Arc<TransferMetrics>,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    /// Whether there may be any; read without the lock.
    has_any: AtomicBool,
}

impl Outbox {
    /// Starts the thread; it ends with [`Outbox::close`].
    pub(crate) fn start(
        engine: Engine,
        metrics: Arc<TransferMetrics>,
    ) -> std::io::Result<Arc<Self>> {
        let outbox = Arc::new(Self {
            engine,
            metrics,
            waiting: Mutex::default(),
            arrived: Condvar::new(),
            has_any: AtomicBool::new(false),
        });
        let thread = Arc::clone(&outbox);
        std::thread::Builder::new()
            .name("ferry-outbox".to_owned())
            .spawn(move || {
                while let Some(asked) = thread.next() {
                    thread.begin(asked);
                }
            })?;
        Ok(outbox)
    }

    /// Where transfers are counted.
    pub(crate) fn metrics(&self) -> &TransferMetrics {
        &self.metrics
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a transfer.
    pub(crate) fn push(&self, asked: Asked) {
        self.extend([asked]);
    }

    /// Notes transfers each of which is to be handed on by itself.
    pub(crate) fn push_alone(&self, asked: Vec<Asked>) {
        self.extend(asked.into_iter().map(|asked| Asked {
            is_alone: true,
            ..asked
        }));
    }

    fn extend(&self, asked: impl IntoIterator<Item = Asked>) {
        let mut waiting = self.lock();
        waiting.asked.extend(asked);
        self.has_any.store(true, Ordering::Release);
        let sleeps = std::mem::take(&mut waiting.sleeps);
        drop(waiting);
        if sleeps {
            self.arrived.notify_one();
        }
    }

    /// The next transfers to hand on together; empty when none waits.
    fn pop(&self, waiting: &mut Waiting) -> Vec<Asked> {
        let (mut ranges, mut bytes) = (0u64, 0u64);
        let mut together: Vec<Asked> = Vec::new();
        while let Some(next) = waiting.asked.front() {
            ranges = ranges.saturating_add(next.runs.ranges());
            bytes = bytes.saturating_add(next.runs.bytes().get());
            let fits = ranges <= TOGETHER_RANGES && bytes <= TOGETHER_BYTES;
            // The first goes, however large it is.
            let goes = together
                .first()
                .is_none_or(|first| fits && next.goes_with(first));
            if !goes {
                break;
            }
            together.extend(waiting.asked.pop_front());
        }
        self.has_any
            .store(!waiting.asked.is_empty(), Ordering::Release);
        together
    }

    /// Hands transfers on to their session; everything that happens to them, now or later, goes into
    /// their statuses.
    fn begin(self: &Arc<Self>, asked: Vec<Asked>) {
        let Some(first) = asked.first() else {
            return;
        };
        let session = match &first.session_opt {
            Some(session) => Ok(session.clone()),
            None => first.route.session(&self.engine),
        };
        match session {
            Ok(session) => begin(&session, asked, self),
            Err(error) => {
                let statuses = asked.iter().map(|asked| &asked.status);
                statuses.for_each(|status| status.update(code::ERR_RDMA_OP, error.to_string()));
            }
        }
    }

    /// Hands on what waits, until a time; for a thread that would only wait meanwhile.
    pub(crate) fn help(self: &Arc<Self>, deadline: Instant) {
        while self.has_any.load(Ordering::Acquire) && Instant::now() < deadline {
            let asked = self.pop(&mut self.lock());
            self.begin(asked);
        }
    }

    /// The next transfers; `None` when the outbox is closed.
    fn next(&self) -> Option<Vec<Asked>> {
        loop {
            let mut waiting = self.lock();
            let asked = self.pop(&mut waiting);
            if !asked.is_empty() {
                return Some(asked);
            }
            if waiting.is_closed {
                return None;
            }
            drop(waiting);
            if self.look_out() {
                continue;
            }
            let mut waiting = self.lock();
            while waiting.asked.is_empty() && !waiting.is_closed {
                waiting.sleeps = true;
                let woken = self.arrived.wait(waiting);
                waiting = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn look_out(&self) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < LOOK_OUT {
            for _ in 0..TURNS {
                if self.has_any.load(Ordering::Acquire) {
                    return true;
                }
                spin_loop();
            }
        }
        false
    }

    /// Ends the thread, after what was asked for so far.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.arrived.notify_one();
    }
}
