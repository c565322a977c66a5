//! Whole requests of arbitrary models between arbitrary shardings, carried out on small memories.
//!
//! Every source byte is a digest of its logical coordinates. The plans of all prefill ranks that
//! feed one decode rank are carried out; then each byte of that rank's tensors must hold what its
//! own coordinates say if the request covers it, having been written exactly once, and be
//! untouched if not. Coordinates are computed here, without the planner.

use std::ops::Range;

use common::ids::ByteLen;
use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlanError, PlannerOptions};
use common::schema::{
    AttentionKind, KvLayout, PeerLayout, PeerState, PeerTensor, RankLayout, StateKind, StateLayout,
    TensorLayout,
};
use common::topology::ParallelConfig;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

/// Items of every pool: pages, slots, rows.
const ITEMS: usize = 24;
/// Bytes of one head of one token.
const HEAD_BYTES: usize = 6;

#[derive(Clone, Debug)]
struct Model {
    is_mla: bool,
    heads: u32,
    layers: u32,
    page_size: u32,
    /// Parts of the convolution's channels, over all ranks.
    conv_parts: Vec<u32>,
    /// Heads of the recurrent state, over all ranks.
    recurrent_heads: u32,
    src_tp: u32,
    dst_tp: u32,
    /// Stages of the prefill.
    src_pp: u32,
}

/// Indices on both sides.
#[derive(Clone, Debug)]
struct Request {
    src_pages: Vec<i32>,
    dst_pages: Vec<i32>,
    /// Where the prompt is cut into chunks, in pages.
    cuts: Vec<usize>,
    window: (Vec<i32>, Vec<i32>),
    slot: (i32, i32),
    row: (u32, u32),
}

fn model() -> impl Strategy<Value = Model> {
    (
        (any::<bool>(), 0u32..5, 1u32..4, 0u32..4),
        (0u32..5, 0u32..5, 0u32..2),
        (1u32..3, 1u32..3),
    )
        .prop_map(
            |((is_mla, heads, layers_per_stage, page), (src, dst, stages), (parts, dims))| {
                let (src_tp, dst_tp, src_pp) = (1 << src, 1 << dst, 1 << stages);
                // Each part divides by both sizes.
                let whole = src_tp.max(dst_tp);
                Model {
                    is_mla,
                    heads: 1 << heads,
                    layers: layers_per_stage * src_pp,
                    page_size: 1 << page,
                    conv_parts: (1..=parts).map(|part| part * whole).collect(),
                    recurrent_heads: dims * whole,
                    src_tp,
                    dst_tp,
                    src_pp,
                }
            },
        )
}

fn indices(most: usize) -> impl Strategy<Value = (Vec<i32>, Vec<i32>)> {
    let items: Vec<i32> = (0..ITEMS as i32).collect();
    (0..=most).prop_flat_map(move |count| {
        let picked = || subsequence(items.clone(), count).prop_shuffle();
        (picked(), picked())
    })
}

fn request() -> impl Strategy<Value = Request> {
    let cuts = prop::collection::vec(0..=8usize, 0..3);
    let slot = (0..ITEMS as i32, 0..ITEMS as i32);
    let row = (0..ITEMS as u32, 0..ITEMS as u32);
    (indices(8), cuts, indices(4), slot, row).prop_map(|(pages, mut cuts, window, slot, row)| {
        let (src_pages, dst_pages) = pages;
        cuts.iter_mut()
            .for_each(|cut| *cut = (*cut).min(src_pages.len()));
        cuts.sort_unstable();
        Request {
            src_pages,
            dst_pages,
            cuts,
            window,
            slot,
            row,
        }
    })
}

/// A digest of coordinates; never the background.
fn digest(coordinates: &[u64]) -> u8 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    for coordinate in coordinates {
        state = (state ^ coordinate).wrapping_mul(0x0100_0000_01b3);
        state ^= state >> 29;
    }
    (state % 255) as u8 + 1
}

/// Part of an item's bytes by global coordinates: for each local byte, what it is.
type ItemBytes = Vec<u64>;

/// One tensor of a rank: for each byte of an item its global coordinate within the tensor's layer,
/// and the layer.
#[derive(Clone, Debug)]
struct Tensor {
    layer: u64,
    list: u64,
    item: ItemBytes,
}

impl Tensor {
    fn item_len(&self) -> usize {
        self.item.len()
    }

    fn layout(&self) -> TensorLayout {
        TensorLayout {
            bytes: ByteLen((self.item_len() * ITEMS) as u64),
            item_len: ByteLen(self.item_len() as u64),
        }
    }
}

/// The share of `whole` units that a rank holds; where there are fewer units than ranks, several
/// hold the same.
fn share(whole: u32, tp_size: u32, rank: u32) -> Range<u32> {
    if whole >= tp_size {
        let each = whole / tp_size;
        rank * each..(rank + 1) * each
    } else {
        let unit = rank / (tp_size / whole);
        unit..unit + 1
    }
}

impl Model {
    /// Bytes of a page of one KV tensor on a rank.
    fn page(&self, tp_size: u32, rank: u32) -> ItemBytes {
        let heads = if self.is_mla {
            0..1
        } else {
            share(self.heads, tp_size, rank)
        };
        let mut bytes = Vec::new();
        for token in 0..u64::from(self.page_size) {
            for head in heads.clone() {
                for byte in 0..HEAD_BYTES as u64 {
                    bytes.push((token * 1000 + u64::from(head)) * 1000 + byte);
                }
            }
        }
        bytes
    }

    /// KV tensors of the layers of a stage: K then V, or one list.
    fn kv(&self, tp_size: u32, rank: u32, layers: Range<u32>) -> Vec<Tensor> {
        let lists = if self.is_mla { 1 } else { 2 };
        let tensors = (0..lists).flat_map(|list| {
            layers.clone().map(move |layer| Tensor {
                layer: u64::from(layer),
                list,
                item: self.page(tp_size, rank),
            })
        });
        tensors.collect()
    }

    /// A convolution (parts of channels, three values each) and a recurrent state, one slot each.
    fn mamba(&self, tp_size: u32, rank: u32) -> Vec<Tensor> {
        let mut conv = Vec::new();
        for (part, size) in self.conv_parts.iter().enumerate() {
            for channel in share(*size, tp_size, rank) {
                conv.extend(
                    (0..3).map(|byte| (part as u64 * 1000 + u64::from(channel)) * 10 + byte),
                );
            }
        }
        let recurrent = share(self.recurrent_heads, tp_size, rank)
            .flat_map(|head| (0..5).map(move |byte| u64::from(head) * 10 + byte));
        [(0, conv), (1, recurrent.collect())]
            .map(|(list, item)| Tensor {
                layer: 0,
                list,
                item,
            })
            .into()
    }

    fn components(&self, tp_size: u32, rank: u32, layers: Range<u32>) -> Vec<Vec<Tensor>> {
        let replicated = |list, len: u64| Tensor {
            layer: 0,
            list,
            item: (0..len).collect(),
        };
        vec![
            self.kv(tp_size, rank, layers.clone()),
            self.mamba(tp_size, rank),
            // The window has the heads of the KV cache.
            self.kv(tp_size, rank, 0..1),
            vec![replicated(0, 11)],
            vec![replicated(0, 9), replicated(1, 4)],
        ]
    }

    fn layout(&self, tensors: &[Vec<Tensor>], rank: u32, start_layer: u32) -> RankLayout {
        let layouts = |component: usize| {
            tensors[component]
                .iter()
                .map(Tensor::layout)
                .collect::<Vec<_>>()
        };
        let state = |component: usize, kind| StateLayout {
            kind,
            tensors: layouts(component),
            dims: Vec::new(),
            outer_counts: Vec::new(),
            conv_shard_groups: Vec::new(),
            layer_ids: Vec::new(),
        };
        let mamba = StateLayout {
            dims: self.dims(self.src_tp),
            outer_counts: vec![1, 1],
            conv_shard_groups: vec![Some(self.conv_parts.clone()), None],
            ..state(1, StateKind::Mamba)
        };
        RankLayout {
            page_size: self.page_size,
            kv: KvLayout {
                tensors: layouts(0),
                layer_ids: Vec::new(),
                start_layer,
                num_draft_entries: 0,
                attention: if self.is_mla {
                    AttentionKind::Mla
                } else {
                    AttentionKind::Mha
                },
                head_num: share(self.heads, self.src_tp, rank).len() as u32,
                total_head_num: self.heads,
            },
            aux: layouts(4),
            states: vec![mamba, state(2, StateKind::Swa), state(3, StateKind::Dsa)],
        }
    }

    fn dims(&self, tp_size: u32) -> Vec<u32> {
        let channels: u32 = self.conv_parts.iter().sum();
        vec![channels / tp_size, self.recurrent_heads / tp_size]
    }

    fn peer(&self, tensors: &[Vec<Tensor>], rank: u32) -> PeerLayout {
        let sizes = |component: usize, item_lens: bool| -> Vec<PeerTensor> {
            let of = |(position, tensor): (usize, &Tensor)| PeerTensor {
                bytes: tensor.layout().bytes,
                item_len_opt: (item_lens || (component == 0 && position == 0))
                    .then(|| tensor.layout().item_len),
            };
            tensors[component].iter().enumerate().map(of).collect()
        };
        let state = |component, dims| PeerState {
            tensors: sizes(component, true),
            dims,
            layer_ids: Vec::new(),
        };
        PeerLayout {
            kv: sizes(0, false),
            kv_layer_ids: Vec::new(),
            aux: sizes(4, false),
            states: vec![
                state(1, self.dims(self.dst_tp)),
                state(2, Vec::new()),
                state(3, Vec::new()),
            ],
            tp_size: self.dst_tp,
            engine_rank: rank,
            dcp_size: 1,
            dcp_rank: 0,
        }
    }

    /// Whether a prefill rank feeds a decode rank.
    fn feeds(&self, src_rank: u32, dst_rank: u32) -> bool {
        if self.src_tp >= self.dst_tp {
            src_rank / (self.src_tp / self.dst_tp) == dst_rank
        } else {
            src_rank == dst_rank / (self.dst_tp / self.src_tp)
        }
    }
}

/// What a byte is: which item of the request, not of the pool.
fn value(component: usize, tensor: &Tensor, position: u64, byte: usize) -> u8 {
    digest(&[
        component as u64,
        tensor.layer,
        tensor.list,
        position,
        tensor.item[byte],
    ])
}

/// One rank's memory of one component's tensors, with how often each byte was written.
struct Memory(Vec<Vec<(u8, u32)>>);

impl Memory {
    fn new(tensors: &[Tensor]) -> Self {
        let empty = |tensor: &Tensor| vec![(0, 0); tensor.item_len() * ITEMS];
        Self(tensors.iter().map(empty).collect())
    }

    /// Puts a request's items where its indices say.
    fn place(&mut self, component: usize, tensors: &[Tensor], indices: &[i64]) {
        for (tensor, memory) in tensors.iter().zip(&mut self.0) {
            for (position, index) in indices.iter().enumerate() {
                let start = *index as usize * tensor.item_len();
                for byte in 0..tensor.item_len() {
                    memory[start + byte].0 = value(component, tensor, position as u64, byte);
                }
            }
        }
    }

    /// Carries out a plan; a range outside of a tensor panics.
    fn apply(&mut self, plan: &ComponentPlan, source: &Self) {
        for pair in &plan.pairs {
            for range in pair.runs.iter_ranges() {
                let (src, dst) = (range.src.get() as usize, range.dst.get() as usize);
                let len = range.len.get() as usize;
                let from = &source.0[pair.src][src..src + len];
                for ((byte, _), (target, writes)) in
                    from.iter().zip(&mut self.0[pair.dst][dst..dst + len])
                {
                    *target = *byte;
                    *writes += 1;
                }
            }
        }
    }

    /// Whether exactly the request's items hold what they must, written once each.
    fn check(
        &self,
        component: usize,
        tensors: &[Tensor],
        indices: &[i64],
    ) -> Result<(), TestCaseError> {
        let mut expected = Self::new(tensors);
        expected.place(component, tensors, indices);
        for (at, (tensor, memory)) in tensors.iter().zip(&self.0).enumerate() {
            for (offset, (byte, writes)) in memory.iter().enumerate() {
                let item = (offset / tensor.item_len()) as i64;
                let covered = indices.contains(&item);
                prop_assert_eq!(
                    (*byte, *writes),
                    (expected.0[at][offset].0, u32::from(covered)),
                    "component {} tensor {} item {} byte {}",
                    component,
                    at,
                    item,
                    offset % tensor.item_len()
                );
            }
        }
        Ok(())
    }
}

fn widened(indices: &[i32]) -> Vec<i64> {
    indices.iter().map(|index| i64::from(*index)).collect()
}

fn carry_out(model: &Model, request: &Request, dst_rank: u32) -> Result<(), TestCaseError> {
    let targets = model.components(model.dst_tp, dst_rank, 0..model.layers);
    let mut memories: Vec<Memory> = targets.iter().map(|tensors| Memory::new(tensors)).collect();
    let peer = model.peer(&targets, dst_rank);
    let src_indices = [
        widened(&request.src_pages),
        vec![request.slot.0.into()],
        widened(&request.window.0),
        widened(&request.window.0),
        vec![request.row.0.into()],
    ];
    let dst_indices = [
        widened(&request.dst_pages),
        vec![request.slot.1.into()],
        widened(&request.window.1),
        widened(&request.window.1),
        vec![request.row.1.into()],
    ];
    let per_stage = model.layers / model.src_pp;
    for pp_rank in 0..model.src_pp {
        for tp_rank in (0..model.src_tp).filter(|rank| model.feeds(*rank, dst_rank)) {
            let layers = pp_rank * per_stage..(pp_rank + 1) * per_stage;
            let start_layer = layers.start;
            let sources = model.components(model.src_tp, tp_rank, layers);
            let mut from: Vec<Memory> =
                sources.iter().map(|tensors| Memory::new(tensors)).collect();
            for (component, tensors) in sources.iter().enumerate() {
                from[component].place(component, tensors, &src_indices[component]);
            }
            let mut local = model.layout(&sources, tp_rank, start_layer);
            let is_last_stage = pp_rank + 1 == model.src_pp;
            if !is_last_stage {
                // State components live in the last stage here.
                local.states.clear();
            }
            let parallel = ParallelConfig {
                tp_size: model.src_tp,
                tp_rank,
                pp_size: model.src_pp,
                pp_rank,
                ..ParallelConfig::default()
            };
            let planner = PeerPlanner::new(&local, &parallel, &peer, PlannerOptions::default());
            let slices_windows = !model.is_mla && model.src_tp != model.dst_tp;
            if slices_windows && model.src_pp > 1 && is_last_stage {
                // The wire does not say which layers of a window a stage has.
                let refused = matches!(
                    planner,
                    Err(PlanError::Unsupported {
                        component: "swa",
                        ..
                    })
                );
                prop_assert!(refused);
                return Ok(());
            }
            let planner = planner.expect("these shardings work together");
            let ends = request
                .cuts
                .iter()
                .copied()
                .chain([request.src_pages.len()]);
            let mut position = 0;
            for end in ends {
                let plan = planner.plan_kv(&KvChunk {
                    src_pages: &request.src_pages[position..end],
                    position,
                    dst_pages: &request.dst_pages,
                    decode_prefix_len: 0,
                    num_kv_tokens: None,
                });
                memories[0].apply(&plan.expect("a chunk"), &from[0]);
                position = end;
            }
            let states: [(&[i32], &[i32]); 3] = [
                (&[request.slot.0], &[request.slot.1]),
                (&request.window.0, &request.window.1),
                (&request.window.0, &request.window.1),
            ];
            if is_last_stage {
                for (at, (src, dst)) in states.into_iter().enumerate() {
                    let plan = planner
                        .plan_state(at as u16, src, dst)
                        .expect("a state plan");
                    memories[1 + at].apply(&plan, &from[1 + at]);
                }
            }
            let plan = planner.plan_aux(request.row.0, request.row.1);
            memories[4].apply(&plan.expect("an aux plan"), &from[4]);
        }
    }
    for (component, tensors) in targets.iter().enumerate() {
        memories[component].check(component, tensors, &dst_indices[component])?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_of_a_request_arrives_once_and_no_other(
        model in model(),
        request in request(),
        rank in any::<prop::sample::Index>(),
    ) {
        carry_out(&model, &request, rank.index(model.dst_tp as usize) as u32)?;
    }

    /// Index lists of which one is longer, and indices out of bounds: an error, or a plan that
    /// stays inside (a range outside panics).
    #[test]
    fn nothing_leaves_its_tensor(
        model in model(),
        src in prop::collection::vec(-2..ITEMS as i32 + 2, 0..8),
        dst in prop::collection::vec(-2..ITEMS as i32 + 2, 0..8),
        state in select(vec![0u16, 1, 2, 3]),
    ) {
        let targets = model.components(model.dst_tp, 0, 0..model.layers);
        let sources = model.components(model.src_tp, 0, 0..model.layers);
        let local = model.layout(&sources, 0, 0);
        let parallel = ParallelConfig { tp_size: model.src_tp, ..ParallelConfig::default() };
        let peer = model.peer(&targets, 0);
        let planner = PeerPlanner::new(&local, &parallel, &peer, PlannerOptions::default())
            .expect("these shardings work together");
        let plans = [
            (0, planner.plan_kv(&KvChunk {
                src_pages: &src,
                position: 0,
                dst_pages: &dst,
                decode_prefix_len: 0,
                num_kv_tokens: None,
            })),
            (1 + usize::from(state), planner.plan_state(state, &src, &dst)),
        ];
        for (component, plan) in plans {
            if let Ok(plan) = plan {
                let mut memory = Memory::new(&targets[component]);
                memory.apply(&plan, &Memory::new(&sources[component]));
            }
        }
    }
}
