//! A peer's engine: the sessions to it, and what became of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::wire::EngineDesc;
use io_engine::{Engine, PeerSessions, Reach, Session, TransportError, TransportErrorKind};
use pyo3::prelude::*;

use crate::mori::enums;
use crate::mori::notify::NotifyAddress;

/// Failures that nobody has asked for are forgotten, the oldest first.
const MAX_FAILURES: usize = 1024;

/// MoRI's numbers of `PeerFailureReason`, as far as they happen here.
const UNKNOWN: u32 = 0;
const PEER_UNREACHABLE: u32 = 1;

/// A peer that cannot be reached any more.
#[derive(Clone, Debug)]
pub(crate) struct PeerFailure {
    pub(crate) remote_key: String,
    pub(crate) reason: u32,
    pub(crate) transport: &'static str,
    pub(crate) detail: String,
}

/// Failures of an engine's peers, in order.
#[derive(Debug, Default)]
pub(crate) struct PeerFailures(Mutex<VecDeque<PeerFailure>>);

impl PeerFailures {
    fn push(&self, failure: PeerFailure) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() == MAX_FAILURES {
            failures.pop_front();
        }
        failures.push_back(failure);
    }

    pub(crate) fn pop(&self) -> Option<PeerFailure> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front()
    }
}

/// A peer's engine that was registered here.
pub(crate) struct Remote {
    pub(crate) desc: EngineDesc,
    pub(crate) notify_opt: Option<NotifyAddress>,
    failures: Arc<PeerFailures>,
    sessions: Mutex<PeerSessions>,
    /// For which classes of reach there is one, a bit for each; read without the lock.
    reached: AtomicU32,
}

impl Remote {
    pub(crate) fn new(desc: EngineDesc, failures: Arc<PeerFailures>) -> Self {
        Self {
            notify_opt: NotifyAddress::of(&desc),
            desc,
            failures,
            sessions: Mutex::default(),
            reached: AtomicU32::new(0),
        }
    }

    /// Whether a transfer needs no new connection, as far as is known.
    pub(crate) fn has_session(&self, reach: &Reach) -> bool {
        self.reached.load(Ordering::Acquire) & (1 << reach.class()) != 0
    }

    /// The session that reaches some memory, opened if there is none or the last one has failed.
    /// Blocks meanwhile; callers that come at the same time wait for the same session. Whether the
    /// peer is still there is not asked, which would be a system call: a transfer that fails for
    /// that ends the session.
    pub(crate) fn session(
        &self,
        engine: &Engine,
        reach: &Reach,
    ) -> Result<Session, TransportError> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        match sessions.open(engine, &self.desc, reach) {
            Ok(open) => {
                self.reached.fetch_or(1 << reach.class(), Ordering::Release);
                Ok(open)
            }
            Err(error) => {
                drop(sessions);
                self.report(None, PEER_UNREACHABLE, &error.to_string());
                Err(error)
            }
        }
    }

    /// Notes that a transfer failed; if the peer is gone, its session is over and that is reported
    /// once. Whoever opens a session meanwhile is not waited for: the thread here moves bytes.
    pub(crate) fn transfer_failed(&self, error: &TransportError) {
        let reason = match error.kind() {
            TransportErrorKind::Protocol | TransportErrorKind::Io => UNKNOWN,
            _ => PEER_UNREACHABLE,
        };
        if let Ok(sessions) = self.sessions.try_lock() {
            self.end_if_dead(sessions, reason, &error.to_string());
        }
    }

    /// Looks whether the peer has gone since; reports it if so.
    pub(crate) fn check(&self) {
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        self.end_if_dead(sessions, PEER_UNREACHABLE, "the connection is lost");
    }

    fn end_if_dead(&self, mut sessions: MutexGuard<'_, PeerSessions>, reason: u32, detail: &str) {
        if let Some(lost) = sessions.take_dead() {
            // Those that live are found again under the lock.
            self.reached.store(0, Ordering::Release);
            drop(sessions);
            self.report(Some(&lost), reason, detail);
        }
    }

    fn report(&self, session_opt: Option<&Session>, reason: u32, detail: &str) {
        self.failures.push(PeerFailure {
            remote_key: self.desc.key.clone(),
            reason,
            transport: session_opt.map_or("", |session| session.transport().name()),
            detail: detail.to_owned(),
        });
    }
}

/// A peer that cannot be reached any more.
#[pyclass(module = "ferry.mori_compat.cpp", frozen)]
pub(crate) struct PeerFailureEvent(pub(super) PeerFailure);

#[pymethods]
impl PeerFailureEvent {
    /// Key of the peer's engine.
    #[getter]
    fn remote_engine_key(&self) -> &str {
        &self.0.remote_key
    }

    /// Why.
    #[getter]
    fn reason<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        enums::reason(py, self.0.reason)
    }

    /// 0: there are no queue pairs.
    #[getter]
    fn qp_num(&self) -> u32 {
        0
    }

    /// 0: there is no port of a network card.
    #[getter]
    fn port_num(&self) -> u32 {
        0
    }

    /// The transport that failed; empty when none could be opened.
    #[getter]
    fn device_name(&self) -> &str {
        self.0.transport
    }

    /// What happened.
    #[getter]
    fn detail(&self) -> &str {
        &self.0.detail
    }
}
