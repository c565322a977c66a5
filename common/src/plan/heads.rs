//! KV heads across TP sizes: for each token of a page, a slice of heads.

use crate::ids::{ByteLen, ByteOffset};
use crate::plan::pages::IndexRun;
use crate::plan::{PlanError, RunList, StridedRun};

/// TP sizes and ranks of the two sides, each rank within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpPair {
    /// Attention TP size of the prefill.
    pub src_size: u32,
    /// The prefill rank.
    pub src_rank: u32,
    /// Attention TP size of the decode.
    pub dst_size: u32,
    /// The decode rank.
    pub dst_rank: u32,
}

impl TpPair {
    /// Takes ranks modulo their sizes, as engine ranks count over data-parallel groups too.
    ///
    /// # Errors
    /// [`PlanError::Topology`] when a size is 0 or neither divides the other.
    pub fn new(
        src_size: u32,
        src_rank: u32,
        dst_size: u32,
        dst_rank: u32,
    ) -> Result<Self, PlanError> {
        let refused = |detail: String| Err(PlanError::Topology { detail });
        if src_size == 0 || dst_size == 0 {
            return refused(format!(
                "tp sizes must be positive: prefill {src_size}, decode {dst_size}"
            ));
        }
        if !src_size
            .max(dst_size)
            .is_multiple_of(src_size.min(dst_size))
        {
            return refused(format!(
                "one tp size must divide the other: prefill {src_size}, decode {dst_size}"
            ));
        }
        Ok(Self {
            src_size,
            src_rank: src_rank % src_size,
            dst_size,
            dst_rank: dst_rank % dst_size,
        })
    }

    /// Whether both sides are sharded alike.
    pub const fn is_equal(self) -> bool {
        self.src_size == self.dst_size
    }

    /// How many prefill ranks feed one decode rank.
    pub const fn writers_per_destination(self) -> u32 {
        if self.src_size > self.dst_size {
            self.src_size / self.dst_size
        } else {
            1
        }
    }

    /// Whether this prefill rank is the one that sends what all ranks of its TP group hold alike
    /// (SGLang's `should_send_replicated_state`).
    pub const fn sends_replicated(self) -> bool {
        self.src_rank.is_multiple_of(self.writers_per_destination())
    }

    /// Whether this prefill rank sends its KV heads. Where TP exceeds the number of KV heads
    /// several ranks hold the same head, and 0.5.23 has each of them write it; here only the
    /// first of those that feed the same decode rank does.
    pub const fn sends_heads(self, total_heads: u32) -> bool {
        let replication = heads_per_rank(self.src_size, total_heads);
        let writers = self.writers_per_destination();
        let alike = if replication < writers {
            replication
        } else {
            writers
        };
        alike <= 1 || self.src_rank.is_multiple_of(alike)
    }
}

/// Which heads move between two ranks, counted from the first head that each holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSlice {
    /// First head in the source.
    pub src_start: u32,
    /// How many heads.
    pub count: u32,
    /// First head in the destination.
    pub dst_start: u32,
}

/// Heads held by a rank: at least one, as heads are replicated where TP exceeds their number.
/// With the arguments exchanged: how many ranks hold the same head.
pub const fn heads_per_rank(total_heads: u32, tp_size: u32) -> u32 {
    match total_heads.checked_div(tp_size) {
        None | Some(0) => 1,
        Some(heads) => heads,
    }
}

/// SGLang's `compute_head_slice_params`. Replicated heads map by integer division, since
/// consecutive ranks share a head.
pub const fn head_slice(tp: TpPair, total_heads: u32) -> HeadSlice {
    let src_heads = heads_per_rank(total_heads, tp.src_size);
    let dst_heads = heads_per_rank(total_heads, tp.dst_size);
    if tp.src_size > tp.dst_size {
        let unique_head = tp.src_rank / heads_per_rank(tp.src_size, total_heads);
        HeadSlice {
            src_start: 0,
            count: src_heads,
            dst_start: (unique_head * src_heads) % dst_heads,
        }
    } else {
        let unique_head = tp.dst_rank / heads_per_rank(tp.dst_size, total_heads);
        HeadSlice {
            src_start: (unique_head * dst_heads) % src_heads,
            count: dst_heads,
            dst_start: 0,
        }
    }
}

/// Bytes of head slices in pages of `[page_size, heads, head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSlice {
    /// Tokens of one page.
    pub page_size: u32,
    /// Bytes of a source page.
    pub src_item_len: u64,
    /// Bytes of a destination page.
    pub dst_item_len: u64,
    /// Bytes of one token in the source page.
    pub src_token_len: u64,
    /// Bytes of one token in the destination page.
    pub dst_token_len: u64,
    /// Offset of the slice in a source token.
    pub src_offset: u64,
    /// Offset of the slice in a destination token.
    pub dst_offset: u64,
    /// Bytes of the slice.
    pub slice_len: u64,
}

impl TokenSlice {
    /// Derives the slice from a source page; the destination page is what its heads need.
    ///
    /// # Errors
    /// [`PlanError::Geometry`] when pages do not split into whole heads, or when heads do not
    /// divide over the TP sizes.
    pub fn new(
        component: &'static str,
        tp: TpPair,
        total_heads: u32,
        page_size: u32,
        src_item_len: u64,
        dst_item_len: Option<u64>,
    ) -> Result<Self, PlanError> {
        let geometry = |detail: String| PlanError::Geometry { component, detail };
        for (side, size) in [("prefill", tp.src_size), ("decode", tp.dst_size)] {
            let larger = total_heads.max(size);
            if total_heads == 0 || !larger.is_multiple_of(total_heads.min(size)) {
                return Err(geometry(format!(
                    "{total_heads} kv heads do not divide over {side} tp {size}"
                )));
            }
        }
        let src_heads = u64::from(heads_per_rank(total_heads, tp.src_size));
        let dst_heads = u64::from(heads_per_rank(total_heads, tp.dst_size));
        let tokens = u64::from(page_size);
        let src_parts = tokens * src_heads;
        if src_parts == 0 || src_item_len == 0 || !src_item_len.is_multiple_of(src_parts) {
            return Err(geometry(format!(
                "a prefill page of {src_item_len} bytes does not split into {page_size} tokens of \
                 {src_heads} heads"
            )));
        }
        let head_len = src_item_len / src_parts;
        let overflow = PlanError::Overflow {
            what: "bytes of a destination page",
        };
        let needed = (tokens * dst_heads).checked_mul(head_len).ok_or(overflow)?;
        if let Some(dst_item_len) = dst_item_len.filter(|length| *length != needed) {
            return Err(geometry(format!(
                "a decode page of {dst_item_len} bytes is not {page_size} tokens of {dst_heads} heads \
                 of {head_len} bytes ({needed} bytes); prefill page {src_item_len} bytes"
            )));
        }
        let heads = head_slice(tp, total_heads);
        Ok(Self {
            page_size,
            src_item_len,
            dst_item_len: needed,
            src_token_len: src_heads * head_len,
            dst_token_len: dst_heads * head_len,
            src_offset: u64::from(heads.src_start) * head_len,
            dst_offset: u64::from(heads.dst_start) * head_len,
            slice_len: u64::from(heads.count) * head_len,
        })
    }

    /// One strided run for each run of pages: the stride goes on from the last token of a page to
    /// the first of the next, because a page is a whole number of tokens.
    ///
    /// # Errors
    /// [`PlanError::Overflow`] when an offset does not fit 64 bits.
    pub fn run_list(&self, pages: &[IndexRun]) -> Result<RunList, PlanError> {
        let overflow = || PlanError::Overflow {
            what: "offset of a head slice",
        };
        let start = |page: u64, item_len: u64, offset: u64| {
            let start = page
                .checked_mul(item_len)
                .and_then(|start| start.checked_add(offset));
            start.map(ByteOffset).ok_or_else(overflow)
        };
        let strided = pages.iter().map(|run| {
            let tokens = run
                .count
                .checked_mul(u64::from(self.page_size))
                .ok_or_else(overflow)?;
            Ok(StridedRun {
                src: start(run.src, self.src_item_len, self.src_offset)?,
                dst: start(run.dst, self.dst_item_len, self.dst_offset)?,
                len: ByteLen(self.slice_len),
                count: u32::try_from(tokens).map_err(|_| overflow())?,
                src_stride: self.src_token_len,
                dst_stride: self.dst_token_len,
            })
        });
        RunList::new(strided.collect::<Result<_, PlanError>>()?)
    }
}
