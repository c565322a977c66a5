//! Times our planner for lists of pages that another program gives, one JSON line for each: that
//! program times its own functions in turn.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use common::ids::ByteLen;
use common::plan::pages::index_runs;
use common::plan::{ComponentPlan, KvChunk, PeerPlanner, PlannerOptions};
use common::schema::{AttentionKind, KvLayout, PeerLayout, PeerTensor, RankLayout, TensorLayout};
use common::topology::ParallelConfig;
use serde::{Deserialize, Serialize};

use crate::process::{median, serve};

/// One list of pages and how it moves: MHA, prefill TP 1, decode rank 0.
#[derive(Debug, Deserialize)]
struct Case {
    layers: u32,
    page_size: u32,
    /// Bytes of a page in one tensor of the prefill.
    page_bytes: u64,
    heads: u32,
    decode_tp: u32,
    src: Vec<i32>,
    dst: Vec<i32>,
    /// Nanoseconds to spend on each figure, about.
    budget_ns: u64,
}

/// Medians, in nanoseconds, and what the plan holds.
#[derive(Debug, Serialize)]
struct Timings {
    group_ns: f64,
    plan_ns: f64,
    plan_and_consume_ns: f64,
    ranges: u64,
    bytes: u64,
    heap_bytes: usize,
}

/// Answers cases until its input ends.
///
/// # Errors
/// When a case cannot be planned.
pub fn serve_cases() -> Result<()> {
    serve(|case: Case| Ok(serde_json::to_value(time(&case)?)?))
}

fn planner(case: &Case) -> Result<PeerPlanner> {
    let tensors = 2 * case.layers as usize;
    let longest = case.src.iter().chain(&case.dst).max().copied().unwrap_or(0);
    let pool = (u64::try_from(longest)? + 1) * case.page_bytes;
    let local = RankLayout {
        page_size: case.page_size,
        kv: KvLayout {
            tensors: vec![
                TensorLayout {
                    bytes: ByteLen(pool),
                    item_len: ByteLen(case.page_bytes),
                };
                tensors
            ],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mha,
            head_num: case.heads,
            total_head_num: case.heads,
        },
        aux: Vec::new(),
        states: Vec::new(),
    };
    let peer_tensor = |position: usize| PeerTensor {
        bytes: ByteLen(pool / u64::from(case.decode_tp)),
        item_len_opt: (position == 0)
            .then_some(ByteLen(case.page_bytes / u64::from(case.decode_tp))),
    };
    let peer = PeerLayout {
        kv: (0..tensors).map(peer_tensor).collect(),
        kv_layer_ids: Vec::new(),
        aux: Vec::new(),
        states: Vec::new(),
        tp_size: case.decode_tp,
        engine_rank: 0,
        dcp_size: 1,
        dcp_rank: 0,
    };
    let parallel = ParallelConfig::default();
    Ok(PeerPlanner::new(
        &local,
        &parallel,
        &peer,
        PlannerOptions::default(),
    )?)
}

fn time(case: &Case) -> Result<Timings> {
    let planner = planner(case)?;
    let chunk = KvChunk {
        src_pages: &case.src,
        position: 0,
        dst_pages: &case.dst,
        decode_prefix_len: 0,
        num_kv_tokens: None,
    };
    let plan = planner.plan_kv(&chunk)?;
    Ok(Timings {
        group_ns: median_ns(case.budget_ns, || {
            black_box(index_runs(black_box(&case.src), black_box(&case.dst)).is_ok());
        }),
        plan_ns: median_ns(case.budget_ns, || {
            black_box(planner.plan_kv(black_box(&chunk)).is_ok());
        }),
        plan_and_consume_ns: median_ns(case.budget_ns, || {
            let plan = planner.plan_kv(black_box(&chunk));
            black_box(plan.map(|plan| consume(&plan)).unwrap_or_default());
        }),
        ranges: plan.ranges(),
        bytes: plan.bytes().get(),
        heap_bytes: plan.heap_bytes(),
    })
}

/// Looks at each number of each range of each tensor.
fn consume(plan: &ComponentPlan) -> [u64; 3] {
    let mut sums = [0u64; 3];
    for pair in plan.pairs() {
        for range in pair.runs.iter_ranges() {
            let [src, dst, len] = &mut sums;
            *src = src.wrapping_add(black_box(range.src.get()));
            *dst = dst.wrapping_add(black_box(range.dst.get()));
            *len = len.wrapping_add(black_box(range.len.get()));
        }
    }
    sums
}

/// The median time of one call, over groups of calls long enough to be timed.
fn median_ns(budget_ns: u64, mut act: impl FnMut()) -> f64 {
    const SHORTEST_GROUP_NS: u128 = 20_000;
    let begun = Instant::now();
    let mut calls = 1u32;
    loop {
        let group = Instant::now();
        (0..calls).for_each(|_| act());
        if group.elapsed().as_nanos() >= SHORTEST_GROUP_NS || calls > 1 << 20 {
            break;
        }
        calls *= 2;
    }
    let mut groups = Vec::new();
    while groups.len() < 3 || begun.elapsed().as_nanos() < u128::from(budget_ns) {
        let group = Instant::now();
        (0..calls).for_each(|_| act());
        groups.push(group.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    median(&groups)
}
