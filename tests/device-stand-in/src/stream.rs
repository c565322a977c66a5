//! Streams: each has a thread that does what was asked for, in order and later.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::control::{self, Setting};
use crate::memory::Span;
use crate::{Answer, code};

/// A point that a stream passes.
#[derive(Default)]
pub(crate) struct Event {
    state: Mutex<Passed>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Passed {
    asked: u64,
    done: u64,
    failed: bool,
}

impl Event {
    fn lock(&self) -> MutexGuard<'_, Passed> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the stream has passed it; an event that was never recorded counts as passed.
    pub(crate) fn query(&self) -> Answer<()> {
        let state = *self.lock();
        match (state.done >= state.asked, state.failed) {
            (false, _) => Err(code::NOT_READY),
            (true, true) => Err(code::CONTEXT_IS_DESTROYED),
            (true, false) => Ok(()),
        }
    }

    pub(crate) fn wait(&self) -> Answer<()> {
        let mut state = self.lock();
        while state.done < state.asked {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        match state.failed {
            true => Err(code::CONTEXT_IS_DESTROYED),
            false => Ok(()),
        }
    }

    fn pass(&self, number: u64, failed: bool) {
        let mut state = self.lock();
        state.done = state.done.max(number);
        state.failed |= failed;
        drop(state);
        self.changed.notify_all();
    }
}

/// One copy, both sides cut alike.
pub(crate) struct Copy {
    pub(crate) dst: Vec<Span>,
    pub(crate) src: Vec<Span>,
}

impl Copy {
    fn run(&self) {
        let (mut dsts, mut srcs) = (self.dst.iter(), self.src.iter());
        let (mut dst_opt, mut src_opt) = (dsts.next(), srcs.next());
        let (mut dst_at, mut src_at) = (0, 0);
        while let (Some(dst), Some(src)) = (dst_opt, src_opt) {
            let step = (dst.len - dst_at).min(src.len - src_at);
            let from = std::ptr::with_exposed_provenance::<u8>(src.host + src_at as usize);
            let to = std::ptr::with_exposed_provenance_mut::<u8>(dst.host + dst_at as usize);
            // SAFETY: both spans were resolved when the copy was asked for; device memory is kept by
            // them, and whoever asked keeps pinned memory until the copy is over, as with a driver.
            unsafe { std::ptr::copy(from, to, step as usize) };
            (dst_at, src_at) = (dst_at + step, src_at + step);
            if dst_at == dst.len {
                (dst_opt, dst_at) = (dsts.next(), 0);
            }
            if src_at == src.len {
                (src_opt, src_at) = (srcs.next(), 0);
            }
        }
    }
}

enum Operation {
    Copies(Vec<Copy>),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>),
    End,
}

#[derive(Default)]
struct Queue {
    operations: VecDeque<Operation>,
    is_busy: bool,
}

/// What is asked for, in order.
#[derive(Default)]
pub(crate) struct Stream {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Stream {
    pub(crate) fn start() -> Answer<Arc<Self>> {
        let stream = Arc::new(Self::default());
        let own = Arc::clone(&stream);
        std::thread::Builder::new()
            .name("stand-in-stream".to_owned())
            .spawn(move || own.run())
            .map_err(|_| code::OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, operation: Operation) {
        self.lock().operations.push_back(operation);
        self.changed.notify_all();
    }

    pub(crate) fn copy(&self, copies: Vec<Copy>) {
        self.push(Operation::Copies(copies));
    }

    pub(crate) fn record(&self, event: &Arc<Event>) {
        let mut state = event.lock();
        state.asked += 1;
        state.failed = false;
        let number = state.asked;
        drop(state);
        self.push(Operation::Record(Arc::clone(event), number));
    }

    pub(crate) fn wait_for(&self, event: &Arc<Event>) {
        self.push(Operation::Wait(Arc::clone(event)));
    }

    /// Ends the thread when what was asked for is done.
    pub(crate) fn end(&self) {
        self.push(Operation::End);
    }

    pub(crate) fn synchronize(&self) -> Answer<()> {
        let event = Arc::new(Event::default());
        self.record(&event);
        event.wait()
    }

    fn run(&self) {
        let mut has_failed = false;
        loop {
            let mut queue = self.lock();
            queue.is_busy = false;
            let operation = loop {
                match queue.operations.pop_front() {
                    Some(operation) => break operation,
                    None => {
                        queue = self
                            .changed
                            .wait(queue)
                            .unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            queue.is_busy = true;
            drop(queue);
            match operation {
                Operation::Copies(copies) => {
                    let delay = control::get(Setting::DelayMicroseconds);
                    // The lateness itself is what is asked for.
                    std::thread::sleep(Duration::from_micros(delay));
                    has_failed |= control::is_set(Setting::Reset);
                    if !has_failed {
                        copies.iter().for_each(Copy::run);
                    }
                }
                Operation::Record(event, number) => event.pass(number, has_failed),
                Operation::Wait(event) => has_failed |= event.wait().is_err(),
                Operation::End => return,
            }
        }
    }
}
