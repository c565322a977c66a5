//! Where a pair of tensors ends, and the checks of indices and runs against it.

use std::collections::HashSet;

use crate::ids::{ByteLen, ByteOffset};
use crate::metrics::COMPONENT_AUX;
use crate::plan::ComponentPlan;
use crate::plan::layers::EntryPair;
use crate::plan::{PlanError, RunList, StridedRun};
use crate::schema::{PeerTensor, TensorLayout};

/// Whether nothing moves for a pair of tensors: a length of 0 or no buffer on either side. The
/// pair keeps its position, so the others stay aligned.
pub fn is_elided(src: &TensorLayout, dst: &PeerTensor) -> bool {
    src.bytes.0 == 0 || src.item_len.0 == 0 || dst.is_elided()
}

/// One tensor's items on both sides, for the checks of indices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ItemBounds {
    pub src: usize,
    pub dst: usize,
    pub src_bytes: u64,
    pub src_item_len: u64,
    pub dst_bytes: u64,
    pub dst_item_len: u64,
}

/// Which side an index belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Prefill,
    Decode,
}

impl Side {
    const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Every index lies inside every tensor. O(indices + tensors): the extremes decide.
pub(crate) fn check_bounds(
    component: &'static str,
    side: Side,
    bounds: &[ItemBounds],
    indices: &[i32],
) -> Result<(), PlanError> {
    let (Some(lowest), Some(highest)) = (indices.iter().min(), indices.iter().max()) else {
        return Ok(());
    };
    if bounds.is_empty() && *lowest < 0 {
        return Err(PlanError::Argument {
            what: "index lists",
            detail: format!("{component}: {} index {lowest} is negative", side.name()),
        });
    }
    for entry in bounds {
        let (tensor, bytes, item_len) = match side {
            Side::Prefill => (entry.src, entry.src_bytes, entry.src_item_len),
            Side::Decode => (entry.dst, entry.dst_bytes, entry.dst_item_len),
        };
        let items = bytes.checked_div(item_len).unwrap_or_default();
        let outside = [*lowest, *highest]
            .into_iter()
            .find(|index| u64::try_from(*index).map_or(true, |index| index >= items));
        if let Some(index) = outside {
            let (side, index) = (side.name(), i64::from(index));
            return Err(PlanError::OutOfBounds {
                component,
                side,
                tensor,
                index,
                items,
                item_len,
                bytes,
            });
        }
    }
    Ok(())
}

pub(crate) fn check_row(side: Side, bounds: &[ItemBounds], row: u32) -> Result<(), PlanError> {
    // A row beyond 31 bits is beyond every buffer that exists; the largest index says so.
    check_bounds(
        COMPONENT_AUX,
        side,
        bounds,
        &[i32::try_from(row).unwrap_or(i32::MAX)],
    )
}

/// No destination index stands in a list twice.
pub(crate) fn check_distinct(component: &'static str, indices: &[i32]) -> Result<(), PlanError> {
    let mut seen = HashSet::with_capacity(indices.len());
    match indices.iter().find(|index| !seen.insert(**index)) {
        Some(index) => Err(PlanError::DuplicateDestination {
            component,
            index: *index,
        }),
        None => Ok(()),
    }
}

/// The last word before bytes move: no run of a plan leaves its tensor, and its totals are numbers.
pub(crate) fn check_ends(
    component: &'static str,
    plan: &ComponentPlan,
    bounds: &[ItemBounds],
) -> Result<(), PlanError> {
    let total = |of: fn(&RunList) -> u64| {
        let mut parts = plan.parts.iter().map(|part| part.total(of));
        parts.try_fold(0u64, |total, more| total.checked_add(more?))
    };
    if total(|runs| runs.bytes().get()).is_none() || total(RunList::ranges).is_none() {
        return Err(PlanError::Overflow {
            what: "total of a plan",
        });
    }
    let fits = plan.parts.iter().all(|part| {
        part.runs.src_end().0 <= part.group.src_bytes
            && part.runs.dst_end().0 <= part.group.dst_bytes
    });
    if fits {
        return Ok(());
    }
    for pair in plan.pairs() {
        let entry = bounds
            .iter()
            .find(|entry| entry.src == pair.src && entry.dst == pair.dst);
        let Some(entry) = entry else { continue };
        let sides = [
            (
                Side::Prefill,
                entry.src,
                pair.runs.src_end().0,
                entry.src_bytes,
                entry.src_item_len,
            ),
            (
                Side::Decode,
                entry.dst,
                pair.runs.dst_end().0,
                entry.dst_bytes,
                entry.dst_item_len,
            ),
        ];
        for (side, tensor, end, bytes, item_len) in sides {
            if end > bytes {
                let items = bytes.checked_div(item_len).unwrap_or_default();
                let index = end.checked_div(item_len).unwrap_or_default();
                let index = i64::try_from(index).unwrap_or(i64::MAX);
                let side = side.name();
                return Err(PlanError::OutOfBounds {
                    component,
                    side,
                    tensor,
                    index,
                    items,
                    item_len,
                    bytes,
                });
            }
        }
    }
    Ok(())
}

/// Item bounds of a pair of tensors whose item lengths are known on both sides.
pub(crate) fn bounds_of(
    pair: EntryPair,
    src: &TensorLayout,
    dst_bytes: u64,
    dst_item_len: u64,
) -> ItemBounds {
    ItemBounds {
        src: pair.0,
        dst: pair.1,
        src_bytes: src.bytes.0,
        src_item_len: src.item_len.0,
        dst_bytes,
        dst_item_len,
    }
}

/// A piece of an item as a run.
pub(crate) fn piece(src: u64, dst: u64, len: u64) -> StridedRun {
    StridedRun::contiguous(ByteOffset(src), ByteOffset(dst), ByteLen(len))
}
