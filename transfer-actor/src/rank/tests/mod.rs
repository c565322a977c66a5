//! Ranks in one process, over real sockets and real memory.

mod busy;
mod generations;
mod health;
mod limits;
mod malformed;
mod panics;
mod reports;
mod transfers;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use common::ids::{ByteLen, ByteOffset};
use common::plan::PlannerOptions;
use common::schema::{AttentionKind, KvLayout, RankLayout, StateKind, StateLayout, TensorLayout};
use common::topology::ParallelConfig;
use common::wire::route::{RankAddress, RankReport, RouteRegistration, TopologyReply};
use io_engine::{Engine, EngineConfig, FaultSpec, Memory, Region};
use prometheus::Registry;
use zmtp::PushOptions;

use crate::api::{Announce, Chunk, EngineSpec, Indices, OpenRoom, Role, RoomStatus, RoomView};
use crate::metrics::TransferMetrics;
use crate::rank::{Limits, RankBuffers, RankConfig, RankHandle, Timeouts};

const DEADLINE: Duration = Duration::from_secs(20);
/// Bytes of a page of K or V that holds all heads, of a row of the state, of a row of aux.
const PAGE: u64 = 64;
const STATE_ROW: u64 = 32;
const AUX_ROW: u64 = 16;
const PAGES: u64 = 8;
const ROWS: u64 = 4;
/// What a decode's memory holds before.
const UNTOUCHED: u8 = 0xEE;

/// What ranks reported last, by their engine's key.
type Reports = Arc<Mutex<BTreeMap<String, RankReport>>>;

/// A bootstrap server with the routes that ranks need; its address.
fn bootstrap_server() -> String {
    bootstrap_server_with(&Reports::default())
}

/// As [`bootstrap_server`], and it keeps what ranks report.
fn bootstrap_server_with(reports: &Reports) -> String {
    let reports = Arc::clone(reports);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    let ranks: Arc<Mutex<BTreeMap<u32, RouteRegistration>>> = Arc::default();
    let server = HttpServer::new(move || {
        let (ranks, reports) = (Arc::clone(&ranks), Arc::clone(&reports));
        let answer = move |request: HttpRequest, body: web::Bytes| {
            let response = match request.path().strip_prefix("/v1/reports/") {
                Some(key) => {
                    let report = serde_json::from_slice(&body).expect("a report");
                    let mut reports = reports.lock().expect("no panic");
                    reports.insert(key.to_owned(), report);
                    HttpResponse::NoContent().finish()
                }
                None => answer(&mut ranks.lock().expect("no panic"), &request, &body),
            };
            async move { response }
        };
        App::new().default_service(web::to(answer))
    });
    let server = server.workers(1).disable_signals();
    actix_rt::spawn(server.listen(listener).expect("it listens").run());
    address
}

fn answer(
    ranks: &mut BTreeMap<u32, RouteRegistration>,
    request: &HttpRequest,
    body: &[u8],
) -> HttpResponse {
    if request.path() != "/route" {
        return HttpResponse::NotFound().finish();
    }
    if let Ok(registration) = serde_json::from_slice::<RouteRegistration>(body) {
        ranks.insert(registration.attn_tp_rank, registration);
        return HttpResponse::Ok().finish();
    }
    let asked = request
        .query_string()
        .split('&')
        .find_map(|pair| pair.strip_prefix("target_tp_rank="));
    match asked.and_then(|rank| rank.parse::<u32>().ok()) {
        Some(rank) => match ranks.get(&rank) {
            Some(known) => HttpResponse::Ok().json(RankAddress {
                rank_ip: known.rank_ip.clone(),
                rank_port: known.rank_port,
            }),
            None => HttpResponse::NotFound().finish(),
        },
        None => match ranks.values().next() {
            Some(first) if ranks.len() == first.attn_tp_size as usize => {
                HttpResponse::Ok().json(TopologyReply {
                    attn_tp_size: first.attn_tp_size,
                    attn_cp_size: 1,
                    dp_size: 1,
                    pp_size: 1,
                    page_size: Some(first.page_size),
                    kv_cache_dtype: Some(first.kv_cache_dtype.clone()),
                    follow_bootstrap_room: false,
                    enable_dsa_cache_layer_split: false,
                    dsv41_spec_layout: None,
                    kv_layout: None,
                    decode_allocation_policy: first.decode_allocation_policy.clone(),
                    enable_kv_cache_sharding: false,
                    prefill_http_port: None,
                })
            }
            _ => HttpResponse::ServiceUnavailable().finish(),
        },
    }
}

/// K and V of one layer with four heads, one state component, one aux buffer.
fn layout(tp_size: u32) -> RankLayout {
    let tensor = |items: u64, item_len: u64| TensorLayout {
        bytes: ByteLen(items * item_len),
        item_len: ByteLen(item_len),
    };
    RankLayout {
        page_size: 1,
        kv: KvLayout {
            tensors: vec![tensor(PAGES, PAGE / u64::from(tp_size)); 2],
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mha,
            head_num: 4 / tp_size,
            total_head_num: 4,
        },
        aux: vec![tensor(ROWS, AUX_ROW)],
        states: vec![StateLayout {
            kind: StateKind::Dsa,
            tensors: vec![tensor(ROWS, STATE_ROW)],
            dims: Vec::new(),
            outer_counts: Vec::new(),
            conv_shard_groups: Vec::new(),
            layer_ids: Vec::new(),
        }],
    }
}

fn engine(key: &str, fault_opt: Option<FaultSpec>) -> Engine {
    let mut config = EngineConfig::new(key, "127.0.0.1");
    config.tcp_bind = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    config.fault_opt = fault_opt;
    Engine::start(config).expect("an engine")
}

/// The buffers of one rank, one behind the other in one pool.
#[derive(Debug)]
struct Pool {
    memory: Memory,
    buffers: RankBuffers,
}

impl Pool {
    fn new(engine: &Engine, tp_size: u32) -> Self {
        let layout = layout(tp_size);
        let tensors = layout.kv.tensors.iter().chain(&layout.states[0].tensors);
        let len: u64 = tensors
            .chain(&layout.aux)
            .map(|tensor| tensor.bytes.0)
            .sum();
        let memory = Memory::allocate("pool", ByteLen(len)).expect("memory");
        let mut offset = 0;
        let mut register = |tensor: &TensorLayout, label: &str| -> Option<Region> {
            let at = ByteOffset(offset);
            offset += tensor.bytes.0;
            Some(
                engine
                    .register(&memory, at, tensor.bytes, label)
                    .expect("it fits"),
            )
        };
        let kv = layout
            .kv
            .tensors
            .iter()
            .map(|tensor| register(tensor, "kv"))
            .collect();
        let state = &layout.states[0];
        let states = state
            .tensors
            .iter()
            .map(|tensor| register(tensor, "dsa"))
            .collect();
        let aux = layout
            .aux
            .iter()
            .map(|tensor| register(tensor, "aux"))
            .collect();
        let buffers = RankBuffers {
            layout,
            kv,
            aux,
            states: vec![states],
        };
        Self { memory, buffers }
    }

    fn fill(&self, byte_at: impl Fn(usize) -> u8) {
        let bytes: Vec<u8> = (0..self.memory.len().get() as usize).map(byte_at).collect();
        self.memory.write(ByteOffset(0), &bytes).expect("it fits");
    }

    /// K, V, the state and aux.
    fn contents(&self) -> [Vec<u8>; 4] {
        let buffers = &self.buffers;
        let all = buffers
            .kv
            .iter()
            .chain(&buffers.states[0])
            .chain(&buffers.aux);
        let contents: Vec<Vec<u8>> = all
            .map(|region| {
                let region = region.as_ref().expect("nothing is elided");
                let mut bytes = vec![0; region.len().get() as usize];
                region.read(ByteOffset(0), &mut bytes).expect("it fits");
                bytes
            })
            .collect();
        contents.try_into().expect("four buffers")
    }
}

/// A rank that a test started.
#[derive(Debug)]
struct TestRank {
    rank: RankHandle,
    pool: Pool,
    metrics: Arc<TransferMetrics>,
}

/// Starts a rank; a prefill's memory holds a pattern of its own, a decode's holds nothing.
async fn start(
    role: Role,
    (tp_size, tp_rank): (u32, u32),
    bootstrap: &str,
    fault_opt: Option<FaultSpec>,
) -> TestRank {
    let engine = engine(&format!("{}-{tp_rank}", role.name()), fault_opt);
    let pool = Pool::new(&engine, tp_size);
    match role {
        Role::Prefill => pool.fill(|at| (at * 7 + at / 61 + tp_rank as usize * 101) as u8),
        Role::Decode => pool.fill(|_| UNTOUCHED),
    }
    let config = RankConfig {
        role,
        parallel: ParallelConfig {
            tp_size,
            tp_rank,
            ..ParallelConfig::default()
        },
        engine: EngineSpec {
            kv_cache_dtype: "auto".to_owned(),
            kv_layout: None,
            load_balance_method: "round_robin".to_owned(),
            decode_allocation_policy: "early".to_owned(),
            prefill_http_port: None,
            sglang_release: None,
        },
        bootstrap_opt: (role == Role::Prefill).then(|| bootstrap.to_owned()),
        advertise_host: "127.0.0.1".to_owned(),
        control_bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
        control_ports_opt: None,
        timeouts: Timeouts {
            bootstrap: DEADLINE,
            report: Duration::from_millis(200),
            ..Timeouts::default()
        },
        limits: Limits::default(),
        planner: PlannerOptions::default(),
        push: PushOptions::default(),
        verify_opt: None,
    };
    let metrics = Arc::new(TransferMetrics::new(&Registry::new()).expect("new names"));
    let rank = RankHandle::start(config, engine, pool.buffers.clone(), Arc::clone(&metrics)).await;
    TestRank {
        rank: rank.expect("it starts"),
        pool,
        metrics,
    }
}

impl TestRank {
    async fn open(&self, room: u64, bootstrap: &str) {
        let is_decode = self.rank.role() == Role::Decode;
        let opened = self.rank.open(OpenRoom {
            room,
            bootstrap: is_decode.then(|| bootstrap.to_owned()),
            prefill_dp_rank: None,
            aux_index: (!is_decode).then_some(1),
        });
        opened.await.expect("it opens");
    }

    /// Announces pages 6, 5, 4 and 3, state row 2 and aux row 3.
    async fn announce(&self, room: u64) {
        let announced = self.rank.announce(
            room,
            Announce {
                kv_indices: Indices(vec![6, 5, 4, 3]),
                aux_index: Some(3),
                state_indices: vec![Some(Indices(vec![2]))],
                decode_prefix_len: None,
            },
        );
        announced.await.expect("it is announced");
    }

    /// Sends pages 0 and 1, or 2 and 3 with the state row 1 and aux row 1.
    async fn send(&self, room: u64, is_last: bool) -> RoomView {
        let pages = if is_last { vec![2, 3] } else { vec![0, 1] };
        let sent = self.rank.send_chunk(
            room,
            Chunk {
                kv_indices: Indices(pages),
                state_indices: if is_last {
                    vec![Some(Indices(vec![1]))]
                } else {
                    Vec::new()
                },
                num_kv_tokens: None,
                aux_index: None,
                last: is_last,
            },
        );
        sent.await.expect("it is accepted")
    }

    /// The room once it has this status, or has ended.
    async fn wait(&self, room: u64, status: RoomStatus) -> RoomView {
        let view = self.rank.wait(room, Some(status), DEADLINE).await;
        view.expect("the room is known")
    }

    /// The room once it has this status; it must not fail.
    async fn reach(&self, room: u64, status: RoomStatus) -> RoomView {
        let view = self.wait(room, status).await;
        assert_eq!(view.status, status, "{view:?}");
        view
    }
}

/// Waits until something holds of a rank. Each look is a turn of its mailbox.
async fn eventually(rank: &TestRank, what: &str, holds: impl Fn(&TestRank) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds(rank) {
        assert!(Instant::now() < deadline, "{what}");
        rank.rank.observe().await.expect("it runs");
    }
}
