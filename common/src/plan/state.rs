//! The planner of one state component between one pair of ranks.

use crate::ids::ComponentId;
use crate::plan::bounds::{
    ItemBounds, Side, bounds_of, check_bounds, check_distinct, check_ends, is_elided, piece,
};
use crate::plan::heads::{TokenSlice, TpPair};
use crate::plan::layers::{EntryPair, entry_pairs, mha_pairs};
use crate::plan::mamba::{SlotBlock, SlotShape, slot_blocks};
use crate::plan::pages::{index_runs, item_run_list};
use crate::plan::parts::Groups;
use crate::plan::peer::{PlannerOptions, total_heads};
use crate::plan::{ComponentPlan, PlanError, RunList};
use crate::schema::{AttentionKind, PeerState, RankLayout, StateKind, StateLayout};
use crate::topology::ParallelConfig;

/// How a component's items move.
#[derive(Clone, Debug)]
enum StateRule {
    /// One slot, in pieces.
    Slot(Groups<SlotPieces>),
    /// Whole pages or rows.
    Items(Groups<u64>),
    /// Pages, a slice of heads of each token.
    Heads(Groups<TokenSlice>),
    /// Another rank sends the same bytes.
    Nothing,
}

/// The pieces of one slot of a tensor.
#[derive(Clone, Debug, PartialEq)]
struct SlotPieces {
    blocks: Vec<SlotBlock>,
    src_item_len: u64,
    dst_item_len: u64,
}

/// Joins one component of a prefill rank with the decode's.
#[derive(Clone, Debug)]
pub(crate) struct StatePlanner {
    kind: StateKind,
    rule: StateRule,
    bounds: Vec<ItemBounds>,
}

/// Whether lists of different length move their common prefix (paged, off by one page at most in
/// practice) or are an error (row-indexed: a shift would misalign every row).
const fn tolerates_length_drift(kind: StateKind) -> bool {
    matches!(
        kind,
        StateKind::Swa | StateKind::Dsa | StateKind::MinimaxIndexK
    )
}

impl SlotPieces {
    /// The pieces of slot `src`, each to its place in slot `dst`.
    fn run_list(&self, src: i32, dst: i32) -> Result<RunList, PlanError> {
        let overflow = || PlanError::Overflow {
            what: "offset of a mamba slot",
        };
        let slot = |index: i32, item_len: u64| {
            u64::try_from(index)
                .ok()
                .and_then(|index| index.checked_mul(item_len))
                .ok_or_else(overflow)
        };
        let src_start = slot(src, self.src_item_len)?;
        let dst_start = slot(dst, self.dst_item_len)?;
        let runs = self.blocks.iter().map(|block| {
            let src = src_start.checked_add(block.src).ok_or_else(overflow)?;
            let dst = dst_start.checked_add(block.dst).ok_or_else(overflow)?;
            Ok(piece(src, dst, block.len))
        });
        RunList::new(runs.collect::<Result<_, PlanError>>()?)
    }
}

impl StatePlanner {
    pub(crate) fn new(
        local: &RankLayout,
        parallel: &ParallelConfig,
        tp: TpPair,
        state: &StateLayout,
        peer: &PeerState,
    ) -> Result<Self, PlanError> {
        let component = state.kind.name();
        let unsupported = |detail: &str| PlanError::Unsupported {
            component,
            detail: detail.to_owned(),
        };
        match state.kind {
            StateKind::Mamba => Self::slot(parallel, tp, state, peer),
            StateKind::Swa if local.kv.attention == AttentionKind::Mha && !tp.is_equal() => {
                Self::sliced_pages(local, parallel, tp, state, peer)
            }
            StateKind::QsaPending
            | StateKind::QsaCompressed
            | StateKind::MinimaxIndexK
            | StateKind::MinimaxDenseKv
                if !tp.is_equal() =>
            {
                Err(PlanError::Unsupported {
                    component,
                    detail: format!(
                        "different tp sizes (prefill {}, decode {}); use the same tp on both sides",
                        tp.src_size, tp.dst_size
                    ),
                })
            }
            StateKind::Swa
            | StateKind::Dsa
            | StateKind::SwaRing
            | StateKind::C128State
            | StateKind::QsaPending
            | StateKind::QsaCompressed
            | StateKind::MinimaxIndexK
            | StateKind::MinimaxDenseKv => Self::whole_items(parallel, tp, state, peer),
            StateKind::DsaTail => Err(unsupported("its indices are a descriptor, not rows")),
            StateKind::RequestRow | StateKind::BlockScale | StateKind::BlockScaleSwa => {
                Err(unsupported("this protocol has no rule for it"))
            }
        }
    }

    pub(crate) const fn label(&self) -> &'static str {
        self.kind.name()
    }

    pub(crate) fn check_destination(&self, dst: &[i32]) -> Result<(), PlanError> {
        let component = self.kind.name();
        if self.kind == StateKind::Mamba && dst.len() > 1 {
            return Err(self.count_error(1, dst.len(), "a mamba component has exactly one slot"));
        }
        check_distinct(component, dst)?;
        check_bounds(component, Side::Decode, &self.bounds, dst)
    }

    pub(crate) fn check_source(
        &self,
        src: &[i32],
        dst: &[i32],
        options: PlannerOptions,
    ) -> Result<(), PlanError> {
        self.common_prefix(src, dst, options)?;
        check_bounds(self.kind.name(), Side::Prefill, &self.bounds, src)
    }

    pub(crate) fn plan(
        &self,
        component: ComponentId,
        src: &[i32],
        dst: &[i32],
        options: PlannerOptions,
    ) -> Result<ComponentPlan, PlanError> {
        self.check_destination(dst)?;
        self.check_source(src, dst, options)?;
        let common = self.common_prefix(src, dst, options)?;
        let truncated = src.len().max(dst.len()) - common;
        let (src, dst) = (
            src.get(..common).unwrap_or(src),
            dst.get(..common).unwrap_or(dst),
        );
        let parts = match &self.rule {
            StateRule::Nothing => Vec::new(),
            StateRule::Items(groups) => {
                let runs = index_runs(src, dst)?;
                groups.parts(|item_len| item_run_list(&runs, *item_len))?
            }
            StateRule::Heads(groups) => {
                let runs = index_runs(src, dst)?;
                groups.parts(|slice| slice.run_list(&runs))?
            }
            StateRule::Slot(groups) => match (src.first(), dst.first()) {
                (Some(src), Some(dst)) => groups.parts(|pieces| pieces.run_list(*src, *dst))?,
                _ => Vec::new(),
            },
        };
        let plan = ComponentPlan {
            component,
            parts,
            truncated_items: truncated as u64,
        };
        check_ends(self.kind.name(), &plan, &self.bounds)?;
        Ok(plan)
    }

    /// How many items move; an error where the two lists must have the same length and have not.
    fn common_prefix(
        &self,
        src: &[i32],
        dst: &[i32],
        options: PlannerOptions,
    ) -> Result<usize, PlanError> {
        if self.kind == StateKind::Mamba && (src.len(), dst.len()) != (1, 1) {
            let needed = "a mamba component has exactly one slot on each side";
            return Err(self.count_error(src.len(), dst.len(), needed));
        }
        if src.len() == dst.len() {
            return Ok(src.len());
        }
        let common = src.len().min(dst.len());
        if common == 0 {
            return Err(self.count_error(src.len(), dst.len(), "one side has none"));
        }
        if options.strict_lengths || !tolerates_length_drift(self.kind) {
            return Err(self.count_error(src.len(), dst.len(), "both sides need the same number"));
        }
        Ok(common)
    }

    fn count_error(&self, local: usize, peer: usize, detail: &'static str) -> PlanError {
        PlanError::IndexCount {
            component: self.kind.name(),
            local,
            peer,
            detail,
        }
    }

    fn slot(
        parallel: &ParallelConfig,
        tp: TpPair,
        state: &StateLayout,
        peer: &PeerState,
    ) -> Result<Self, PlanError> {
        let mut bounds = Vec::new();
        let mut slots = Vec::new();
        for pair in live_pairs(parallel, state, peer)? {
            let shape = SlotPair::new(tp, state, peer, pair)?;
            slots.push(SlotPieces {
                blocks: shape.blocks(tp)?,
                src_item_len: shape.bounds.src_item_len,
                dst_item_len: shape.bounds.dst_item_len,
            });
            bounds.push(shape.bounds);
        }
        Ok(Self {
            kind: state.kind,
            rule: StateRule::Slot(Groups::new(slots.into_iter().zip(&bounds))),
            bounds,
        })
    }

    fn whole_items(
        parallel: &ParallelConfig,
        tp: TpPair,
        state: &StateLayout,
        peer: &PeerState,
    ) -> Result<Self, PlanError> {
        let mut bounds = Vec::new();
        for pair in live_pairs(parallel, state, peer)? {
            let entry = item_bounds(state, peer, pair)?;
            if entry.src_item_len != entry.dst_item_len {
                return Err(PlanError::Geometry {
                    component: state.kind.name(),
                    detail: format!(
                        "an item of tensor {} has {} bytes at the prefill, of tensor {} {} bytes at \
                         the decode",
                        entry.src, entry.src_item_len, entry.dst, entry.dst_item_len
                    ),
                });
            }
            bounds.push(entry);
        }
        // These items are the same on every TP rank, so one of several writers is elected.
        let rule = if tp.sends_replicated() {
            StateRule::Items(Groups::by_item_len(&bounds))
        } else {
            StateRule::Nothing
        };
        Ok(Self {
            kind: state.kind,
            rule,
            bounds,
        })
    }

    /// Sliding-window pages of a model with K and V heads, across TP sizes: sliced by heads as KV
    /// is (0.5.23 refuses them).
    fn sliced_pages(
        local: &RankLayout,
        parallel: &ParallelConfig,
        tp: TpPair,
        state: &StateLayout,
        peer: &PeerState,
    ) -> Result<Self, PlanError> {
        let component = state.kind.name();
        if parallel.pp_size > 1 {
            return Err(PlanError::Unsupported {
                component,
                detail: format!(
                    "different tp sizes (prefill {}, decode {}) with pipeline parallelism: its pool \
                     starts every stage at layer 0",
                    tp.src_size, tp.dst_size
                ),
            });
        }
        let (src_count, dst_count) = (state.tensors.len(), peer.tensors.len());
        let pairs = mha_pairs(
            src_count,
            dst_count,
            0,
            &state.layer_ids,
            &peer.layer_ids,
            0,
        )
        .map_err(|error| PlanError::Geometry {
            component,
            detail: error.to_string(),
        })?;
        let heads = total_heads(local, parallel);
        let mut bounds = Vec::new();
        let mut slices = Vec::new();
        for pair in pairs
            .into_iter()
            .filter(|pair| !has_nothing(state, peer, *pair))
        {
            let entry = item_bounds(state, peer, pair)?;
            let dst_item_len = Some(entry.dst_item_len);
            let page = local.page_size;
            slices.push(TokenSlice::new(
                component,
                tp,
                heads,
                page,
                entry.src_item_len,
                dst_item_len,
            )?);
            bounds.push(entry);
        }
        let rule = if tp.sends_heads(heads) {
            StateRule::Heads(Groups::new(slices.into_iter().zip(&bounds)))
        } else {
            StateRule::Nothing
        };
        Ok(Self {
            kind: state.kind,
            rule,
            bounds,
        })
    }
}

/// A mamba tensor on both sides.
struct SlotPair<'a> {
    bounds: ItemBounds,
    src_dim: u32,
    dst_dim: u32,
    outer_count: u32,
    conv_shard_groups: Option<&'a [u32]>,
    component: &'static str,
    whole: bool,
}

impl<'a> SlotPair<'a> {
    fn new(
        tp: TpPair,
        state: &'a StateLayout,
        peer: &PeerState,
        pair: EntryPair,
    ) -> Result<Self, PlanError> {
        let component = state.kind.name();
        let bounds = item_bounds(state, peer, pair)?;
        let same_item = bounds.src_item_len == bounds.dst_item_len;
        let dims = state.dims.get(pair.0).zip(peer.dims.get(pair.1));
        let geometry = |detail: String| PlanError::Geometry { component, detail };
        if tp.is_equal() && !same_item {
            return Err(geometry(format!(
                "a slot of tensor {} has {} bytes at the prefill and {} at the decode",
                pair.0, bounds.src_item_len, bounds.dst_item_len
            )));
        }
        // Without dims nothing is known of how a slot is sharded. 0.5.23 then copies whole items
        // across TP sizes, which is right only where they are replicated.
        let (src_dim, dst_dim) = match dims {
            Some((src_dim, dst_dim)) => (*src_dim, *dst_dim),
            None if same_item => (0, 0),
            None => {
                return Err(geometry(format!(
                    "tp sizes differ (prefill {}, decode {}) and the sharded dimension of tensor {} \
                     is not registered by both sides",
                    tp.src_size, tp.dst_size, pair.0
                )));
            }
        };
        let groups = state
            .conv_shard_groups
            .get(pair.0)
            .and_then(Option::as_deref);
        Ok(Self {
            bounds,
            src_dim,
            dst_dim,
            outer_count: state.outer_counts.get(pair.0).copied().unwrap_or(1),
            conv_shard_groups: groups,
            component,
            whole: tp.is_equal(),
        })
    }

    fn blocks(&self, tp: TpPair) -> Result<Vec<SlotBlock>, PlanError> {
        if self.whole {
            return Ok(vec![SlotBlock {
                src: 0,
                dst: 0,
                len: self.bounds.src_item_len,
            }]);
        }
        let geometry = |detail: String| PlanError::Geometry {
            component: self.component,
            detail,
        };
        let (src_dim, dst_dim) = (u64::from(self.src_dim), u64::from(self.dst_dim));
        let whole_dim = src_dim * u64::from(tp.src_size);
        if whole_dim != dst_dim * u64::from(tp.dst_size) {
            return Err(geometry(format!(
                "the sharded dimension is {src_dim} x tp {} at the prefill and {dst_dim} x tp {} at \
                 the decode",
                tp.src_size, tp.dst_size
            )));
        }
        if src_dim > 0 {
            self.check_divides(tp, whole_dim)?;
        }
        slot_blocks(
            tp,
            SlotShape {
                src_item_len: self.bounds.src_item_len,
                dst_item_len: self.bounds.dst_item_len,
                src_dim,
                dst_dim,
                outer_count: u64::from(self.outer_count),
                conv_shard_groups: self.conv_shard_groups,
            },
        )
    }

    /// Slots split into whole rows of whole units, and parts of a convolution into whole shards.
    fn check_divides(&self, tp: TpPair, whole_dim: u64) -> Result<(), PlanError> {
        let geometry = |detail: String| PlanError::Geometry {
            component: self.component,
            detail,
        };
        let outer = u64::from(self.outer_count);
        let unit = |item_len: u64, dim: u32| {
            let parts = u64::from(dim) * outer;
            (parts > 0 && item_len.is_multiple_of(parts)).then(|| item_len / parts)
        };
        let src_unit = unit(self.bounds.src_item_len, self.src_dim);
        if src_unit.is_none() || src_unit != unit(self.bounds.dst_item_len, self.dst_dim) {
            return Err(geometry(format!(
                "slots of {} bytes (dim {}) at the prefill and {} bytes (dim {}) at the decode do not \
                 split into {outer} rows of equal units",
                self.bounds.src_item_len, self.src_dim, self.bounds.dst_item_len, self.dst_dim
            )));
        }
        let Some(groups) = self.conv_shard_groups else {
            return Ok(());
        };
        let sum: u64 = groups.iter().map(|group| u64::from(*group)).sum();
        let larger = tp.src_size.max(tp.dst_size);
        if sum != whole_dim || groups.iter().any(|group| !group.is_multiple_of(larger)) {
            return Err(geometry(format!(
                "the parts {groups:?} of a convolution of {whole_dim} channels do not divide over tp \
                 {larger}"
            )));
        }
        Ok(())
    }
}

fn has_nothing(state: &StateLayout, peer: &PeerState, (src, dst): EntryPair) -> bool {
    let pair = state.tensors.get(src).zip(peer.tensors.get(dst));
    pair.is_none_or(|(source, target)| is_elided(source, target))
}

/// Pairs of tensors that both sides have; an elided one keeps its position and moves nothing.
fn live_pairs(
    parallel: &ParallelConfig,
    state: &StateLayout,
    peer: &PeerState,
) -> Result<Vec<EntryPair>, PlanError> {
    let pairs = entry_pairs(
        state.kind.name(),
        &state.layer_ids,
        &peer.layer_ids,
        state.tensors.len(),
        peer.tensors.len(),
        parallel.pp_size == 1,
    )?;
    Ok(pairs
        .into_iter()
        .filter(|pair| !has_nothing(state, peer, *pair))
        .collect())
}

/// The item lengths of both sides; the source's stands in where the peer gave none.
fn item_bounds(
    state: &StateLayout,
    peer: &PeerState,
    pair: EntryPair,
) -> Result<ItemBounds, PlanError> {
    let missing = || PlanError::Geometry {
        component: state.kind.name(),
        detail: format!("tensors {} and {} do not both exist", pair.0, pair.1),
    };
    let source = state.tensors.get(pair.0).ok_or_else(missing)?;
    let target = peer.tensors.get(pair.1).ok_or_else(missing)?;
    let dst_item_len = target.item_len_opt.unwrap_or(source.item_len);
    Ok(bounds_of(pair, source, target.bytes.0, dst_item_len.0))
}
