//! Byte runs: the compact form in which a plan is kept and handed to the io engine.
//!
//! A [`RunList`] is computed once for an item length and shared by every pair of tensors that has
//! it, so a plan costs O(runs), never O(runs x layers). It is expanded lazily while it is written.

use std::sync::Arc;

use crate::ids::{ByteLen, ByteOffset};
use crate::plan::PlanError;

/// `count` ranges of `len` bytes; the i-th lies at `src + i * src_stride` and
/// `dst + i * dst_stride`. A plain range has `count` 1 and strides that do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedRun {
    /// Start of the first range in the source tensor.
    pub src: ByteOffset,
    /// Start of the first range in the destination tensor.
    pub dst: ByteOffset,
    /// Bytes of each range.
    pub len: ByteLen,
    /// How many ranges.
    pub count: u32,
    /// Bytes from one source range to the next.
    pub src_stride: u64,
    /// Bytes from one destination range to the next.
    pub dst_stride: u64,
}

impl StridedRun {
    /// One contiguous range.
    pub const fn contiguous(src: ByteOffset, dst: ByteOffset, len: ByteLen) -> Self {
        Self {
            src,
            dst,
            len,
            count: 1,
            src_stride: 0,
            dst_stride: 0,
        }
    }

    /// First offset behind the last source range; `None` on overflow.
    fn src_end(&self) -> Option<u64> {
        end_of(self.src.0, self.len.0, self.count, self.src_stride)
    }

    /// First offset behind the last destination range; `None` on overflow.
    fn dst_end(&self) -> Option<u64> {
        end_of(self.dst.0, self.len.0, self.count, self.dst_stride)
    }
}

fn end_of(start: u64, len: u64, count: u32, stride: u64) -> Option<u64> {
    let Some(steps) = count.checked_sub(1) else {
        return Some(start);
    };
    u64::from(steps)
        .checked_mul(stride)?
        .checked_add(start)?
        .checked_add(len)
}

/// One contiguous range of a run list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Start in the source tensor.
    pub src: ByteOffset,
    /// Start in the destination tensor.
    pub dst: ByteOffset,
    /// Bytes.
    pub len: ByteLen,
}

/// An immutable, cheaply cloned list of runs with its totals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunList {
    runs: Arc<[StridedRun]>,
    bytes: u64,
    ranges: u64,
    src_end: u64,
    dst_end: u64,
}

impl RunList {
    /// Adds up the totals.
    ///
    /// # Errors
    /// [`PlanError::Overflow`] when an end or a total does not fit 64 bits.
    pub fn new(runs: Vec<StridedRun>) -> Result<Self, PlanError> {
        let (mut bytes, mut ranges, mut src_end, mut dst_end) = (0u64, 0u64, 0u64, 0u64);
        for run in &runs {
            let run_bytes = run.len.0.checked_mul(u64::from(run.count));
            bytes = run_bytes
                .and_then(|run_bytes| bytes.checked_add(run_bytes))
                .ok_or(PlanError::Overflow {
                    what: "total bytes of a run list",
                })?;
            ranges = ranges
                .checked_add(u64::from(run.count))
                .ok_or(PlanError::Overflow {
                    what: "number of ranges of a run list",
                })?;
            src_end = src_end.max(run.src_end().ok_or(PlanError::Overflow {
                what: "end of a source run",
            })?);
            dst_end = dst_end.max(run.dst_end().ok_or(PlanError::Overflow {
                what: "end of a destination run",
            })?);
        }
        Ok(Self {
            runs: runs.into(),
            bytes,
            ranges,
            src_end,
            dst_end,
        })
    }

    /// The runs.
    pub fn runs(&self) -> &[StridedRun] {
        &self.runs
    }

    /// Bytes that one pair of tensors moves.
    pub const fn bytes(&self) -> ByteLen {
        ByteLen(self.bytes)
    }

    /// Contiguous ranges that one pair of tensors moves.
    pub const fn ranges(&self) -> u64 {
        self.ranges
    }

    /// First source offset behind every range: the source tensor must be at least this long.
    pub const fn src_end(&self) -> ByteLen {
        ByteLen(self.src_end)
    }

    /// First destination offset behind every range: the destination must be at least this long.
    pub const fn dst_end(&self) -> ByteLen {
        ByteLen(self.dst_end)
    }

    /// The ranges, one by one and in order. The sums cannot overflow: [`RunList::new`] checked
    /// the end of every run.
    pub fn iter_ranges(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.runs.iter().flat_map(|run| {
            (0..u64::from(run.count)).map(move |step| ByteRange {
                src: ByteOffset(run.src.0 + step * run.src_stride),
                dst: ByteOffset(run.dst.0 + step * run.dst_stride),
                len: run.len,
            })
        })
    }
}
