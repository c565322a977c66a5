//! Pages and tokens that are shared out over ranks: every one goes to exactly one rank.

use common::plan::dcp::{DcpChunk, dcp_tokens};
use common::plan::pages::{pages_of_cp_rank, pages_of_shard_rank};
use common::plan::{PeerPlanner, PlannerOptions};
use common::schema::{AttentionKind, KvLayout, PeerLayout, RankLayout};
use common::topology::ParallelConfig;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn any_or_small() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..5u64, 1 => (0..5u64).prop_map(|less| u64::MAX - less), 1 => any::<u64>()]
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn context_ranks_share_a_chunks_pages_out(
        pages in vec(any::<i32>(), 0..20),
        before in 0..10usize,
        behind in 0..10usize,
        size in 1..9usize,
    ) {
        let positions = before..before + pages.len();
        let total = positions.end + behind;
        let mut sent = vec![0; pages.len()];
        for rank in 0..size {
            let (own, at) = pages_of_cp_rank(&pages, positions.clone(), Some(total), rank, size);
            prop_assert_eq!(own.len(), at.len());
            for (page, position) in own.iter().zip(at) {
                prop_assert_eq!(*page, pages[position - before]);
                sent[position - before] += 1;
            }
        }
        prop_assert!(sent.iter().all(|times| *times == 1), "{sent:?}");
    }

    #[test]
    fn shard_ranks_share_a_chunks_pages_out(
        pages in vec(0..i32::MAX, 0..20),
        first in 0..10usize,
        size in 1..9i32,
    ) {
        let mut sent = vec![0; pages.len()];
        for rank in 0..size {
            let (own, at) = pages_of_shard_rank(&pages, first, rank, size);
            prop_assert_eq!(own.len(), at.len());
            for (page, position) in own.iter().zip(at) {
                prop_assert_eq!(page * size + rank, pages[position - first]);
                sent[position - first] += 1;
            }
        }
        prop_assert!(sent.iter().all(|times| *times == 1), "{sent:?}");
    }

    #[test]
    fn a_re_split_of_any_numbers_is_refused_or_pairs_up(
        src_pages in vec(0..9i32, 0..5),
        dst_pages in vec(0..9i32, 0..5),
        sizes in (any_or_small(), any_or_small(), any_or_small()),
        starts in (any_or_small(), any_or_small()),
        num_tokens in option::of(any_or_small()),
    ) {
        let tokens = dcp_tokens(&DcpChunk {
            src_pages: &src_pages,
            dst_pages: &dst_pages,
            page_size: sizes.0,
            dcp_size: sizes.1,
            dcp_rank: sizes.2,
            first_page: starts.0,
            decode_prefix_len: starts.1,
            num_tokens,
        });
        if let Ok(tokens) = tokens {
            prop_assert!(sizes.2 < sizes.1, "a rank outside its group");
            prop_assert_eq!(tokens.target_src.len(), tokens.target_dst.len());
            prop_assert_eq!(tokens.draft_src.len(), tokens.draft_dst.len());
        }
    }

    #[test]
    fn a_context_rank_outside_its_group_is_refused(size in 1..9u32, rank in 0..20u32) {
        let kv = KvLayout {
            tensors: Vec::new(),
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mla,
            head_num: 1,
            total_head_num: 1,
        };
        let local = RankLayout { page_size: 1, kv, aux: Vec::new(), states: Vec::new() };
        let peer = PeerLayout {
            kv: Vec::new(),
            kv_layer_ids: Vec::new(),
            aux: Vec::new(),
            states: Vec::new(),
            tp_size: 1,
            engine_rank: 0,
            dcp_size: size,
            dcp_rank: rank,
        };
        let parallel = ParallelConfig::default();
        let planner = PeerPlanner::new(&local, &parallel, &peer, PlannerOptions::default());
        prop_assert_eq!(planner.is_ok(), rank < size);
    }
}
