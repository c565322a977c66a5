//! How a room's status may change, and the meeting of two halves under `prefill_complete`.

use crate::ids::{Endpoint, Generation};
use crate::wire::KvPoll;

/// The status after a report of `new`. A room that is not known is begun by Bootstrapping or
/// WaitingForInput and by nothing else; Failed is final; otherwise a status never goes back.
pub fn advance(current: Option<KvPoll>, new: KvPoll) -> Option<KvPoll> {
    match (current, new) {
        (None, KvPoll::Bootstrapping | KvPoll::WaitingForInput) => Some(new),
        (None, _) => None,
        (Some(KvPoll::Failed), _) | (_, KvPoll::Failed) => Some(KvPoll::Failed),
        (Some(current), new) => Some(current.max(new)),
    }
}

/// Where the status of a deferred room goes, and whether it is a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeferredNotice {
    /// The decode's control socket.
    pub endpoint: Endpoint,
    /// Whether the room failed.
    pub failed: bool,
}

/// One room under the policy `prefill_complete`. The decode's BOOTSTRAP and the end of the prefill
/// may come in either order; the decode hears of readiness once, when both are there, and of a
/// failure whenever there is somebody to tell. A failed room stays as a tombstone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeferredBootstrap {
    owner: Option<Generation>,
    endpoint: Option<Endpoint>,
    ready: bool,
    ready_notified: bool,
    failed: bool,
}

impl DeferredBootstrap {
    /// The engine opens the room. `None` when somebody has it already; else whether it has failed
    /// before it was opened.
    pub fn open(&mut self, owner: Generation) -> Option<bool> {
        if self.owner.is_some() {
            return None;
        }
        self.owner = Some(owner);
        Some(self.failed)
    }

    /// Where the decode listens, once it has said so.
    pub const fn endpoint(&self) -> Option<&Endpoint> {
        self.endpoint.as_ref()
    }

    /// The decode says where it listens. A second, different endpoint is told at once that it
    /// failed: a room names one request.
    pub fn register(&mut self, endpoint: Endpoint) -> Option<DeferredNotice> {
        if self
            .endpoint
            .as_ref()
            .is_some_and(|first| *first != endpoint)
        {
            return Some(DeferredNotice {
                endpoint,
                failed: true,
            });
        }
        self.endpoint = Some(endpoint);
        self.notice()
    }

    /// The owner's prefill is complete.
    pub fn complete(&mut self, owner: Generation) -> Option<DeferredNotice> {
        if self.owner != Some(owner) || self.failed {
            return None;
        }
        self.ready = true;
        self.notice()
    }

    /// The room failed.
    pub fn fail(&mut self) -> Option<DeferredNotice> {
        if self.failed {
            return None;
        }
        self.failed = true;
        self.notice()
    }

    /// The owner clears the room. After a success nothing of it remains, and the decode hears of
    /// the Success only now; otherwise it stays as a failed tombstone.
    pub fn close(&mut self, owner: Generation, success: bool) -> Option<DeferredNotice> {
        if self.owner != Some(owner) {
            return None;
        }
        if success && !self.failed {
            let endpoint = std::mem::take(self).endpoint?;
            return Some(DeferredNotice {
                endpoint,
                failed: false,
            });
        }
        self.owner = None;
        self.fail()
    }

    fn notice(&mut self) -> Option<DeferredNotice> {
        let endpoint = self.endpoint.clone()?;
        if self.failed {
            return Some(DeferredNotice {
                endpoint,
                failed: true,
            });
        }
        if self.ready && !self.ready_notified {
            self.ready_notified = true;
            return Some(DeferredNotice {
                endpoint,
                failed: false,
            });
        }
        None
    }
}
