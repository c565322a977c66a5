//! A plan is O(runs): it takes the same memory, in the same number of allocations, however many
//! layers it serves.

use common::ids::ByteLen;
use common::plan::{KvChunk, PeerPlanner, PlannerOptions};
use common::schema::{AttentionKind, KvLayout, PeerLayout, PeerTensor, RankLayout, TensorLayout};
use common::topology::ParallelConfig;

const PAGES: i32 = 1024;
const PAGE_BYTES: u64 = 64 * 8 * 256;

fn planner(
    layers: usize,
    decode_tp: u32,
    decode_dcp: u32,
    attention: AttentionKind,
) -> PeerPlanner {
    let bytes = ByteLen(PAGE_BYTES * 4 * PAGES as u64);
    let tensor = TensorLayout {
        bytes,
        item_len: ByteLen(PAGE_BYTES),
    };
    let local = RankLayout {
        page_size: 64,
        kv: KvLayout {
            tensors: vec![tensor; 2 * layers],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention,
            head_num: 8,
            total_head_num: 8,
        },
        aux: Vec::new(),
        states: Vec::new(),
    };
    let peer_tensor = PeerTensor {
        bytes,
        item_len_opt: None,
    };
    let peer = PeerLayout {
        kv: vec![peer_tensor; 2 * layers],
        kv_layer_ids: Vec::new(),
        aux: Vec::new(),
        states: Vec::new(),
        tp_size: decode_tp,
        engine_rank: 0,
        dcp_size: decode_dcp,
        dcp_rank: 0,
    };
    let parallel = ParallelConfig::default();
    PeerPlanner::new(&local, &parallel, &peer, PlannerOptions::default()).expect("they fit")
}

#[test]
fn a_plan_takes_no_more_memory_for_more_layers() {
    // No two pages follow each other.
    let src: Vec<i32> = (0..PAGES).map(|page| 2 * page).collect();
    let dst: Vec<i32> = (0..PAGES).map(|page| 3 * page).collect();
    let chunk = KvChunk {
        src_pages: &src,
        position: 0,
        dst_pages: &dst,
        decode_prefix_len: 0,
        num_kv_tokens: Some(64 * PAGES as u64),
    };
    let cases = [
        (1, 1, AttentionKind::Mha),
        (2, 1, AttentionKind::Mha),
        (1, 2, AttentionKind::Mla),
    ];
    for (decode_tp, decode_dcp, attention) in cases {
        let measured = [36, 72].map(|layers| {
            let planner = planner(layers, decode_tp, decode_dcp, attention);
            let mut plan_opt = None;
            let taken = allocation_counter::measure(|| plan_opt = planner.plan_kv(&chunk).ok());
            let plan = plan_opt.expect("a plan");
            assert_eq!(plan.pairs().count(), 2 * layers);
            (
                taken.count_total,
                taken.bytes_max,
                taken.bytes_current,
                plan.heap_bytes(),
            )
        });
        let case = format!("decode tp {decode_tp}, dcp {decode_dcp}");
        assert_eq!(measured[0], measured[1], "{case}");
    }
}
