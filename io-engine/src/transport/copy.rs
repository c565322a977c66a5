//! Copies done by this process: the work of an engine's copying workers, for every transport that
//! reaches the peer's memory without the peer's help.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use crate::device::mover::{self, Move};
use crate::engine::EngineInner;
use crate::error::{TransportError, TransportErrorKind};
use crate::foreign::Place;
use crate::region::Region;
use crate::session::{Direction, Job};
use crate::status::Status;
use crate::stream;
use crate::transport::queue::{PIECE_BYTES, PieceRange, Taken};
use crate::transport::{BatchQueue, Piece};

/// A batch of at most so many bytes and ranges is moved by the thread that submits it: the copy
/// takes some 15 us, less than waking a worker and being woken by it. One token of a model of 40
/// layers is such a batch.
const HERE_BYTES: u64 = 160 << 10;
const HERE_RANGES: u64 = 80;

/// Bytes of one piece of a batch with device memory: several pinned buffers, so that their copies
/// overlap.
const DEVICE_PIECE_BYTES: u64 = 4 << 20;

/// How one batch reaches the peer's memory; holds what keeps that memory valid.
pub(crate) trait CopyWork: Send + Sync {
    fn copy(&self, job: &Job, piece: &Piece) -> Result<(), TransportError>;

    /// Bytes that one call of `copy` is to move at most, of a batch of so many.
    fn piece_bytes(&self, _batch_bytes: u64) -> u64 {
        PIECE_BYTES
    }
}

/// The queue of an engine's copying workers.
pub(crate) type CopyQueue = BatchQueue<Arc<dyn CopyWork>>;

/// Hands a batch to an engine's workers, or copies it at once if it is very small.
pub(crate) fn submit(
    engine: &Weak<EngineInner>,
    work: impl CopyWork + 'static,
    job: Job,
    status: Arc<Status>,
) {
    let Some(engine) = engine.upgrade() else {
        return status.fail(TransportError::closed_session());
    };
    let (queue, work) = (engine.copies(), Arc::new(work));
    // A device's copies are waited for, and whoever submits must not be.
    if job.is_on_device || job.bytes > HERE_BYTES || job.ranges > HERE_RANGES {
        let piece_bytes = match job.is_on_device {
            true => DEVICE_PIECE_BYTES,
            false => work.piece_bytes(job.bytes),
        };
        return queue.push(job, status, work, piece_bytes);
    }
    let copied = queue.run_here(job, &status, |job, status, piece| {
        status.piece_done(work.copy(job, piece));
        Ok::<(), Infallible>(())
    });
    let Ok(()) = copied;
}

/// A worker; ends when the queue is closed.
pub(crate) fn run(queue: &CopyQueue) {
    let mut piece = Piece::default();
    while let Taken::Piece { job, status, work } = queue.take(&mut piece, None) {
        // A panic is a fault of ours, but it must fail its batch, not hang it.
        let copied = catch_unwind(AssertUnwindSafe(|| work.copy(&job, &piece)));
        // What the batch holds is let go before anybody who waits for its end goes on.
        drop((work, job));
        status.piece_done(copied.unwrap_or_else(|_| {
            Err(TransportError::unproved(
                TransportErrorKind::Io,
                "a copying worker panicked",
            ))
        }));
    }
}

/// Copies a piece between memory that can be reached from here. `remote` says at which address of
/// this process a range of the remote region of the pair at a place is, or, where a device may have
/// it, `remote_place` where; each checked against that region, which the caller keeps. They are two
/// because a range of 4 KiB is copied in the time of a few of the former.
pub(crate) fn copy_mapped(
    job: &Job,
    piece: &Piece,
    remote: impl Fn(usize, u64, u64) -> Result<*mut u8, TransportError>,
    remote_place: impl Fn(usize, u64, u64) -> Result<Place, TransportError>,
) -> Result<(), TransportError> {
    if job.is_on_device {
        return copy_with_devices(job, piece, remote_place);
    }
    let place = |range: &PieceRange| {
        let (src, dst) = ends(job, range, Region::address, &remote)?;
        Ok::<_, TransportError>((src, dst, range.len as usize))
    };
    let mut ranges = piece.ranges.iter();
    let mut next_opt = ranges.next().map(place).transpose()?;
    while let Some((src, dst, len)) = next_opt {
        next_opt = ranges.next().map(place).transpose()?;
        if let Some((next_src, next_dst, _)) = next_opt {
            // Pages lie anywhere, so their first touch misses every cache, the page table's too.
            // Overlapping that with the copy of the page before saves a tenth at 4 KiB.
            stream::prefetch(next_src);
            stream::prefetch(next_dst);
        }
        let overlaps = src.addr().abs_diff(dst.addr()) < len;
        if overlaps {
            return Err(overlap());
        }
        // SAFETY: both ranges were just checked against their regions, whose memory the job's
        // guards and the caller keep mapped, and they do not overlap.
        unsafe { stream::copy(src, dst, len) };
    }
    Ok(())
}

/// As [`copy_mapped`], where a side may be a device's memory.
fn copy_with_devices(
    job: &Job,
    piece: &Piece,
    remote: impl Fn(usize, u64, u64) -> Result<Place, TransportError>,
) -> Result<(), TransportError> {
    let mut moves = Vec::with_capacity(piece.ranges.len());
    for range in &piece.ranges {
        let (src, dst) = ends(job, range, Region::place, &remote)?;
        // Addresses of devices and of the process are of one space, so this holds for all of them.
        if src.number().abs_diff(dst.number()) < range.len {
            return Err(overlap());
        }
        let len = range.len;
        moves.push(Move { src, dst, len });
    }
    // SAFETY: the ranges were just checked against their regions, whose memory the job's guards and
    // the caller keep, and they do not overlap.
    unsafe { mover::run(&moves, job.after_opt) }
}

/// Where a range is read and where it is written, each found by the function of its side.
fn ends<T>(
    job: &Job,
    range: &PieceRange,
    local: impl Fn(&Region, u64, u64) -> Result<T, TransportError>,
    remote: impl Fn(usize, u64, u64) -> Result<T, TransportError>,
) -> Result<(T, T), TransportError> {
    let own = &job.pair(range.pair)?.local;
    Ok(match job.direction {
        Direction::Write => (
            local(own, range.src, range.len)?,
            remote(range.pair, range.dst, range.len)?,
        ),
        Direction::Read => (
            remote(range.pair, range.src, range.len)?,
            local(own, range.dst, range.len)?,
        ),
    })
}

fn overlap() -> TransportError {
    TransportError::quiesced(
        TransportErrorKind::OutOfBounds,
        "source and destination of a batch overlap",
    )
}
