//! What every byte of a rank's state components means.

use std::ops::Range;

use common::schema::{PeerState, StateKind, StateLayout};

use super::case::{Case, DST_ITEMS, Ids, SRC_ITEMS, Slab, StateCase};
use super::image::{Coordinate, Part, Tensor, heads_of};

/// Which side of the request, and which of its ranks.
#[derive(Clone, Copy)]
pub struct Holder<'a> {
    pub tp_size: u32,
    pub tp_rank: u32,
    pub items: i32,
    pub indices: &'a [i32],
}

fn layers(state: &StateCase, stages: Range<usize>) -> Vec<u32> {
    let before: u32 = state.layers_of_stage[..stages.start].iter().sum();
    let here: u32 = state.layers_of_stage[stages].iter().sum();
    (before..before + here).collect()
}

/// The tensors of one slab, one for each layer (for K and V: all of K, then all of V).
fn slab_tensors(
    case: &Case,
    (component, slab_at): (usize, usize),
    slab: &Slab,
    layers: &[u32],
    holder: Holder<'_>,
) -> Vec<Tensor> {
    let coordinate = |part: usize, layer: u32, item: u32, column: u32, byte: u32| Coordinate {
        part: Part::State(component, part),
        layer,
        item,
        column,
        byte,
    };
    let indices = || holder.indices.iter().enumerate();
    match slab {
        Slab::Replicated { item_len } => {
            let tensors = layers.iter().map(|layer| {
                let mut tensor = Tensor::new(*item_len as usize, holder.items);
                for (item, index) in indices() {
                    let bytes = 0..*item_len;
                    let bytes = bytes.map(|byte| coordinate(slab_at, *layer, item as u32, 0, byte));
                    tensor.paint(*index as usize * *item_len as usize, bytes);
                }
                tensor
            });
            tensors.collect()
        }
        Slab::Sharded {
            parts, outer, unit, ..
        } => {
            // This rank's channels, counted over the model: its shard of each part in turn.
            let mut channels = Vec::new();
            let mut first = 0;
            for part in parts {
                let share = part / holder.tp_size;
                let start = first + holder.tp_rank * share;
                channels.extend(start..start + share);
                first += part;
            }
            let item_len = channels.len() * (outer * unit) as usize;
            let tensors = layers.iter().map(|layer| {
                let mut tensor = Tensor::new(item_len, holder.items);
                for (_, index) in indices() {
                    let bytes = (0..*outer).flat_map(|row| {
                        channels.iter().flat_map(move |channel| {
                            (0..*unit)
                                .map(move |byte| coordinate(slab_at, *layer, row, *channel, byte))
                        })
                    });
                    tensor.paint(*index as usize * item_len, bytes);
                }
                tensor
            });
            tensors.collect()
        }
        Slab::Heads { head_len } => {
            let heads = heads_of(case.total_heads, holder.tp_size, holder.tp_rank);
            let page = case.page_size;
            let item_len = page as usize * heads.len() * *head_len as usize;
            let halves = [0, 1].into_iter().flat_map(|half| {
                let heads = heads.clone();
                layers.iter().map(move |layer| {
                    let mut tensor = Tensor::new(item_len, holder.items);
                    for (item, index) in indices() {
                        let bytes = (0..page).flat_map(|slot| {
                            let token = item as u32 * page + slot;
                            heads.clone().flat_map(move |head| {
                                (0..*head_len)
                                    .map(move |byte| coordinate(half, *layer, token, head, byte))
                            })
                        });
                        tensor.paint(*index as usize * item_len, bytes);
                    }
                    tensor
                })
            });
            halves.collect()
        }
    }
}

fn copies(slab: &Slab) -> usize {
    match slab {
        Slab::Heads { .. } => 2,
        _ => 1,
    }
}

/// The same for each tensor of a component, in the order of the registration.
fn per_tensor<T: Clone>(state: &StateCase, layers: usize, of: impl Fn(&Slab) -> T) -> Vec<T> {
    let slabs = state.slabs.iter();
    slabs
        .flat_map(|slab| vec![of(slab); layers * copies(slab)])
        .collect()
}

fn dims(state: &StateCase, layers: usize, tp_size: u32) -> Vec<u32> {
    per_tensor(state, layers, |slab| match slab {
        Slab::Sharded { parts, .. } => parts.iter().sum::<u32>() / tp_size,
        _ => 0,
    })
}

fn ids(state: &StateCase, layers: &[u32], given: bool) -> Vec<u32> {
    let copies: usize = state.slabs.iter().map(copies).sum();
    layers.repeat(if given { copies } else { 0 })
}

/// A component of a prefill rank: its buffers, and what its engine registers.
pub fn prefill_state(
    case: &Case,
    component: usize,
    tp_rank: u32,
    stage: usize,
) -> (Vec<Tensor>, StateLayout) {
    let state = &case.states[component];
    let layers = layers(state, stage..stage + 1);
    let holder = Holder {
        tp_size: case.prefill_tp,
        tp_rank,
        items: SRC_ITEMS,
        indices: &state.src_indices,
    };
    let slabs = state.slabs.iter().enumerate();
    let tensors: Vec<Tensor> = slabs
        .flat_map(|(at, slab)| slab_tensors(case, (component, at), slab, &layers, holder))
        .collect();
    let is_mamba = state.kind == StateKind::Mamba;
    let layout = StateLayout {
        kind: state.kind,
        tensors: tensors.iter().map(Tensor::layout).collect(),
        dims: if is_mamba {
            dims(state, layers.len(), case.prefill_tp)
        } else {
            Vec::new()
        },
        outer_counts: per_tensor(state, layers.len(), |slab| match slab {
            Slab::Sharded { outer, .. } => *outer,
            _ => 1,
        }),
        conv_shard_groups: per_tensor(state, layers.len(), |slab| match slab {
            Slab::Sharded {
                parts, convolution, ..
            } => convolution.then(|| parts.clone()),
            _ => None,
        }),
        layer_ids: ids(
            state,
            &layers,
            matches!(state.ids, Ids::Both | Ids::PrefillOnly),
        ),
    };
    (tensors, layout)
}

/// A component of the decode rank as it must be when the request has arrived, and what the rank
/// registers.
pub fn decode_state(case: &Case, component: usize) -> (Vec<Tensor>, PeerState) {
    let state = &case.states[component];
    let mut layers = layers(state, case.decode_stages());
    if state.decode_reversed {
        layers.reverse();
    }
    let common = state.src_indices.len().min(state.dst_indices.len());
    let holder = Holder {
        tp_size: case.decode_tp,
        tp_rank: case.decode_rank,
        items: DST_ITEMS,
        indices: &state.dst_indices[..common],
    };
    let slabs = state.slabs.iter().enumerate();
    let mut tensors: Vec<Tensor> = slabs
        .flat_map(|(at, slab)| slab_tensors(case, (component, at), slab, &layers, holder))
        .collect();
    if let Some(elided) = state.elided.and_then(|elided| tensors.get_mut(elided)) {
        *elided = Tensor::default();
    }
    let peer = PeerState {
        tensors: tensors.iter().map(|tensor| tensor.peer(true)).collect(),
        dims: dims(state, layers.len(), case.decode_tp),
        layer_ids: ids(
            state,
            &layers,
            matches!(state.ids, Ids::Both | Ids::DecodeOnly),
        ),
    };
    (tensors, peer)
}
