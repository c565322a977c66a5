//! Pieces in device memory, which go through pinned buffers: some are copied while others are on
//! the wire.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::{Lane, LaneState, Lanes, Unanswered};
use crate::device::packed::Packed;
use crate::device::staging::{DEPTH, Way};
use crate::error::TransportError;
use crate::foreign::Place;
use crate::session::Job;
use crate::status::Status;
use crate::sys::io_vec;
use crate::transport::Piece;
use crate::transport::queue::PieceRange;
use crate::transport::tcp::vectored::receive_all;

/// A piece whose copy out of device memory is under way; it was taken and is not sent.
pub(super) struct StagedPiece {
    // In front of the job, so that regions are let go when nothing is under way any more.
    packed: Packed,
    job: Arc<Job>,
    status: Arc<Status>,
    piece: Piece,
}

/// What a lane has staged and not sent; it fails with the session.
pub(super) struct Ahead<'a> {
    pub(super) lanes: &'a Lanes,
    pub(super) pieces: VecDeque<StagedPiece>,
}

impl Drop for Ahead<'_> {
    fn drop(&mut self) {
        for staged in std::mem::take(&mut self.pieces) {
            let reason = self.lanes.queue.closed_reason();
            let reason = reason.unwrap_or_else(TransportError::closed_session);
            let StagedPiece {
                packed,
                job,
                status,
                ..
            } = staged;
            // Waits for the copy.
            drop(packed);
            drop(job);
            status.piece_done(Err(reason.with_proof()));
        }
    }
}

/// A piece whose copy into device memory is under way.
pub(super) struct Landing {
    // In front of the job, so that regions are let go when nothing is under way any more.
    packed: Packed,
    job: Arc<Job>,
    status: Arc<Status>,
    begun: Result<(), TransportError>,
}

impl Lanes {
    /// Begins to copy a piece out of device memory; it is sent later.
    pub(super) fn stage(
        &self,
        lane: &Lane,
        ahead: &mut Ahead<'_>,
        job: Arc<Job>,
        status: Arc<Status>,
        piece: &mut Piece,
    ) -> io::Result<()> {
        let places = local_places(&job, &piece.ranges, |range| range.src);
        let packed = loop {
            let taken = places
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|places| Packed::take(places, Way::Out, ahead.pieces.is_empty()));
            match taken {
                Ok(None) => {
                    if let Err(error) = self.send_oldest(lane, ahead) {
                        // It was taken, and nothing of it was sent.
                        status.piece_done(Err(self.broken(&error).with_proof()));
                        return Err(error);
                    }
                }
                Ok(Some(packed)) => break Ok(packed),
                Err(error) => break Err(error),
            }
        };
        let packed = packed.and_then(|mut packed| {
            let places = places.as_deref().unwrap_or_default();
            // SAFETY: the ranges were just checked against regions that the job keeps.
            unsafe { packed.gather(places, job.after_opt)? };
            Ok(packed)
        });
        match packed {
            Ok(packed) => ahead.pieces.push_back(StagedPiece {
                packed,
                job,
                status,
                piece: std::mem::take(piece),
            }),
            // Of this piece nothing was sent; the stream is as it was.
            Err(error) => {
                drop(job);
                status.piece_done(Err(error));
            }
        }
        Ok(())
    }

    /// Waits for the oldest copy out of device memory and sends the piece.
    pub(super) fn send_oldest(&self, lane: &Lane, ahead: &mut Ahead<'_>) -> io::Result<()> {
        let Some(mut staged) = ahead.pieces.pop_front() else {
            return Ok(());
        };
        if let Err(error) = staged.packed.wait() {
            let StagedPiece { status, job, .. } = staged;
            drop(job);
            status.piece_done(Err(error));
            return Ok(());
        }
        let payload = (staged.packed.address(), staged.piece.bytes);
        // The buffer is kept until all of it was sent.
        self.send(
            lane,
            staged.job,
            staged.status,
            &staged.piece,
            Some(payload),
        )
    }

    /// Reads the payload of the oldest piece, whose answer was read, and begins to copy it into
    /// device memory.
    pub(super) fn receive_for_device(&self, lane: &Lane, state: &mut LaneState) -> io::Result<()> {
        let Some(oldest) = state.unanswered.pop_front() else {
            return Ok(());
        };
        state.unanswered_bytes -= oldest.bytes;
        state.answered_opt = Some(Instant::now());
        let places = local_places(&oldest.job, &oldest.ranges, |range| range.dst);
        let places = places.map_err(io::Error::other);
        let taken = places.and_then(|places| {
            let packed = loop {
                let may_wait = state.landing.is_empty();
                match Packed::take(&places, Way::In, may_wait).map_err(io::Error::other)? {
                    Some(packed) => break packed,
                    None => state.finish_landing(),
                }
            };
            let mut vectors = [io_vec(packed.address(), oldest.bytes)];
            let deadline = Instant::now() + self.stall_timeout;
            // SAFETY: a pinned buffer that is kept, with room for the piece.
            unsafe { receive_all(&lane.stream, &mut vectors, deadline)? };
            Ok((packed, places))
        });
        let Unanswered { status, job, .. } = oldest;
        let (mut packed, places) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                // The payload was not read, so the stream is of no use any more.
                drop(job);
                status.piece_done(Err(self.broken(&error)));
                return Err(error);
            }
        };
        // SAFETY: the ranges were just checked against regions that the job keeps.
        let begun = unsafe { packed.scatter(&places) };
        state.landing.push_back(Landing {
            packed,
            job,
            status,
            begun,
        });
        if state.landing.len() >= DEPTH {
            state.finish_landing();
        }
        Ok(())
    }
}

impl LaneState {
    /// Waits for the oldest copy into device memory and reports its piece.
    pub(super) fn finish_landing(&mut self) {
        let Some(landing) = self.landing.pop_front() else {
            return;
        };
        let Landing {
            mut packed,
            job,
            status,
            begun,
        } = landing;
        let result = begun.and(packed.wait());
        drop(packed);
        drop(job);
        status.piece_done(result);
    }
}

/// Where the local ends of a piece's ranges are, with their bytes; `offset` says which end that is.
fn local_places(
    job: &Job,
    ranges: &[PieceRange],
    offset: impl Fn(&PieceRange) -> u64,
) -> Result<Vec<(Place, u64)>, TransportError> {
    let place = |range: &PieceRange| {
        let region = &job.pair(range.pair)?.local;
        Ok((region.place(offset(range), range.len)?, range.len))
    };
    ranges.iter().map(place).collect()
}
