//! One queue pair at work: pieces of batches posted as chains, and what becomes of them.
//!
//! A failed queue pair is stopped and drained, or destroyed if it does not drain: then this side
//! sends nothing more, and nothing comes in. Packets of its writes can still be in the network, so
//! whoever wrote is told only when the session has heard from the peer that its end is destroyed
//! ([`Owed`]).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::error::{TransportError, TransportErrorKind};
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::transport::Piece;
use crate::transport::rdma::notifications::{Notification, Notifications};
use crate::transport::rdma::poller::Poller;
use crate::transport::rdma::rail::Rail;
use crate::transport::rdma::requests::{Lane, Request};
use crate::transport::rdma::session::Session;
use crate::transport::rdma::verbs::{CompletionStatus, Finished, Gid, QueuePair};

/// Bytes under way over one queue pair, all but the last piece's. Several times what a fast network
/// holds, and little enough that a batch which is cancelled ends soon.
const MOST_BYTES: u64 = 4 << 20;
/// A batch that was given up and of which nothing moves for so long is stuck in the queue pair.
const STUCK_AFTER: Duration = Duration::from_millis(100);
/// A stopped queue pair that has not flushed its work by then never will (its device may be gone);
/// destroying it ends the work, too.
const DRAINED_AFTER: Duration = Duration::from_secs(1);

/// Who is told.
pub(crate) enum Owner {
    /// The session that opened it, and which of its queue pairs this is.
    Session(Weak<Session>, usize),
    /// The engine that a peer opened it to.
    Accepted {
        /// Key of the peer's engine.
        peer_key: String,
        notifications: Arc<Notifications>,
    },
}

/// Where a queue pair leads, for texts.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) peer: String,
    pub(crate) own_gid: Gid,
    pub(crate) peer_gid: Gid,
}

pub(crate) struct Endpoint {
    rail: Arc<Rail>,
    poller: Arc<Poller>,
    owner: Owner,
    route: Route,
    state: Mutex<State>,
    /// Chains under way, read without the lock.
    under_way: AtomicUsize,
}

struct State {
    /// `None` once it has ended.
    pair_opt: Option<QueuePair>,
    posted: VecDeque<Posted>,
    posted_bytes: u64,
    /// Requests of pieces for which the send queue had no room.
    leftovers: VecDeque<Leftover>,
    failure_opt: Option<TransportError>,
    /// What failed, until the queue pair has ended.
    failed: Vec<(Posted, TransportError)>,
    /// When a chain was last posted to an idle queue pair or came back, or the queue pair failed.
    progressed: Instant,
    // Reused.
    finished: Vec<Finished>,
    messages: Vec<[u8; 16]>,
}

/// A chain; [`Status::piece_done`] is owed.
struct Posted {
    chain: u64,
    bytes: u64,
    status: Arc<Status>,
    /// `None` of a notification.
    job_opt: Option<Arc<Job>>,
}

/// [`Status::piece_done`] is owed for the rest together.
struct Leftover {
    lane: Lane,
    requests: Vec<Request>,
    job: Arc<Job>,
    status: Arc<Status>,
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
struct News {
    done: Vec<Posted>,
    failed: Vec<(Posted, TransportError)>,
    notifications: Vec<Notification>,
    ended_opt: Option<TransportError>,
    /// As in [`Ended`].
    pair_opt: Option<QueuePair>,
    progressed: bool,
}

impl Endpoint {
    pub(crate) fn new(
        rail: &Arc<Rail>,
        poller: &Arc<Poller>,
        pair: QueuePair,
        owner: Owner,
        route: Route,
    ) -> Arc<Self> {
        Arc::new(Self {
            rail: Arc::clone(rail),
            poller: Arc::clone(poller),
            owner,
            route,
            state: Mutex::new(State {
                pair_opt: Some(pair),
                posted: VecDeque::new(),
                posted_bytes: 0,
                leftovers: VecDeque::new(),
                failure_opt: None,
                failed: Vec::new(),
                progressed: Instant::now(),
                finished: Vec::new(),
                messages: Vec::new(),
            }),
            under_way: AtomicUsize::new(0),
        })
    }

    pub(crate) fn rail(&self) -> &Arc<Rail> {
        &self.rail
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of its queue pair, until it has ended.
    pub(crate) fn queue_pair_number(&self) -> Option<u32> {
        self.lock().pair_opt.as_ref().map(QueuePair::number)
    }

    /// Whether completions are awaited.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way.load(Ordering::Acquire) > 0
    }

    /// Whether another piece may be posted.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.lock();
        let free = state.pair_opt.as_ref().map_or(0, QueuePair::free_sends);
        state.failure_opt.is_none()
            && state.leftovers.is_empty()
            && free > 0
            && state.posted_bytes < MOST_BYTES
    }

    /// Posts a piece; [`Status::piece_done`] is owed for it from here on.
    pub(crate) fn post(
        &self,
        lane: Lane,
        requests: Vec<Request>,
        job: Arc<Job>,
        status: Arc<Status>,
    ) {
        let mut state = self.lock();
        if let Some(error) = state.failure_opt.clone() {
            drop(state);
            drop((lane, job));
            return status.piece_done(Err(error));
        }
        state.leftovers.push_back(Leftover {
            lane,
            requests,
            job,
            status,
        });
        self.work_off(state);
    }

    /// Tells the peer that what was posted before is in place.
    pub(crate) fn notify(&self, notification: Notification, status: Arc<Status>) {
        let mut state = self.lock();
        if let Some(error) = state.failure_opt.clone() {
            drop(state);
            return status.piece_done(Err(error));
        }
        let sent = match state.pair_opt.as_mut() {
            Some(pair) => pair.send_message(&notification.pack()),
            None => Err(TransportError::closed_session()),
        };
        match sent {
            Ok(chain) => {
                self.note(
                    &mut state,
                    Posted {
                        chain,
                        bytes: 0,
                        status,
                        job_opt: None,
                    },
                );
                drop(state);
                self.poller.posted();
            }
            Err(error) => {
                drop(state);
                status.piece_done(Err(error));
            }
        }
    }

    fn note(&self, state: &mut State, posted: Posted) {
        if state.posted.is_empty() {
            state.progressed = Instant::now();
        }
        state.posted_bytes += posted.bytes;
        state.posted.push_back(posted);
        self.under_way.fetch_add(1, Ordering::AcqRel);
    }

    /// Posts what was left over for as long as there is room.
    fn work_off(&self, mut state: MutexGuard<'_, State>) {
        let mut ended = Vec::new();
        while let Some(mut leftover) = state.leftovers.pop_front() {
            if leftover.status.is_stopping() {
                ended.push((leftover, Ok(())));
                continue;
            }
            let Some(pair) = state.pair_opt.as_mut() else {
                ended.push((leftover, Err(TransportError::closed_session())));
                continue;
            };
            if pair.free_sends() < leftover.lane.least_sends() {
                state.leftovers.push_front(leftover);
                break;
            }
            match leftover.lane.post(pair, &leftover.requests) {
                Ok((chain, taken, bytes)) => {
                    let rest = leftover.requests.split_off(taken);
                    self.rail.count_bytes(bytes);
                    let posted = Posted {
                        chain,
                        bytes,
                        status: Arc::clone(&leftover.status),
                        job_opt: Some(Arc::clone(&leftover.job)),
                    };
                    self.note(&mut state, posted);
                    if rest.is_empty() || !leftover.status.take_piece() {
                        continue;
                    }
                    leftover.requests = rest;
                    state.leftovers.push_front(leftover);
                }
                Err(error) if error.is_quiesced() => ended.push((leftover, Err(error))),
                Err(error) => {
                    // A part of it is with the device, which nobody hears of before it is stopped.
                    let chain = u64::MAX;
                    let posted = Posted {
                        chain,
                        bytes: 0,
                        status: leftover.status,
                        job_opt: Some(leftover.job),
                    };
                    self.note(&mut state, posted);
                    drop(state);
                    self.fail(&error.with_proof());
                    return;
                }
            }
        }
        drop(state);
        self.poller.posted();
        for (leftover, result) in ended {
            let status = Arc::clone(&leftover.status);
            drop(leftover);
            status.piece_done(result);
        }
    }

    /// An event came: takes completions, and asks for the next event.
    pub(crate) fn process(&self) {
        self.take_completions(true);
    }

    /// Looks for completions without one; whether there were any.
    pub(crate) fn process_polled(&self) -> bool {
        self.take_completions(false)
    }

    fn take_completions(&self, arms: bool) -> bool {
        let mut news = News::default();
        let mut state = self.lock();
        let Some(pair) = state.pair_opt.as_mut() else {
            return false;
        };
        // Armed before polling: what comes after the last poll makes an event.
        let mut outcome = if arms { pair.arm() } else { Ok(()) };
        let (mut finished, mut messages) = (
            std::mem::take(&mut state.finished),
            std::mem::take(&mut state.messages),
        );
        while outcome.is_ok() {
            let Some(pair) = state.pair_opt.as_mut() else {
                break;
            };
            match pair.poll(&mut finished, &mut messages) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => outcome = Err(error),
            }
        }
        for each in finished.drain(..) {
            self.settle(&mut state, &each, &mut news);
        }
        let told = messages.drain(..).map(Notification::unpack);
        news.notifications.extend(told);
        (state.finished, state.messages) = (finished, messages);
        if let Err(error) = outcome {
            self.begin_to_fail(&mut state, error);
        }
        self.end_if_drained(&mut state, &mut news);
        match state.leftovers.is_empty() || state.failure_opt.is_some() {
            true => drop(state),
            false => self.work_off(state),
        }
        let came = news.progressed || !news.notifications.is_empty();
        self.tell(news);
        came
    }

    fn settle(&self, state: &mut State, finished: &Finished, news: &mut News) {
        let is_next = state
            .posted
            .front()
            .is_some_and(|posted| posted.chain == finished.chain);
        let Some(posted) = is_next.then(|| state.posted.pop_front()).flatten() else {
            return;
        };
        state.posted_bytes -= posted.bytes;
        state.progressed = Instant::now();
        self.under_way.fetch_sub(1, Ordering::AcqRel);
        news.progressed = true;
        if finished.status.is_success() {
            news.done.push(posted);
            return;
        }
        let error = match &state.failure_opt {
            // Flushed because of the first failure, whose text says more.
            Some(first) if finished.status == CompletionStatus::FLUSHED => first.clone(),
            _ => self.failure(state, finished),
        };
        self.begin_to_fail(state, error.clone());
        state.failed.push((posted, error));
    }

    fn failure(&self, state: &State, finished: &Finished) -> TransportError {
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
    fn begin_to_fail(&self, state: &mut State, error: TransportError) {
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

    fn end_if_drained(&self, state: &mut State, news: &mut News) {
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

    fn tell(&self, news: News) {
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

    /// Whether it is the end of a queue pair that a peer opened.
    pub(crate) const fn is_accepted(&self) -> bool {
        matches!(self.owner, Owner::Accepted { .. })
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
    fn expect_nothing(&mut self) {
        for posted in &mut self.posted {
            posted.chain = u64::MAX;
        }
    }
}

impl Posted {
    /// Whether packets of it that are under way can change the peer's memory.
    fn wrote(&self) -> bool {
        let direction = self.job_opt.as_ref().map(|job| job.direction);
        direction == Some(Direction::Write)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        drop(state.pair_opt.take());
        let error = state
            .failure_opt
            .take()
            .unwrap_or_else(TransportError::closed_session)
            .without_proof();
        let failed = std::mem::take(&mut state.failed).into_iter();
        let posted = std::mem::take(&mut state.posted).into_iter();
        for posted in failed.map(|(posted, _)| posted).chain(posted) {
            drop(posted.job_opt);
            posted.status.piece_done(Err(error.clone()));
        }
        for leftover in std::mem::take(&mut state.leftovers) {
            drop(leftover.job);
            leftover.status.piece_done(Err(error.clone()));
        }
    }
}

/// Which way a piece's ranges lie.
pub(crate) fn requests_of(job: &Job, piece: &Piece) -> Vec<Request> {
    let request = |range: &crate::transport::queue::PieceRange| {
        let (local, remote) = match job.direction {
            Direction::Write => (range.src, range.dst),
            Direction::Read => (range.dst, range.src),
        };
        Request {
            pair: range.pair,
            local,
            remote,
            bytes: range.len,
        }
    };
    piece.ranges.iter().map(request).collect()
}
