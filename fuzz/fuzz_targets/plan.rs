//! A decode rank's registration and announcement, as they come over the wire, for a prefill rank whose
//! buffers are mostly alike: what is planned stays inside the regions of both sides.

#![no_main]

use common::ids::ByteLen;
use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlannerOptions};
use common::schema::{
    AttentionKind, KvLayout, PeerLayout, PeerTensor, RankLayout, StateKind, StateLayout,
    TensorLayout,
};
use common::topology::ParallelConfig;
use common::wire::{ControlMessage, decode_message};
use ferry_fuzz::frames;
use libfuzzer_sys::fuzz_target;

/// Frames of a REGISTER; the others are those of a TRANSFER_INFO.
const REGISTER_FRAMES: usize = 18;
/// Ranges of a plan that are looked at one by one.
const MOST_RANGES: u64 = 10_000;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[choice, shift], bytes)) = bytes.split_first_chunk::<2>() else {
        return;
    };
    let mut register = frames(bytes);
    let info = register.split_off(REGISTER_FRAMES.min(register.len()));
    let (Ok(register), Ok(info)) = (decode_message(&register), decode_message(&info)) else {
        return;
    };
    let (ControlMessage::Register(register), ControlMessage::TransferInfo(info)) =
        (register.message, info.message)
    else {
        return;
    };
    let peer = PeerLayout::from(&*register);
    let local = local_layout(&peer, choice);
    let tp_size = 1 << (shift & 3);
    let parallel = ParallelConfig {
        tp_size,
        tp_rank: u32::from(shift >> 2) % tp_size,
        ..ParallelConfig::default()
    };
    let options = PlannerOptions {
        strict_lengths: choice & 1 == 1,
    };
    let Ok(planner) = PeerPlanner::new(&local, &parallel, &peer, options) else {
        return;
    };
    let announced =
        planner.check_announcement(&info.kv_indices, info.aux_index, &info.state_indices);
    if announced.is_err() {
        return;
    }
    let chunk = KvChunk {
        src_pages: &info.kv_indices,
        position: 0,
        dst_pages: &info.kv_indices,
        decode_prefix_len: info.decode_prefix_len.unwrap_or_default(),
        num_kv_tokens: None,
    };
    if let Ok(plan) = planner.plan_kv(&chunk) {
        check(&plan, &local.kv.tensors, &peer.kv);
    }
    for (at, indices) in info
        .state_indices
        .iter()
        .enumerate()
        .take(planner.state_count())
    {
        if let Ok(plan) = planner.plan_state(at as u16, indices, indices) {
            check(&plan, &local.states[at].tensors, &peer.states[at].tensors);
        }
    }
    if let Some(row) = info.aux_index
        && let Ok(plan) = planner.plan_aux(0, row)
    {
        check(&plan, &local.aux, &peer.aux);
    }
});

/// The peer's buffers, with the item lengths that its registration does not tell.
fn local_layout(peer: &PeerLayout, choice: u8) -> RankLayout {
    let item_len_opt = peer.kv.first().and_then(|first| first.item_len_opt);
    let item_len = item_len_opt.unwrap_or(ByteLen(64));
    let alike = |tensor: &PeerTensor| TensorLayout {
        bytes: tensor.bytes,
        item_len: tensor.item_len_opt.unwrap_or(item_len),
    };
    let attention = [
        AttentionKind::Mha,
        AttentionKind::Mla,
        AttentionKind::HybridMla,
    ];
    let states = peer
        .states
        .iter()
        .enumerate()
        .map(|(at, state)| StateLayout {
            kind: StateKind::ALL[(usize::from(choice) + at) % StateKind::ALL.len()],
            tensors: state.tensors.iter().map(alike).collect(),
            dims: state.dims.clone(),
            outer_counts: Vec::new(),
            conv_shard_groups: Vec::new(),
            layer_ids: state.layer_ids.clone(),
        });
    RankLayout {
        page_size: 1 + u32::from(choice >> 4),
        kv: KvLayout {
            tensors: peer.kv.iter().map(alike).collect(),
            layer_ids: peer.kv_layer_ids.clone(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: attention[usize::from(choice) % attention.len()],
            head_num: 2,
            total_head_num: 8,
        },
        aux: peer.aux.iter().map(alike).collect(),
        states: states.collect(),
    }
}

fn check(plan: &ComponentPlan, src: &[TensorLayout], dst: &[PeerTensor]) {
    for pair in plan.pairs() {
        let (src_bytes, dst_bytes) = (src[pair.src].bytes, dst[pair.dst].bytes);
        assert!(pair.runs.src_end().get() <= src_bytes.get(), "{pair:?}");
        assert!(pair.runs.dst_end().get() <= dst_bytes.get(), "{pair:?}");
        if pair.runs.ranges() <= MOST_RANGES {
            for range in pair.runs.iter_ranges() {
                let (len, limit) = (range.len.get(), dst_bytes.get());
                assert!(
                    range.dst.get() <= limit && len <= limit - range.dst.get(),
                    "{range:?}"
                );
            }
        }
    }
}
