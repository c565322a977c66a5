//! The side that writes: proves the peer, learns its regions, and lets them go when told to.

mod proof;
mod table;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_bytes::ByteBuf;

pub(crate) use self::proof::prove;
use self::proof::{connect_within, prove_reach};
use self::table::{Known, MappedPool, Place};
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::AnyMemory;
use crate::region::TAG_MAGIC;
use crate::session::Job;
use crate::status::Status;
use crate::sys;
use crate::transport::same_host::{
    MAX_TO_WRITER_BYTES, ToOwner, ToWriter, Way, is_meant, receive, receive_with, send,
};

/// Begins a batch whose regions are known.
pub(crate) type Begin = Box<dyn Fn(Admitted, Job, Arc<Status>) + Send + Sync>;

/// A proven peer: its process and its regions. A thread of its own talks to it and notices its
/// end; whoever submits never waits for it.
pub(crate) struct Link {
    /// 0 when the peer is in another pid namespace.
    pid: i32,
    /// Where the peer's pid is known.
    pidfd_opt: Option<OwnedFd>,
    way: Way,
    stream: UnixStream,
    /// Wakes the thread when there is something to say.
    wake: File,
    answer_timeout: Duration,
    begin: Begin,
    state: Mutex<State>,
    /// Whether the state has its end; read without the lock.
    has_ended: AtomicBool,
}

#[derive(Default)]
struct State {
    regions: HashMap<u32, Known>,
    /// Pools of the peer that are mapped here, by its number for them.
    pools: HashMap<u64, MappedPool>,
    /// Parts of a device's pool of which more are to come.
    device_parts: Vec<(OwnedFd, u64)>,
    /// Batches that name a region which no table has told of yet.
    waiting: VecDeque<Waiting>,
    /// Number of the last table that was asked for.
    asked: u64,
    /// Regions that the peer is to be told were let go.
    released: Vec<u32>,
    /// Batches that were admitted and have not ended.
    admitted: usize,
    ended_opt: Option<TransportError>,
}

struct Waiting {
    job: Job,
    status: Arc<Status>,
    /// A table with this number, or a later one, decides.
    table: u64,
}

impl Link {
    /// Connects to an engine's socket and takes the proof.
    pub(crate) fn connect(
        name: &str,
        way: Way,
        instance: [u8; 16],
        timeout: Duration,
        begin: Begin,
    ) -> Result<Arc<Self>, TransportError> {
        let failed = |what: &str| {
            let what = format!("same-host proof over @{name}: {what}");
            move |error: io::Error| TransportError::io(what, &error)
        };
        let refused = |kind, what: String| {
            TransportError::quiesced(kind, format!("same-host proof over @{name}: {what}"))
        };
        let stream = connect_within(name, timeout).map_err(failed("connect"))?;
        let credentials = sys::peer_credentials(&stream).map_err(failed("credentials"))?;
        if credentials.pid <= 0 && way == Way::Process {
            return Err(refused(
                TransportErrorKind::Unreachable,
                "the peer is in another pid namespace".to_owned(),
            ));
        }
        let own_uid = sys::effective_uid();
        if credentials.uid != own_uid {
            let message = format!(
                "the peer runs as user {}, this process as {own_uid}; run both as one user, or use \
                 tcp",
                credentials.uid
            );
            return Err(refused(TransportErrorKind::PermissionDenied, message));
        }
        let pidfd_opt = match credentials.pid {
            ..=0 => None,
            pid => Some(sys::pidfd(pid).map_err(failed("pidfd_open"))?),
        };
        let hello = ToOwner::Hello(TAG_MAGIC.to_owned(), ByteBuf::from(instance), way);
        send(&stream, &hello).map_err(failed("hello"))?;
        // The answer also shows that the process lived after the pidfd was taken.
        let answer = receive(&stream, MAX_TO_WRITER_BYTES).map_err(failed("welcome"))?;
        let ToWriter::Welcome(magic, told_instance, address, secret) = answer else {
            let message = "the peer did not begin with a welcome".to_owned();
            return Err(refused(TransportErrorKind::Protocol, message));
        };
        if !is_meant(&magic, &told_instance, &instance) {
            let message = "the socket belongs to another engine than the descriptor".to_owned();
            return Err(refused(TransportErrorKind::Protocol, message));
        }
        if way == Way::Process {
            prove_reach(credentials.pid, address, &secret)?;
        }
        let link = Arc::new(Self {
            pid: credentials.pid,
            pidfd_opt,
            way,
            stream,
            wake: sys::event().map_err(failed("eventfd"))?,
            answer_timeout: timeout,
            begin,
            state: Mutex::default(),
            has_ended: AtomicBool::new(false),
        });
        let thread = Arc::clone(&link);
        std::thread::Builder::new()
            .name("ferry-link".to_owned())
            .spawn(move || thread.run())
            .map_err(failed("starting a thread"))?;
        Ok(link)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Why nothing can be moved any more; `None` while it can. Asks the kernel.
    pub(crate) fn failure(&self) -> Option<TransportError> {
        let pidfd_opt = self.pidfd_opt.as_ref();
        if pidfd_opt.is_some_and(|pidfd| sys::has_exited(pidfd.as_fd())) {
            // Perhaps before the thread has noticed.
            self.end(self.exited());
        }
        self.noticed_failure()
    }

    /// As [`Link::failure`], as far as the link's thread has noticed: no system call.
    pub(crate) fn noticed_failure(&self) -> Option<TransportError> {
        if !self.has_ended.load(Ordering::Acquire) {
            return None;
        }
        self.state().ended_opt.clone()
    }

    /// Begins a batch as soon as each of its regions is known, and fails it if one is not
    /// registered, or not with this key and this long.
    pub(crate) fn admit(self: &Arc<Self>, job: Job, status: Arc<Status>) {
        let mut state = self.state();
        let admitted = match state.ended_opt.clone() {
            Some(error) => Err(error),
            None => self.try_admit(&mut state, &job),
        };
        if let Ok(None) = admitted {
            let table = state.asked + 1;
            state.waiting.push_back(Waiting { job, status, table });
            drop(state);
            return self.wake();
        }
        drop(state);
        match admitted {
            Ok(Some(admitted)) => (self.begin)(admitted, job, status),
            Ok(None) => {}
            Err(error) => status.fail(error),
        }
    }

    /// Ends the connection: once what is being written is over, the peer sees it closed.
    pub(crate) fn end(&self, error: TransportError) {
        let mut state = self.state();
        let reason = state.ended_opt.get_or_insert(error).clone();
        self.has_ended.store(true, Ordering::Release);
        let waiting = std::mem::take(&mut state.waiting);
        self.close_if_idle(&state);
        drop(state);
        self.wake();
        waiting
            .into_iter()
            .for_each(|batch| batch.status.fail(reason.clone()));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exited(&self) -> TransportError {
        TransportError::quiesced(
            TransportErrorKind::PeerDead,
            format!("the peer's process {} has exited", self.pid),
        )
    }

    fn wake(&self) {
        // Fails only when the counter is full, and then the thread has been woken.
        let _ = (&self.wake).write_all(&1u64.to_ne_bytes());
    }

    fn close_if_idle(&self, state: &State) {
        if state.ended_opt.is_some()
            && state.admitted == 0
            && let Err(error) = self.stream.shutdown(Shutdown::Both)
        {
            tracing::debug!(%error, "a same-host connection had ended already");
        }
    }

    /// `None` when a region is not known (yet).
    fn try_admit(
        self: &Arc<Self>,
        state: &mut State,
        job: &Job,
    ) -> Result<Option<Admitted>, TransportError> {
        let mut places = Vec::with_capacity(job.pairs.len());
        for pair in &job.pairs {
            let Some(known) = state.regions.get(&pair.remote.id) else {
                return Ok(None);
            };
            places.push(known.check(&pair.remote)?);
        }
        let regions: Vec<u32> = job.pairs.iter().map(|pair| pair.remote.id).collect();
        for id in &regions {
            if let Some(known) = state.regions.get_mut(id) {
                known.writers += 1;
            }
        }
        state.admitted += 1;
        Ok(Some(Admitted {
            link: Arc::clone(self),
            regions,
            places,
        }))
    }

    fn run(self: &Arc<Self>) {
        let mut asked_at_opt = None;
        while self.state().ended_opt.is_none() {
            if let Err(error) = self.turn(&mut asked_at_opt) {
                if self.state().ended_opt.is_none() {
                    tracing::info!(pid = self.pid, %error, "a same-host peer is gone");
                }
                self.end(error);
            }
        }
    }

    /// Says what there is to say, then waits for the peer, for something to say, or for the end.
    fn turn(self: &Arc<Self>, asked_at_opt: &mut Option<Instant>) -> Result<(), TransportError> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => TransportError::quiesced(
                TransportErrorKind::PeerDead,
                format!("the engine in process {} has ended", self.pid),
            ),
            _ => TransportError::io(format!("same-host peer, process {}", self.pid), &error),
        };
        for message in self.outgoing(asked_at_opt) {
            send(&self.stream, &message).map_err(failed)?;
        }
        let timeout_opt =
            asked_at_opt.map(|asked_at| self.answer_timeout.saturating_sub(asked_at.elapsed()));
        // Without a pidfd the end of the stream is the only sign of the peer's end.
        let pidfd_opt = self.pidfd_opt.as_ref().map(OwnedFd::as_fd);
        let fds = [
            self.stream.as_fd(),
            self.wake.as_fd(),
            pidfd_opt.unwrap_or(self.stream.as_fd()),
        ];
        let [readable, is_woken, has_exited] =
            sys::wait_readable(fds, timeout_opt).map_err(failed)?;
        if has_exited && pidfd_opt.is_some() {
            return Err(self.exited());
        }
        if is_woken {
            // Takes the count back to zero; what it was does not matter.
            let _ = (&self.wake).read(&mut [0; 8]);
        }
        if readable {
            let (message, descriptors) =
                receive_with(&self.stream, MAX_TO_WRITER_BYTES).map_err(failed)?;
            return self.handle(message, descriptors, asked_at_opt);
        }
        if timeout_opt.is_some_and(|timeout| timeout.is_zero()) {
            return Err(TransportError::quiesced(
                TransportErrorKind::Timeout,
                format!(
                    "process {} did not tell its regions within {:?}",
                    self.pid, self.answer_timeout
                ),
            ));
        }
        Ok(())
    }

    /// One table is asked for at a time, so that the socket's buffer never fills.
    fn outgoing(&self, asked_at_opt: &mut Option<Instant>) -> Vec<ToOwner> {
        let mut messages = Vec::new();
        let mut state = self.state();
        if !state.released.is_empty() {
            messages.push(ToOwner::Released(std::mem::take(&mut state.released)));
        }
        if !state.waiting.is_empty() && asked_at_opt.is_none() {
            state.asked += 1;
            *asked_at_opt = Some(Instant::now());
            messages.push(ToOwner::Table(state.asked));
        }
        messages
    }

    fn handle(
        self: &Arc<Self>,
        message: ToWriter,
        descriptors: Vec<OwnedFd>,
        asked_at_opt: &mut Option<Instant>,
    ) -> Result<(), TransportError> {
        match message {
            ToWriter::Welcome(..) => Err(TransportError::quiesced(
                TransportErrorKind::Protocol,
                format!("process {} sent a second welcome", self.pid),
            )),
            ToWriter::Pools(pools) => self.map(&pools, descriptors),
            ToWriter::DevicePool(row) => self.map_device(&row, descriptors),
            ToWriter::Table(number, rows) => {
                *asked_at_opt = None;
                self.learn(number, rows)
            }
            ToWriter::Forget(ids) => {
                let mut state = self.state();
                for id in ids {
                    match state.regions.get_mut(&id) {
                        // The last of its writers lets it go.
                        Some(known) if known.writers > 0 => known.is_forgotten = true,
                        _ => {
                            state.regions.remove(&id);
                            state.released.push(id);
                        }
                    }
                }
                Ok(())
            }
        }
    }

    fn nonsense(&self, of_what: &str) -> TransportError {
        TransportError::quiesced(
            TransportErrorKind::Protocol,
            format!("process {} told nonsense {of_what}", self.pid),
        )
    }
}

/// A batch that may write; on drop it has ended.
pub(crate) struct Admitted {
    link: Arc<Link>,
    regions: Vec<u32>,
    places: Vec<Place>,
}

impl Admitted {
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// Where the remote region of a pair begins in the peer's address space.
    pub(crate) fn address(&self, pair: usize) -> Option<u64> {
        match self.places.get(pair) {
            Some(Place::Address(address)) => Some(*address),
            _ => None,
        }
    }

    /// Where a range of the remote region of a pair is here, which must lie inside: what `find`
    /// says of its pool. Valid while `self` lives.
    pub(crate) fn reach<T>(
        &self,
        (pair, offset, len): (usize, u64, u64),
        find: impl Fn(&AnyMemory, u64, u64) -> Result<T, TransportError>,
    ) -> Result<T, TransportError> {
        let outside = || {
            TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!("{len} bytes at offset {offset} leave a mapped region"),
            )
        };
        let Some(Place::Mapped {
            pool,
            offset: start,
            len: region_len,
        }) = self.places.get(pair)
        else {
            return Err(outside());
        };
        let end = offset.checked_add(len).filter(|end| end <= region_len);
        let at = end.and_then(|_| start.checked_add(offset));
        find(pool, at.ok_or_else(outside)?, len)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.link.state();
        for id in &self.regions {
            let Some(known) = state.regions.get_mut(id) else {
                continue;
            };
            known.writers = known.writers.saturating_sub(1);
            if known.is_forgotten && known.writers == 0 {
                state.regions.remove(id);
                state.released.push(*id);
            }
        }
        state.admitted = state.admitted.saturating_sub(1);
        let must_tell = !state.released.is_empty();
        self.link.close_if_idle(&state);
        drop(state);
        if must_tell {
            self.link.wake();
        }
    }
}
