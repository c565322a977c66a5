//! Heads and mamba slots across TP sizes.

use common::plan::heads::{TokenSlice, TpPair, head_slice};
use common::plan::mamba::{SlotShape, slot_blocks};
use common::plan::pages::index_runs;
use common::topology::ParallelConfig;
use serde_json::json;

use crate::{number, numbers, optional, or_null, section};

#[test]
fn heads() {
    section("compute_head_slice_params", |input| {
        let size = |name: &str| number::<u32>(&input[name]);
        let (src_size, dst_size) = (size("src_attn_tp_size"), size("dst_attn_tp_size"));
        let tp = TpPair {
            src_size,
            src_rank: size("src_tp_rank") % src_size,
            dst_size,
            dst_rank: size("dst_tp_rank") % dst_size,
        };
        let slice = head_slice(tp, size("total_kv_heads"));
        (
            json!([slice.src_start, slice.count, slice.dst_start, slice.count]),
            None,
        )
    });
    section("tp_slice_plan", |input| {
        let size = |name: &str| number::<u32>(&input[name]);
        let planned = TpPair::new(
            size("prefill_tp"),
            size("prefill_rank"),
            size("decode_tp"),
            size("decode_rank"),
        )
        .and_then(|tp| {
            TokenSlice::new(
                "kv",
                tp,
                size("total_kv_heads"),
                size("page_size"),
                number(&input["src_item_len"]),
                optional(&input["dst_item_len"]),
            )
        })
        .and_then(|slice| {
            let runs =
                index_runs::<i64>(&numbers(&input["src_pages"]), &numbers(&input["dst_pages"]))?;
            Ok((slice, slice.run_list(&runs)?))
        });
        let value = or_null(planned, |(slice, list)| {
            let ranges: Vec<_> = list.iter_ranges().collect();
            json!({
                "cfg": {
                    "page_size": slice.page_size,
                    "src_item_len": slice.src_item_len,
                    "dst_item_len": slice.dst_item_len,
                    "bytes_per_token_src": slice.src_token_len,
                    "bytes_per_token_dst": slice.dst_token_len,
                    "src_head_slice_offset": slice.src_offset,
                    "dst_head_slice_offset": slice.dst_offset,
                    "heads_bytes_per_token_to_send": slice.slice_len,
                },
                "local": ranges.iter().map(|range| range.src.0).collect::<Vec<_>>(),
                "remote": ranges.iter().map(|range| range.dst.0).collect::<Vec<_>>(),
                "sizes_first": ranges.iter().take(1).map(|range| range.len.0).collect::<Vec<_>>(),
                "n": ranges.len(),
            })
        });
        (value, None)
    });
}

#[test]
fn mamba() {
    section("compute_mamba_state_slice_byte_blocks", |input| {
        let groups: Option<Vec<u32>> = input["conv_shard_groups"]
            .as_array()
            .map(|groups| groups.iter().map(number).collect());
        let size = |name: &str| number::<u32>(&input[name]);
        let blocks = TpPair::new(
            size("src_attn_tp_size"),
            size("local_tp_rank_in_group"),
            size("dst_attn_tp_size"),
            size("dst_tp_rank_in_group"),
        )
        .and_then(|tp| {
            slot_blocks(
                tp,
                SlotShape {
                    src_item_len: number(&input["src_item_len"]),
                    dst_item_len: number(&input["dst_item_len"]),
                    src_dim: number(&input["src_dim"]),
                    dst_dim: number(&input["dst_dim"]),
                    outer_count: number(&input["outer_count"]),
                    conv_shard_groups: groups.as_deref(),
                },
            )
        });
        let value = or_null(blocks, |blocks| {
            json!(
                blocks
                    .iter()
                    .map(|block| [block.src, block.dst, block.len])
                    .collect::<Vec<_>>()
            )
        });
        (value, None)
    });
    section("should_send_replicated_state", |input| {
        let size = |name: &str| number::<u32>(&input[name]);
        let (src_size, rank) = (size("src_attn_tp_size"), size("local_tp_rank_in_group"));
        let within = ParallelConfig {
            tp_size: src_size,
            tp_rank: rank,
            ..ParallelConfig::default()
        }
        .validate();
        let pair = within.and_then(|()| TpPair::new(src_size, rank, size("dst_attn_tp_size"), 0));
        (or_null(pair, |tp| json!(tp.sends_replicated())), None)
    });
}
