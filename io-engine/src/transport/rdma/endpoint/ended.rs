//! How a queue pair fails, drains and ends, and who is told.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Endpoint, Owner, Posted, State};
use crate::error::{TransportError, TransportErrorKind};
use crate::session::Job;
use crate::status::Status;
use crate::transport::rdma::notifications::Notification;
use crate::transport::rdma::requests::{Lane, Request};
use crate::transport::rdma::verbs::{Finished, QueuePair};

/// A stopped queue pair that has not flushed its work by then never will (its device may be gone);
/// destroying it ends the work, too.
const DRAINED_AFTER: Duration = Duration::from_secs(1);
/// A batch that was given up and of which nothing moves for so long is stuck in the queue pair.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// [`Status::piece_done`] is owed for the rest together.
pub(super) struct Leftover {
    pub(super) lane: Lane,
    pub(super) requests: Vec<Request>,
    pub(super) job: Arc<Job>,
    pub(super) status: Arc<Status>,
}

/// What is left of a queue pair that has ended.
pub(crate) struct Ended {
    pub(crate) owed: Vec<Owed>,
    /// Stopped and drained. Destroying it may wait until the packets that it sent have left this
    /// host, so it comes last.
    pair_opt: Option<QueuePair>,
}

impl Ended {
    /// Tells what was under way; `is_proved`: the peer has said that nothing comes in over the
    /// queue pair any more. What is left is to be dropped.
    pub(crate) fn tell(self, is_proved: bool) -> Option<QueuePair> {
        for Owed { status, error } in self.owed {
            status.piece_done(Err(match is_proved {
                true => error,
                false => error.without_proof(),
            }));
        }
        self.pair_opt
    }
}

/// The failure of a write whose packets may still be in the network.
pub(crate) struct Owed {
    status: Arc<Status>,
    error: TransportError,
}

impl Owed {
    /// Gives the death of the peer as the reason for what its memory's keys were refused for.
    pub(crate) fn explain_by(&mut self, death_opt: Option<&TransportError>) {
        if let (Some(death), TransportErrorKind::NotRegistered) = (death_opt, self.error.kind()) {
            let text = format!("{death} ({})", self.error);
            self.error = TransportError::quiesced(TransportErrorKind::PeerDead, text);
        }
    }
}

/// What is to be told when the lock is free.
#[derive(Default)]
pub(super) struct News {
    pub(super) done: Vec<Posted>,
    pub(super) failed: Vec<(Posted, TransportError)>,
    pub(super) notifications: Vec<Notification>,
    pub(super) ended_opt: Option<TransportError>,
    /// As in [`Ended`].
    pub(super) pair_opt: Option<QueuePair>,
    pub(super) progressed: bool,
}

impl Endpoint {
    pub(super) fn failure(&self, state: &State, finished: &Finished) -> TransportError {
        let number = state.pair_opt.as_ref().map_or(0, QueuePair::number);
        TransportError::quiesced(
            finished.status.error_kind(),
            format!(
                "rdma to {} ({}) over {} ({}), queue pair {number}: {}, vendor code {:#x}",
                self.route.peer,
                self.route.peer_gid,
                self.rail.device().name(),
                self.route.own_gid,
                finished.status,
                finished.vendor_error
            ),
        )
    }

    /// Stops the queue pair; it ends when it is drained.
    pub(super) fn begin_to_fail(&self, state: &mut State, error: TransportError) {
        if state.failure_opt.is_some() {
            return;
        }
        if error.kind() != TransportErrorKind::Closed {
            self.rail.count_failure();
        }
        state.failure_opt = Some(error);
        state.progressed = Instant::now();
        if let Some(Err(error)) = state.pair_opt.as_mut().map(QueuePair::stop) {
            // Destroying it stops it, too.
            tracing::warn!(%error, "a queue pair could not be stopped");
            state.expect_nothing();
        }
    }

    pub(super) fn end_if_drained(&self, state: &mut State, news: &mut News) {
        let Some(failure) = state.failure_opt.clone() else {
            return;
        };
        // Those that nobody will hear of end with the queue pair itself.
        let is_expected = |posted: &Posted| posted.chain != u64::MAX;
        if state.posted.iter().any(is_expected) || state.pair_opt.is_none() {
            return;
        }
        let pair_opt = state.pair_opt.take();
        if state.posted.is_empty() && !self.is_accepted() {
            news.pair_opt = pair_opt;
        } else {
            // Under the lock: whoever finds no queue pair may rely on its end.
            drop(pair_opt);
        }
        state.posted_bytes = 0;
        let lost = std::mem::take(&mut state.posted);
        self.under_way.fetch_sub(lost.len(), Ordering::AcqRel);
        news.failed = std::mem::take(&mut state.failed);
        let lost = lost.into_iter().map(|posted| (posted, failure.clone()));
        news.failed.extend(lost);
        let leftovers = std::mem::take(&mut state.leftovers).into_iter();
        news.failed.extend(leftovers.map(|leftover| {
            let posted = Posted {
                chain: u64::MAX,
                bytes: 0,
                status: leftover.status,
                job_opt: Some(leftover.job),
            };
            (posted, failure.clone())
        }));
        news.ended_opt = Some(failure);
    }

    pub(super) fn tell(&self, news: News) {
        // What a batch holds is let go before anybody who waits for its end goes on.
        for Posted {
            status, job_opt, ..
        } in news.done
        {
            drop(job_opt);
            status.piece_done(Ok(()));
        }
        let mut owed = Vec::new();
        for (posted, error) in news.failed {
            let wrote = posted.wrote();
            let Posted {
                status, job_opt, ..
            } = posted;
            drop(job_opt);
            match wrote {
                true => owed.push(Owed { status, error }),
                // The queue pair is destroyed: nothing comes in over it.
                false => status.piece_done(Err(error)),
            }
        }
        let ended = Ended {
            owed,
            pair_opt: news.pair_opt,
        };
        match &self.owner {
            Owner::Session(session, place) => {
                let Some(session) = session.upgrade() else {
                    // It ends after its queue pairs, so nothing of it can be under way.
                    drop(ended.tell(false));
                    return;
                };
                for notification in news.notifications {
                    session.notified(notification);
                }
                match news.ended_opt {
                    Some(error) => session.endpoint_ended(*place, self, &error, ended),
                    None if news.progressed => session.pump(),
                    None => {}
                }
            }
            Owner::Accepted {
                peer_key,
                notifications,
            } => {
                for notification in news.notifications {
                    notifications.note(peer_key, notification);
                }
                if let Some(error) = news.ended_opt {
                    tracing::info!(peer = peer_key, %error, "a peer's queue pair ended");
                }
            }
        }
    }

    /// Stops it because of something else than a completion. Batches are told when it is drained.
    pub(crate) fn fail(&self, error: &TransportError) {
        let mut news = News::default();
        let mut state = self.lock();
        self.begin_to_fail(&mut state, error.clone());
        self.end_if_drained(&mut state, &mut news);
        drop(state);
        self.poller.posted();
        self.tell(news);
    }

    /// Destroys the queue pair of a peer: once this has returned, nothing comes in over it.
    pub(crate) fn destroy(&self) {
        drop(self.lock().pair_opt.take());
    }

    /// Stops a queue pair in which a batch that was given up does not move, and ends one that was
    /// stopped and does not drain.
    pub(crate) fn look_for_stuck(&self) {
        // A completion whose event was missed would be stuck, too.
        self.take_completions(true);
        let mut state = self.lock();
        let waited = state.progressed.elapsed();
        if state.failure_opt.is_some() {
            if waited >= DRAINED_AFTER {
                let mut news = News::default();
                state.expect_nothing();
                self.end_if_drained(&mut state, &mut news);
                drop(state);
                self.tell(news);
            }
            return;
        }
        let mut posted = state.posted.iter();
        let is_given_up = posted.any(|posted| posted.status.is_stopping());
        if !is_given_up || waited < STUCK_AFTER {
            return;
        }
        drop(state);
        self.fail(&TransportError::quiesced(
            TransportErrorKind::Timeout,
            format!(
                "rdma to {} ({}) over {} ({}): nothing moved, and a batch was given up",
                self.route.peer,
                self.route.peer_gid,
                self.rail.device().name(),
                self.route.own_gid
            ),
        ));
    }
}

impl State {
    /// Nobody will hear of what is posted: it ends with the queue pair itself.
    pub(super) fn expect_nothing(&mut self) {
        for posted in &mut self.posted {
            posted.chain = u64::MAX;
        }
    }
}
