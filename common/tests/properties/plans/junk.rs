//! Layouts, topologies and indices that mostly make no sense: nothing panics, and a plan that is
//! made nevertheless stays inside its regions and writes nothing twice.

use std::collections::{HashMap, HashSet};

use common::ids::ByteLen;
use common::plan::layers::{entry_pairs, mha_pairs, mla_pairs};
use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlanError, PlannerOptions};
use common::schema::{
    AttentionKind, KvLayout, PeerLayout, PeerState, PeerTensor, RankLayout, StateKind, StateLayout,
    TensorLayout,
};
use common::topology::ParallelConfig;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// Beyond this a plan's ranges are not listed; its ends are checked all the same.
const MOST_RANGES: u64 = 20_000;

/// A length: mostly one that others may fit.
fn length() -> impl Strategy<Value = u64> {
    const EXTREMES: &[u64] = &[1, 7, 1 << 31, 1 << 32, 1 << 62, u64::MAX / 3, u64::MAX];
    prop_oneof![
        8 => select(&[0u64, 8, 16, 24, 32, 48, 96][..]),
        1 => 0..200u64,
        1 => select(EXTREMES),
    ]
}

/// A count or rank: mostly small.
fn small() -> impl Strategy<Value = u32> {
    prop_oneof![
        8 => 0..5u32,
        2 => select(&[6u32, 8, 16][..]),
        1 => select(&[u32::MAX, 1 << 31, 1000][..]),
    ]
}

fn tensor() -> impl Strategy<Value = (u64, u64)> {
    (length(), 0..7u64, select(&[0u64, 0, 0, 1, 5][..])).prop_map(|(item_len, items, more)| {
        (
            item_len.saturating_mul(items).saturating_add(more),
            item_len,
        )
    })
}

fn layout() -> impl Strategy<Value = TensorLayout> {
    tensor().prop_map(|(bytes, item_len)| TensorLayout {
        bytes: ByteLen(bytes),
        item_len: ByteLen(item_len),
    })
}

fn peer_tensor() -> impl Strategy<Value = PeerTensor> {
    (tensor(), any::<bool>()).prop_map(|((bytes, item_len), known)| PeerTensor {
        bytes: ByteLen(bytes),
        item_len_opt: known.then_some(ByteLen(item_len)),
    })
}

fn ids() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![2 => Just(Vec::new()), 1 => vec(0..4u32, 0..6)]
}

fn state() -> impl Strategy<Value = StateLayout> {
    let lists = (
        vec(small(), 0..4),
        vec(0..4u32, 0..4),
        vec(option::of(vec(small(), 0..4)), 0..4),
        ids(),
    );
    (select(&StateKind::ALL[..]), vec(layout(), 0..4), lists).prop_map(|(kind, tensors, lists)| {
        StateLayout {
            kind,
            tensors,
            dims: lists.0,
            outer_counts: lists.1,
            conv_shard_groups: lists.2,
            layer_ids: lists.3,
        }
    })
}

fn local() -> impl Strategy<Value = RankLayout> {
    let attention = select(
        &[
            AttentionKind::Mha,
            AttentionKind::Mla,
            AttentionKind::HybridMla,
        ][..],
    );
    let numbers = (small(), small(), small(), small());
    let kv = (vec(layout(), 0..6), ids(), numbers, attention);
    let kv = kv.prop_map(|(tensors, layer_ids, numbers, attention)| KvLayout {
        tensors,
        layer_ids,
        start_layer: numbers.0,
        num_draft_entries: numbers.1,
        attention,
        head_num: numbers.2,
        total_head_num: numbers.3,
    });
    (small(), kv, vec(layout(), 0..3), vec(state(), 0..3)).prop_map(
        |(page_size, kv, aux, states)| RankLayout {
            page_size,
            kv,
            aux,
            states,
        },
    )
}

fn peer() -> impl Strategy<Value = PeerLayout> {
    let state = (vec(peer_tensor(), 0..4), vec(small(), 0..4), ids());
    let state = state.prop_map(|(tensors, dims, layer_ids)| PeerState {
        tensors,
        dims,
        layer_ids,
    });
    let buffers = (
        vec(peer_tensor(), 0..6),
        ids(),
        vec(peer_tensor(), 0..3),
        vec(state, 0..3),
    );
    let dcp = prop_oneof![2 => Just((1u32, 0u32)), 1 => (small(), small())];
    (buffers, small(), small(), dcp).prop_map(|(buffers, tp_size, engine_rank, dcp)| PeerLayout {
        kv: buffers.0,
        kv_layer_ids: buffers.1,
        aux: buffers.2,
        states: buffers.3,
        tp_size,
        engine_rank,
        dcp_size: dcp.0,
        dcp_rank: dcp.1,
    })
}

fn parallel() -> impl Strategy<Value = ParallelConfig> {
    let dcp = prop_oneof![3 => Just((1u32, 0u32)), 1 => (small(), small())];
    ((small(), small()), (1..3u32, 0..3u32), dcp).prop_map(|(tp, pp, dcp)| ParallelConfig {
        tp_size: tp.0,
        tp_rank: tp.1.checked_rem(tp.0).unwrap_or_default(),
        pp_size: pp.0,
        pp_rank: pp.1 % pp.0,
        dcp_size: dcp.0,
        dcp_rank: dcp.1,
        ..ParallelConfig::default()
    })
}

fn indices() -> impl Strategy<Value = Vec<i32>> {
    let index = prop_oneof![
        20 => 0..7i32,
        1 => select(&[-1, i32::MIN, i32::MAX, 1000][..]),
    ];
    prop_oneof![vec(index, 0..5), Just(vec![3, 0, 1, 2]), Just(vec![0])]
}

/// A peer that has the same buffers; only then most layouts fit each other.
fn like(local: &RankLayout, peer: PeerLayout) -> PeerLayout {
    let of = |tensor: &TensorLayout| PeerTensor {
        bytes: tensor.bytes,
        item_len_opt: Some(tensor.item_len),
    };
    let states = local.states.iter().map(|state| PeerState {
        tensors: state.tensors.iter().map(of).collect(),
        dims: state.dims.clone(),
        layer_ids: state.layer_ids.clone(),
    });
    PeerLayout {
        kv: local.kv.tensors.iter().map(of).collect(),
        kv_layer_ids: local.kv.layer_ids.clone(),
        states: states.collect(),
        ..peer
    }
}

pub fn check_plan(plan: &ComponentPlan, src: &[u64], dst: &[u64]) -> Result<(), TestCaseError> {
    plan.bytes();
    let mut written: HashMap<usize, Vec<(u64, u64)>> = HashMap::new();
    for pair in plan.pairs() {
        let src_bytes = src.get(pair.src).copied().unwrap_or_default();
        let dst_bytes = dst.get(pair.dst).copied().unwrap_or_default();
        prop_assert!(
            pair.runs.src_end().get() <= src_bytes,
            "{pair:?} leaves {src_bytes} bytes"
        );
        prop_assert!(
            pair.runs.dst_end().get() <= dst_bytes,
            "{pair:?} leaves {dst_bytes} bytes"
        );
        if pair.runs.ranges() > MOST_RANGES {
            continue;
        }
        for range in pair.runs.iter_ranges() {
            let src_end = range.src.get() + range.len.get();
            let dst_end = range.dst.get() + range.len.get();
            prop_assert!(src_end <= src_bytes && dst_end <= dst_bytes, "{range:?}");
            written
                .entry(pair.dst)
                .or_default()
                .push((range.dst.get(), dst_end));
        }
    }
    for (tensor, mut ranges) in written {
        ranges.retain(|(start, end)| start < end);
        ranges.sort_unstable();
        for (one, next) in ranges.iter().zip(ranges.iter().skip(1)) {
            prop_assert!(
                one.1 <= next.0,
                "tensor {tensor}: {one:?} and {next:?} overlap"
            );
        }
    }
    Ok(())
}

pub fn bytes_of(tensors: &[TensorLayout]) -> Vec<u64> {
    tensors.iter().map(|tensor| tensor.bytes.get()).collect()
}

pub fn peer_bytes_of(tensors: &[PeerTensor]) -> Vec<u64> {
    tensors.iter().map(|tensor| tensor.bytes.get()).collect()
}

proptest! {
    #![proptest_config(crate::config())]

    /// Every source tensor goes somewhere that exists, and no two to the same place.
    #[test]
    fn tensors_pair_one_to_one_or_not_at_all(
        (src_count, dst_count) in (0..9usize, 0..9usize),
        (start_layer, drafts) in (0..4usize, 0..9usize),
        (src_ids, dst_ids) in (ids(), ids()),
        by_position: bool,
    ) {
        let mha = mha_pairs(src_count, dst_count, start_layer, &src_ids, &dst_ids, drafts);
        let mla = mla_pairs(src_count, dst_count, start_layer, &src_ids, &dst_ids, drafts);
        let state = entry_pairs("test", &src_ids, &dst_ids, src_count, dst_count, by_position);
        for pairs in [mha, mla, state].into_iter().flatten() {
            let sources: Vec<usize> = pairs.iter().map(|pair| pair.0).collect();
            prop_assert_eq!(sources, (0..src_count).collect::<Vec<_>>());
            let targets: HashSet<usize> = pairs.iter().map(|pair| pair.1).collect();
            prop_assert_eq!(targets.len(), src_count, "{:?}", &pairs);
            prop_assert!(targets.iter().all(|target| *target < dst_count), "{pairs:?}");
        }
    }

    #[test]
    fn no_plan_leaves_its_regions_or_writes_twice(
        (local, parallel) in (local(), parallel()),
        (peer, alike) in (peer(), prop::bool::weighted(0.7)),
        (src_pages, dst_pages) in (indices(), indices()),
        numbers in (
            prop_oneof![4 => 0..3u64, 1 => any::<u64>()],
            prop_oneof![4 => 0..3u64, 1 => any::<u64>()],
            option::of(prop_oneof![4 => 0..20u64, 1 => any::<u64>()]),
        ),
        (src_states, dst_states) in (vec(indices(), 3), vec(indices(), 3)),
        rows in (small(), small()),
        strict_lengths: bool,
    ) {
        let peer = if alike { like(&local, peer) } else { peer };
        let options = PlannerOptions { strict_lengths };
        let Ok(planner) = PeerPlanner::new(&local, &parallel, &peer, options) else {
            return Ok(());
        };
        if planner.check_announcement(&dst_pages, None, &[]).is_ok() {
            let (position, decode_prefix_len, num_kv_tokens) = numbers;
            let chunk = KvChunk {
                src_pages: &src_pages,
                position: position as usize,
                dst_pages: &dst_pages,
                decode_prefix_len,
                num_kv_tokens,
            };
            let checked = planner.check_kv_chunk(&chunk);
            let planned = planner.plan_kv(&chunk);
            // Only a total of several tensors is beyond what the check of a chunk looks at.
            let overflows = matches!(planned, Err(PlanError::Overflow { .. }));
            prop_assert!(planned.is_ok() || checked.is_err() || overflows, "{planned:?}");
            if let Ok(plan) = planned {
                check_plan(&plan, &bytes_of(&local.kv.tensors), &peer_bytes_of(&peer.kv))?;
            }
        }
        for at in 0..planner.state_count() {
            let (src, dst) = (&src_states[at], &dst_states[at]);
            let (layout, registered) = (&local.states[at], &peer.states[at]);
            let checked = planner.check_state(at as u16, src, dst);
            let planned = planner.plan_state(at as u16, src, dst);
            if let Ok(plan) = planned {
                prop_assert_eq!(checked, Ok(()));
                check_plan(&plan, &bytes_of(&layout.tensors), &peer_bytes_of(&registered.tensors))?;
            }
        }
        if let Ok(plan) = planner.plan_aux(rows.0, rows.1) {
            check_plan(&plan, &bytes_of(&local.aux), &peer_bytes_of(&peer.aux))?;
        }
    }
}
