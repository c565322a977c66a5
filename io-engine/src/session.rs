//! A connection between two engines, and what is submitted to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::plan::RunList;

use crate::error::{TransportError, TransportErrorKind};
use crate::region::{Location, Region, RegionGuard, RemoteRegion};
use crate::status::{Status, TransferHandle, TransferResult, deadline_after};
use crate::timer::Timer;
use crate::transport::{Transport, TransportKind};

/// Runs between one local and one remote region.
#[derive(Clone, Debug)]
pub struct WritePair {
    /// This side's region: where the bytes of a write are, and where those of a read go.
    pub local: Region,
    /// The peer's region.
    pub remote: RemoteRegion,
    /// Which bytes; expanded lazily while they move. `src` offsets lie in the region that is read,
    /// `dst` offsets in the one that is written.
    pub runs: RunList,
}

/// What one call moves; the order of its ranges is free.
#[derive(Clone, Debug, Default)]
pub struct WriteBatch {
    /// The pairs.
    pub pairs: Vec<WritePair>,
}

/// Which way the bytes of a batch go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From local regions to the peer's.
    Write,
    /// From the peer's regions to local ones.
    Read,
}

/// A batch whose ranges lie inside both sides' regions, as far as this side knows. It keeps the
/// local regions registered until it ends.
pub(crate) struct Job {
    pub pairs: Vec<WritePair>,
    pub direction: Direction,
    /// Over all pairs. Only counted with, never addressed with.
    pub bytes: u64,
    /// Over all pairs.
    pub ranges: u64,
    /// Whether a local region is a device's memory.
    pub is_local_on_device: bool,
    /// Whether a region of either side is, as far as the peer's descriptors say.
    pub is_on_device: bool,
    /// An event of a device's driver that the bytes are there behind.
    pub after_opt: Option<u64>,
    /// Until when the submitting thread waits for the end, so that it may do the work itself.
    pub waits_until_opt: Option<Instant>,
    _guards: Vec<RegionGuard>,
}

impl Job {
    /// The pair at a place.
    pub(crate) fn pair(&self, place: usize) -> Result<&WritePair, TransportError> {
        self.pairs.get(place).ok_or_else(|| {
            TransportError::quiesced(
                TransportErrorKind::Protocol,
                "a range of a pair that the batch does not have",
            )
        })
    }

    /// Checks every pair and enters the local regions.
    pub(crate) fn new(pairs: Vec<WritePair>, direction: Direction) -> Result<Self, TransportError> {
        pairs.iter().try_for_each(|pair| check(pair, direction))?;
        let guards = pairs.iter().map(|pair| pair.local.enter());
        let guards = guards.collect::<Result<_, _>>()?;
        Ok(Self::joined(pairs, direction, guards))
    }

    fn joined(pairs: Vec<WritePair>, direction: Direction, guards: Vec<RegionGuard>) -> Self {
        let total = |of: fn(&RunList) -> u64| {
            let numbers = pairs.iter().map(|pair| of(&pair.runs));
            numbers.fold(0, u64::saturating_add)
        };
        let is_local_on_device = pairs.iter().any(|pair| pair.local.is_on_device());
        let is_remote_on_device = pairs
            .iter()
            .any(|pair| pair.remote.location != Location::Host);
        Self {
            is_local_on_device,
            is_on_device: is_local_on_device || is_remote_on_device,
            after_opt: None,
            bytes: total(|runs| runs.bytes().get()),
            ranges: total(RunList::ranges),
            pairs,
            direction,
            waits_until_opt: None,
            _guards: guards,
        }
    }

    /// A job that nothing may be copied by: its ranges are not checked.
    #[cfg(test)]
    pub(crate) fn unchecked(pairs: Vec<WritePair>) -> Self {
        Self::joined(pairs, Direction::Write, Vec::new())
    }
}

impl WritePair {
    /// First offset behind the ranges in the remote region.
    pub(crate) fn remote_end(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Write => self.runs.dst_end().get(),
            Direction::Read => self.runs.src_end().get(),
        }
    }

    fn local_end(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Write => self.runs.src_end().get(),
            Direction::Read => self.runs.dst_end().get(),
        }
    }
}

/// An open connection to a peer's engine over one transport. Clones share it; it is closed by
/// [`Session::close`], with its engine, or with the last clone.
#[derive(Clone)]
pub struct Session {
    transport: Arc<dyn Transport>,
    timer: Arc<Timer>,
    peer_key: Arc<str>,
    passed_over: Arc<[(TransportKind, String)]>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Session")
            .field("peer", &self.peer_key)
            .field("transport", &self.transport.kind())
            .finish()
    }
}

impl Session {
    pub(crate) fn new(
        transport: Arc<dyn Transport>,
        timer: Arc<Timer>,
        peer_key: &str,
        passed_over: Vec<(TransportKind, String)>,
    ) -> Self {
        Self {
            transport,
            timer,
            peer_key: peer_key.into(),
            passed_over: passed_over.into(),
        }
    }

    /// How bytes move. Chosen when the session was opened; it never changes.
    pub fn transport(&self) -> TransportKind {
        self.transport.kind()
    }

    /// Transports that come before the chosen one in the engine's order, each with why it was not
    /// taken.
    pub fn passed_over(&self) -> &[(TransportKind, String)] {
        &self.passed_over
    }

    /// Key of the peer's engine.
    pub fn peer_key(&self) -> &str {
        &self.peer_key
    }

    /// Tells its connection from that of every other session that lives.
    pub fn connection(&self) -> usize {
        Arc::as_ptr(&self.transport).addr()
    }

    /// Whether the peer is still there, as far as can be told without sending.
    pub fn is_alive(&self) -> bool {
        self.transport.is_alive()
    }

    /// Begins to write. Every range is compared with both regions first; if one leaves its
    /// region, nothing is written and the handle ends with that error.
    pub fn write(&self, batch: WriteBatch) -> TransferHandle {
        self.submit(Direction::Write, batch, None)
    }

    /// Begins to read from the peer's regions into local ones; as [`Session::write`] otherwise.
    pub fn read(&self, batch: WriteBatch) -> TransferHandle {
        self.submit(Direction::Read, batch, None)
    }

    /// Begins to write or read. A batch that has not ended after `timeout_opt` fails with
    /// [`TransportErrorKind::Timeout`]; if the peer still holds some of it a moment later, without
    /// the proof that nothing is written any more.
    pub fn submit(
        &self,
        direction: Direction,
        batch: WriteBatch,
        timeout_opt: Option<Duration>,
    ) -> TransferHandle {
        let (job_opt, status) = self.prepare(direction, batch);
        if let Some(job) = job_opt {
            self.transport.submit(job, Arc::clone(&status));
        }
        if let Some(timeout) = timeout_opt
            && !status.is_concluded()
        {
            let due = deadline_after(timeout);
            self.timer
                .watch(&status, due, timeout, self.transport.grace());
        }
        TransferHandle(status)
    }

    /// As [`Session::submit`] without a timeout, once an event of the driver of the local regions'
    /// device has passed: their bytes are there behind it. Batches between host memory do not wait.
    ///
    /// # Safety
    /// The event (a `CUevent` or `hipEvent_t`) must live until the batch has ended.
    pub unsafe fn write_after(&self, batch: WriteBatch, event: u64) -> TransferHandle {
        let (job_opt, status) = self.prepare(Direction::Write, batch);
        if let Some(mut job) = job_opt {
            job.after_opt = Some(event);
            self.transport.submit(job, Arc::clone(&status));
        }
        TransferHandle(status)
    }

    /// Writes or reads and waits for the end: the fastest way for a thread that would wait anyway.
    /// The timeout is as for [`Session::submit`].
    ///
    /// # Errors
    /// Why the batch failed.
    pub fn transfer(
        &self,
        direction: Direction,
        batch: WriteBatch,
        timeout: Duration,
    ) -> TransferResult {
        let deadline = deadline_after(timeout);
        let (job_opt, status) = self.prepare(direction, batch);
        if let Some(mut job) = job_opt {
            job.waits_until_opt = Some(deadline);
            self.transport.submit(job, Arc::clone(&status));
        }
        if !status.is_concluded() {
            self.timer
                .watch(&status, deadline, timeout, self.transport.grace());
        }
        let handle = TransferHandle(status);
        loop {
            // The timer ends it.
            if let Some(result) = handle.wait(Duration::MAX) {
                return result;
            }
        }
    }

    /// Tells the peer, under `number`, that what this session wrote so far and whose end was seen is
    /// in place; its engine's `take_notification` then says so. Only `rdma` carries this.
    pub fn notify(&self, number: u64) -> TransferHandle {
        let status = Status::new(0, 0);
        self.transport.notify(number, Arc::clone(&status));
        TransferHandle(status)
    }

    /// Checks a batch; without a job the status has its result.
    fn prepare(&self, direction: Direction, batch: WriteBatch) -> (Option<Job>, Arc<Status>) {
        let job = Job::new(batch.pairs, direction).and_then(|job| {
            job.pairs
                .iter()
                .try_for_each(|pair| self.check_locations(pair))?;
            Ok(job)
        });
        match job {
            Err(error) => {
                let status = Status::new(0, 0);
                status.fail(error);
                (None, status)
            }
            Ok(job) => {
                let status = Status::new(job.bytes, job.ranges);
                if job.ranges > 0 {
                    return (Some(job), status);
                }
                status.exhausted();
                (None, status)
            }
        }
    }

    /// Closes the connection. Batches in flight fail; each says whether its writes have stopped.
    pub fn close(&self) {
        self.transport.close();
    }

    fn check_locations(&self, pair: &WritePair) -> Result<(), TransportError> {
        let (local, remote) = (pair.local.location(), pair.remote.location);
        if self.transport.can_move(local, &pair.remote) {
            return Ok(());
        }
        Err(TransportError::quiesced(
            TransportErrorKind::NotRegistered,
            format!(
                "transport {} cannot move bytes between {local} (region {}) and {remote} (remote region {})",
                self.transport(),
                pair.local.id(),
                pair.remote.id
            ),
        ))
    }
}

fn check(pair: &WritePair, direction: Direction) -> Result<(), TransportError> {
    let (local_end, remote_end) = (pair.local_end(direction), pair.remote_end(direction));
    let sides = [
        ("local", pair.local.id(), local_end, pair.local.len().get()),
        ("remote", pair.remote.id, remote_end, pair.remote.len),
    ];
    for (side, id, end, len) in sides {
        if end > len {
            return Err(TransportError::quiesced(
                TransportErrorKind::OutOfBounds,
                format!(
                    "a batch ends at {end} in {side} region {id} ({}) of {len} bytes",
                    pair.local.label()
                ),
            ));
        }
    }
    Ok(())
}
