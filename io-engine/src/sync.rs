//! Locks and flags of what loom looks at (`make test-loom`): the standard library's, and loom's in a
//! build for its models.

#[cfg(ferry_loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(ferry_loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};

use self::atomic::{AtomicBool, Ordering};

/// Says that a thread goes to sleep on something that a lock does not reach, such as a descriptor.
///
/// Whoever sleeps calls [`SleepFlag::raise`], looks for work under the work's lock, sleeps only if
/// there is none, and then calls [`SleepFlag::lower`]. Whoever adds work under that lock asks
/// [`SleepFlag::is_up`] afterwards and wakes. So one of the two always sees the other.
#[derive(Debug)]
pub(crate) struct SleepFlag(AtomicBool);

impl SleepFlag {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub(crate) fn lower(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
