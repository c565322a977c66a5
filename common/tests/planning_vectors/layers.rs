//! Which tensors pair, and which tokens go to which context rank.

use common::ids::ByteLen;
use common::plan::bounds::is_elided;
use common::plan::dcp::{DcpChunk, dcp_tokens, needs_resplit, token_lens};
use common::plan::layers::{entry_pairs, mha_pairs, mla_pairs};
use common::schema::{PeerTensor, TensorLayout};
use golden::list;
use serde_json::json;

use crate::{number, numbers, optional, or_null, section};

#[test]
fn layers() {
    section("build_transfer_entry_pairs", |input| {
        let pairs = entry_pairs(
            "kv",
            &numbers(&input["src_layer_ids"]),
            &numbers(&input["dst_layer_ids"]),
            number(&input["n_src"]),
            number(&input["n_dst"]),
            input["allow_positional_fallback"] == json!(true),
        );
        (or_null(pairs, |pairs| json!(pairs)), None)
    });
    section("resolve_dcp_dst_entry_indices", |input| {
        let (src, dst): (Vec<u32>, Vec<u32>) = (
            numbers(&input["src_layer_ids"]),
            numbers(&input["dst_layer_ids"]),
        );
        let (n_src, n_dst): (usize, usize) = (number(&input["n_src"]), number(&input["n_dst"]));
        // Without ids the function counts source entries and looks at no destination.
        let n_dst = if src.is_empty() && dst.is_empty() {
            n_src
        } else {
            n_dst
        };
        let pairs = entry_pairs("kv", &src, &dst, n_src, n_dst, false);
        (
            or_null(pairs, |pairs| {
                json!(pairs.iter().map(|pair| pair.1).collect::<Vec<_>>())
            }),
            None,
        )
    });
    section("mha_desc_slices", |input| {
        let (local, dst): (usize, usize) =
            (number(&input["local_layers"]), number(&input["dst_layers"]));
        let start: usize = number(&input["start_layer"]);
        let ids = |name: &str| numbers::<u32>(&input[name]);
        let (src_ids, dst_ids) = (ids("src_layer_ids"), ids("dst_layer_ids"));
        let looks_like_a_draft = local < dst && !dst.is_multiple_of(local);
        // A prefill that starts at layer 0 declares that the decode's surplus is a draft model.
        let draft = if looks_like_a_draft && start == 0 {
            dst - local
        } else {
            0
        };
        let pairs = mha_pairs(2 * local, 2 * dst, start, &src_ids, &dst_ids, draft);
        let value = or_null(pairs, |pairs| {
            let half = |side: fn(&(usize, usize)) -> usize, range: std::ops::Range<usize>| {
                pairs[range].iter().map(side).collect::<Vec<_>>()
            };
            json!([
                half(|pair| pair.0, 0..local),
                half(|pair| pair.0, local..2 * local),
                half(|pair| pair.1, 0..local),
                half(|pair| pair.1, local..2 * local),
                local
            ])
        });
        let no_ids = src_ids.is_empty() && dst_ids.is_empty();
        let guessed = looks_like_a_draft && start > 0 && start + local <= dst && no_ids;
        let rule =
            "v is counted from the destination's number of layers unless a draft model is declared";
        (value, guessed.then_some(rule))
    });
    section("mla_desc_slices", |input| {
        let (local, dst): (usize, usize) =
            (number(&input["local_layers"]), number(&input["dst_layers"]));
        let pairs = mla_pairs(
            local,
            dst,
            number(&input["start_layer"]),
            &numbers(&input["src_layer_ids"]),
            &numbers(&input["dst_layer_ids"]),
            0,
        );
        let value = or_null(pairs, |pairs| {
            let (src, dst): (Vec<usize>, Vec<usize>) = pairs.into_iter().unzip();
            json!([src, dst, local])
        });
        (value, None)
    });
    section("is_elided_entry", |input| {
        let dst_lens = input["dst_lens"].as_array();
        let at: usize = number(&input["dst_index"]);
        let item_len_opt = dst_lens
            .and_then(|lens| lens.get(at))
            .map(|length| ByteLen(number(length)));
        let src = TensorLayout {
            bytes: ByteLen(64),
            item_len: ByteLen(number(&input["src_len"])),
        };
        let ours = is_elided(
            &src,
            &PeerTensor {
                bytes: ByteLen(64),
                item_len_opt,
            },
        );
        let only_source = input["allow_dst_elision"] == json!(false) && src.item_len.0 > 0;
        let rule = "item length 0 on either side: nothing moves";
        (
            json!(ours),
            (only_source && item_len_opt == Some(ByteLen(0))).then_some(rule),
        )
    });
}

#[test]
fn decode_context_parallelism() {
    section("build_dcp_token_transfer_plan", |input| {
        let (src, dst): (Vec<i32>, Vec<i32>) = (numbers(&input["src"]), numbers(&input["dst"]));
        let tokens = dcp_tokens(&DcpChunk {
            src_pages: &src,
            dst_pages: &dst,
            page_size: number(&input["physical_page_size"]),
            dcp_size: number(&input["dcp_size"]),
            dcp_rank: number(&input["dcp_rank"]),
            first_page: number(&input["src_page_offset"]),
            decode_prefix_len: number(&input["decode_prefix_len"]),
            num_tokens: optional(&input["num_kv_tokens"]),
        });
        let value = or_null(tokens, |tokens| {
            json!({
                "target_src": tokens.target_src,
                "target_dst": tokens.target_dst,
                "draft_src": tokens.draft_src,
                "draft_dst": tokens.draft_dst,
                "empty": tokens.target_src.is_empty() && tokens.draft_src.is_empty(),
            })
        });
        (value, None)
    });
    section("requires_dcp_relayout", |input| {
        let pair = |name: &str| {
            let sizes: Vec<u32> = numbers(&input[name]);
            (sizes[0], sizes[1])
        };
        let resplit = needs_resplit(
            pair("prefill_dcp"),
            pair("decode_dcp"),
            input["mla"] == json!(true),
        );
        (or_null(resplit, |resplit| json!(resplit)), None)
    });
    section("prepare_dcp_token_item_lens", |input| {
        let dst: Vec<Option<u64>> = list(input, "dst").iter().map(optional).collect();
        let lens = token_lens(
            &numbers(&input["kv_item_lens"]),
            &dst,
            number(&input["page_size"]),
            number(&input["dcp"]),
            number(&input["num_draft"]),
        );
        (or_null(lens, |lens| json!(lens)), None)
    });
}
