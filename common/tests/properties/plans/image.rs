//! What every byte of a rank's KV and aux buffers means.

use std::ops::Range;

use common::ids::ByteLen;
use common::schema::{KvLayout, PeerTensor, TensorLayout};

use super::case::{Case, DST_ITEMS, SRC_ITEMS};

/// Which buffer a byte belongs to, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Key,
    Value,
    Latent,
    Aux(usize),
    /// A state component and which of its slabs (or K and V) it is.
    State(usize, usize),
}

/// The logical place of one byte: the same on both sides, whatever their layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinate {
    pub part: Part,
    pub layer: u32,
    /// Token of the request, or position in the index list of a component of rows.
    pub item: u32,
    /// KV head, or channel of a slot.
    pub column: u32,
    pub byte: u32,
}

/// One buffer: the length of its items, and what each byte of it means to the request.
#[derive(Clone, Debug, Default)]
pub struct Tensor {
    pub item_len: usize,
    pub meaning: Vec<Option<Coordinate>>,
}

impl Tensor {
    pub fn new(item_len: usize, items: i32) -> Self {
        Self {
            item_len,
            meaning: vec![None; item_len * items as usize],
        }
    }

    pub fn layout(&self) -> TensorLayout {
        TensorLayout {
            bytes: ByteLen(self.meaning.len() as u64),
            item_len: ByteLen(self.item_len as u64),
        }
    }

    pub fn peer(&self, knows_item_len: bool) -> PeerTensor {
        PeerTensor {
            bytes: ByteLen(self.meaning.len() as u64),
            item_len_opt: knows_item_len.then_some(ByteLen(self.item_len as u64)),
        }
    }

    /// Writes the coordinates of successive bytes from an offset on.
    pub fn paint(&mut self, offset: usize, coordinates: impl Iterator<Item = Coordinate>) {
        for (at, coordinate) in coordinates.enumerate() {
            let byte = &mut self.meaning[offset + at];
            assert!(byte.is_none(), "two meanings for one byte");
            *byte = Some(coordinate);
        }
    }
}

/// The KV heads of a rank: an even share, or one that several consecutive ranks hold.
pub fn heads_of(total_heads: u32, tp_size: u32, rank: u32) -> Range<u32> {
    let share = (total_heads / tp_size).max(1);
    let first = u64::from(rank) * u64::from(total_heads) / u64::from(tp_size);
    let first = first as u32;
    first..first + share
}

/// Which KV tensor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvTensor {
    pub part: Part,
    pub layer: u32,
    pub is_draft: bool,
}

fn stage_layers(case: &Case, stages: Range<usize>) -> Vec<u32> {
    let before: u32 = case.layers_of_stage[..stages.start].iter().sum();
    let here: u32 = case.layers_of_stage[stages].iter().sum();
    (before..before + here).collect()
}

fn list_of(case: &Case, layers: &[u32], drafts: u32) -> Vec<KvTensor> {
    let total: u32 = case.layers_of_stage.iter().sum();
    let drafts: Vec<u32> = (total..total + drafts).collect();
    let parts: &[Part] = if case.is_latent() {
        &[Part::Latent]
    } else {
        &[Part::Key, Part::Value]
    };
    let mut tensors = Vec::new();
    for (layers, is_draft) in [(layers, false), (&drafts[..], true)] {
        for part in parts {
            tensors.extend(layers.iter().map(|layer| KvTensor {
                part: *part,
                layer: *layer,
                is_draft,
            }));
        }
    }
    tensors
}

/// The tensors of the decode rank. Where layers pair by id their order is the decode's own.
pub fn kv_tensors(case: &Case) -> Vec<KvTensor> {
    let stages = case.layers_of_stage.len();
    let mut layers = stage_layers(case, case.decode_stages());
    if case.kv_ids && stages > 1 && case.decode_stage.is_none() {
        layers.reverse();
    }
    let has_drafts = case.decode_stages().end == stages;
    list_of(
        case,
        &layers,
        if has_drafts { case.decode_drafts } else { 0 },
    )
}

/// The tensors of a prefill rank.
pub fn prefill_kv_tensors(case: &Case, stage: usize) -> Vec<KvTensor> {
    let has_drafts = case.prefill_has_drafts && stage + 1 == case.layers_of_stage.len();
    let layers = stage_layers(case, stage..stage + 1);
    list_of(
        case,
        &layers,
        if has_drafts { case.decode_drafts } else { 0 },
    )
}

fn elided(case: &Case) -> Option<(KvTensor, bool)> {
    let (position, at_decode) = case.kv_elided?;
    Some((kv_tensors(case)[position], at_decode))
}

/// Pages of tokens of heads: `token_at` says which token of the request stands in a slot.
fn paint_pages(
    tensor: &mut Tensor,
    pages: &[i32],
    tokens_of_page: u32,
    (heads, head_len): (Range<u32>, u32),
    of: KvTensor,
    token_at: impl Fn(u32) -> Option<u32>,
) {
    let token_len = heads.len() * head_len as usize;
    for (position, page) in pages.iter().enumerate() {
        for slot in 0..tokens_of_page {
            let Some(token) = token_at(position as u32 * tokens_of_page + slot) else {
                continue;
            };
            let offset = *page as usize * tensor.item_len + slot as usize * token_len;
            let coordinates = heads.clone().flat_map(|head| {
                (0..head_len).map(move |byte| Coordinate {
                    part: of.part,
                    layer: of.layer,
                    item: token,
                    column: head,
                    byte,
                })
            });
            tensor.paint(offset, coordinates);
        }
    }
}

/// The KV buffers of a prefill rank.
pub fn prefill_kv(case: &Case, tp_rank: u32, stage: usize) -> Vec<Tensor> {
    let heads = match case.is_latent() {
        true => 0..1,
        false => heads_of(case.total_heads, case.prefill_tp, tp_rank),
    };
    let item_len = case.page_size as usize * heads.len() * case.head_len as usize;
    let tensors = prefill_kv_tensors(case, stage).into_iter().map(|of| {
        if elided(case) == Some((of, false)) {
            return Tensor::default();
        }
        let mut tensor = Tensor::new(item_len, SRC_ITEMS);
        let token_at = |slot: u32| (slot < case.tokens).then_some(slot);
        let shape = (heads.clone(), case.head_len);
        paint_pages(
            &mut tensor,
            &case.src_pages,
            case.page_size,
            shape,
            of,
            token_at,
        );
        tensor
    });
    tensors.collect()
}

/// The KV buffers of the decode rank, as they must be when the request has arrived.
pub fn decode_kv(case: &Case) -> Vec<Tensor> {
    let heads = match case.is_latent() {
        true => 0..1,
        false => heads_of(case.total_heads, case.decode_tp, case.decode_rank),
    };
    let token_len = heads.len() * case.head_len as usize;
    let (size, rank) = (case.dcp_size, case.dcp_rank);
    let tensors = kv_tensors(case).into_iter().map(|of| {
        if elided(case) == Some((of, true)) {
            return Tensor::default();
        }
        // A draft's page holds the tokens of all context ranks.
        let tokens_of_page = case.page_size * if of.is_draft { size } else { 1 };
        let mut tensor = Tensor::new(tokens_of_page as usize * token_len, DST_ITEMS);
        let sent = elided(case) != Some((of, false)) && (!of.is_draft || case.prefill_has_drafts);
        let token_at = |slot: u32| {
            let token = if of.is_draft {
                slot
            } else {
                slot * size + rank
            };
            (sent && token < case.tokens).then_some(token)
        };
        let shape = (heads.clone(), case.head_len);
        paint_pages(
            &mut tensor,
            &case.dst_pages,
            tokens_of_page,
            shape,
            of,
            token_at,
        );
        tensor
    });
    tensors.collect()
}

fn ids_of(case: &Case, tensors: &[KvTensor]) -> Vec<u32> {
    let ids = tensors.iter().map(|tensor| tensor.layer);
    ids.filter(|_| case.kv_ids).collect()
}

/// What the prefill engine registers of its KV buffers.
pub fn kv_layout(case: &Case, stage: usize, tensors: &[Tensor]) -> KvLayout {
    let listed = prefill_kv_tensors(case, stage);
    let heads = if case.is_latent() {
        1
    } else {
        case.total_heads
    };
    KvLayout {
        tensors: tensors.iter().map(Tensor::layout).collect(),
        layer_ids: ids_of(case, &listed),
        start_layer: case.layers_of_stage[..stage].iter().sum(),
        num_draft_entries: listed.iter().filter(|tensor| tensor.is_draft).count() as u32,
        attention: case.attention,
        head_num: (heads / case.prefill_tp).max(1),
        total_head_num: heads,
    }
}

pub fn decode_kv_ids(case: &Case) -> Vec<u32> {
    ids_of(case, &kv_tensors(case))
}

/// The aux buffers of either side, with one row painted if it is sent.
pub fn aux(case: &Case, items: i32, row: u32, painted: bool) -> Vec<Tensor> {
    let lens = case.aux_lens.iter().enumerate();
    let tensors = lens.map(|(buffer, len)| {
        let mut tensor = Tensor::new(*len as usize, items);
        let coordinates = (0..*len).map(|byte| Coordinate {
            part: Part::Aux(buffer),
            layer: 0,
            item: 0,
            column: 0,
            byte,
        });
        if painted {
            tensor.paint(row as usize * *len as usize, coordinates);
        }
        tensor
    });
    tensors.collect()
}
