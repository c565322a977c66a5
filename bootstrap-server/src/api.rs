//! The shapes of the admin API: what the server answers, its OpenAPI document describes and its
//! client reads. Times are seconds since 1970, ages are seconds.

use common::wire::route::RankReport;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// A stable word.
    pub code: String,
    /// What happened, where, and what to do.
    pub message: String,
    /// More, where there is more.
    pub detail: Option<String>,
}

/// Engines, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineList {
    /// At most as many as asked for.
    pub engines: Vec<EngineSummary>,
    /// What `after` must be for the next ones; null when there are none.
    pub next: Option<String>,
}

/// An engine at a glance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EngineSummary {
    /// Its name.
    pub namespace: String,
    /// Whether this server has a port for it now.
    pub listening: bool,
    /// Counts replacements of the engine from 1; null before the first rank.
    pub generation: Option<u64>,
    /// When the generation began.
    pub generation_began_at: Option<u64>,
    /// Ranks that are registered.
    pub ranks_present: usize,
    /// Ranks of the complete engine.
    pub ranks_expected: usize,
    /// Registered ranks that do not answer probes.
    pub ranks_unreachable: usize,
    /// Whether all ranks are there.
    pub complete: bool,
    /// Since when ranks are missing or do not answer; null while all are there and do.
    pub failing_since: Option<u64>,
    /// Since when it takes no new rooms; null when it takes them.
    pub draining_since: Option<u64>,
    /// Why decodes are told that it is unhealthy; null when they are not.
    pub problem: Option<String>,
    /// Registered io engines.
    pub registrations: usize,
    /// Rooms bound to a dp rank.
    pub rooms: usize,
}

/// Everything that is known of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Engine {
    /// Its name.
    pub namespace: String,
    /// Whether this server has a port for it now.
    pub listening: bool,
    /// Counts replacements of the engine from 1; null before the first rank.
    pub generation: Option<u64>,
    /// When the generation began.
    pub generation_began_at: Option<u64>,
    /// The SGLang release in whose form decodes are answered.
    pub release: Option<String>,
    /// Sizes, page size, data type, layouts, flags and policy.
    pub topology: Option<Value>,
    /// Generations that are over and remembered.
    pub retired_generations: usize,
    /// Whether all ranks are there.
    pub complete: bool,
    /// Since when it takes no new rooms; null when it takes them.
    pub draining_since: Option<u64>,
    /// Why decodes are told that it is unhealthy; null when they are not.
    pub problem: Option<String>,
    /// Ranks of the complete engine.
    pub ranks_expected: usize,
    /// The registered ones.
    pub ranks_present: Vec<Rank>,
    /// Names of those that have not registered; at most 1,024.
    pub ranks_missing: Vec<String>,
    /// How many have not registered.
    pub ranks_missing_count: usize,
    /// Registered io engines.
    pub registrations: Vec<Registration>,
    /// What its rank actors reported last.
    pub reports: Vec<Report>,
}

/// Ranks of an engine, by number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RankList {
    /// Ranks of the complete engine.
    pub ranks_expected: usize,
    /// The registered ones, at most as many as asked for.
    pub ranks: Vec<Rank>,
    /// Names of those that have not registered; at most 1,024.
    pub ranks_missing: Vec<String>,
    /// What `after` must be for the next ones; null when there are none.
    pub next: Option<String>,
}

/// A registered rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Rank {
    /// Its name, for example `dp0 cp0 tp1 pp0`.
    pub rank: String,
    /// Data-parallel number.
    pub dp: u32,
    /// Context-parallel number.
    pub cp: u32,
    /// Tensor-parallel number.
    pub tp: u32,
    /// Pipeline stage.
    pub pp: u32,
    /// `ip:port`, the only identity that it registers with.
    pub instance: String,
    /// The engine's own HTTP port.
    pub prefill_http_port: Option<u16>,
    /// When it registered.
    pub registered_at: u64,
    /// How long ago that is.
    pub age_seconds: u64,
    /// Whether it answers probes; null when it was not probed or may not be.
    pub reachable: Option<bool>,
    /// Since when it does not; null unless it is unreachable.
    pub unreachable_since: Option<u64>,
    /// The SGLang release whose fields it registered with.
    pub release: String,
    /// Fields that no known release sends.
    pub unknown_fields: Value,
}

/// Generations of an engine, the newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GenerationList {
    /// The present one and those that are over and remembered.
    pub generations: Vec<Generation>,
}

/// The ranks that made the engine at some time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Generation {
    /// Counts from 1.
    pub generation: u64,
    /// Whether it is the present one.
    pub present: bool,
    /// When it began; null where that was forgotten.
    pub began_at: Option<u64>,
    /// What its ranks have in common.
    pub topology: Value,
    /// Each rank's name and address.
    pub instances: std::collections::BTreeMap<String, String>,
}

/// Registered io engines, by key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegistrationList {
    /// At most as many as asked for.
    pub registrations: Vec<Registration>,
    /// What `after` must be for the next ones; null when there are none.
    pub next: Option<String>,
}

/// A registered io engine. The keys of its regions are not shown.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// The io engine's key.
    pub engine_key: String,
    /// `prefill` or `decode`.
    pub role: String,
    /// Its number in its engine.
    pub rank: u32,
    /// `ip:port` of its control socket.
    pub instance: String,
    /// Whether it answers probes; null when it was not probed or may not be.
    pub reachable: Option<bool>,
    /// Since when it does not; null unless it is unreachable.
    pub unreachable_since: Option<u64>,
    /// When it registered.
    pub registered_at: u64,
    /// How long ago that is.
    pub age_seconds: u64,
    /// The SGLang release whose form its message has.
    pub sglang_release: Option<String>,
    /// Attention TP size.
    pub tp_size: Option<u32>,
    /// Its buffers, by component.
    pub components: Option<Vec<Component>>,
}

/// The buffers of one component.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Component {
    /// `kv`, a state's type, or `aux`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Buffers.
    pub tensors: usize,
    /// Buffers that this rank does not hold.
    pub elided_tensors: usize,
    /// Bytes of all buffers.
    pub bytes: u64,
    /// Bytes of one item of each buffer, as far as they are known.
    pub item_lengths: Vec<u64>,
    /// Size of the sharded dimension of each buffer.
    pub dims: Vec<u32>,
    /// Layer of each buffer.
    pub layer_ids: Vec<u32>,
    /// Where each buffer is, null for one that this rank does not hold; null in lists of
    /// registrations.
    pub buffers: Option<Vec<Option<Buffer>>>,
}

/// Where a buffer is. The key that lets others write into it is not shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Buffer {
    /// Its number within the io engine.
    pub id: u32,
    /// Address in its owner's process, hexadecimal.
    pub address: String,
    /// Its size.
    pub bytes: u64,
    /// `host`, `device`, or `unknown`.
    pub location: String,
    /// Device number; null for host memory.
    pub device: Option<i32>,
    /// NUMA node of host memory; null for device memory, and where it is not known.
    pub numa_node: Option<i32>,
}

/// Rooms bound to a dp rank, by number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RoomList {
    /// At most as many as asked for.
    pub rooms: Vec<Room>,
    /// What `after` must be for the next ones; null when there are none.
    pub next: Option<String>,
}

/// A room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Room {
    /// Its number.
    pub room: u64,
    /// The data-parallel rank that serves it.
    pub dp_rank: u32,
    /// How long ago it was bound.
    pub age_seconds: u64,
}

/// What happened, the oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// At most as many as asked for.
    pub events: Vec<Event>,
    /// What `since` must be for what happens after these.
    pub next: u64,
    /// Events up to this number have been forgotten.
    pub forgotten: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Greater than that of every event before it, restarts of the server included.
    pub id: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    pub kind: EventKind,
    /// The engine, unless it concerns them all.
    pub namespace: Option<String>,
    /// In words.
    pub message: String,
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A rank or an io engine registered, or a registration was removed.
    Registration,
    /// An engine was replaced by another.
    Generation,
    /// A rank or an io engine stopped answering, or answers again.
    Reachability,
    /// An operator removed, drained or imported something.
    Operator,
    /// A change could not be made durable, or changes can be again.
    Store,
    /// A rank actor reports failed transfers.
    Failure,
}

impl EventKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::Registration,
        Self::Generation,
        Self::Reachability,
        Self::Operator,
        Self::Store,
        Self::Failure,
    ];

    /// As JSON and queries name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Registration => "registration",
            Self::Generation => "generation",
            Self::Reachability => "reachability",
            Self::Operator => "operator",
            Self::Store => "store",
            Self::Failure => "failure",
        }
    }
}

/// What rank actors reported last, by engine and key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReportList {
    /// At most as many as asked for.
    pub reports: Vec<Report>,
    /// What `after` must be for the next ones; null when there are none.
    pub next: Option<String>,
}

/// What a rank actor reported last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Report {
    /// The engine on whose port it was sent.
    pub namespace: String,
    /// The io engine's key.
    pub engine_key: String,
    /// How long ago it came.
    pub age_seconds: u64,
    /// Whether the next one is overdue.
    pub stale: bool,
    /// What it said.
    pub report: RankReport,
}

/// Whether an engine is to take no new rooms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// True: rooms that are not known yet are refused. Known ones are served to their end.
    pub draining: bool,
}

/// The whole registry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Export {
    /// Of this form: 1.
    #[schema(minimum = 1, maximum = 1)]
    pub version: u32,
    /// When it was made.
    pub exported_at: u64,
    /// By name; the contents are the server's own.
    #[schema(value_type = Object)]
    pub engines: std::collections::BTreeMap<String, Value>,
}

/// What an import did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Imported {
    /// Engines that are now as in the import.
    pub engines: Vec<String>,
    /// Engines that were removed.
    pub removed: Vec<String>,
}

/// Whether the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Live {
    /// True.
    pub live: bool,
}

/// Whether changes can be made, and which engines are unhealthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    /// Whether changes can be made.
    pub ready: bool,
    /// Why not.
    pub problems: Vec<Problem>,
    /// Files of tokens and certificates that could not be read again.
    pub warnings: Vec<String>,
    /// Engines whose decodes are told that they are unhealthy.
    pub engines: Vec<EngineProblem>,
}

/// What keeps the server from making changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A stable word.
    pub code: String,
    /// What happened.
    pub message: String,
}

/// An unhealthy engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineProblem {
    /// Its name.
    pub namespace: String,
    /// Why.
    pub message: String,
}
