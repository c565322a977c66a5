//! Rooms that an engine's loop looks at: what it wants done is noted, and what has become of a room
//! is known here without asking the rank. No call but `wait` waits.
//!
//! A scheduler of Python polls every request in every turn. A question to the rank would cost it two
//! changes of thread; a look at a number costs nothing.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use transfer_actor::api::{Announce, Chunk, OpenRoom, RoomStatus, RoomView};
use transfer_actor::error::ApiError;
use transfer_actor::rank::RankHandle;

use crate::rank::{indices, indices_of_states, seconds, view};
use crate::runtime::SIGNAL_INTERVAL;

/// A follower asks again after this time; it is told of every change before.
const FOLLOW: Duration = Duration::from_secs(300);

/// What an engine wants done with a room. As many wait as the engine has asked for and the rank's
/// thread has not come to.
enum Command {
    Open(OpenRoom),
    Announce(Announce),
    Send(Chunk),
    Complete,
    Abort(Option<String>),
    /// Finds out whether the pages of an aborted room may be used again.
    Look,
    Clear,
}

type Commands = UnboundedSender<(Command, Arc<Followed>)>;

/// The rooms of a rank that are followed.
pub(super) struct Rooms(Commands);

impl Rooms {
    /// Does what is wanted on the rank's own thread, in order.
    pub(super) fn start(rank: &RankHandle) -> Self {
        let (commands, wanted) = unbounded_channel();
        // False when the rank has ended, which every command finds out then.
        rank.spawn(serve(rank.clone(), wanted));
        Self(commands)
    }

    pub(super) fn open(&self, open: OpenRoom) -> Room {
        let followed = Arc::new(Followed {
            number: open.room,
            status: AtomicU8::new(number(RoomStatus::Bootstrapping)),
            facts: Mutex::default(),
            changed: Condvar::new(),
        });
        let room = Room {
            commands: self.0.clone(),
            followed,
        };
        room.want(Command::Open(open));
        room
    }
}

async fn serve(rank: RankHandle, mut wanted: UnboundedReceiver<(Command, Arc<Followed>)>) {
    while let Some((command, room)) = wanted.recv().await {
        match command {
            Command::Open(open) => match rank.open(open).await {
                Ok(view) => {
                    room.learn(&view);
                    actix_rt::spawn(follow(rank.clone(), view.generation, room));
                }
                Err(error) => room.refuse(&error.to_string()),
            },
            // Its status says so already; the rank may have another room of this number.
            _ if room.is_refused() => {}
            Command::Clear => {
                if let Err(error) = rank.clear(room.number).await {
                    tracing::debug!(%error, "a room that was to be cleared is gone");
                }
            }
            command => {
                if let Err(error) = obey(&rank, command, &room).await {
                    give_up(&rank, &room, &error).await;
                }
            }
        }
    }
}

async fn obey(rank: &RankHandle, command: Command, room: &Followed) -> Result<(), ApiError> {
    let number = room.number;
    let view = match command {
        Command::Announce(announce) => rank.announce(number, announce).await?,
        Command::Send(chunk) => rank.send_chunk(number, chunk).await?,
        Command::Complete => rank.prefill_complete(number).await?,
        Command::Abort(reason_opt) => rank.abort(number, reason_opt).await?,
        Command::Look | Command::Open(_) | Command::Clear => {
            rank.wait(number, None, Duration::ZERO).await?
        }
    };
    room.learn(&view);
    Ok(())
}

/// What could not be done fails the room, unless it has failed already, at both ends.
async fn give_up(rank: &RankHandle, room: &Followed, error: &ApiError) {
    let seen = rank.wait(room.number, None, Duration::ZERO).await;
    let view = match seen {
        Ok(view) if view.status == RoomStatus::Failed => Ok(view),
        Ok(_) => rank.abort(room.number, Some(error.to_string())).await,
        Err(gone) => Err(gone),
    };
    match view {
        Ok(view) => room.learn(&view),
        Err(_) => room.refuse(&error.to_string()),
    }
}

/// Learns every status of one use of a room until its end.
async fn follow(rank: RankHandle, generation: u64, room: Arc<Followed>) {
    let mut seen = RoomStatus::Bootstrapping;
    loop {
        let next = match seen {
            RoomStatus::Bootstrapping => RoomStatus::WaitingForInput,
            RoomStatus::WaitingForInput => RoomStatus::Transferring,
            RoomStatus::Transferring => RoomStatus::Success,
            RoomStatus::Success | RoomStatus::Failed => return,
        };
        match rank.wait(room.number, Some(next), FOLLOW).await {
            Ok(view) if view.generation == generation => {
                seen = view.status;
                room.learn(&view);
            }
            // It is cleared, and perhaps in use again.
            Ok(_) => return,
            Err(error) => return room.refuse(&error.to_string()),
        }
    }
}

#[derive(Default)]
struct Facts {
    reason_opt: Option<String>,
    decode_prefix_len_opt: Option<u64>,
    is_release_safe: bool,
    /// The rank does not have it.
    is_refused: bool,
    is_cleared: bool,
}

/// What is known of a room.
struct Followed {
    number: u64,
    status: AtomicU8,
    facts: Mutex<Facts>,
    changed: Condvar,
}

const fn number(status: RoomStatus) -> u8 {
    status as u8
}

impl Followed {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status(&self) -> u8 {
        self.status.load(Ordering::Acquire)
    }

    fn is_refused(&self) -> bool {
        self.facts().is_refused
    }

    fn learn(&self, view: &RoomView) {
        let mut facts = self.facts();
        if facts.is_cleared {
            return;
        }
        facts.reason_opt.clone_from(&view.reason);
        facts.decode_prefix_len_opt = view.decode_prefix_len;
        facts.is_release_safe = view.release_safe;
        self.status.store(number(view.status), Ordering::Release);
        drop(facts);
        self.changed.notify_all();
    }

    /// The rank does not have the room.
    fn refuse(&self, reason: &str) {
        let mut facts = self.facts();
        // Of a cleared room that is no failure.
        if facts.is_cleared {
            return;
        }
        facts.is_refused = true;
        let failed = number(RoomStatus::Failed);
        if self.status.swap(failed, Ordering::AcqRel) != failed {
            facts.reason_opt = Some(reason.to_owned());
        }
        drop(facts);
        self.changed.notify_all();
    }

    /// The status once it is at least this one or an end, or when the time is over.
    fn wait(&self, wanted: u8, until: Instant) -> u8 {
        let mut facts = self.facts();
        loop {
            let status = self.status();
            let is_over = status >= wanted || status == number(RoomStatus::Failed);
            let left = until.saturating_duration_since(Instant::now());
            if is_over || left.is_zero() {
                return status;
            }
            let waited = self.changed.wait_timeout(facts, left);
            facts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A room that is followed. What is asked of it is done in order, soon; what could not be done fails
/// the room. It is cleared with `clear`, or when nobody holds it any more.
#[pyclass(module = "ferry", frozen)]
pub(crate) struct Room {
    commands: Commands,
    followed: Arc<Followed>,
}

impl Room {
    fn want(&self, command: Command) {
        if self
            .commands
            .send((command, Arc::clone(&self.followed)))
            .is_err()
        {
            self.followed.refuse("the rank has ended");
        }
    }
}

#[pymethods]
impl Room {
    /// The room's number.
    #[getter]
    fn room(&self) -> u64 {
        self.followed.number
    }

    /// The number of its status, as it is now.
    #[getter]
    fn status(&self) -> u8 {
        self.followed.status()
    }

    /// Why it failed; `None` if it did not.
    #[getter]
    fn reason(&self) -> Option<String> {
        self.followed.facts().reason_opt.clone()
    }

    /// Tokens that the decode holds already, once it has announced them (prefill).
    #[getter]
    fn decode_prefix_len(&self) -> Option<u64> {
        self.followed.facts().decode_prefix_len_opt
    }

    /// Whether every prefill rank has proved that its writes have stopped, after an abort, as far as
    /// was known at the last call (decode).
    fn is_release_safe(&self) -> bool {
        let is_safe = self.followed.facts().is_release_safe;
        if !is_safe {
            self.want(Command::Look);
        }
        is_safe
    }

    /// Says where its state must land (decode).
    fn announce(
        &self,
        kv_indices: &Bound<'_, PyAny>,
        aux_index: Option<u32>,
        state_indices: Vec<Option<Bound<'_, PyAny>>>,
        decode_prefix_len: Option<u64>,
    ) -> PyResult<()> {
        self.want(Command::Announce(Announce {
            kv_indices: indices(kv_indices)?,
            aux_index,
            state_indices: indices_of_states(state_indices)?,
            decode_prefix_len,
        }));
        Ok(())
    }

    /// Hands over its next pages (prefill).
    fn send_chunk(
        &self,
        kv_indices: &Bound<'_, PyAny>,
        aux_index: Option<u32>,
        state_indices: Vec<Option<Bound<'_, PyAny>>>,
        num_kv_tokens: Option<u64>,
        last: bool,
    ) -> PyResult<()> {
        self.want(Command::Send(Chunk {
            kv_indices: indices(kv_indices)?,
            state_indices: indices_of_states(state_indices)?,
            num_kv_tokens,
            aux_index,
            last,
        }));
        Ok(())
    }

    /// Says that its prefill is complete.
    fn prefill_complete(&self) {
        self.want(Command::Complete);
    }

    /// Gives it up.
    fn abort(&self, reason: Option<String>) {
        self.want(Command::Abort(reason));
    }

    /// Forgets it. What was known of it stays.
    fn clear(&self) {
        let was_cleared = std::mem::replace(&mut self.followed.facts().is_cleared, true);
        if !was_cleared {
            self.want(Command::Clear);
        }
    }

    /// The number of its status once that is at least this one or an end, or when the time is over.
    fn wait(&self, py: Python<'_>, status: u8, timeout_s: f64) -> PyResult<u8> {
        view::status_of(status)?;
        let deadline = Instant::now() + seconds(timeout_s)?;
        loop {
            let slice = deadline.min(Instant::now() + SIGNAL_INTERVAL);
            let seen = py.detach(|| self.followed.wait(status, slice));
            let is_over = seen >= status || seen == number(RoomStatus::Failed);
            if is_over || Instant::now() >= deadline {
                return Ok(seen);
            }
            py.check_signals()?;
        }
    }

    fn __repr__(&self) -> String {
        format!("<Room {} of status {}>", self.room(), self.status())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.clear();
    }
}
