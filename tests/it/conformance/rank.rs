//! One rank, ours or SGLang's, as a test drives it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use common::check::CheckMode;
use common::ids::{ByteLen, ByteOffset};
use common::metrics::CONTROL_MESSAGES;
use common::plan::PlannerOptions;
use common::topology::ParallelConfig;
use io_engine::{
    AnyMemory, DeviceMemory, DeviceRuntime, Engine, EngineConfig, FaultSpec, Memory, Region,
    TransportKind,
};
use prometheus::Registry;
use prometheus::proto::{LabelPair, Metric};
use serde_json::{Value, json};
use tests::process::wait_for;
use tests::sglang::SglangPeer;
use transfer_actor::api::{Announce, Chunk, EngineSpec, Indices, OpenRoom, Role, RoomStatus};
use transfer_actor::metrics::TransferMetrics;
use transfer_actor::rank::{Limits, RankBuffers, RankConfig, RankHandle, Timeouts};
use zmtp::PushOptions;

use crate::conformance::model::{List, Model, Place, Placement, Shape};

/// Bytes between two buffers of a pool.
const GAP: usize = 64;

/// How long anything may take on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(40);

/// Over what all bytes are to move, where the environment says so; nothing else is offered. Pools of
/// SGLang's own in host memory cannot be mapped, so with `shm` those go by `cma`, whose pools in
/// device memory it does not reach.
pub fn transports_opt() -> Option<Vec<TransportKind>> {
    let name = std::env::var("FERRY_TEST_TRANSPORT").ok()?;
    let kind: TransportKind = name.parse().expect("FERRY_TEST_TRANSPORT is a transport");
    Some(match kind {
        TransportKind::Shm => vec![TransportKind::Shm, TransportKind::Cma],
        other => vec![other],
    })
}

/// Whether pools, but for aux rows, are to be in device memory.
pub fn is_in_device_memory() -> bool {
    match std::env::var("FERRY_TEST_MEMORY").as_deref() {
        Ok("device") => true,
        Ok("host") | Err(_) => false,
        Ok(other) => panic!("FERRY_TEST_MEMORY is host or device, not {other}"),
    }
}

/// Whether SGLang's ranks need our module instead of the double of MoRI, which has no network and
/// knows no device.
pub fn is_beyond_the_double() -> bool {
    transports_opt().is_some() || is_in_device_memory()
}

/// The device of a rank; neighbours and peers are on different ones.
fn device_of(role: Role, place: Place) -> u32 {
    (place.tp_rank + u32::from(role == Role::Decode)) % 2
}

/// What all ranks of a test have in common.
#[derive(Clone, Debug)]
pub struct Setting {
    pub model: Model,
    /// The loopback address that everything binds and names.
    pub host: IpAddr,
    pub allocation_policy: String,
    /// Whether our ranks want bytes to be compared by checksums.
    pub verify_opt: Option<CheckMode>,
    /// SGLang's release.
    pub release: String,
    /// Whether SGLang writes aux rows by its engine instead of sending them as messages.
    pub aux_by_write: bool,
    /// A fault of our engine.
    pub fault_opt: Option<FaultSpec>,
    /// Whether SGLang's ranks move bytes by the wheel's `mori` instead of the double.
    pub is_over_our_module: bool,
    /// The roles whose manager is our plugin's; then the bootstrap server of a prefill is, too.
    pub managers: &'static [Role],
    /// SGLang's backend: `mori` or `mooncake`.
    pub backend: &'static str,
    /// More of the environment of SGLang's ranks.
    pub environment: Vec<(&'static str, String)>,
    /// A fault of that module, as `FaultSpec` reads it.
    pub module_fault: &'static str,
}

/// A rank of ours, in this process.
#[derive(Debug)]
pub struct OurRank {
    pub handle: RankHandle,
    pools: Vec<Pool>,
    regions: Vec<Region>,
    registry: Registry,
}

#[derive(Debug)]
pub enum Side {
    Ours(OurRank),
    Sglang(Box<SglangPeer>),
}

/// A running rank and the shape of its buffers.
#[derive(Debug)]
pub struct Rank {
    pub side: Side,
    pub role: Role,
    pub shape: Shape,
    /// Distinguishes its background from that of other ranks.
    owner: u64,
    bootstrap: SocketAddr,
}

/// Where the last pages of a chunk stand in a request.
#[derive(Clone, Copy, Debug)]
pub struct ChunkEnd {
    /// Tokens of the chunk.
    pub tokens: u64,
    /// Whether states and aux go with it.
    pub is_last: bool,
}

fn indices(numbers: &[i32]) -> Indices {
    Indices(numbers.to_vec())
}

impl Rank {
    /// Starts a rank of ours.
    pub async fn start_ours(
        setting: &Setting,
        role: Role,
        place: Place,
        bootstrap: SocketAddr,
    ) -> Self {
        let shape = Shape::new(&setting.model, place);
        let key = format!("ferry-{}-{}-{}", role.name(), place.tp_rank, place.dcp_rank);
        let mut config = EngineConfig::new(key, setting.host.to_string());
        config.tcp_bind = SocketAddr::new(setting.host, 0);
        config.cma_trust_descriptors = true;
        if let Some(transports) = transports_opt() {
            config.transports = transports;
        }
        config.fault_opt = setting.fault_opt.clone();
        let engine = Engine::start(config).expect("an engine starts");
        let (pools, regions) = register(&engine, &shape, device_of(role, place));
        let of_list = |list: List| -> Vec<Option<Region>> {
            let both = shape.buffers.iter().zip(&regions);
            both.filter(|(buffer, _)| buffer.list == list)
                .map(|(_, region)| Some(region.clone()))
                .collect()
        };
        let buffers = RankBuffers {
            layout: shape.layout(),
            kv: of_list(List::Kv),
            aux: of_list(List::Aux),
            states: (0..setting.model.states.len())
                .map(|component| of_list(List::State(component)))
                .collect(),
        };
        let config = RankConfig {
            role,
            parallel: ParallelConfig {
                tp_size: place.tp_size,
                tp_rank: place.tp_rank,
                dcp_size: place.dcp_size,
                dcp_rank: place.dcp_rank,
                ..ParallelConfig::default()
            },
            engine: EngineSpec {
                kv_cache_dtype: "auto".to_owned(),
                kv_layout: None,
                load_balance_method: "round_robin".to_owned(),
                decode_allocation_policy: setting.allocation_policy.clone(),
                prefill_http_port: None,
                sglang_release: Some(setting.release.clone()),
            },
            bootstrap_opt: (role == Role::Prefill).then(|| bootstrap.to_string()),
            advertise_host: setting.host.to_string(),
            control_bind: setting.host,
            control_ports_opt: None,
            timeouts: Timeouts {
                bootstrap: DEADLINE,
                heartbeat: Duration::from_millis(500),
                ..Timeouts::default()
            },
            limits: Limits::default(),
            planner: PlannerOptions::default(),
            push: PushOptions::default(),
            verify_opt: setting.verify_opt,
        };
        let registry = Registry::new();
        let metrics = TransferMetrics::new(&registry).expect("new names");
        let metrics = Arc::new(metrics);
        let handle = RankHandle::start(config, engine, buffers, metrics).await;
        let rank = Self {
            side: Side::Ours(OurRank {
                handle: handle.expect("the rank starts"),
                pools,
                regions,
                registry,
            }),
            role,
            shape,
            owner: owner(role, place),
            bootstrap,
        };
        rank.prepared(None)
    }

    /// Starts a rank of SGLang's. The first one of a prefill may serve SGLang's own bootstrap server.
    pub fn start_sglang(
        setting: &Setting,
        role: Role,
        place: Place,
        bootstrap: SocketAddr,
        serves_bootstrap: bool,
    ) -> Self {
        let shape = Shape::new(&setting.model, place);
        let host = setting.host.to_string();
        let mut environment = BTreeMap::new();
        let mut set = |variable: &str, value: &str| {
            environment.insert(variable.to_owned(), value.to_owned());
        };
        set("SGLANG_HOST_IP", &host);
        set(
            "SGLANG_MORI_SEND_AUX_RDMA",
            &setting.aux_by_write.to_string(),
        );
        // Only then does a decode of SGLang wait for the acknowledgement of an abort.
        set("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "true");
        if setting.is_over_our_module || is_beyond_the_double() {
            set("SGLCONF_MORI", "installed");
            set("FERRY_INJECT_FAULT", setting.module_fault);
        }
        if let Some(transports) = transports_opt() {
            let names: Vec<_> = transports.iter().map(|kind| kind.name()).collect();
            set("FERRY_TRANSPORTS", &names.join(","));
        }
        if is_in_device_memory() {
            let device = format!("cuda:{}", device_of(role, place));
            set("SGLCONF_DEVICE", &device);
        }
        set("SGLCONF_BACKEND", setting.backend);
        for (variable, value) in &setting.environment {
            set(variable, value);
        }
        if setting.managers.contains(&role) {
            set("SGLCONF_PLUGIN", "1");
            set("FERRY_MANAGER", "1");
            set("FERRY_METRICS_PORT", "0");
        }
        let args = shape.sglang_args();
        let configuration = json!({
            "mode": role.name(),
            "host": host,
            "port": bootstrap.port(),
            "serve_bootstrap": serves_bootstrap,
            "is_mla": args["is_mla"],
            "args": args,
            "context": {
                "attn_tp_size": place.tp_size,
                "attn_tp_rank": place.tp_rank,
                "attn_dcp_size": place.dcp_size,
                "attn_dcp_rank": place.dcp_rank,
                "disaggregation_decode_allocation_policy": setting.allocation_policy,
            },
        });
        let peer = SglangPeer::start(&setting.release, &environment, &configuration);
        let rank = Self {
            side: Side::Sglang(Box::new(peer)),
            role,
            shape,
            owner: owner(role, place),
            bootstrap,
        };
        rank.prepared(None)
    }

    /// Writes what the buffers hold before a request, which lies in a prefill's already.
    pub fn prepare(&mut self, request_opt: Option<(u64, &Placement, u32)>) {
        for position in 0..self.shape.buffers.len() {
            let buffer = &self.shape.buffers[position];
            let contents = self.shape.contents(buffer, self.owner, request_opt);
            match &mut self.side {
                Side::Ours(rank) => {
                    let written = rank.regions[position].write(ByteOffset(0), &contents);
                    written.expect("it fits");
                }
                Side::Sglang(peer) => {
                    let filled = json!({
                        "buffer": buffer.name, "offset": 0, "hex": hex::encode(contents),
                    });
                    peer.ask("fill", filled);
                }
            }
        }
    }

    /// Kills SGLang's rank.
    pub fn kill(&mut self) {
        match &mut self.side {
            Side::Sglang(peer) => peer.kill(),
            Side::Ours(_) => panic!("this rank is ours"),
        }
    }

    fn prepared(mut self, request_opt: Option<(u64, &Placement, u32)>) -> Self {
        self.prepare(request_opt);
        self
    }

    /// The whole of a buffer.
    pub fn read(&mut self, position: usize) -> Vec<u8> {
        let name = &self.shape.buffers[position].name;
        match &mut self.side {
            Side::Ours(rank) => {
                let region = &rank.regions[position];
                let mut bytes = vec![0; region.len().get() as usize];
                region.read(ByteOffset(0), &mut bytes).expect("it fits");
                bytes
            }
            Side::Sglang(peer) => {
                let answer = peer.ask("read", json!({ "buffer": name }));
                hex::decode(answer["hex"].as_str().expect("bytes")).expect("hexadecimal")
            }
        }
    }

    /// Compares every byte of every buffer, also those that must not change.
    pub fn check(&mut self, request_opt: Option<(u64, &Placement, u32)>) {
        for position in 0..self.shape.buffers.len() {
            let found = self.read(position);
            let buffer = &self.shape.buffers[position];
            let wanted = self.shape.contents(buffer, self.owner, request_opt);
            let item_len = buffer.item_len();
            let differs = (0..wanted.len()).find(|at| found.get(*at) != Some(&wanted[*at]));
            assert_eq!(found.len(), wanted.len(), "{}", buffer.name);
            assert!(
                differs.is_none(),
                "{} {:?}: {} differs first at item {}, byte {}",
                self.role.name(),
                self.shape,
                buffer.name,
                differs.unwrap_or_default() / item_len,
                differs.unwrap_or_default() % item_len,
            );
        }
        if let Side::Ours(rank) = &self.side {
            assert!(rank.gaps_are_untouched(), "a write left its buffer");
        }
    }

    /// Whether all buffers hold a request and nothing else has changed.
    pub fn holds(&mut self, request: (u64, &Placement, u32)) -> bool {
        (0..self.shape.buffers.len()).all(|position| {
            let found = self.read(position);
            let buffer = &self.shape.buffers[position];
            found == self.shape.contents(buffer, self.owner, Some(request))
        })
    }

    /// Waits until the aux rows of a request are there. SGLang sends them as messages that may
    /// come behind its Success.
    pub fn wait_for_aux(&mut self, request: (u64, &Placement, u32)) {
        for position in 0..self.shape.buffers.len() {
            if self.shape.buffers[position].list != List::Aux {
                continue;
            }
            wait_for("the aux rows", || {
                let found = self.read(position);
                let buffer = &self.shape.buffers[position];
                let wanted = self.shape.contents(buffer, self.owner, Some(request));
                (found == wanted).then_some(())
            });
        }
    }

    /// What SGLang is asked.
    pub fn ask(&mut self, op: &str, arguments: Value) -> Value {
        match &mut self.side {
            Side::Sglang(peer) => peer.ask(op, arguments),
            Side::Ours(_) => panic!("{op}: only SGLang's ranks are asked"),
        }
    }

    pub const fn is_ours(&self) -> bool {
        matches!(self.side, Side::Ours(_))
    }

    /// How many STATUS messages a prefill rank has sent.
    pub fn statuses_sent(&mut self) -> usize {
        match &mut self.side {
            Side::Ours(rank) => {
                let families = rank.registry.gather();
                let messages = families
                    .iter()
                    .filter(|family| family.name() == CONTROL_MESSAGES)
                    .flat_map(|family| family.get_metric());
                let is_sent_status = |metric: &&Metric| {
                    let values: Vec<_> = metric.get_label().iter().map(LabelPair::value).collect();
                    values.contains(&"status") && values.contains(&"sent")
                };
                let sent = messages.filter(is_sent_status);
                sent.map(|metric| metric.get_counter().get_value() as usize)
                    .sum()
            }
            Side::Sglang(peer) => {
                let answer = peer.ask("frames", json!({}));
                let sent = answer["messages"].as_array().expect("messages").iter();
                sent.filter(|message| message["kind"] == "STATUS").count()
            }
        }
    }

    /// The sum of a counter over all of its labels; none of a rank of SGLang's.
    pub fn counted(&self, name: &str) -> Option<u64> {
        let Side::Ours(rank) = &self.side else {
            return None;
        };
        let families = rank.registry.gather();
        let counters = families
            .iter()
            .filter(|family| family.name() == name)
            .flat_map(|family| family.get_metric());
        let values = counters.map(|metric| metric.get_counter().get_value() as u64);
        Some(values.sum())
    }

    /// Opens a room; `aux_row` is the source row of a prefill.
    pub async fn open(&mut self, room: u64, aux_row: i32) {
        match &mut self.side {
            Side::Ours(rank) => {
                let is_decode = self.role == Role::Decode;
                let opened = rank.handle.open(OpenRoom {
                    room,
                    bootstrap: is_decode.then(|| self.bootstrap.to_string()),
                    prefill_dp_rank: None,
                    aux_index: (!is_decode).then_some(aux_row as u32),
                });
                opened.await.expect("it opens");
            }
            Side::Sglang(peer) => {
                peer.ask("open", json!({ "room": room }));
            }
        }
    }

    /// Says where a room must land; `prefix` is how many tokens the decode holds.
    pub async fn announce(&mut self, room: u64, place: &Placement, prefix: u64) {
        match &mut self.side {
            Side::Ours(rank) => {
                let states = place.states.iter();
                let announce = Announce {
                    kv_indices: indices(&place.pages),
                    aux_index: Some(place.aux as u32),
                    state_indices: states.map(|state| Some(indices(state))).collect(),
                    decode_prefix_len: Some(prefix),
                };
                let announced = rank.handle.announce(room, announce).await;
                announced.expect("it is announced");
            }
            Side::Sglang(peer) => {
                let states = (!place.states.is_empty()).then_some(&place.states);
                peer.ask(
                    "announce",
                    json!({
                        "room": room,
                        "kv": place.pages,
                        "aux": place.aux,
                        "state": states,
                        "prefix": prefix,
                    }),
                );
            }
        }
    }

    /// Says how many pages a room will send and from which row of aux; ours knows the row already.
    pub fn begin_send(&mut self, room: u64, pages: usize, aux_row: i32) {
        if let Side::Sglang(peer) = &mut self.side {
            let init = json!({ "room": room, "pages": pages, "aux": aux_row });
            peer.ask("init", init);
        }
    }

    /// Sends the next pages; the states go with the last.
    pub async fn send(&mut self, room: u64, pages: &[i32], states: &[Vec<i32>], end: ChunkEnd) {
        match &mut self.side {
            Side::Ours(rank) => {
                let states = states.iter().map(|state| Some(indices(state)));
                let chunk = Chunk {
                    kv_indices: indices(pages),
                    state_indices: states.filter(|_| end.is_last).collect(),
                    num_kv_tokens: Some(end.tokens),
                    aux_index: None,
                    last: end.is_last,
                };
                let sent = rank.handle.send_chunk(room, chunk).await;
                sent.expect("it is accepted");
            }
            Side::Sglang(peer) => {
                let states = (end.is_last && !states.is_empty()).then_some(states);
                peer.ask(
                    "send",
                    json!({ "room": room, "kv": pages, "state": states, "tokens": end.tokens }),
                );
            }
        }
    }

    /// The status once it is this one, or an end; with why it failed.
    pub async fn wait(&mut self, room: u64, status: RoomStatus) -> (RoomStatus, String) {
        match &mut self.side {
            Side::Ours(rank) => {
                // A failure ends every wait; asking for it would be answered at once.
                let wanted = match status {
                    RoomStatus::Failed => RoomStatus::Success,
                    wanted => wanted,
                };
                let view = rank.handle.wait(room, Some(wanted), DEADLINE).await;
                let view = view.expect("the room is known");
                (view.status, view.reason.unwrap_or_default())
            }
            Side::Sglang(peer) => {
                let wait = json!({
                    "room": room, "status": status as u8, "timeout_s": DEADLINE.as_secs(),
                });
                let reached = peer.ask("wait", wait)["status"].as_u64();
                let reached = STATUSES[reached.expect("a status") as usize];
                if reached != RoomStatus::Failed {
                    return (reached, String::new());
                }
                let failure = peer.ask("failure", json!({ "room": room }));
                (
                    reached,
                    failure["reason"].as_str().unwrap_or_default().to_owned(),
                )
            }
        }
    }

    /// The status now.
    pub async fn status(&mut self, room: u64) -> RoomStatus {
        match &mut self.side {
            Side::Ours(rank) => {
                let view = rank.handle.wait(room, None, Duration::ZERO).await;
                view.expect("the room is known").status
            }
            Side::Sglang(peer) => {
                let status = peer.ask("poll", json!({ "room": room }))["status"].as_u64();
                STATUSES[status.expect("a status") as usize]
            }
        }
    }

    /// As [`wait`](Self::wait); it must come to that.
    pub async fn reach(&mut self, room: u64, status: RoomStatus) -> String {
        let (reached, reason) = self.wait(room, status).await;
        let who = (self.role.name(), self.is_ours());
        assert_eq!(reached, status, "{who:?}: {reason}");
        reason
    }

    /// Gives a room up.
    pub async fn abort(&mut self, room: u64) {
        match &mut self.side {
            Side::Ours(rank) => {
                let aborted = rank.handle.abort(room, None).await;
                aborted.expect("it can be aborted");
            }
            Side::Sglang(peer) => {
                peer.ask("abort", json!({ "room": room }));
            }
        }
    }

    /// Forgets a room.
    pub async fn clear(&mut self, room: u64) {
        match &mut self.side {
            Side::Ours(rank) => rank.handle.clear(room).await.expect("it is cleared"),
            Side::Sglang(peer) => {
                peer.ask("clear", json!({ "room": room }));
            }
        }
    }

    /// The prefill is complete (policy `prefill_complete`).
    pub async fn prefill_complete(&mut self, room: u64) {
        match &mut self.side {
            Side::Ours(rank) => {
                let marked = rank.handle.prefill_complete(room).await;
                marked.expect("it is marked");
            }
            Side::Sglang(peer) => {
                peer.ask("mark", json!({ "room": room }));
            }
        }
    }

    /// Whether a decode may use the pages of an aborted room again, as far as it knows now.
    pub async fn is_release_safe(&mut self, room: u64) -> bool {
        match &mut self.side {
            Side::Ours(rank) => {
                let view = rank.handle.wait(room, None, Duration::ZERO).await;
                view.expect("the room is known").release_safe
            }
            Side::Sglang(peer) => {
                let safe = peer.ask("release_safe", json!({ "room": room }));
                safe["safe"] == json!(true)
            }
        }
    }
}

/// SGLang's numbers.
const STATUSES: [RoomStatus; 5] = [
    RoomStatus::Failed,
    RoomStatus::Bootstrapping,
    RoomStatus::WaitingForInput,
    RoomStatus::Transferring,
    RoomStatus::Success,
];

fn owner(role: Role, place: Place) -> u64 {
    let rank = u64::from(place.tp_rank) * 64 + u64::from(place.dcp_rank);
    rank * 2 + u64::from(role == Role::Decode)
}

/// Memory with buffers one behind the other, and bytes between them that belong to none.
#[derive(Debug)]
struct Pool {
    memory: AnyMemory,
    /// Where each buffer begins, and its bytes.
    buffers: Vec<(u64, u64)>,
    len: u64,
}

impl Pool {
    fn of(lens: &[u64], device_opt: Option<u32>) -> Self {
        let gap = GAP as u64;
        let mut buffers = Vec::with_capacity(lens.len());
        let mut len = gap;
        for bytes in lens {
            buffers.push((len, *bytes));
            len += bytes + gap;
        }
        let memory = match device_opt {
            None => {
                let memory = Memory::allocate("conformance", ByteLen(len)).expect("memory");
                AnyMemory::from(&memory)
            }
            Some(number) => {
                let memory = DeviceMemory::allocate(DeviceRuntime::Cuda, number, ByteLen(len));
                let memory = memory.expect("device memory");
                // A device's memory holds what it held before.
                let zeros = vec![0; len as usize];
                memory.write(ByteOffset(0), &zeros).expect("it fits");
                AnyMemory::from(&memory)
            }
        };
        Self {
            memory,
            buffers,
            len,
        }
    }

    /// Whether every byte that belongs to no buffer is as it was.
    fn gaps_are_untouched(&self) -> bool {
        let mut all = vec![0; self.len as usize];
        let read = match &self.memory {
            AnyMemory::Pool(memory) => memory.read(ByteOffset(0), &mut all),
            AnyMemory::Device(memory) => memory.read(ByteOffset(0), &mut all),
            AnyMemory::Foreign(_) => unreachable!("pools here are allocated"),
        };
        read.expect("it fits");
        for (start, len) in &self.buffers {
            all[*start as usize..(start + len) as usize].fill(0);
        }
        all.iter().all(|byte| *byte == 0)
    }
}

/// Registers all buffers: in one pool, or where pools are in device memory in one there, and one in
/// host memory for aux rows. Regions are in the order of the buffers.
fn register(engine: &Engine, shape: &Shape, device: u32) -> (Vec<Pool>, Vec<Region>) {
    let is_on_device = |list: List| is_in_device_memory() && list != List::Aux;
    let mut pools = Vec::new();
    let mut regions: Vec<Option<Region>> = vec![None; shape.buffers.len()];
    for on_device in [true, false] {
        let chosen = shape.buffers.iter().enumerate();
        let chosen = chosen.filter(|(_, buffer)| is_on_device(buffer.list) == on_device);
        let chosen: Vec<_> = chosen.collect();
        let lens: Vec<u64> = chosen.iter().map(|(_, buffer)| buffer.byte_len()).collect();
        if lens.is_empty() {
            continue;
        }
        let pool = Pool::of(&lens, on_device.then_some(device));
        for ((position, buffer), (start, len)) in chosen.iter().zip(&pool.buffers) {
            let label = match buffer.list {
                List::Kv => "kv",
                List::State(_) => "state",
                List::Aux => "aux",
            };
            let part = (ByteOffset(*start), ByteLen(*len));
            let region = engine.register(pool.memory.clone(), part.0, part.1, label);
            regions[*position] = Some(region.expect("it fits"));
        }
        pools.push(pool);
    }
    let regions = regions
        .into_iter()
        .map(|region| region.expect("registered"));
    (pools, regions.collect())
}

impl OurRank {
    /// Whether every byte of the pools that belongs to no buffer is as it was.
    fn gaps_are_untouched(&self) -> bool {
        self.pools.iter().all(Pool::gaps_are_untouched)
    }
}
