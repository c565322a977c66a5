//! The two sides' layouts against a third, independent way: put together the whole logical tensor
//! from the prefill ranks' items, cut the decode ranks' items out of it, and compare.

use super::*;
use crate::model::ModelName;

const CAPACITY: Capacity = Capacity {
    kv_pages: 8,
    sliding_pages: 8,
    requests: 4,
};

fn layouts(model: &ModelShape, side: Side, tp_size: u32) -> Vec<RankLayout> {
    (0..tp_size)
        .map(|rank| RankLayout::new(model, side, tp_size, rank, 4, CAPACITY))
        .collect()
}

fn rendered(layout: &RankLayout, component: Component, tensor: usize, ordinal: u32) -> Vec<u8> {
    let (_, component) = layout
        .component(component)
        .expect("the model has the component");
    let tensor = &component.tensors[tensor];
    let mut item = vec![0_u8; tensor.item_len as usize];
    tensor.render(Coordinates::new(3).with(99), ordinal, &mut item);
    item
}

/// Gathers the item of every rank into one item as a single rank would hold it. `unit` is the
/// stretch that repeats (one token of a page, or the whole item), `parts` the sizes of the parts
/// of a unit that are sharded by themselves, `replicas` how many neighbours hold the same.
fn gather(items: &[Vec<u8>], unit: usize, parts: &[usize], replicas: usize) -> Vec<u8> {
    let shards = items.len() / replicas;
    let mut whole = Vec::new();
    for repeat in 0..items[0].len() / (unit / shards) {
        let mut part_start = repeat * (unit / shards);
        for part in parts {
            for item in items.iter().step_by(replicas) {
                whole.extend_from_slice(&item[part_start..part_start + part / shards]);
            }
            part_start += part / shards;
        }
    }
    whole
}

fn assert_same_state(model: &ModelShape, prefill_tp: u32, decode_tp: u32) {
    let prefill = layouts(model, Side::Prefill, prefill_tp);
    let decode = layouts(model, Side::Decode, decode_tp);
    let replicas = |tp_size: u32| (tp_size / model.attention.heads).max(1) as usize;
    for component in Component::ALL {
        let Some((_, layout)) = prefill[0].component(component) else {
            continue;
        };
        for index in 0..layout.tensors.len() {
            for ordinal in [0, 3] {
                let items_of = |layouts: &[RankLayout]| {
                    let render = |layout| rendered(layout, component, index, ordinal);
                    layouts.iter().map(render).collect::<Vec<_>>()
                };
                let (sent, held) = (items_of(&prefill), items_of(&decode));
                let (unit, parts) = match component {
                    Component::Kv | Component::Swa => {
                        let shape = &model.attention;
                        let token = (shape.heads * shape.head_bytes) as usize;
                        (token, vec![token])
                    }
                    Component::Mamba => {
                        let mamba = model.mamba_opt.as_ref().expect("it has the component");
                        if index < mamba.layer_ids.len() {
                            let bytes = |group: &u32| (group * mamba.conv_channel_bytes) as usize;
                            let parts: Vec<_> = mamba.conv_groups.iter().map(bytes).collect();
                            (parts.iter().sum(), parts)
                        } else {
                            let bytes = mamba.recurrent_heads
                                * mamba.recurrent_rows
                                * mamba.recurrent_row_bytes;
                            (bytes as usize, vec![bytes as usize])
                        }
                    }
                    Component::Aux => {
                        assert!(sent.iter().chain(&held).all(|item| *item == sent[0]));
                        continue;
                    }
                };
                let paged = matches!(component, Component::Kv | Component::Swa);
                let copies = |tp_size| if paged { replicas(tp_size) } else { 1 };
                let whole = gather(&sent, unit, &parts, copies(prefill_tp));
                assert_eq!(
                    whole,
                    gather(&held, unit, &parts, copies(decode_tp)),
                    "{component}"
                );
                for group in held.chunks(copies(decode_tp)) {
                    assert!(
                        group.iter().all(|item| *item == group[0]),
                        "replicas differ"
                    );
                }
            }
        }
    }
}

#[test]
fn both_sides_expect_the_same_logical_state() {
    for name in [
        ModelName::Hybrid,
        ModelName::Qwen3Dense8b,
        ModelName::Qwen35Hybrid122b,
    ] {
        let model = ModelShape::new(name, 0.01, 16);
        for (prefill_tp, decode_tp) in [(4, 2), (2, 4), (1, 8), (8, 1), (2, 2)] {
            assert_same_state(&model, prefill_tp, decode_tp);
        }
    }
}

#[test]
fn replicated_heads_are_mapped_by_division() {
    let shares: Vec<_> = (0..4).map(|rank| head_share(2, 4, rank).start).collect();
    assert_eq!(shares, [0, 0, 1, 1]);
    assert_eq!(head_share(8, 4, 3), 6..8);
}

#[test]
fn no_two_rows_of_a_request_are_equal() {
    let model = ModelShape::new(ModelName::Hybrid, 0.01, 16);
    let layout = RankLayout::new(&model, Side::Decode, 1, 0, 4, CAPACITY);
    let mut seen = std::collections::HashSet::new();
    for component in [Component::Kv, Component::Swa] {
        let tensors = layout
            .component(component)
            .expect("it has both")
            .1
            .tensors
            .len();
        for tensor in 0..tensors {
            for ordinal in 0..3 {
                for row in rendered(&layout, component, tensor, ordinal).chunks_exact(128) {
                    assert!(seen.insert(row.to_vec()));
                }
            }
        }
    }
}

#[test]
fn tensors_neither_overlap_nor_touch() {
    let model = ModelShape::new(ModelName::Hybrid, 1.0, 16);
    for component in RankLayout::new(&model, Side::Prefill, 4, 1, 16, CAPACITY).components {
        let mut end = 0;
        for tensor in &component.tensors {
            assert!(tensor.offset >= end + GAP_BYTES);
            end = tensor.offset + tensor.item_len * u64::from(component.items);
        }
        assert!(component.pool_bytes >= end + GAP_BYTES);
    }
}

#[test]
fn the_registered_layout_is_that_of_the_model() {
    let model = ModelShape::new(ModelName::Qwen35Hybrid122b, 1.0, 16);
    let spec = RankLayout::new(&model, Side::Prefill, 4, 1, 16, CAPACITY).to_spec(&model);
    assert_eq!(spec.kv.tensors.len(), 24);
    assert_eq!(spec.kv.layer_ids.len(), 24);
    assert_eq!((spec.kv.head_num, spec.kv.total_head_num), (1, 2));
    assert_eq!(spec.states.len(), 1);
    let mamba = &spec.states[0];
    assert_eq!((mamba.kind.as_str(), mamba.tensors.len()), ("mamba", 72));
    assert_eq!((mamba.dims[0], mamba.dims[36]), (3072, 16));
    assert_eq!(mamba.tensors[0].item_len, 3072 * 3 * 2);
    assert_eq!(mamba.tensors[36].item_len, 16 * 128 * 128 * 4);
    assert_eq!(mamba.conv_shard_groups[0], Some(vec![2048, 2048, 8192]));
    assert_eq!(mamba.conv_shard_groups[36], None);

    let dense = ModelShape::new(ModelName::Qwen3Dense8b, 1.0, 16);
    let spec = RankLayout::new(&dense, Side::Decode, 2, 1, 16, CAPACITY).to_spec(&dense);
    assert_eq!(spec.kv.tensors.len(), 72);
    assert!(spec.states.is_empty() && spec.kv.layer_ids.is_empty());
}
