//! Mamba slots across TP sizes (SGLang's `compute_mamba_state_slice_byte_blocks`).
//!
//! A recurrent tensor is one slice of its sharded dimension. A convolution is the concatenation of
//! parts (q, k, v), each sharded on its own, so each part moves on its own, in both directions.
//! Rows that stand before the sharded dimension repeat all of that.

use crate::plan::PlanError;
use crate::plan::heads::TpPair;

/// One contiguous piece of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotBlock {
    /// Offset in the source slot, in bytes.
    pub src: u64,
    /// Offset in the destination slot, in bytes.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

/// One tensor of a slot on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShape<'a> {
    /// Bytes of the source slot.
    pub src_item_len: u64,
    /// Bytes of the destination slot.
    pub dst_item_len: u64,
    /// Sharded dimension of the source; 0 marks a replicated item.
    pub src_dim: u64,
    /// Sharded dimension of the destination.
    pub dst_dim: u64,
    /// Rows before the sharded dimension.
    pub outer_count: u64,
    /// Whole sizes (over all ranks) of the parts of a convolution.
    pub conv_shard_groups: Option<&'a [u32]>,
}

/// A slice of the sharded dimension, in units of it.
struct DimSlice {
    src: u64,
    dst: u64,
    count: u64,
}

/// The pieces that this pair of ranks moves; none where another rank is elected to send.
///
/// # Errors
/// [`PlanError::Argument`] when only one side is replicated, replicated lengths differ, or a
/// dimension or row count does not divide.
pub fn slot_blocks(tp: TpPair, shape: SlotShape<'_>) -> Result<Vec<SlotBlock>, PlanError> {
    let refused = |detail: String| PlanError::Argument {
        what: "mamba slot",
        detail,
    };
    if (shape.src_dim == 0) != (shape.dst_dim == 0) {
        return Err(refused(format!(
            "replicated on one side only: prefill dim {}, decode dim {}",
            shape.src_dim, shape.dst_dim
        )));
    }
    if shape.src_dim == 0 {
        if shape.src_item_len != shape.dst_item_len {
            return Err(refused(format!(
                "a replicated slot has {} bytes at the prefill and {} at the decode",
                shape.src_item_len, shape.dst_item_len
            )));
        }
        let whole = SlotBlock {
            src: 0,
            dst: 0,
            len: shape.src_item_len,
        };
        return Ok(if tp.sends_replicated() {
            vec![whole]
        } else {
            Vec::new()
        });
    }
    let bytes_per_dim = |item_len: u64, dim: u64, side: &str| {
        dim.checked_mul(shape.outer_count)
            .filter(|parts| *parts > 0)
            .map(|parts| item_len / parts)
            .ok_or_else(|| {
                refused(format!(
                    "{side} dim {dim} with {} outer rows",
                    shape.outer_count
                ))
            })
    };
    let src_bytes = bytes_per_dim(shape.src_item_len, shape.src_dim, "prefill")?;
    let dst_bytes = bytes_per_dim(shape.dst_item_len, shape.dst_dim, "decode")?;
    let slices = dim_slices(tp, shape);
    let overflow = || PlanError::Overflow {
        what: "offset in a mamba slot",
    };
    let place = |row: u64, dim: u64, start: u64, bytes: u64| {
        let at = row
            .checked_mul(dim)
            .and_then(|rows| rows.checked_add(start));
        at.and_then(|at| at.checked_mul(bytes)).ok_or_else(overflow)
    };
    let mut blocks = Vec::new();
    for row in 0..shape.outer_count {
        for slice in &slices {
            blocks.push(SlotBlock {
                src: place(row, shape.src_dim, slice.src, src_bytes)?,
                dst: place(row, shape.dst_dim, slice.dst, dst_bytes)?,
                len: slice.count.checked_mul(src_bytes).ok_or_else(overflow)?,
            });
        }
    }
    Ok(blocks)
}

fn dim_slices(tp: TpPair, shape: SlotShape<'_>) -> Vec<DimSlice> {
    let (src_size, dst_size) = (u64::from(tp.src_size), u64::from(tp.dst_size));
    let aggregates = src_size > dst_size;
    let writer = u64::from(tp.src_rank % tp.writers_per_destination());
    let groups = shape.conv_shard_groups.filter(|groups| {
        let whole: u64 = groups.iter().map(|group| u64::from(*group)).sum();
        shape.src_dim.checked_mul(src_size) == Some(whole)
    });
    let Some(groups) = groups else {
        let slice = if aggregates {
            DimSlice {
                src: 0,
                dst: writer * shape.src_dim,
                count: shape.src_dim,
            }
        } else {
            let src = (u64::from(tp.dst_rank) * shape.dst_dim) % shape.src_dim;
            DimSlice {
                src,
                dst: 0,
                count: shape.dst_dim,
            }
        };
        return vec![slice];
    };
    let (mut src_start, mut dst_start) = (0, 0);
    let mut slices = Vec::with_capacity(groups.len());
    for group in groups {
        let (src_part, dst_part) = (u64::from(*group) / src_size, u64::from(*group) / dst_size);
        slices.push(if aggregates {
            DimSlice {
                src: src_start,
                dst: dst_start + writer * src_part,
                count: src_part,
            }
        } else {
            let within = (u64::from(tp.dst_rank) * dst_part) % src_part.max(1);
            DimSlice {
                src: src_start + within,
                dst: dst_start,
                count: dst_part,
            }
        });
        src_start += src_part;
        dst_start += dst_part;
    }
    slices
}
