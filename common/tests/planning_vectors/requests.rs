//! Whole requests, with every range that was written.

use std::collections::BTreeSet;

use common::ids::ByteLen;
use common::plan::{KvChunk, PeerPlanner, PlanError, PlannerOptions, RunList};
use common::schema::{
    AttentionKind, KvLayout, PeerLayout, PeerState, PeerTensor, RankLayout, StateKind, StateLayout,
    TensorLayout,
};
use common::topology::ParallelConfig;
use golden::{Tally, list};
use serde_json::{Value, json};

use crate::{FILE, number, numbers};

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
            for pair in planner.plan_kv(&chunk)?.pairs() {
                add(0, 0, pair.src, pair.dst, pair.runs);
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
                    for pair in planner.plan_state(index, src, dst)?.pairs() {
                        add(src_first, dst_first, pair.src, pair.dst, pair.runs);
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
    let golden = golden::load(FILE);
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
