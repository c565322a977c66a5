//! Every case of `planning_vectors.json`: SGLang's own arithmetic, function by function, and whole
//! requests with every range that was written.

mod support;

use std::collections::BTreeSet;

use common::ids::{ByteLen, Generation};
use common::plan::bounds::is_elided;
use common::plan::dcp::{DcpChunk, dcp_tokens, needs_resplit, token_lens};
use common::plan::heads::{TokenSlice, TpPair, head_slice};
use common::plan::layers::{entry_pairs, mha_pairs, mla_pairs};
use common::plan::mamba::{SlotShape, slot_blocks};
use common::plan::pages::{
    IndexRun, index_runs, item_run_list, pages_of_cp_rank, pages_of_shard_rank,
};
use common::plan::{KvChunk, PeerPlanner, PlanError, PlannerOptions, RunList};
use common::room::{DeferredBootstrap, DeferredNotice, advance};
use common::schema::{
    AttentionKind, KvLayout, PeerLayout, PeerState, PeerTensor, RankLayout, StateKind, StateLayout,
    TensorLayout,
};
use common::topology::{
    DecodeSide, ParallelConfig, PrefillTopology, parse_endpoint, resolve_rank_mapping,
};
use common::wire::KvPoll;
use common::wire::int_lists::{self, ListInteger};
use serde_json::{Value, json};
use support::{Tally, integer, list};

const FILE: &str = "planning_vectors.json";

/// The recorded value, or `Null` for an error: its words are free.
fn recorded(case: &Value) -> Value {
    if case.get("error").is_some() {
        Value::Null
    } else {
        case["out"].clone()
    }
}

fn or_null<T>(result: Result<T, PlanError>, value: impl FnOnce(T) -> Value) -> Value {
    result.map_or(Value::Null, value)
}

fn number<T: TryFrom<i128>>(value: &Value) -> T {
    integer(value)
        .and_then(|number| T::try_from(number).ok())
        .unwrap_or_else(|| panic!("an integer that fits: {value}"))
}

fn numbers<T: TryFrom<i128>>(value: &Value) -> Vec<T> {
    value
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(number)
        .collect()
}

fn optional<T: TryFrom<i128>>(value: &Value) -> Option<T> {
    integer(value).and_then(|number| T::try_from(number).ok())
}

/// Runs one section: `ours` gives our result and the rule, if one says that it deviates.
fn section(name: &str, ours: impl Fn(&Value) -> (Value, Option<&'static str>)) {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, name) {
        let (result, rule) = ours(&case["in"]);
        tally.compare(&case["in"], &recorded(case), &result, rule);
    }
    tally.finish(name);
}

#[test]
fn pages() {
    section("group_concurrent_contiguous", |input| {
        let runs = index_runs(&numbers(&input["src"]), &numbers(&input["dst"]));
        let value = or_null(runs, |runs| {
            let src: Vec<_> = runs.iter().map(|run| [run.src, run.count]).collect();
            let dst: Vec<_> = runs.iter().map(|run| [run.dst, run.count]).collect();
            json!([src, dst])
        });
        (value, None)
    });
    section("grouped_index_plan_from_indices", |input| {
        let item_len = number(&input["item_len"]);
        let planned = index_runs(&numbers(&input["src"]), &numbers(&input["dst"]))
            .and_then(|runs| Ok((item_run_list(&runs, item_len)?, runs)));
        let value = or_null(planned, |(list, runs)| {
            let of = |field: fn(&IndexRun) -> u64| runs.iter().map(field).collect::<Vec<_>>();
            let ranges: Vec<_> = list.iter_ranges().collect();
            json!({
                "src_starts": of(|run| run.src),
                "dst_starts": of(|run| run.dst),
                "counts": of(|run| run.count),
                "local": ranges.iter().map(|range| range.src.0).collect::<Vec<_>>(),
                "remote": ranges.iter().map(|range| range.dst.0).collect::<Vec<_>>(),
                "sizes": ranges.iter().map(|range| range.len.0).collect::<Vec<_>>(),
            })
        });
        (value, None)
    });
    section("filter_kv_indices_for_cp_rank", |input| {
        let slice: Vec<usize> = numbers(&input["index_slice"]);
        let (pages, positions) = pages_of_cp_rank(
            &numbers(&input["kv_indices"]),
            slice[0]..slice[1],
            optional(&input["total_pages"]),
            number(&input["attn_cp_rank"]),
            number(&input["attn_cp_size"]),
        );
        (json!([pages, [positions.start, positions.end]]), None)
    });
    section("filter_kv_indices_for_shard_rank", |input| {
        let slice: Vec<usize> = numbers(&input["index_slice"]);
        let (pages, positions) = pages_of_shard_rank(
            &numbers(&input["kv_indices"]),
            slice[0],
            number(&input["shard_rank"]),
            number(&input["shard_size"]),
        );
        (json!([pages, positions]), None)
    });
}

/// Writes lists of one integer type; `None` where a value does not fit the type.
fn packed<T: ListInteger + TryFrom<i128>>(lists: &[Vec<i128>]) -> Option<Vec<u8>> {
    let lists: Option<Vec<Vec<T>>> = lists
        .iter()
        .map(|list| list.iter().map(|item| T::try_from(*item).ok()).collect())
        .collect();
    int_lists::pack_lists(&lists?, "test").ok()
}

fn unpacked<T: ListInteger + Into<i128>>(bytes: &[u8]) -> Option<Vec<Vec<i128>>> {
    let lists: Vec<Vec<T>> = int_lists::unpack_lists(bytes, "test").ok()?;
    Some(
        lists
            .into_iter()
            .map(|list| list.into_iter().map(Into::into).collect())
            .collect(),
    )
}

#[test]
fn lists_of_integers() {
    section("pack_int_lists", |input| {
        let lists: Vec<Vec<i128>> = list(input, "lists").iter().map(numbers).collect();
        let packed = match input["fmt"].as_str() {
            Some("i") => packed::<i32>(&lists),
            Some("I") => packed::<u32>(&lists),
            _ => packed::<u64>(&lists),
        };
        (
            packed.map_or(Value::Null, |frame| json!(hex::encode(frame))),
            None,
        )
    });
    for name in ["unpack_int_lists", "unpack_int_lists_malformed"] {
        section(name, |input| {
            let bytes = hex::decode(input["hex"].as_str().expect("hex")).expect("hex");
            let (lists, width) = match input["fmt"].as_str() {
                Some("i") => (unpacked::<i32>(&bytes), 4),
                Some("I") => (unpacked::<u32>(&bytes), 4),
                _ => (unpacked::<u64>(&bytes), 8),
            };
            // One section keeps integers as numbers, the other as decimal strings.
            let value = lists.map_or(Value::Null, |lists| {
                let shown = |item: &i128| {
                    if name.ends_with("malformed") {
                        json!(i64::try_from(*item).expect("a small number"))
                    } else {
                        json!(item.to_string())
                    }
                };
                lists
                    .iter()
                    .map(|list| list.iter().map(shown).collect::<Value>())
                    .collect()
            });
            // SGLang's reader takes what the lengths reach and no notice of what is left over.
            let loose = !bytes.is_empty() && !is_whole(&bytes) && python_reads(&bytes, width);
            (value, loose.then_some("int lists are whole: no short tail"))
        });
    }
}

/// Whether the lengths of a list of lists add up to the frame.
fn is_whole(bytes: &[u8]) -> bool {
    let (fields, _) = bytes.as_chunks::<4>();
    let mut fields = fields
        .iter()
        .map(|field| u32::from_le_bytes(*field) as usize);
    let count = fields.next().unwrap_or_default();
    let lengths: Vec<usize> = fields.take(count).collect();
    lengths.len() == count && bytes.len() == 4 + 4 * count + lengths.iter().sum::<usize>()
}

/// Whether every list that a lenient reader cuts out is a whole number of integers.
fn python_reads(bytes: &[u8], width: usize) -> bool {
    let (fields, _) = bytes.as_chunks::<4>();
    let mut fields = fields
        .iter()
        .map(|field| u32::from_le_bytes(*field) as usize);
    let Some(count) = fields.next() else {
        return false;
    };
    let lengths: Vec<usize> = fields.take(count).collect();
    let mut offset = 4 + 4 * count;
    lengths.len() == count
        && lengths.iter().all(|length| {
            let start = offset.min(bytes.len());
            offset += length;
            (offset.min(bytes.len()) - start).is_multiple_of(width)
        })
}

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
            let runs = index_runs(&numbers(&input["src_pages"]), &numbers(&input["dst_pages"]))?;
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

#[test]
fn topology() {
    section("resolve_rank_mapping", |input| {
        let (prefill, decode) = (&input["prefill"], &input["decode"]);
        let flag = |value: &Value| *value == json!(true);
        let topology = PrefillTopology {
            attn_tp_size: number(&prefill["attn_tp_size"]),
            attn_cp_size: number(&prefill["attn_cp_size"]),
            dp_size: 1,
            pp_size: number(&prefill["pp_size"]),
            page_size: None,
            kv_cache_dtype: None,
            follow_bootstrap_room: true,
            enable_dsa_cache_layer_split: flag(&prefill["enable_dsa_cache_layer_split"]),
            enable_kv_cache_sharding: flag(&prefill["enable_kv_cache_sharding"]),
            decode_allocation_policy: "early".to_owned(),
        };
        let side = DecodeSide {
            attn_tp_size: number(&decode["attn_tp_size"]),
            engine_rank: number(&decode["engine_rank"]),
            attn_cp_size: 1,
            pp_size: number(&decode["pp_size"]),
            pp_rank: number(&decode["pp_rank"]),
            is_mla: flag(&decode["is_mla"]),
            all_cp_ranks: flag(&decode["enable_all_cp_ranks_for_transfer"]),
        };
        let value = or_null(resolve_rank_mapping(&topology, &side), |mapping| {
            json!({
                "target_tp_rank": mapping.target_tp_rank,
                "target_tp_ranks": mapping.target_tp_ranks,
                "target_cp_ranks": mapping.target_cp_ranks,
                "target_pp_ranks": mapping.target_pp_ranks,
                "required_dst_info_num": mapping.required_dst_info_num,
                "required_prefill_response_num": mapping.required_prefill_response_num,
            })
        });
        (value, None)
    });
    section("network_address_parse", |input| {
        let text = input.as_str().expect("an address");
        let value = or_null(parse_endpoint(text), |endpoint| {
            json!({
                "host": endpoint.host,
                "port": endpoint.port,
                "tcp": format!("tcp://{endpoint}").replace("[a:b:c]", "a:b:c"),
                "is_ipv6": endpoint.host.parse::<std::net::Ipv6Addr>().is_ok(),
            })
        });
        let port = text.rsplit_once(':').map_or("", |(_, port)| port);
        let signed = port.starts_with('+') && port[1..].bytes().all(|byte| byte.is_ascii_digit());
        (value, signed.then_some("integers are plain ascii digits"))
    });
}

#[test]
fn rooms() {
    section("update_status", |input| {
        let status = |value: &Value| value.as_u64().and_then(KvPoll::from_number);
        let after = advance(
            status(&input["current"]),
            status(&input["new"]).expect("a status"),
        );
        (
            after.map_or(Value::Null, |status| json!(status as u8)),
            None,
        )
    });
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for trace in list(&golden, "deferred_bootstrap_traces") {
        let mut room: Option<DeferredBootstrap> = None;
        for (step, entry) in trace
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .enumerate()
        {
            let owner = Generation(
                entry["owner"]
                    .as_str()
                    .map_or(0, |name| u64::from(name.as_bytes()[0])),
            );
            let said = |notice: Option<DeferredNotice>| {
                notice.map_or(Value::Null, |notice| {
                    json!([[notice.endpoint.host, notice.endpoint.port], notice.failed])
                })
            };
            // Completing and closing need a room that exists; the others begin one.
            let operation = entry["op"].as_str().expect("an operation");
            let ours = match operation {
                "open" => {
                    let opened = room.get_or_insert_default().open(owner);
                    opened.map_or(Value::Null, |failed| json!({ "failed": failed }))
                }
                "register" => {
                    let endpoint = &entry["endpoint"];
                    let endpoint = common::ids::Endpoint::new(
                        endpoint[0].as_str().expect("a host"),
                        number(&endpoint[1]),
                    );
                    said(room.get_or_insert_default().register(endpoint))
                }
                "complete" => said(room.as_mut().and_then(|room| room.complete(owner))),
                "fail" => said(room.get_or_insert_default().fail()),
                "close_ok" => said(room.as_mut().and_then(|room| room.close(owner, true))),
                "close_fail" => said(room.as_mut().and_then(|room| room.close(owner, false))),
                other => panic!("an unknown operation: {other}"),
            };
            tally.compare(
                format!("step {step} of {trace}"),
                &entry["out"],
                &ours,
                None,
            );
        }
    }
    tally.finish("deferred_bootstrap_traces");
}

/// (source engine, source buffer, destination engine, destination buffer, offsets, bytes).
type Written = BTreeSet<(String, u64, String, u64, u64, u64)>;

/// Byte-granular pieces would be slow; ranges are cut at 64 bytes, of which all lengths here are
/// multiples, so that one range and the same bytes in several compare equal.
fn add_range(written: &mut Written, src: (&str, u64, u64), dst: (&str, u64, u64), len: u64) {
    const PIECE: u64 = 8;
    for piece in 0..len / PIECE {
        let at = piece * PIECE;
        let row = (
            src.0.to_owned(),
            src.1,
            dst.0.to_owned(),
            dst.1,
            src.2 + at,
            dst.2 + at,
        );
        assert!(written.insert(row), "a range is written twice");
    }
    assert!(len.is_multiple_of(PIECE), "a length of {len}");
}

const ITEMS: u64 = 64;

fn tensors(item_lens: &Value) -> Vec<TensorLayout> {
    let lens: Vec<u64> = numbers(item_lens);
    lens.iter()
        .map(|len| TensorLayout {
            bytes: ByteLen(len * ITEMS),
            item_len: ByteLen(*len),
        })
        .collect()
}

struct Request {
    prefill: RankLayout,
    decode: PeerLayout,
    prefill_tp: u32,
    decode_tp: u32,
}

fn request_of(case: &Value) -> Request {
    let args = &case["args"];
    let (prefill, decode) = (&args["prefill"], &args["decode"]);
    let name = case["name"].as_str().expect("a name");
    // The types are not in the arguments; the names of the cases tell them.
    let kinds: Vec<StateKind> = match name.strip_prefix("state_").and_then(StateKind::from_name) {
        Some(kind) => vec![kind],
        None => ["mamba", "swa", "dsa"]
            .into_iter()
            .filter(|kind| {
                name.contains(kind)
                    || (*kind != "dsa" && list(prefill, "state_item_lens").len() == 2)
            })
            .filter_map(StateKind::from_name)
            .collect(),
    };
    let states = list(prefill, "state_item_lens")
        .iter()
        .zip(kinds)
        .enumerate();
    let states = states.map(|(at, (lens, kind))| StateLayout {
        kind,
        tensors: tensors(lens),
        dims: numbers(&prefill["state_dim_per_tensor"][at]),
        outer_counts: Vec::new(),
        conv_shard_groups: prefill["state_conv_shard_groups"][at]
            .as_array()
            .map_or(&[][..], Vec::as_slice)
            .iter()
            .map(|groups| {
                groups
                    .as_array()
                    .map(|groups| groups.iter().map(number).collect())
            })
            .collect(),
        layer_ids: numbers(&prefill["state_layer_ids"][at]),
    });
    let mut states: Vec<StateLayout> = states.collect();
    if name.contains("zero_rows")
        && let Some(last) = states
            .first_mut()
            .and_then(|state| state.tensors.last_mut())
    {
        last.bytes = ByteLen(0);
    }
    let mla = args["mla"] == json!(true);
    let (prefill_tp, decode_tp) = (number(&args["nP"]), number(&args["nD"]));
    let peer_tensor = |len: &Value, known: bool| {
        let len: u64 = number(len);
        PeerTensor {
            bytes: ByteLen(len * ITEMS),
            item_len_opt: known.then_some(ByteLen(len)),
        }
    };
    let decode_states = list(decode, "state_item_lens")
        .iter()
        .enumerate()
        .map(|(at, lens)| PeerState {
            tensors: lens
                .as_array()
                .expect("lengths")
                .iter()
                .map(|len| peer_tensor(len, true))
                .collect(),
            dims: numbers(&decode["state_dim_per_tensor"][at]),
            // The recorded decode registers the prefill's layer ids.
            layer_ids: numbers(&prefill["state_layer_ids"][at]),
        });
    Request {
        prefill: RankLayout {
            page_size: number(&prefill["page_size"]),
            kv: KvLayout {
                tensors: tensors(&prefill["kv_item_lens"]),
                layer_ids: Vec::new(),
                start_layer: 0,
                num_draft_entries: 0,
                attention: if mla {
                    AttentionKind::Mla
                } else {
                    AttentionKind::Mha
                },
                head_num: number(&prefill["kv_head_num"]),
                total_head_num: number(&prefill["total_kv_head_num"]),
            },
            aux: tensors(&prefill["aux_item_lens"]),
            states,
        },
        decode: PeerLayout {
            kv: list(decode, "kv_item_lens")
                .iter()
                .enumerate()
                .map(|(at, len)| peer_tensor(len, at == 0))
                .collect(),
            kv_layer_ids: Vec::new(),
            aux: list(prefill, "aux_item_lens")
                .iter()
                .map(|len| peer_tensor(len, false))
                .collect(),
            states: decode_states.collect(),
            tp_size: decode_tp,
            engine_rank: 0,
            dcp_size: 1,
            dcp_rank: 0,
        },
        prefill_tp,
        decode_tp,
    }
}

/// Everything that all prefill ranks write to all decode ranks.
fn planned(case: &Value, request: &Request) -> Result<Written, PlanError> {
    let args = &case["args"];
    let mut written = Written::new();
    let (src_pages, dst_pages): (Vec<i32>, Vec<i32>) =
        (numbers(&args["src_pages"]), numbers(&args["dst_pages"]));
    let states = |name: &str| -> Vec<Vec<i32>> { list(args, name).iter().map(numbers).collect() };
    let (src_states, dst_states) = (states("src_state"), states("dst_state"));
    for tp_rank in 0..request.prefill_tp {
        for engine_rank in 0..request.decode_tp {
            let feeds = if request.prefill_tp >= request.decode_tp {
                tp_rank / (request.prefill_tp / request.decode_tp) == engine_rank
            } else {
                engine_rank / (request.decode_tp / request.prefill_tp) == tp_rank
            };
            if !feeds {
                continue;
            }
            let parallel = ParallelConfig {
                tp_size: request.prefill_tp,
                tp_rank,
                ..ParallelConfig::default()
            };
            let peer = PeerLayout {
                engine_rank,
                ..request.decode.clone()
            };
            let planner = PeerPlanner::new(
                &request.prefill,
                &parallel,
                &peer,
                PlannerOptions::default(),
            )?;
            planner.check_announcement(&dst_pages, Some(0), &dst_states)?;
            let (src_engine, dst_engine) = (format!("P{tp_rank}"), format!("D{engine_rank}"));
            let mut add =
                |src_first: usize, dst_first: usize, src: usize, dst: usize, runs: &RunList| {
                    for range in runs.iter_ranges() {
                        let src = (src_engine.as_str(), (src_first + src) as u64, range.src.0);
                        let dst = (dst_engine.as_str(), (dst_first + dst) as u64, range.dst.0);
                        add_range(&mut written, src, dst, range.len.0);
                    }
                };
            let chunk = KvChunk {
                src_pages: &src_pages,
                position: 0,
                dst_pages: &dst_pages,
                decode_prefix_len: 0,
                num_kv_tokens: None,
            };
            planner.check_kv_chunk(&chunk)?;
            for pair in planner.plan_kv(&chunk)?.pairs {
                add(0, 0, pair.src, pair.dst, &pair.runs);
            }
            // Buffers are numbered in the order of their registration: kv, aux, then states.
            let mut src_first = request.prefill.kv.tensors.len() + request.prefill.aux.len();
            let mut dst_first = request.decode.kv.len() + request.decode.aux.len();
            for (at, state) in request.prefill.states.iter().enumerate() {
                let (src, dst) = (src_states.get(at), dst_states.get(at));
                let announced = dst.is_some_and(|dst| !dst.is_empty());
                if let (Some(src), Some(dst), true) = (src, dst, announced) {
                    let index = u16::try_from(at).expect("few components");
                    planner.check_state(index, src, dst)?;
                    for pair in planner.plan_state(index, src, dst)?.pairs {
                        add(src_first, dst_first, pair.src, pair.dst, &pair.runs);
                    }
                }
                src_first += state.tensors.len();
                dst_first += request
                    .decode
                    .states
                    .get(at)
                    .map_or(0, |state| state.tensors.len());
            }
        }
    }
    Ok(written)
}

#[test]
fn whole_requests_write_the_recorded_bytes() {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, "request_plans") {
        let request = request_of(case);
        let ours = planned(case, &request);
        let failed = list(case, "failure")
            .iter()
            .any(|failure| !failure.is_null());
        let mut theirs = Written::new();
        for transfer in list(case, "transfers") {
            let (locals, remotes, sizes): (Vec<u64>, Vec<u64>, Vec<u64>) = (
                numbers(&transfer["local"]),
                numbers(&transfer["remote"]),
                numbers(&transfer["sizes"]),
            );
            let name = |field: &str| transfer[field].as_str().expect("an engine").to_owned();
            let (src, dst) = (name("src"), name("dst"));
            for ((local, remote), size) in locals.iter().zip(&remotes).zip(&sizes) {
                let src = (src.as_str(), number(&transfer["src_mem"]), *local);
                let dst = (dst.as_str(), number(&transfer["dst_mem"]), *remote);
                add_range(&mut theirs, src, dst, *size);
            }
        }
        match (failed, ours) {
            (false, Ok(ours)) if ours == theirs => tally.matched(),
            (false, Ok(_)) => tally.wrong(format!("{}: other bytes", case["name"])),
            (true, Err(_)) => tally.matched(),
            (true, Ok(ours))
                if case["failure"].to_string().contains("NoneType")
                    && ours.is_superset(&theirs) =>
            {
                tally.deviates("a buffer of 0 bytes with a non-zero item length is elided");
            }
            (_, ours) => tally.wrong(format!(
                "{}: {:?}",
                case["name"],
                ours.map(|written| written.len())
            )),
        }
    }
    tally.finish("request_plans");
}
