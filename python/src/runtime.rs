//! The one thread of this process on which ranks and servers are started, and waiting for it.

use std::future::Future;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use actix_rt::{ArbiterHandle, System};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::sync::oneshot;

/// A waiting thread looks for signals this often, so that Ctrl-C ends it.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(200);

/// The thread; it is started by the first who needs it, and runs to the end of the process.
pub(crate) fn arbiter() -> PyResult<ArbiterHandle> {
    static ARBITER: OnceLock<Option<ArbiterHandle>> = OnceLock::new();
    let arbiter = ARBITER.get_or_init(|| {
        let (started, is_started) = sync_channel(1);
        let spawned = std::thread::Builder::new()
            .name("ferry-ranks".to_owned())
            .spawn(move || {
                let system = System::new();
                // Whoever started it waits.
                let _ = started.send(System::current().arbiter().clone());
                if let Err(error) = system.run() {
                    tracing::error!(%error, "the ranks' thread has ended");
                }
            });
        spawned.ok().and_then(|_| is_started.recv().ok())
    });
    let none = || PyRuntimeError::new_err("the ranks' thread could not be started");
    arbiter.clone().ok_or_else(none)
}

/// Runs something on the thread and waits for its result. A signal (Ctrl-C) ends it and the wait.
pub(crate) fn run<T, Work>(
    py: Python<'_>,
    work: impl FnOnce() -> Work + Send + 'static,
) -> PyResult<T>
where
    T: Send + 'static,
    Work: Future<Output = T> + 'static,
{
    let (finished, mut result) = sync_channel(1);
    let (caller, caller_has_gone) = oneshot::channel::<()>();
    let ended = || PyRuntimeError::new_err("the ranks' thread has ended");
    let spawned = arbiter()?.spawn_fn(move || {
        actix_rt::spawn(async move {
            tokio::select! {
                output = work() => {
                    // The caller may have gone just now.
                    let _ = finished.send(output);
                }
                _ = caller_has_gone => {}
            }
        });
    });
    if !spawned {
        return Err(ended());
    }
    loop {
        let received;
        (result, received) = py.detach(move || {
            let received = result.recv_timeout(SIGNAL_INTERVAL);
            (result, received)
        });
        match received {
            Ok(output) => {
                drop(caller);
                return Ok(output);
            }
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
        }
    }
}
