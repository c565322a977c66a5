//! What became of a transfer, and waiting for it.

use std::borrow::Cow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use io_engine::TransportErrorKind;
use pyo3::prelude::*;

use crate::mori::enums;

/// MoRI's numbers of `StatusCode`.
pub(crate) mod code {
    pub(crate) const SUCCESS: u32 = 0;
    pub(crate) const INIT: u32 = 1;
    pub(crate) const IN_PROGRESS: u32 = 2;
    /// Every code above it is a failure.
    pub(crate) const ERR_BEGIN: u32 = 10;
    pub(crate) const ERR_INVALID_ARGS: u32 = 11;
    pub(crate) const ERR_NOT_FOUND: u32 = 12;
    pub(crate) const ERR_RDMA_OP: u32 = 13;
    pub(crate) const ERR_BAD_STATE: u32 = 14;
}

/// What MoRI calls a failure of this kind.
pub(crate) const fn code_of(kind: TransportErrorKind) -> u32 {
    match kind {
        TransportErrorKind::OutOfBounds => code::ERR_INVALID_ARGS,
        TransportErrorKind::NotRegistered | TransportErrorKind::BadKey => code::ERR_NOT_FOUND,
        TransportErrorKind::NoCommonTransport | TransportErrorKind::Closed => code::ERR_BAD_STATE,
        _ => code::ERR_RDMA_OP,
    }
}

/// A waiting thread looks for signals this often, so that Ctrl-C ends it.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(200);
/// Stands for "without a limit".
const LONGEST_WAIT: Duration = Duration::from_secs(u32::MAX as u64);

/// The state behind a `TransferStatus`; the transfer holds it too.
#[derive(Debug)]
pub(crate) struct StatusCell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    code: u32,
    message: Cow<'static, str>,
    /// Threads that wait: nobody is woken, which is a system call, when there are none.
    waiters: usize,
}

impl StatusCell {
    pub(crate) fn new(code: u32) -> Arc<Self> {
        let state = State {
            code,
            message: Cow::Borrowed(""),
            waiters: 0,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn code(&self) -> u32 {
        self.lock().code
    }

    fn message(&self) -> String {
        self.lock().message.clone().into_owned()
    }

    /// Takes a result, unless there is a failure already.
    pub(crate) fn update(&self, code: u32, message: impl Into<Cow<'static, str>>) {
        let mut state = self.lock();
        if state.code > code::ERR_BEGIN {
            return;
        }
        state.message = message.into();
        self.change(state, code);
    }

    pub(crate) fn set_code(&self, code: u32) {
        self.change(self.lock(), code);
    }

    fn change(&self, mut state: MutexGuard<'_, State>, code: u32) {
        state.code = code;
        let has_waiters = state.waiters > 0;
        drop(state);
        if has_waiters {
            self.changed.notify_all();
        }
    }

    /// Waits until the transfer is not in progress; returns the code it has then.
    fn wait_until(&self, deadline: Instant) -> u32 {
        let mut state = self.lock();
        state.waiters += 1;
        while state.code == code::IN_PROGRESS {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiters -= 1;
        state.code
    }
}

/// When a wait of `timeout_ms` ends; a negative one has no end.
fn deadline_after(timeout_ms: i64) -> Instant {
    let timeout = u64::try_from(timeout_ms).map_or(LONGEST_WAIT, Duration::from_millis);
    Instant::now() + timeout.min(LONGEST_WAIT)
}

/// Waits without the interpreter lock, and looks for signals now and then.
fn wait_for(py: Python<'_>, cell: &Arc<StatusCell>, deadline: Instant) -> PyResult<u32> {
    let mut code = cell.code();
    while code == code::IN_PROGRESS && Instant::now() < deadline {
        let slice = deadline.min(Instant::now() + SIGNAL_INTERVAL);
        code = py.detach(|| cell.wait_until(slice));
        py.check_signals()?;
    }
    Ok(code)
}

/// Waits for many, as `wait_all` does: 0 looks once and prefers a failure; a negative time waits
/// for all of them; otherwise they share the time, in order. The first code that is not success,
/// or `IN_PROGRESS` when the time is over. `help` is called before it waits, without the
/// interpreter lock.
pub(crate) fn wait_all(
    py: Python<'_>,
    cells: &[Arc<StatusCell>],
    timeout_ms: i64,
    help: impl Fn(Instant) + Sync,
) -> PyResult<u32> {
    let deadline = deadline_after(timeout_ms);
    let is_any_in_progress = || cells.iter().any(|cell| cell.code() == code::IN_PROGRESS);
    while timeout_ms != 0 && is_any_in_progress() && Instant::now() < deadline {
        let slice = deadline.min(Instant::now() + SIGNAL_INTERVAL);
        py.detach(|| {
            help(slice);
            // They end about in the order in which they began: whoever waits for the last of them
            // is not woken by the others.
            for cell in cells.iter().rev() {
                cell.wait_until(slice);
            }
        });
        py.check_signals()?;
    }
    let (mut error_opt, mut is_in_progress) = (None, false);
    for cell in cells {
        match cell.code() {
            code::SUCCESS => {}
            code::IN_PROGRESS => {
                is_in_progress = true;
                if timeout_ms != 0 {
                    break;
                }
            }
            error => error_opt = error_opt.or(Some(error)),
        }
    }
    Ok(error_opt.unwrap_or(match is_in_progress {
        true => code::IN_PROGRESS,
        false => code::SUCCESS,
    }))
}

/// The state of one transfer. It stays valid for as long as anybody holds it, the transfer
/// included.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct TransferStatus {
    pub(crate) cell: Arc<StatusCell>,
}

#[pymethods]
#[allow(non_snake_case, reason = "the names of the original")]
impl TransferStatus {
    #[new]
    pub(crate) fn new() -> Self {
        Self {
            cell: StatusCell::new(code::INIT),
        }
    }

    /// The code as it is now.
    fn Code<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enums::status_code(py, self.cell.code())
    }

    /// Why it failed; `success` when it has succeeded.
    fn Message(&self) -> String {
        self.cell.message()
    }

    /// Whether nothing was begun with it.
    fn Init(&self) -> bool {
        self.cell.code() == code::INIT
    }

    /// Whether the transfer has not ended.
    fn InProgress(&self) -> bool {
        self.cell.code() == code::IN_PROGRESS
    }

    /// Whether the bytes are where they belong.
    fn Succeeded(&self) -> bool {
        self.cell.code() == code::SUCCESS
    }

    /// Whether it ended with an error.
    fn Failed(&self) -> bool {
        self.cell.code() > code::ERR_BEGIN
    }

    /// Sets the code, whatever it was.
    fn SetCode(&self, code: &Bound<'_, PyAny>) -> PyResult<()> {
        self.cell.set_code(enums::status_number(code)?);
        Ok(())
    }

    /// Sets the message.
    fn SetMessage(&self, message: String) {
        self.cell.lock().message = Cow::Owned(message);
    }

    /// Sets both, unless it has failed already.
    fn Update(&self, code: &Bound<'_, PyAny>, message: String) -> PyResult<()> {
        self.cell.update(enums::status_number(code)?, message);
        Ok(())
    }

    /// Waits for the end of a transfer that is in progress.
    fn Wait(&self, py: Python<'_>) -> PyResult<()> {
        wait_for(py, &self.cell, deadline_after(-1)).map(|_| ())
    }

    /// As `Wait`, for at most this long; negative has no limit, 0 only looks. The code after it.
    #[pyo3(signature = (timeout_ms = -1))]
    fn WaitFor<'py>(&self, py: Python<'py>, timeout_ms: i64) -> PyResult<Bound<'py, PyAny>> {
        let code = wait_for(py, &self.cell, deadline_after(timeout_ms))?;
        enums::status_code(py, code)
    }

    fn __repr__(&self) -> String {
        let state = self.cell.lock();
        format!("<TransferStatus code {}: {:?}>", state.code, state.message)
    }
}
