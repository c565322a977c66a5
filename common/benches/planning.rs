//! What planning and the codec cost for each request: 36 layers of K and V, pages in random order
//! on both sides.

use std::hint::black_box;
use std::time::Duration;

use common::ids::{ByteLen, Endpoint, Room};
use common::plan::pages::index_runs;
use common::plan::{KvChunk, PeerPlanner, PlannerOptions};
use common::schema::{AttentionKind, KvLayout, PeerLayout, PeerTensor, RankLayout, TensorLayout};
use common::topology::ParallelConfig;
use common::wire::{
    Abort, AbortAck, AuxData, Bootstrap, ControlMessage, EngineDesc, KvPoll, MemoryDesc, Register,
    Release, Status, TransferInfo, decode_message,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const LAYERS: u32 = 36;
const HEADS: u32 = 8;
const PAGE_SIZE: u32 = 64;
const PAGE_BYTES: u64 = 64 * 8 * 128 * 2;
const PAGE_COUNTS: [usize; 4] = [64, 256, 1024, 4096];
const POOL_PAGES: u64 = 16_384;

/// `count` different pages in an order that looks random and is the same in each run.
fn random_pages(count: usize, seed: u64) -> Vec<i32> {
    let mut state = seed;
    let mut pages: Vec<i32> = (0..POOL_PAGES as i32).collect();
    for last in (1..pages.len()).rev() {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        pages.swap(last, (state >> 33) as usize % (last + 1));
    }
    pages.truncate(count);
    pages
}

fn planner(decode_tp: u32) -> PeerPlanner {
    let tensors = 2 * LAYERS as usize;
    let bytes = POOL_PAGES * PAGE_BYTES;
    let tensor = TensorLayout {
        bytes: ByteLen(bytes),
        item_len: ByteLen(PAGE_BYTES),
    };
    let local = RankLayout {
        page_size: PAGE_SIZE,
        kv: KvLayout {
            tensors: vec![tensor; tensors],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mha,
            head_num: HEADS,
            total_head_num: HEADS,
        },
        aux: Vec::new(),
        states: Vec::new(),
    };
    let peer_tensor = |position: usize| PeerTensor {
        bytes: ByteLen(bytes / u64::from(decode_tp)),
        item_len_opt: (position == 0).then_some(ByteLen(PAGE_BYTES / u64::from(decode_tp))),
    };
    let peer = PeerLayout {
        kv: (0..tensors).map(peer_tensor).collect(),
        kv_layer_ids: Vec::new(),
        aux: Vec::new(),
        states: Vec::new(),
        tp_size: decode_tp,
        engine_rank: 0,
        dcp_size: 1,
        dcp_rank: 0,
    };
    let parallel = ParallelConfig::default();
    PeerPlanner::new(&local, &parallel, &peer, PlannerOptions::default()).expect("they fit")
}

fn bench_planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("planning");
    let (equal, sliced) = (planner(1), planner(2));
    for count in PAGE_COUNTS {
        let (src, dst) = (random_pages(count, 1), random_pages(count, 2));
        let chunk = KvChunk {
            src_pages: &src,
            position: 0,
            dst_pages: &dst,
            decode_prefix_len: 0,
            num_kv_tokens: None,
        };
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::new("group", count), |bencher| {
            bencher.iter(|| index_runs(black_box(&src), black_box(&dst)));
        });
        group.bench_function(BenchmarkId::new("check_announcement", count), |bencher| {
            bencher.iter(|| equal.check_announcement(black_box(&dst), None, &[]));
        });
        for (name, planner) in [("plan_equal_tp", &equal), ("plan_tp_1_to_2", &sliced)] {
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter(|| planner.plan_kv(black_box(&chunk)));
            });
        }
        group.bench_function(BenchmarkId::new("plan_and_consume", count), |bencher| {
            bencher.iter(|| {
                let plan = equal.plan_kv(black_box(&chunk)).expect("a plan");
                for pair in plan.pairs() {
                    for range in pair.runs.iter_ranges() {
                        black_box(range);
                    }
                }
            });
        });
    }
    group.finish();
}

/// Every message, as large as a request of 1,024 pages and a rank of 72 tensors make it.
fn messages() -> Vec<ControlMessage> {
    let room = Room::new(1 << 40).expect("a room");
    let endpoint = Endpoint::new("10.0.0.7".to_owned(), 40_001);
    let desc = |id: u32| MemoryDesc {
        engine_key: "decode-engine-0".to_owned(),
        id,
        data: 0x7f00_0000_0000,
        size: POOL_PAGES * PAGE_BYTES,
        ..MemoryDesc::default()
    };
    vec![
        ControlMessage::Register(Box::new(Register {
            endpoint: endpoint.clone(),
            engine: EngineDesc {
                key: "decode-engine-0".to_owned(),
                ..EngineDesc::default()
            },
            kv: (0..2 * LAYERS).map(desc).collect(),
            aux: (0..8).map(desc).collect(),
            states: Vec::new(),
            gpu_id: 0,
            tp_size: 1,
            engine_rank: 0,
            kv_item_len: PAGE_BYTES,
            state_item_lens: Vec::new(),
            state_dims: Vec::new(),
            dcp_size: 1,
            dcp_rank: 0,
            state_layer_ids: Vec::new(),
            kv_layer_ids: Vec::new(),
            release: Release::NEWEST,
        })),
        ControlMessage::TransferInfo(TransferInfo {
            room,
            endpoint: endpoint.clone(),
            engine_key: "decode-engine-0".to_owned(),
            kv_indices: random_pages(1024, 1),
            aux_index: Some(3),
            state_indices: vec![vec![5]],
            required_dst_info_num: 1,
            decode_prefix_len: Some(0),
            grant_opt: None,
        }),
        ControlMessage::Status(Status {
            room,
            poll: KvPoll::Success,
            prefill_rank: 0,
            reason: None,
        }),
        ControlMessage::Abort(Abort {
            room,
            reply_to: Some(endpoint.clone()),
            generation: Some(1),
        }),
        ControlMessage::AbortAck(AbortAck {
            room,
            prefill_rank: 0,
            generation: Some(1),
        }),
        ControlMessage::AuxData(AuxData {
            room,
            buffer_index: 0,
            aux_index: 3,
            data: vec![7; 512],
        }),
        ControlMessage::Bootstrap(Bootstrap {
            room,
            reply_to: endpoint,
        }),
    ]
}

fn bench_codec(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codec");
    for message in messages() {
        let frames = message.encode(Release::NEWEST).expect("frames");
        group.bench_function(BenchmarkId::new("encode", message.kind()), |bencher| {
            bencher.iter(|| message.encode(black_box(Release::NEWEST)));
        });
        group.bench_function(BenchmarkId::new("decode", message.kind()), |bencher| {
            bencher.iter(|| decode_message(black_box(&frames)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = bench_planning, bench_codec
}
criterion_main!(benches);
