//! One queue pair at work: pieces of batches posted as chains, and what becomes of them.
//!
//! A failed queue pair is stopped and drained, or destroyed if it does not drain: then this side
//! sends nothing more, and nothing comes in. Packets of its writes can still be in the network, so
//! whoever wrote is told only when the session has heard from the peer that its end is destroyed
//! ([`ended::Owed`]).

mod ended;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

pub(crate) use self::ended::Ended;
use self::ended::{Leftover, News};
use crate::error::TransportError;
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

    /// Whether it is the end of a queue pair that a peer opened.
    pub(crate) const fn is_accepted(&self) -> bool {
        matches!(self.owner, Owner::Accepted { .. })
    }
}

impl State {}

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
