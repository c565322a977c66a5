//! Pinned host buffers, streams, and what is under way between a device and the host.
//!
//! Buffers for bytes that leave a device and for bytes that go to one are counted apart: two engines
//! that send to each other would otherwise each hold what the other waits for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use super::copies::sorted;
use super::library::{NON_BLOCKING, PORTABLE, WITHOUT_TIMING};
use super::{CopyRange, Device};
use crate::error::{TransportError, TransportErrorKind};
use crate::region::DeviceRuntime;
use crate::transport::queue::PIECE_BYTES;

/// Bytes of one buffer.
pub(crate) const BUFFER_BYTES: u64 = PIECE_BYTES;
/// Buffers of each way of one runtime.
const MOST_BUFFERS: usize = 16;
/// Buffers that one worker has under way at once.
pub(crate) const DEPTH: usize = 4;

/// At least so many pieces, of so few bytes on average, are gathered on the device before they go
/// to the host, and scattered there after they came: a transfer of its own over the bus costs each
/// of them more than a second copy in the device's memory.
const GATHER_PIECES: usize = 64;
const GATHER_BELOW_BYTES: u64 = 4096;

static GATHERED_PIECES: AtomicU64 = AtomicU64::new(0);
static DIRECT_PIECES: AtomicU64 = AtomicU64::new(0);
static STAGED_BYTES: AtomicU64 = AtomicU64::new(0);
static SHARED_BYTES: AtomicU64 = AtomicU64::new(0);

/// What this process has moved from and to devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// Pieces that were gathered or scattered on the device.
    pub gathered_pieces: u64,
    /// Pieces that went to or came from the host each by itself.
    pub direct_pieces: u64,
    /// Bytes that went through pinned buffers.
    pub staged_bytes: u64,
    /// Bytes that went from device memory to device memory.
    pub shared_bytes: u64,
}

/// Counts since the process began.
pub fn device_report() -> DeviceReport {
    DeviceReport {
        gathered_pieces: GATHERED_PIECES.load(Ordering::Relaxed),
        direct_pieces: DIRECT_PIECES.load(Ordering::Relaxed),
        staged_bytes: STAGED_BYTES.load(Ordering::Relaxed),
        shared_bytes: SHARED_BYTES.load(Ordering::Relaxed),
    }
}

/// Which way bytes of a buffer go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From a device.
    Out,
    /// To a device.
    In,
}

/// What one runtime's memory shares; it goes with the last of it.
#[derive(Default)]
pub(crate) struct Stage {
    out: Ring,
    into: Ring,
    lanes: Mutex<HashMap<u32, Vec<Lane>>>,
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Stage")
    }
}

static STAGES: LazyLock<Mutex<HashMap<DeviceRuntime, Weak<Stage>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Ring {
    state: Mutex<RingState>,
    returned: Condvar,
}

#[derive(Default)]
struct RingState {
    free: Vec<Pinned>,
    made: usize,
    /// Whether the driver has refused more.
    is_short: bool,
}

impl Ring {
    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pinned host memory of [`BUFFER_BYTES`].
struct Pinned {
    device: Device,
    address: u64,
}

impl Pinned {
    fn allocate(device: Device) -> Result<Self, TransportError> {
        let _entered = device.enter()?;
        let mut address = 0;
        // SAFETY: the call writes one pointer, which lives for its length.
        let code = unsafe {
            (device.calls().allocate_host)(&mut address, BUFFER_BYTES as usize, PORTABLE)
        };
        device.check("allocating pinned host memory", code)?;
        Ok(Self { device, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self.device.enter().and_then(|_entered| {
            // SAFETY: allocated by `allocate` and freed once; what was under way with it is over.
            let code = unsafe { (self.device.calls().free_host)(self.address) };
            self.device.check("freeing pinned host memory", code)
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "pinned host memory was not freed");
        }
    }
}

/// A pinned buffer in use; it goes back on drop.
pub(crate) struct Buffer {
    pinned_opt: Option<Pinned>,
    stage: Arc<Stage>,
    way: Way,
}

impl Buffer {
    /// Where it begins in this process; [`BUFFER_BYTES`] are there while it lives.
    pub(crate) fn address(&self) -> u64 {
        self.pinned_opt.as_ref().map_or(0, |pinned| pinned.address)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let ring = self.stage.ring(self.way);
        ring.lock().free.extend(self.pinned_opt.take());
        ring.returned.notify_one();
    }
}

impl Stage {
    /// That of a device's runtime.
    pub(crate) fn of(device: Device) -> Arc<Self> {
        let mut stages = STAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let known = stages.get(&device.kind()).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let stage = Arc::new(Self::default());
            stages.insert(device.kind(), Arc::downgrade(&stage));
            stage
        })
    }

    fn ring(&self, way: Way) -> &Ring {
        match way {
            Way::Out => &self.out,
            Way::In => &self.into,
        }
    }

    /// Takes a buffer. Without one free, waits for one, or says `None` to a caller that holds some
    /// already: those of others come back only if nobody waits while holding.
    ///
    /// # Errors
    /// The driver's, when it has refused the first one.
    pub(crate) fn take(
        self: &Arc<Self>,
        device: Device,
        way: Way,
        may_wait: bool,
    ) -> Result<Option<Buffer>, TransportError> {
        let ring = self.ring(way);
        let buffer = |pinned| Buffer {
            pinned_opt: Some(pinned),
            stage: Arc::clone(self),
            way,
        };
        let mut state = ring.lock();
        loop {
            if let Some(pinned) = state.free.pop() {
                return Ok(Some(buffer(pinned)));
            }
            if state.made < MOST_BUFFERS && !state.is_short {
                match Pinned::allocate(device) {
                    Ok(pinned) => {
                        state.made += 1;
                        return Ok(Some(buffer(pinned)));
                    }
                    Err(error) if state.made == 0 => return Err(error),
                    Err(error) => {
                        state.is_short = true;
                        tracing::warn!(
                            %error,
                            buffers = state.made,
                            "device memory is staged through fewer pinned buffers than wanted"
                        );
                    }
                }
            }
            if !may_wait {
                return Ok(None);
            }
            state = ring
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lane(&self, device: Device) -> Result<Lane, TransportError> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = lanes.get_mut(&device.number()).and_then(Vec::pop) {
            return Ok(lane);
        }
        drop(lanes);
        Lane::create(device)
    }

    fn give_back(&self, lane: Lane) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.entry(lane.device.number()).or_default().push(lane);
    }
}

/// A stream, the event at its end, and room on the device for gathered pieces.
struct Lane {
    device: Device,
    stream: u64,
    event: u64,
    scratch_opt: Option<u64>,
}

impl Lane {
    fn create(device: Device) -> Result<Self, TransportError> {
        let _entered = device.enter()?;
        let (mut stream, mut event) = (0, 0);
        let calls = device.calls();
        // SAFETY: the call writes one handle, which lives for its length.
        let code = unsafe { (calls.create_stream)(&mut stream, NON_BLOCKING) };
        device.check("creating a stream", code)?;
        // SAFETY: as above.
        let code = unsafe { (calls.create_event)(&mut event, WITHOUT_TIMING) };
        let created = device.check("creating an event", code);
        if let Err(error) = created {
            // SAFETY: created above, and nothing is in it.
            unsafe { (calls.destroy_stream)(stream) };
            return Err(error);
        }
        Ok(Self {
            device,
            stream,
            event,
            scratch_opt: None,
        })
    }

    /// Room on the device, unless it has none to give.
    fn scratch(&mut self) -> Option<u64> {
        if self.scratch_opt.is_none() {
            let mut address = 0;
            // SAFETY: the call writes one address, which lives for its length.
            let code =
                unsafe { (self.device.calls().allocate)(&mut address, BUFFER_BYTES as usize) };
            match self.device.check("allocating room to gather in", code) {
                Ok(()) => self.scratch_opt = Some(address),
                Err(error) => tracing::debug!(%error, "small pieces go one by one"),
            }
        }
        self.scratch_opt
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else {
            return;
        };
        let calls = self.device.calls();
        // SAFETY: each was made by this value's functions, is let go once, and nothing that uses it
        // is under way.
        unsafe {
            (calls.destroy_event)(self.event);
            (calls.destroy_stream)(self.stream);
            if let Some(scratch) = self.scratch_opt {
                (calls.free)(scratch);
            }
        }
    }
}

/// Copies that are under way. What they touch must be kept until [`Flight::wait`] has returned, or
/// the value is dropped.
pub(crate) struct Flight {
    lane_opt: Option<Lane>,
    stage: Arc<Stage>,
    is_begun: bool,
    has_failed: bool,
}

impl Flight {
    pub(crate) fn open(stage: &Arc<Stage>, device: Device) -> Result<Self, TransportError> {
        Ok(Self {
            lane_opt: Some(stage.lane(device)?),
            stage: Arc::clone(stage),
            is_begun: false,
            has_failed: false,
        })
    }

    /// Begins to copy pieces of device memory into a buffer, one behind the other, once an event of
    /// the same driver has passed.
    ///
    /// # Safety
    /// The pieces are device memory and the buffer has room for them; both stay until the end, and
    /// nobody looks at the buffer before.
    pub(crate) unsafe fn begin_out(
        &mut self,
        pieces: &[(u64, u64)],
        buffer: u64,
        after_opt: Option<u64>,
    ) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(pieces, buffer, Way::Out, after_opt) }
    }

    /// Begins to copy a buffer into pieces of device memory, one behind the other.
    ///
    /// # Safety
    /// As [`Flight::begin_out`]; nobody writes to the buffer before the end.
    pub(crate) unsafe fn begin_in(
        &mut self,
        buffer: u64,
        pieces: &[(u64, u64)],
    ) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(pieces, buffer, Way::In, None) }
    }

    /// Begins to copy within device memory of one runtime.
    ///
    /// # Safety
    /// The ranges are device memory that stays until the end.
    pub(crate) unsafe fn between(
        &mut self,
        ranges: &[CopyRange],
        after_opt: Option<u64>,
    ) -> Result<(), TransportError> {
        let bytes = ranges.iter().map(|range| range.len).sum();
        SHARED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        let lane = self.lane_opt.as_ref().ok_or_else(lost)?;
        let (device, stream) = (lane.device, lane.stream);
        let _entered = device.enter()?;
        self.is_begun = true;
        wait_for(device, stream, after_opt)?;
        // SAFETY: the caller's promise.
        unsafe { issue(device, stream, ranges, (false, false))? };
        self.record()
    }

    /// # Safety
    /// As [`Flight::begin_out`] or [`Flight::begin_in`].
    unsafe fn begin(
        &mut self,
        pieces: &[(u64, u64)],
        buffer: u64,
        way: Way,
        after_opt: Option<u64>,
    ) -> Result<(), TransportError> {
        let lane = self.lane_opt.as_mut().ok_or_else(lost)?;
        let (device, stream) = (lane.device, lane.stream);
        let bytes: u64 = pieces.iter().map(|(_, len)| len).sum();
        if bytes > BUFFER_BYTES {
            return Err(lost());
        }
        let _entered = device.enter()?;
        let is_small = bytes < GATHER_BELOW_BYTES * pieces.len() as u64;
        let scratch_opt = (pieces.len() >= GATHER_PIECES && is_small).then(|| lane.scratch());
        let scratch_opt = scratch_opt.flatten();
        self.is_begun = true;
        wait_for(device, stream, after_opt)?;
        let counted = if scratch_opt.is_some() {
            &GATHERED_PIECES
        } else {
            &DIRECT_PIECES
        };
        counted.fetch_add(pieces.len() as u64, Ordering::Relaxed);
        STAGED_BYTES.fetch_add(bytes, Ordering::Relaxed);
        let contiguous = scratch_opt.unwrap_or(buffer);
        let mut reached = contiguous;
        let ranges: Vec<CopyRange> = pieces
            .iter()
            .map(|(address, len)| {
                let place = reached;
                reached += len;
                match way {
                    Way::Out => CopyRange {
                        dst: place,
                        src: *address,
                        len: *len,
                    },
                    Way::In => CopyRange {
                        dst: *address,
                        src: place,
                        len: *len,
                    },
                }
            })
            .collect();
        let is_direct = scratch_opt.is_none();
        let sides = (is_direct && way == Way::Out, is_direct && way == Way::In);
        let across = |dst, src| {
            [CopyRange {
                dst,
                src,
                len: bytes,
            }]
        };
        // SAFETY: the pieces and the buffer are the caller's; the scratch has room for a buffer's
        // bytes, and stays with the lane. The stream keeps the order.
        unsafe {
            match (scratch_opt, way) {
                (None, _) => issue(device, stream, &ranges, sides)?,
                (Some(scratch), Way::Out) => {
                    issue(device, stream, &ranges, sides)?;
                    device.copy(stream, &across(buffer, scratch))?;
                }
                (Some(scratch), Way::In) => {
                    device.copy(stream, &across(scratch, buffer))?;
                    issue(device, stream, &ranges, sides)?;
                }
            }
        }
        self.record()
    }

    fn record(&mut self) -> Result<(), TransportError> {
        let lane = self.lane_opt.as_ref().ok_or_else(lost)?;
        // SAFETY: both are the lane's.
        let code = unsafe { (lane.device.calls().record)(lane.event, lane.stream) };
        lane.device.check("recording an event", code)
    }

    /// Waits until the copies are over; what they wrote is then visible.
    ///
    /// # Errors
    /// Why they failed. They are over then, too.
    pub(crate) fn wait(&mut self) -> Result<(), TransportError> {
        if !self.is_begun {
            return Ok(());
        }
        let lane = self.lane_opt.as_ref().ok_or_else(lost)?;
        let _entered = lane.device.enter()?;
        // SAFETY: the event is the lane's.
        let code = unsafe { (lane.device.calls().wait)(lane.event) };
        self.settle("waiting for a copy", code)
    }

    fn settle(&mut self, call: &str, code: i32) -> Result<(), TransportError> {
        let lane = self.lane_opt.as_ref().ok_or_else(lost)?;
        let result = lane.device.check(call, code);
        self.is_begun = false;
        self.has_failed |= result.is_err();
        result
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let Some(lane) = self.lane_opt.take() else {
            return;
        };
        if self.is_begun {
            // Also what was begun before a call failed, and so has no event behind it.
            let ended = lane.device.enter().and_then(|_entered| {
                // SAFETY: the stream is the lane's.
                let code = unsafe { (lane.device.calls().synchronize)(lane.stream) };
                lane.device.check("waiting for a stream", code)
            });
            self.has_failed |= ended.is_err();
        }
        // The lane of a device that failed is not used again.
        if !self.has_failed {
            self.stage.give_back(lane);
        }
    }
}

fn wait_for(device: Device, stream: u64, event_opt: Option<u64>) -> Result<(), TransportError> {
    let Some(event) = event_opt else {
        return Ok(());
    };
    // SAFETY: the stream is a lane's; whoever gave the event said that it lives.
    let code = unsafe { (device.calls().stream_waits_for)(stream, event, 0) };
    device.check("letting a stream wait for an event", code)
}

/// # Safety
/// As [`Device::copy`].
unsafe fn issue(
    device: Device,
    stream: u64,
    ranges: &[CopyRange],
    sides: (bool, bool),
) -> Result<(), TransportError> {
    let (rows, single) = sorted(ranges, sides);
    for rows in &rows {
        // SAFETY: the caller's promise.
        unsafe { device.copy_rows(stream, rows)? };
    }
    // SAFETY: the caller's promise.
    unsafe { device.copy(stream, &single) }
}

fn lost() -> TransportError {
    TransportError::quiesced(
        TransportErrorKind::Device,
        "a copy of device memory that fits no buffer",
    )
}
