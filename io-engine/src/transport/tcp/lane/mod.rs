//! One connection of a session: pieces out, answers in.
//!
//! A lane's thread waits for answers and for batches at once. It takes pieces from the session's
//! queue and keeps some of them unanswered. When a lane is idle, a very small batch is sent by
//! whoever submits it, which saves waking the thread on its way out.

mod staged;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use self::staged::{Ahead, Landing};
use crate::device::staging::DEPTH;
use crate::error::{TransportError, TransportErrorKind};
use crate::region::RegionKey;
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::sync::SleepFlag;
use crate::sys::{self, Interest, IoVec, io_vec};
use crate::transport::queue::{PIECE_BYTES, PieceRange, Taken};
use crate::transport::tcp::vectored::{receive_all, send_all};
use crate::transport::tcp::wire::{self, ANSWER_BYTES, AnswerCode, Group, RequestHeader};
use crate::transport::{BatchQueue, Piece};

/// Pieces that a lane has asked for before it waits for the oldest one's answer.
const UNANSWERED_PIECES: usize = 64;
/// Their bytes, all but the last piece's.
const UNANSWERED_BYTES: u64 = 1 << 20;

/// A batch of at most so many bytes and ranges is sent by the thread that submits it, if a lane is
/// idle: it fits a socket's buffer, so sending it does not block.
const HERE: (u64, u64) = (16 << 10, 16);
/// The same for a thread that waits for the end anyway.
const HERE_IF_WAITED_FOR: (u64, u64) = (128 << 10, 64);

/// What the lanes of a session share.
pub(crate) struct Lanes {
    pub queue: BatchQueue<()>,
    lanes: Vec<Lane>,
    peer: SocketAddr,
    stall_timeout: Duration,
    next_lane: AtomicUsize,
}

struct Lane {
    stream: TcpStream,
    /// Wakes the thread when there are batches.
    wake: File,
    /// Whether the thread waits, so that it has to be woken.
    is_waiting: SleepFlag,
    state: Mutex<LaneState>,
}

#[derive(Default)]
struct LaneState {
    unanswered: VecDeque<Unanswered>,
    unanswered_bytes: u64,
    /// Pieces that have come and are on their way into device memory, oldest first.
    landing: VecDeque<Landing>,
    /// When the last answer came.
    answered_opt: Option<Instant>,
    next: u64,
    /// Whether the lane has ended, so that nothing may be sent any more.
    is_over: bool,
    // Reused from piece to piece.
    header: Vec<u8>,
    vectors: Vectors,
}

/// A piece that the peer has not answered.
struct Unanswered {
    id: u64,
    asked: Instant,
    status: Arc<Status>,
    /// Keeps the local regions until the peer has everything, or this side has.
    job: Arc<Job>,
    bytes: u64,
    /// Of a read: where its payload goes.
    ranges: Vec<PieceRange>,
}

/// Addresses for one call. They are only valid during the call that they were made for.
#[derive(Default)]
struct Vectors(Vec<IoVec>);

// SAFETY: the addresses are never dereferenced except by the call that they were just made for, on
// the same thread; between calls they are numbers in a buffer that is kept for its capacity.
unsafe impl Send for Vectors {}

impl LaneState {
    /// For how long the peer may still take to answer; `None` when it owes nothing.
    fn time_left(&self, stall_timeout: Duration) -> Option<Duration> {
        let oldest = self.unanswered.front()?;
        let since = self
            .answered_opt
            .map_or(oldest.asked, |answered| answered.max(oldest.asked));
        Some(stall_timeout.saturating_sub(since.elapsed()))
    }
}

impl Lanes {
    /// Starts a thread for each stream. All end when the queue is closed.
    pub(crate) fn start(
        streams: Vec<TcpStream>,
        peer: SocketAddr,
        stall_timeout: Duration,
    ) -> io::Result<Arc<Self>> {
        let lane = |stream| {
            Ok(Lane {
                stream,
                wake: sys::event()?,
                is_waiting: SleepFlag::new(),
                state: Mutex::default(),
            })
        };
        let lanes = Arc::new(Self {
            queue: BatchQueue::default(),
            lanes: streams
                .into_iter()
                .map(lane)
                .collect::<io::Result<Vec<_>>>()?,
            peer,
            stall_timeout,
            next_lane: AtomicUsize::new(0),
        });
        for place in 0..lanes.lanes.len() {
            let own = Arc::clone(&lanes);
            let spawned = std::thread::Builder::new()
                .name("ferry-lane".to_owned())
                .spawn(move || own.run(place));
            if let Err(error) = spawned {
                lanes.fail(&TransportError::io("starting a thread", &error));
                return Err(error);
            }
        }
        Ok(lanes)
    }

    /// Sends a very small batch at once if a lane is idle, and queues every other. A caller that
    /// waits for the end reads the answer itself, so that no other thread has to wake up.
    pub(crate) fn submit(&self, job: Job, status: Arc<Status>) {
        let idle_opt = is_very_small(&job).then(|| self.idle_lane()).flatten();
        let Some((lane, mut state)) = idle_opt else {
            self.queue.push(job, status, (), PIECE_BYTES);
            return self.lanes.iter().for_each(Lane::wake_if_waiting);
        };
        let waits_until_opt = job.waits_until_opt;
        let sent = self.queue.run_here(job, &status, |job, status, piece| {
            lane.ask(&mut state, Arc::clone(job), Arc::clone(status), piece, None)
        });
        let exchanged = match (sent, waits_until_opt) {
            (Ok(()), Some(deadline)) => self.read_answers(lane, &mut state, deadline),
            (sent, _) => sent,
        };
        let is_owed = !state.unanswered.is_empty();
        drop(state);
        match exchanged {
            // The lane's thread goes on waiting.
            Ok(()) if is_owed => lane.wake_if_waiting(),
            Ok(()) => {}
            Err(error) => self.fail(&self.broken(&error)),
        }
    }

    /// Reads answers until none is owed, or time is up.
    fn read_answers(
        &self,
        lane: &Lane,
        state: &mut LaneState,
        deadline: Instant,
    ) -> io::Result<()> {
        while !state.unanswered.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let fds = [lane.stream.as_fd()];
            match sys::wait_readable(fds, Some(left.min(self.stall_timeout)))? {
                [true] => self.read_answer(lane, state)?,
                [false] => break,
            }
        }
        Ok(())
    }

    /// Whether every stream is open, without sending.
    pub(crate) fn are_connected(&self) -> bool {
        let mut streams = self.lanes.iter().map(|lane| lane.stream.as_fd());
        streams.all(sys::is_connected)
    }

    /// Ends the session for all lanes.
    pub(crate) fn fail(&self, error: &TransportError) {
        self.queue.close(error);
        for lane in &self.lanes {
            // Already closed by the peer, perhaps; what matters is that nobody waits on it.
            let _ = lane.stream.shutdown(Shutdown::Both);
            lane.wake();
        }
    }

    fn broken(&self, error: &io::Error) -> TransportError {
        let is_stalled = matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        );
        if is_stalled {
            return TransportError::unproved(
                TransportErrorKind::Timeout,
                format!(
                    "tcp to {}: the peer took and answered nothing for {:?}",
                    self.peer, self.stall_timeout
                ),
            );
        }
        TransportError::io(format!("tcp to {}", self.peer), error).without_proof()
    }

    /// A lane that owes and is owed nothing.
    fn idle_lane(&self) -> Option<(&Lane, MutexGuard<'_, LaneState>)> {
        let first = self.next_lane.fetch_add(1, Ordering::Relaxed);
        let places = (0..self.lanes.len()).map(|step| (first + step) % self.lanes.len());
        places
            .filter_map(|place| self.lanes.get(place))
            .find_map(|lane| {
                let state = match lane.state.try_lock() {
                    Ok(state) => state,
                    Err(TryLockError::Poisoned(state)) => state.into_inner(),
                    Err(TryLockError::WouldBlock) => return None,
                };
                let is_idle = state.unanswered.is_empty() && !state.is_over;
                is_idle.then_some((lane, state))
            })
    }

    fn run(&self, place: usize) {
        let Some(lane) = self.lanes.get(place) else {
            return;
        };
        // Also after a panic.
        let _end = EndOfLane { lanes: self, lane };
        let mut piece = Piece::default();
        let mut ahead = Ahead {
            lanes: self,
            pieces: VecDeque::new(),
        };
        loop {
            if ahead.pieces.len() >= DEPTH {
                if let Err(error) = self.send_oldest(lane, &mut ahead) {
                    self.fail(&self.broken(&error));
                    break;
                }
                continue;
            }
            let turned = match self.queue.take(&mut piece, Some(Duration::ZERO)) {
                Taken::Closed => break,
                Taken::Nothing if !ahead.pieces.is_empty() => self.send_oldest(lane, &mut ahead),
                Taken::Nothing => self.wait(lane),
                Taken::Piece {
                    job,
                    status,
                    work: (),
                } if job.is_local_on_device && job.direction == Direction::Write => {
                    self.stage(lane, &mut ahead, job, status, &mut piece)
                }
                Taken::Piece {
                    job,
                    status,
                    work: (),
                } => self.send(lane, job, status, &piece, None),
            };
            if let Err(error) = turned {
                self.fail(&self.broken(&error));
                break;
            }
        }
    }

    /// Sends a piece, and reads answers if too many are owed.
    fn send(
        &self,
        lane: &Lane,
        job: Arc<Job>,
        status: Arc<Status>,
        piece: &Piece,
        payload_opt: Option<(u64, u64)>,
    ) -> io::Result<()> {
        let mut state = lane.lock();
        lane.ask(&mut state, job, status, piece, payload_opt)?;
        while state.unanswered.len() > UNANSWERED_PIECES
            || state.unanswered_bytes > UNANSWERED_BYTES
        {
            self.read_answer(lane, &mut state)?;
        }
        Ok(())
    }

    /// Waits for an answer, for batches, or for the peer's end.
    fn wait(&self, lane: &Lane) -> io::Result<()> {
        lane.is_waiting.raise();
        // A batch that came before the flag was up woke nobody.
        let state = lane.lock();
        let is_landing = !state.landing.is_empty();
        let time_left_opt = state.time_left(self.stall_timeout);
        drop(state);
        let (interest, timeout_opt) = match time_left_opt {
            // What has come goes on to its device while more comes.
            _ if is_landing => (Interest::Readable, Some(Duration::ZERO)),
            _ if self.queue.has_work() => (Interest::Ended, Some(Duration::ZERO)),
            Some(left) => (Interest::Readable, Some(left)),
            // Whoever makes the peer owe an answer reads it, or wakes this thread.
            None => (Interest::Ended, None),
        };
        let fds = [
            (lane.stream.as_fd(), interest),
            (lane.wake.as_fd(), Interest::Readable),
        ];
        let ready = sys::wait_for(fds, timeout_opt);
        lane.is_waiting.lower();
        let [is_ready, is_woken] = ready?;
        if is_woken {
            // Takes the count back to zero; what it was does not matter.
            let _ = (&lane.wake).read(&mut [0; 8]);
        }
        let mut state = lane.lock();
        // The end of the stream is for the next turn, when all that came has landed.
        if is_ready && !(is_landing && state.unanswered.is_empty()) {
            return self.read_answer(lane, &mut state);
        }
        if is_landing {
            state.finish_landing();
            return Ok(());
        }
        match state.time_left(self.stall_timeout) {
            Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Reads the oldest piece's answer, and a read's payload.
    fn read_answer(&self, lane: &Lane, state: &mut LaneState) -> io::Result<()> {
        let mut fixed = [0; ANSWER_BYTES];
        (&lane.stream).read_exact(&mut fixed)?;
        let (id, code, text_len) = wire::parse_answer(&fixed)?;
        let mut text = vec![0; text_len];
        (&lane.stream).read_exact(&mut text)?;
        let Some(oldest) = state.unanswered.front() else {
            return Err(io::Error::other("an answer that nothing asked for"));
        };
        if oldest.id != id {
            return Err(io::Error::other("answers came out of order"));
        }
        let text = String::from_utf8_lossy(&text);
        let refused = |kind| {
            let message = format!("{} refused a request: {text}", self.peer);
            Err(TransportError::quiesced(kind, message))
        };
        let result = match code {
            AnswerCode::Done => Ok(()),
            AnswerCode::NotRegistered => refused(TransportErrorKind::NotRegistered),
            AnswerCode::BadKey => refused(TransportErrorKind::BadKey),
            AnswerCode::OutOfBounds => refused(TransportErrorKind::OutOfBounds),
            AnswerCode::DeviceFailed => refused(TransportErrorKind::Device),
            AnswerCode::Unknown(_) => {
                refused(TransportErrorKind::Protocol).map_err(TransportError::without_proof)
            }
        };
        let is_read = result.is_ok() && oldest.job.direction == Direction::Read;
        if is_read && oldest.job.is_local_on_device {
            return self.receive_for_device(lane, state);
        }
        if is_read {
            let vectors = &mut state.vectors.0;
            vectors.clear();
            for range in &oldest.ranges {
                let Some(pair) = oldest.job.pairs.get(range.pair) else {
                    continue;
                };
                let address = pair.local.address(range.dst, range.len);
                vectors.push(io_vec(address.map_err(io::Error::other)? as u64, range.len));
            }
            let deadline = Instant::now() + self.stall_timeout;
            // SAFETY: the ranges were just made from checked addresses of regions that the job
            // keeps mapped; no reference to pool memory is ever made.
            unsafe { receive_all(&lane.stream, vectors, deadline)? };
        }
        let Some(oldest) = state.unanswered.pop_front() else {
            return Ok(());
        };
        state.unanswered_bytes -= oldest.bytes;
        state.answered_opt = Some(Instant::now());
        let Unanswered { status, job, .. } = oldest;
        // What the batch holds is let go before anybody who waits for its end goes on.
        drop(job);
        status.piece_done(result);
        Ok(())
    }
}

impl Lane {
    fn lock(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread has been woken.
        let _ = (&self.wake).write_all(&1u64.to_ne_bytes());
    }

    fn wake_if_waiting(&self) {
        if self.is_waiting.is_up() {
            self.wake();
        }
    }

    /// Sends a piece, which the peer owes an answer for from now on.
    fn ask(
        &self,
        state: &mut LaneState,
        job: Arc<Job>,
        status: Arc<Status>,
        piece: &Piece,
        payload_opt: Option<(u64, u64)>,
    ) -> io::Result<()> {
        let id = state.next;
        state.next += 1;
        state.unanswered_bytes += piece.bytes;
        // Owed whatever happens while it is sent.
        state.unanswered.push_back(Unanswered {
            id,
            asked: Instant::now(),
            status,
            job: Arc::clone(&job),
            bytes: piece.bytes,
            ranges: match job.direction {
                Direction::Write => Vec::new(),
                Direction::Read => piece.ranges.clone(),
            },
        });
        let is_write = job.direction == Direction::Write;
        let groups = piece
            .ranges
            .chunk_by(|one, next| one.pair == next.pair)
            .filter_map(|ranges| Some((job.pairs.get(ranges.first()?.pair)?, ranges)));
        let header = &mut state.header;
        header.clear();
        let fixed = RequestHeader {
            direction: job.direction,
            piece: id,
            groups: groups.clone().count() as u32,
            ranges: piece.ranges.len() as u32,
            payload: piece.bytes,
        };
        fixed.put(header);
        for (pair, ranges) in groups.clone() {
            let group = Group {
                region: pair.remote.id,
                // `submit` refused pairs without a key.
                key: pair.remote.shown_key().unwrap_or(RegionKey([0; 16])),
                ranges: ranges.len() as u32,
            };
            group.put(header);
        }
        for range in &piece.ranges {
            let offset = if is_write { range.dst } else { range.src };
            wire::put_range(header, offset, range.len);
        }
        let vectors = &mut state.vectors.0;
        vectors.clear();
        vectors.push(io_vec(header.as_ptr() as u64, header.len() as u64));
        if let Some((address, bytes)) = payload_opt {
            vectors.push(io_vec(address, bytes));
        } else if is_write {
            for (pair, ranges) in groups {
                for range in ranges {
                    let address = pair.local.address(range.src, range.len);
                    let address = address.map_err(io::Error::other)?;
                    vectors.push(io_vec(address as u64, range.len));
                }
            }
        }
        // SAFETY: the first range is the header; the others were just made from checked addresses
        // of regions that the job keeps mapped, or are a filled buffer that the caller keeps.
        unsafe { send_all(&self.stream, vectors) }
    }
}

/// A session without one of its lanes is dead, and what the peer has not answered may still land.
struct EndOfLane<'a> {
    lanes: &'a Lanes,
    lane: &'a Lane,
}

impl Drop for EndOfLane<'_> {
    fn drop(&mut self) {
        self.lanes.fail(&TransportError::unproved(
            TransportErrorKind::Io,
            format!("a lane to {} ended", self.lanes.peer),
        ));
        let mut state = self.lane.lock();
        state.is_over = true;
        while !state.landing.is_empty() {
            state.finish_landing();
        }
        let unanswered = std::mem::take(&mut state.unanswered);
        drop(state);
        let Some(first_cause) = self.lanes.queue.closed_reason() else {
            return;
        };
        // Nobody sends from it any more; what was sent may still land.
        let lost = first_cause.without_proof().with_free_source();
        for unanswered in unanswered {
            unanswered.status.piece_done(Err(lost.clone()));
        }
    }
}

fn is_very_small(job: &Job) -> bool {
    // A device's copies are waited for, and whoever submits must not be.
    if job.is_local_on_device {
        return false;
    }
    let (most_bytes, most_ranges) = match job.waits_until_opt {
        Some(_) => HERE_IF_WAITED_FOR,
        None => HERE,
    };
    job.bytes <= most_bytes && job.ranges <= most_ranges
}
