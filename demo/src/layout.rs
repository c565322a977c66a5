//! How one rank holds its share of a model's state: tensors in pools, and what each item of a
//! tensor must contain.
//!
//! This is written from the model's shape alone and shares no code with the planner that it
//! checks. A rank's share follows SGLang: head `rank * heads / tp` is the first (so ranks beyond
//! the number of heads hold replicas), each part of a convolution is sharded by itself, recurrent
//! heads are sharded evenly, aux rows are whole on every rank.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use transfer_actor::api::{AttentionSpec, KvSpec, LayoutSpec, StateSpec, TensorSpec};

use crate::content::Coordinates;
use crate::model::{AttentionShape, ModelShape};

/// Bytes of background before the first tensor of a pool, between two and after the last, so that
/// a write that leaves its tensor is seen.
const GAP_BYTES: u64 = 4096;

/// Every tensor begins on a multiple of this.
const TENSOR_ALIGNMENT: u64 = 256;

/// Every page whose number is a multiple of this is never handed out, so that some of each pool
/// stays untouched however long the run.
pub const CANARY_STRIDE: u32 = 16;

/// Which of the two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// Reads the prompt; sends.
    Prefill,
    /// Generates; receives.
    Decode,
}

impl fmt::Display for Side {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// One part of a request's state, by the name that metrics use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Component {
    /// Paged K and V of the full-attention layers.
    Kv,
    /// Convolution and recurrent state, one slot a request.
    Mamba,
    /// Paged K and V of the sliding-window layers.
    Swa,
    /// Auxiliary rows, one a request.
    Aux,
}

impl Component {
    /// All of them, in the order of their pools.
    pub const ALL: [Self; 4] = [Self::Kv, Self::Mamba, Self::Swa, Self::Aux];

    /// The label in metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Mamba => "mamba",
            Self::Swa => "swa",
            Self::Aux => "aux",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.label())
    }
}

impl std::str::FromStr for Component {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|component| component.label() == text)
            .ok_or_else(|| format!("unknown component {text:?}: kv, mamba, swa or aux"))
    }
}

/// How many items of each component a rank has room for.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Pages of the KV cache.
    pub kv_pages: u32,
    /// Pages of the sliding window.
    pub sliding_pages: u32,
    /// Slots and rows.
    pub requests: u32,
}

/// The rows of one item of a tensor, in the order in which they lie in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Rows {
    /// One page: for each token the rank's heads.
    Heads {
        family: u64,
        layer: u32,
        part: u64,
        page_size: u32,
        heads: Range<u32>,
        head_bytes: u32,
    },
    /// One slot: for each part of the convolution the rank's channels.
    Channels {
        layer: u32,
        shards: Vec<Range<u32>>,
        channel_bytes: u32,
    },
    /// One slot: for each of the rank's heads the rows of its matrix.
    Matrices {
        layer: u32,
        heads: Range<u32>,
        rows: u32,
        row_bytes: u32,
    },
    /// One row as it is.
    Whole { buffer: u32 },
}

/// Coordinates that tell the families of rows apart.
const FAMILY_ATTENTION: u64 = 1;
const FAMILY_SLIDING: u64 = 2;
const FAMILY_CONV: u64 = 3;
const FAMILY_RECURRENT: u64 = 4;
const FAMILY_AUX: u64 = 5;

/// One buffer of equal items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// What it is called in messages, for example `v.layer7`.
    pub name: String,
    /// Its model layer; none for aux.
    pub layer_opt: Option<u32>,
    /// Where it begins in the component's pool, in bytes.
    pub offset: u64,
    /// Bytes of one item (page, slot or row).
    pub item_len: u64,
    rows: Rows,
}

impl Tensor {
    /// Writes what an item must contain: the `ordinal`-th page of the request, or its only slot or
    /// row. `request` is the hash of the seed and the request; `out` has the length of an item.
    pub fn render(&self, request: Coordinates, ordinal: u32, out: &mut [u8]) {
        match &self.rows {
            Rows::Heads {
                family,
                layer,
                part,
                page_size,
                heads,
                head_bytes,
            } => {
                let tensor = request.with(*family).with(u64::from(*layer)).with(*part);
                let head_count = heads.len();
                let first_token = u64::from(ordinal) * u64::from(*page_size);
                for (index, row) in out.chunks_exact_mut(*head_bytes as usize).enumerate() {
                    let token = first_token + (index / head_count) as u64;
                    let head = u64::from(heads.start) + (index % head_count) as u64;
                    tensor.with(token).with(head).fill(row);
                }
            }
            Rows::Channels {
                layer,
                shards,
                channel_bytes,
            } => {
                let tensor = request.with(FAMILY_CONV).with(u64::from(*layer));
                let channels = shards.iter().cloned().flatten();
                for (row, channel) in out.chunks_exact_mut(*channel_bytes as usize).zip(channels) {
                    tensor.with(u64::from(channel)).fill(row);
                }
            }
            Rows::Matrices {
                layer,
                heads,
                rows,
                row_bytes,
            } => {
                let tensor = request.with(FAMILY_RECURRENT).with(u64::from(*layer));
                let places = heads
                    .clone()
                    .flat_map(|head| (0..*rows).map(move |row| (head, row)));
                for (bytes, (head, row)) in out.chunks_exact_mut(*row_bytes as usize).zip(places) {
                    tensor
                        .with(u64::from(head))
                        .with(u64::from(row))
                        .fill(bytes);
                }
            }
            Rows::Whole { buffer } => {
                request.with(FAMILY_AUX).with(u64::from(*buffer)).fill(out);
            }
        }
    }
}

/// One component of one rank: all of its tensors lie in one pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentLayout {
    /// Which one.
    pub component: Component,
    /// Items in each tensor.
    pub items: u32,
    /// Bytes of the pool, gaps included.
    pub pool_bytes: u64,
    /// The buffers, in the order in which they are registered.
    pub tensors: Vec<Tensor>,
}

impl ComponentLayout {
    fn new(
        component: Component,
        items: u32,
        unplaced: Vec<(String, Option<u32>, u64, Rows)>,
    ) -> Self {
        let mut end = GAP_BYTES;
        let mut tensors = Vec::with_capacity(unplaced.len());
        for (name, layer_opt, item_len, rows) in unplaced {
            let offset = end.next_multiple_of(TENSOR_ALIGNMENT);
            end = offset + item_len * u64::from(items) + GAP_BYTES;
            tensors.push(Tensor {
                name,
                layer_opt,
                offset,
                item_len,
                rows,
            });
        }
        Self {
            component,
            items,
            pool_bytes: end.next_multiple_of(GAP_BYTES),
            tensors,
        }
    }

    /// Bytes of one item over all tensors.
    pub fn item_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.item_len).sum()
    }

    fn tensor_specs(&self, pool: usize) -> Vec<TensorSpec> {
        let bytes_of = |tensor: &Tensor| tensor.item_len * u64::from(self.items);
        self.tensors
            .iter()
            .map(|tensor| TensorSpec {
                pool,
                offset: tensor.offset,
                bytes: bytes_of(tensor),
                item_len: tensor.item_len,
            })
            .collect()
    }
}

/// Everything that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Which engine it belongs to.
    pub side: Side,
    /// Ranks of that engine.
    pub tp_size: u32,
    /// This one.
    pub tp_rank: u32,
    /// Tokens of one page.
    pub page_size: u32,
    /// What it holds; the position is the number of the pool.
    pub components: Vec<ComponentLayout>,
}

/// A rank's equal share of `size` heads or channels that begin at `start`.
fn even_share(start: u32, size: u32, tp_size: u32, tp_rank: u32) -> Range<u32> {
    let share = size / tp_size;
    start + tp_rank * share..start + (tp_rank + 1) * share
}

/// The KV heads of a rank. Where there are more ranks than heads, `tp / heads` neighbours hold the
/// same one.
fn head_share(heads: u32, tp_size: u32, tp_rank: u32) -> Range<u32> {
    let first = tp_rank * heads / tp_size;
    first..first + (heads / tp_size).max(1)
}

impl RankLayout {
    /// The layout of one rank. The TP size has passed [`ModelShape::check_tp`].
    pub fn new(
        model: &ModelShape,
        side: Side,
        tp_size: u32,
        tp_rank: u32,
        page_size: u32,
        capacity: Capacity,
    ) -> Self {
        let paged =
            |shape: &AttentionShape, family: u64| -> Vec<(String, Option<u32>, u64, Rows)> {
                let heads = head_share(shape.heads, tp_size, tp_rank);
                let token_bytes = heads.len() as u64 * u64::from(shape.head_bytes);
                let item_len = token_bytes * u64::from(page_size);
                let parts = [("k", 0), ("v", 1)];
                let of_part = |(part_name, part): (&str, u64)| {
                    let tensor = |layer: &u32| {
                        let rows = Rows::Heads {
                            family,
                            layer: *layer,
                            part,
                            page_size,
                            heads: heads.clone(),
                            head_bytes: shape.head_bytes,
                        };
                        (
                            format!("{part_name}.layer{layer}"),
                            Some(*layer),
                            item_len,
                            rows,
                        )
                    };
                    shape.layer_ids.iter().map(tensor).collect::<Vec<_>>()
                };
                parts.into_iter().flat_map(of_part).collect()
            };

        let mut components = vec![ComponentLayout::new(
            Component::Kv,
            capacity.kv_pages,
            paged(&model.attention, FAMILY_ATTENTION),
        )];

        if let Some(mamba) = &model.mamba_opt {
            let mut next_group = 0;
            let mut shards = Vec::new();
            for group in &mamba.conv_groups {
                shards.push(even_share(next_group, *group, tp_size, tp_rank));
                next_group += group;
            }
            let channels = shards.iter().map(|shard| shard.len() as u64).sum::<u64>();
            let heads = even_share(0, mamba.recurrent_heads, tp_size, tp_rank);
            let conv = mamba.layer_ids.iter().map(|layer| {
                let item_len = channels * u64::from(mamba.conv_channel_bytes);
                let rows = Rows::Channels {
                    layer: *layer,
                    shards: shards.clone(),
                    channel_bytes: mamba.conv_channel_bytes,
                };
                (format!("conv.layer{layer}"), Some(*layer), item_len, rows)
            });
            let recurrent = mamba.layer_ids.iter().map(|layer| {
                let matrix_bytes =
                    u64::from(mamba.recurrent_rows) * u64::from(mamba.recurrent_row_bytes);
                let rows = Rows::Matrices {
                    layer: *layer,
                    heads: heads.clone(),
                    rows: mamba.recurrent_rows,
                    row_bytes: mamba.recurrent_row_bytes,
                };
                let item_len = heads.len() as u64 * matrix_bytes;
                (
                    format!("recurrent.layer{layer}"),
                    Some(*layer),
                    item_len,
                    rows,
                )
            });
            let tensors = conv.chain(recurrent).collect();
            components.push(ComponentLayout::new(
                Component::Mamba,
                capacity.requests,
                tensors,
            ));
        }

        if let Some(sliding) = &model.sliding_opt {
            let tensors = paged(sliding, FAMILY_SLIDING);
            components.push(ComponentLayout::new(
                Component::Swa,
                capacity.sliding_pages,
                tensors,
            ));
        }

        let aux = (0_u32..).zip(&model.aux).map(|(buffer, shape)| {
            let rows = Rows::Whole { buffer };
            (
                shape.name.to_owned(),
                None,
                u64::from(shape.row_bytes),
                rows,
            )
        });
        components.push(ComponentLayout::new(
            Component::Aux,
            capacity.requests,
            aux.collect(),
        ));
        Self {
            side,
            tp_size,
            tp_rank,
            page_size,
            components,
        }
    }

    /// The layout of a component and the number of its pool.
    pub fn component(&self, component: Component) -> Option<(usize, &ComponentLayout)> {
        self.components
            .iter()
            .enumerate()
            .find(|(_, layout)| layout.component == component)
    }

    /// Bytes of all pools.
    pub fn pool_bytes(&self) -> u64 {
        self.components
            .iter()
            .map(|component| component.pool_bytes)
            .sum()
    }

    /// The layout as the service takes it.
    pub fn to_spec(&self, model: &ModelShape) -> LayoutSpec {
        let mut spec = LayoutSpec {
            page_size: self.page_size,
            kv: KvSpec {
                tensors: Vec::new(),
                layer_ids: Vec::new(),
                start_layer: 0,
                num_draft_entries: 0,
                attention: AttentionSpec::Mha,
                head_num: head_share(model.attention.heads, self.tp_size, self.tp_rank).len()
                    as u32,
                total_head_num: model.attention.heads,
            },
            aux: Vec::new(),
            states: Vec::new(),
        };
        for (pool, layout) in self.components.iter().enumerate() {
            let tensors = layout.tensor_specs(pool);
            let layer_ids = || {
                layout
                    .tensors
                    .iter()
                    .filter_map(|tensor| tensor.layer_opt)
                    .collect()
            };
            match layout.component {
                Component::Kv => {
                    spec.kv.tensors = tensors;
                    if model.names_layers {
                        spec.kv.layer_ids = layer_ids();
                    }
                }
                Component::Aux => spec.aux = tensors,
                Component::Swa => spec.states.push(StateSpec {
                    kind: layout.component.label().to_owned(),
                    tensors,
                    dims: Vec::new(),
                    outer_counts: Vec::new(),
                    conv_shard_groups: Vec::new(),
                    layer_ids: Vec::new(),
                }),
                Component::Mamba => {
                    let groups = model
                        .mamba_opt
                        .as_ref()
                        .map(|mamba| mamba.conv_groups.clone());
                    let sharded = |tensor: &Tensor| match &tensor.rows {
                        Rows::Channels { shards, .. } => {
                            let channels = shards.iter().map(|shard| shard.len() as u32).sum();
                            (channels, groups.clone())
                        }
                        Rows::Matrices { heads, .. } => (heads.len() as u32, None),
                        Rows::Heads { .. } | Rows::Whole { .. } => (0, None),
                    };
                    let (dims, conv_shard_groups) = layout.tensors.iter().map(sharded).unzip();
                    spec.states.push(StateSpec {
                        kind: layout.component.label().to_owned(),
                        outer_counts: vec![1; tensors.len()],
                        tensors,
                        dims,
                        conv_shard_groups,
                        layer_ids: layer_ids(),
                    });
                }
            }
        }
        spec
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
