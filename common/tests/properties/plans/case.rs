//! A request between two engines, in terms of the model and not of bytes.

use common::schema::{AttentionKind, StateKind};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Items (pages, rows, slots) of every buffer of a prefill and of a decode rank.
pub const SRC_ITEMS: i32 = 9;
pub const DST_ITEMS: i32 = 7;

/// Which side gives layer ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    Neither,
    Both,
    PrefillOnly,
    DecodeOnly,
}

/// What one tensor of each layer of a state component holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Slab {
    /// The same bytes on every rank of a TP group.
    Replicated { item_len: u32 },
    /// `outer` rows of channels, the channels sharded over TP in each of the parts.
    Sharded {
        parts: Vec<u32>,
        outer: u32,
        unit: u32,
        /// Whether the prefill says where the parts lie; one part needs no saying.
        convolution: bool,
    },
    /// Pages of tokens, the KV heads sharded over TP; a K and a V tensor for each layer.
    Heads { head_len: u32 },
}

#[derive(Clone, Debug)]
pub struct StateCase {
    pub kind: StateKind,
    pub slabs: Vec<Slab>,
    /// Layers of each prefill stage that have this state.
    pub layers_of_stage: Vec<u32>,
    pub ids: Ids,
    /// Whether the decode lists its layers backwards; needs ids.
    pub decode_reversed: bool,
    pub src_indices: Vec<i32>,
    pub dst_indices: Vec<i32>,
    /// Tensors that are elided, by position in the decode rank's component.
    pub elided: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub prefill_tp: u32,
    pub decode_tp: u32,
    pub decode_rank: u32,
    /// Data-parallel group of the decode rank, which its engine rank counts.
    pub decode_dp_rank: u32,
    /// KV layers of each prefill pipeline stage.
    pub layers_of_stage: Vec<u32>,
    /// The decode's pipeline stage, if it has stages as the prefill does.
    pub decode_stage: Option<usize>,
    pub attention: AttentionKind,
    pub total_heads: u32,
    pub head_len: u32,
    pub page_size: u32,
    pub kv_ids: bool,
    /// Draft layers of the decode, and whether the prefill has them too.
    pub decode_drafts: u32,
    pub prefill_has_drafts: bool,
    /// Position of a KV tensor of the decode rank that is elided, and on which side.
    pub kv_elided: Option<(usize, bool)>,
    pub dcp_size: u32,
    pub dcp_rank: u32,
    /// Pages of the request behind the decode's prefix.
    pub src_pages: Vec<i32>,
    pub dst_pages: Vec<i32>,
    /// Tokens in these pages; only a request that is re-split by token may end within a page.
    pub tokens: u32,
    /// Virtual pages that the decode holds already.
    pub prefix_pages: u32,
    /// Where the request is cut into chunks, in pages.
    pub cuts: Vec<usize>,
    pub states: Vec<StateCase>,
    pub aux_lens: Vec<u32>,
    pub aux_rows: (u32, u32),
}

impl Case {
    pub fn is_latent(&self) -> bool {
        self.attention != AttentionKind::Mha
    }

    pub fn decode_stages(&self) -> std::ops::Range<usize> {
        match self.decode_stage {
            Some(stage) => stage..stage + 1,
            None => 0..self.layers_of_stage.len(),
        }
    }
}

/// Distinct items in an order that is partly consecutive.
fn items(limit: i32, least: usize, most: usize) -> impl Strategy<Value = Vec<i32>> {
    let shuffled = Just((0..limit).collect::<Vec<i32>>()).prop_shuffle();
    (shuffled, least..=most, any::<bool>()).prop_map(|(mut items, count, sorted)| {
        items.truncate(count);
        if sorted {
            items.sort_unstable();
        }
        items
    })
}

/// Numbers of heads that divide over both sides or that both sides hold in replicas.
fn fitting_heads(prefill_tp: u32, decode_tp: u32, chosen: Index) -> u32 {
    let fits = |heads: u32, tp: u32| heads.max(tp).is_multiple_of(heads.min(tp));
    let candidates = [1, 2, 3, 4, 6, 8, 12, 16, 24];
    let candidates: Vec<u32> = candidates
        .into_iter()
        .filter(|heads| fits(*heads, prefill_tp) && fits(*heads, decode_tp))
        .collect();
    candidates[chosen.index(candidates.len())]
}

/// What a state component is made of before it is fitted to a case.
#[derive(Clone, Debug)]
struct RawState {
    kind: StateKind,
    slabs: Vec<RawSlab>,
    layers_of_stage: [u32; 3],
    ids: Ids,
    decode_reversed: bool,
    src_indices: Vec<i32>,
    dst_indices: Vec<i32>,
    elided: Option<Index>,
}

#[derive(Clone, Debug)]
struct RawSlab {
    replicated: bool,
    parts: Vec<u32>,
    outer: u32,
    unit: u32,
    convolution: bool,
}

fn raw_slab() -> impl Strategy<Value = RawSlab> {
    let parts = vec(1..3u32, 1..4);
    (
        prop::bool::weighted(0.2),
        parts,
        1..3u32,
        1..3u32,
        any::<bool>(),
    )
        .prop_map(|(replicated, parts, outer, unit, convolution)| RawSlab {
            replicated,
            parts,
            outer,
            unit,
            convolution,
        })
}

fn raw_state() -> impl Strategy<Value = RawState> {
    const IDS: &[Ids] = &[Ids::Both, Ids::Neither, Ids::PrefillOnly, Ids::DecodeOnly];
    let kinds = &StateKind::ALL[..9];
    let shape = (
        vec(raw_slab(), 1..3),
        any::<[bool; 1]>(),
        [0..3u32, 0..3, 0..3],
    );
    let indices = (items(SRC_ITEMS, 1, 4), items(DST_ITEMS, 1, 4));
    let elided = proptest::option::weighted(0.2, any::<Index>());
    (select(kinds), shape, select(IDS), indices, elided).prop_map(
        |(kind, (slabs, [decode_reversed], layers_of_stage), ids, indices, elided)| RawState {
            kind,
            slabs,
            layers_of_stage,
            ids,
            decode_reversed,
            src_indices: indices.0,
            dst_indices: indices.1,
            elided,
        },
    )
}

impl RawState {
    /// Makes it a component that can move in this case.
    fn fit(self, case: &Case) -> StateCase {
        let stages = case.layers_of_stage.len();
        let equal_tp = case.prefill_tp == case.decode_tp;
        let kind = match self.kind {
            StateKind::Swa if !equal_tp && stages > 1 && !case.is_latent() => StateKind::Dsa,
            StateKind::QsaPending
            | StateKind::QsaCompressed
            | StateKind::MinimaxIndexK
            | StateKind::MinimaxDenseKv
                if !equal_tp =>
            {
                StateKind::C128State
            }
            kind => kind,
        };
        let by_heads = kind == StateKind::Swa && !case.is_latent();
        let slabs = match kind {
            StateKind::Mamba => self.slabs.iter().map(|raw| raw.slab(case)).collect(),
            _ if by_heads => vec![Slab::Heads {
                head_len: case.head_len,
            }],
            _ => vec![Slab::Replicated {
                item_len: self.slabs[0].unit + self.slabs[0].outer,
            }],
        };
        let (mut src_indices, mut dst_indices) = (self.src_indices, self.dst_indices);
        let tolerates_drift = matches!(
            kind,
            StateKind::Swa | StateKind::Dsa | StateKind::MinimaxIndexK
        );
        let common = match kind {
            StateKind::Mamba => 1,
            _ => src_indices.len().min(dst_indices.len()),
        };
        if !tolerates_drift {
            src_indices.truncate(common);
            dst_indices.truncate(common);
        }
        let layers_of_stage = self.layers_of_stage[..stages].to_vec();
        // Stages meet a decode without stages by layer id only.
        let needs_ids = stages > 1 && case.decode_stage.is_none();
        let ids = match self.ids {
            _ if needs_ids => Ids::Both,
            Ids::PrefillOnly | Ids::DecodeOnly if stages > 1 || by_heads => Ids::Neither,
            ids => ids,
        };
        let here: u32 = layers_of_stage[case.decode_stages()].iter().sum();
        let tensors = here as usize * slabs.len();
        StateCase {
            kind,
            decode_reversed: self.decode_reversed && ids == Ids::Both && !by_heads,
            elided: self
                .elided
                .filter(|_| tensors > 0)
                .map(|chosen| chosen.index(tensors)),
            slabs,
            layers_of_stage,
            ids,
            src_indices,
            dst_indices,
        }
    }
}

impl RawSlab {
    fn slab(&self, case: &Case) -> Slab {
        if self.replicated {
            return Slab::Replicated {
                item_len: self.unit * 3,
            };
        }
        // Each part divides over the larger of the two sides.
        let larger = case.prefill_tp.max(case.decode_tp);
        Slab::Sharded {
            parts: self.parts.iter().map(|part| part * larger).collect(),
            outer: self.outer,
            unit: self.unit,
            convolution: self.convolution || self.parts.len() > 1,
        }
    }
}

/// Any request that the two engines can serve.
pub fn case() -> impl Strategy<Value = Case> {
    let tp = select(&[1u32, 2, 4, 8, 16][..]);
    let sizes = (tp.clone(), tp, any::<Index>(), 0..2u32);
    let stages = (vec(1..3u32, 1..=3), proptest::option::of(any::<Index>()));
    let attention = select(
        &[
            AttentionKind::Mha,
            AttentionKind::Mla,
            AttentionKind::HybridMla,
        ][..],
    );
    let model = (
        attention,
        any::<Index>(),
        1..3u32,
        select(&[1u32, 2, 3][..]),
    );
    let layers = (
        any::<bool>(),
        prop_oneof![3 => Just(0u32), 1 => 1..3u32],
        any::<bool>(),
        proptest::option::weighted(0.2, (any::<Index>(), any::<bool>())),
    );
    let dcp = (
        prop_oneof![2 => Just(1u32), 1 => select(&[2u32, 4][..])],
        any::<Index>(),
        0..3u32,
        0..3u32,
    );
    let pages = (
        items(SRC_ITEMS, 0, 6),
        items(DST_ITEMS, 6, 6),
        vec(any::<Index>(), 0..3),
    );
    let aux = (vec(0..4u32, 0..3), 0..SRC_ITEMS as u32, 0..DST_ITEMS as u32);
    let rest = (vec(raw_state(), 0..3), aux);
    (sizes, stages, model, layers, dcp, pages, rest).prop_map(
        |(sizes, stages, model, layers, dcp, pages, (states, aux))| {
            let (prefill_tp, decode_tp) = (sizes.0, sizes.1);
            let (layers_of_stage, decode_stage) = stages;
            let latent = model.0 != AttentionKind::Mha;
            // A re-split needs one decode entry for each prefill entry.
            let decode_stage = decode_stage.map(|chosen| chosen.index(layers_of_stage.len()));
            let whole = layers_of_stage.len() == 1 || decode_stage.is_some();
            let dcp_size = if latent && whole { dcp.0 } else { 1 };
            let page_size = model.3;
            let src_pages = pages.0;
            let tokens = src_pages.len() as u32 * page_size;
            let tokens = if dcp_size > 1 {
                tokens - dcp.3.min(tokens).min(page_size - 1)
            } else {
                tokens
            };
            let mut dst_pages = pages.1;
            let announced = if dcp_size > 1 {
                tokens.div_ceil(page_size * dcp_size) as usize
            } else {
                src_pages.len()
            };
            dst_pages.truncate(announced);
            let mut cuts: Vec<usize> = pages
                .2
                .iter()
                .map(|cut| cut.index(src_pages.len() + 1))
                .collect();
            cuts.sort_unstable();
            let drafts_fit = layers_of_stage.len() == 1 || latent;
            let decode_drafts = if drafts_fit { layers.1 } else { 0 };
            let staged = decode_stage.is_some() && layers_of_stage.len() > 1;
            let mut case = Case {
                prefill_tp,
                decode_tp,
                decode_rank: sizes.2.index(decode_tp as usize) as u32,
                decode_dp_rank: sizes.3,
                layers_of_stage,
                decode_stage,
                attention: model.0,
                total_heads: if latent {
                    1
                } else {
                    fitting_heads(prefill_tp, decode_tp, model.1)
                },
                head_len: model.2,
                page_size,
                kv_ids: layers.0,
                decode_drafts,
                prefill_has_drafts: layers.2 || dcp_size > 1 || staged,
                kv_elided: None,
                dcp_size,
                dcp_rank: dcp.1.index(dcp_size as usize) as u32,
                src_pages,
                dst_pages,
                tokens,
                prefix_pages: dcp.2,
                cuts,
                states: Vec::new(),
                aux_lens: aux.0,
                aux_rows: (aux.1, aux.2),
            };
            let tensors: usize = super::image::kv_tensors(&case).len();
            case.kv_elided = layers
                .3
                .filter(|_| dcp_size == 1 && tensors > 0)
                .map(|(chosen, at_decode)| (chosen.index(tensors), at_decode));
            case.states = states.into_iter().map(|raw| raw.fit(&case)).collect();
            case
        },
    )
}
