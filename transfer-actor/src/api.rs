//! The JSON that engines speak with the service: the attach message (over the attach socket, with
//! the pools' file descriptors beside it) and the bodies of the HTTP API on the Unix socket.
//!
//! These are wire types: `TryFrom` makes a [`common::schema::RankLayout`] from [`LayoutSpec`].

use std::collections::BTreeMap;

use common::topology::ParallelConfig;
use serde::{Deserialize, Serialize};

/// What a rank is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads the prompt; sends state.
    Prefill,
    /// Generates; receives state.
    Decode,
}

/// First and only message of an engine on the attach socket: one JSON document, preceded by its
/// length (`u32`, little-endian), with one memfd for each pool as `SCM_RIGHTS` beside it. The
/// service answers with an [`AttachReply`] in the same framing. The rank lives as long as the
/// connection: when it closes, the service fails the rank's rooms and forgets it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// Prefill or decode.
    pub role: Role,
    /// A prefill's own bootstrap server, `host:port`. Decode ranks name it for each room instead.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// Sizes and ranks in the parallel groups.
    pub parallel: ParallelSpec,
    /// What the prefill publishes about its engine.
    pub engine: EngineSpec,
    /// Bytes of each pool, in the order of the file descriptors.
    pub pools: Vec<u64>,
    /// Those pools that are in device memory, by their places in `pools`. Each comes as the
    /// descriptors of its parts, in the place of the one descriptor of a pool in host memory.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub device_pools: BTreeMap<usize, DevicePool>,
    /// The buffers inside the pools.
    pub layout: LayoutSpec,
}

/// A pool in device memory, as its driver exports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePool {
    /// `cuda` or `hip`.
    pub runtime: String,
    /// The device's UUID, in hexadecimal.
    pub device: String,
    /// How far behind the beginning of its first part the pool begins, in bytes.
    #[serde(default)]
    pub lead: u64,
    /// Bytes of each allocation that it lies in.
    pub parts: Vec<u64>,
}

/// Sizes and ranks in the parallel groups, by SGLang's names; sizes default to 1, ranks to 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)]
pub struct ParallelSpec {
    pub attn_tp_size: u32,
    pub attn_tp_rank: u32,
    pub attn_cp_size: u32,
    pub attn_cp_rank: u32,
    pub attn_dp_size: u32,
    pub attn_dp_rank: u32,
    pub pp_size: u32,
    pub pp_rank: u32,
    pub system_dp_size: u32,
    pub system_dp_rank: u32,
    pub dcp_size: u32,
    pub dcp_rank: u32,
}

impl Default for ParallelSpec {
    fn default() -> Self {
        Self {
            attn_tp_size: 1,
            attn_tp_rank: 0,
            attn_cp_size: 1,
            attn_cp_rank: 0,
            attn_dp_size: 1,
            attn_dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            system_dp_size: 1,
            system_dp_rank: 0,
            dcp_size: 1,
            dcp_rank: 0,
        }
    }
}

impl From<&ParallelSpec> for ParallelConfig {
    fn from(spec: &ParallelSpec) -> Self {
        // SGLang publishes one of two data-parallel groups: the system's where it has several.
        let uses_system = spec.system_dp_size > 1;
        Self {
            tp_size: spec.attn_tp_size,
            tp_rank: spec.attn_tp_rank,
            cp_size: spec.attn_cp_size,
            cp_rank: spec.attn_cp_rank,
            dp_size: if uses_system {
                spec.system_dp_size
            } else {
                spec.attn_dp_size
            },
            dp_rank: if uses_system {
                spec.system_dp_rank
            } else {
                spec.attn_dp_rank
            },
            pp_size: spec.pp_size,
            pp_rank: spec.pp_rank,
            dcp_size: spec.dcp_size,
            dcp_rank: spec.dcp_rank,
        }
    }
}

/// What a prefill publishes about its engine (`PUT /route`), and a decode compares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSpec {
    /// Name of the KV data type, `auto` for the model's own.
    pub kv_cache_dtype: String,
    /// Layout of a page, when it is not the default.
    #[serde(default)]
    pub kv_layout: Option<String>,
    /// How requests are spread over data-parallel ranks.
    #[serde(default = "default_load_balance_method")]
    pub load_balance_method: String,
    /// When the decode side allocates: `early` or `prefill_complete`.
    #[serde(default = "default_decode_allocation_policy")]
    pub decode_allocation_policy: String,
    /// The engine's own HTTP port, if it has one.
    #[serde(default)]
    pub prefill_http_port: Option<u16>,
    /// Prefill only: SGLang's release on the decode side, for example `0.5.18`, where it is older
    /// than the newest that is known. A decode refuses a topology with keys of later releases.
    #[serde(default)]
    pub sglang_release: Option<String>,
}

fn default_load_balance_method() -> String {
    "round_robin".to_owned()
}

fn default_decode_allocation_policy() -> String {
    "early".to_owned()
}

/// A rank's buffers (SGLang's `KVArgs`, with pools in place of pointers).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutSpec {
    /// Tokens of one page.
    pub page_size: u32,
    /// The paged KV cache.
    pub kv: KvSpec,
    /// Auxiliary buffers.
    #[serde(default)]
    pub aux: Vec<TensorSpec>,
    /// State components.
    #[serde(default)]
    pub states: Vec<StateSpec>,
}

/// One buffer within a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Which pool.
    pub pool: usize,
    /// Offset of the buffer in the pool, in bytes.
    pub offset: u64,
    /// Size of the buffer, in bytes; 0 when it is elided on this rank.
    pub bytes: u64,
    /// Size of one item (page, slot or row), in bytes; 0 when elided.
    pub item_len: u64,
}

/// The paged KV cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvSpec {
    /// K buffers then V buffers (`mha`), or one list (`mla`, `hybrid_mla`).
    pub tensors: Vec<TensorSpec>,
    /// Layer of each tensor; may be empty.
    #[serde(default)]
    pub layer_ids: Vec<u32>,
    /// First layer of this pipeline stage.
    #[serde(default)]
    pub start_layer: u32,
    /// Trailing entries that belong to a draft model.
    #[serde(default)]
    pub num_draft_entries: u32,
    /// `mha`, `mla` or `hybrid_mla`.
    pub attention: AttentionSpec,
    /// KV heads held by this rank.
    pub head_num: u32,
    /// KV heads of the model.
    pub total_head_num: u32,
}

/// How a model keeps its KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionSpec {
    /// K and V lists.
    Mha,
    /// One latent list.
    Mla,
    /// One latent list beside sharded linear-attention state.
    HybridMla,
}

/// One state component.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpec {
    /// SGLang's name of the state type, for example `mamba` or `swa`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its buffers.
    pub tensors: Vec<TensorSpec>,
    /// Sharded dimension of each tensor; 0 marks a replicated item.
    #[serde(default)]
    pub dims: Vec<u32>,
    /// Outer rows before the sharded dimension of each tensor.
    #[serde(default)]
    pub outer_counts: Vec<u32>,
    /// Parts of a convolution's sharded dimension; null for a tensor that is one slice.
    #[serde(default)]
    pub conv_shard_groups: Vec<Option<Vec<u32>>>,
    /// Layer of each tensor; may be empty.
    #[serde(default)]
    pub layer_ids: Vec<u32>,
}

/// The service's answer to an [`AttachRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachReply {
    /// The rank is up (and, for a prefill, registered at its bootstrap server).
    Attached {
        /// Number of the rank in the HTTP API.
        rank: u32,
        /// Key of its io engine.
        engine_key: String,
        /// Its control socket, `host:port`.
        control: String,
    },
    /// Nothing was kept.
    Refused {
        /// What was wrong, where, and what to do.
        message: String,
    },
}

/// Indices of any shape: nested lists, rows or a bare list, flattened once, here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Indices(pub Vec<i32>);

impl<'de> Deserialize<'de> for Indices {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Nested {
            One(i32),
            Many(Vec<Nested>),
        }
        fn flatten(nested: Nested, out: &mut Vec<i32>) {
            match nested {
                Nested::One(index) => out.push(index),
                Nested::Many(list) => list.into_iter().for_each(|inner| flatten(inner, out)),
            }
        }
        let mut flat = Vec::new();
        flatten(Nested::deserialize(deserializer)?, &mut flat);
        Ok(Self(flat))
    }
}

/// `POST /v1/ranks/{rank}/rooms`: the engine opens a room.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenRoom {
    /// The router's `bootstrap_room`.
    pub room: u64,
    /// Decode only: the prefill's bootstrap server, `host:port`.
    #[serde(default)]
    pub bootstrap: Option<String>,
    /// Decode only: which data-parallel rank of the prefill; asked of the bootstrap server if
    /// absent and there is more than one.
    #[serde(default)]
    pub prefill_dp_rank: Option<u32>,
    /// Prefill only: row of the aux buffers to send from.
    #[serde(default)]
    pub aux_index: Option<u32>,
}

/// `POST /v1/ranks/{rank}/rooms/{room}/announce` (decode): where the state must land.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Announce {
    /// Destination pages in the order of the prompt.
    pub kv_indices: Indices,
    /// Destination row of the aux buffers.
    #[serde(default)]
    pub aux_index: Option<u32>,
    /// Destination indices of each component, null where a component has none.
    #[serde(default)]
    pub state_indices: Vec<Option<Indices>>,
    /// Tokens that this decode already holds.
    #[serde(default)]
    pub decode_prefix_len: Option<u64>,
}

/// `POST /v1/ranks/{rank}/rooms/{room}/chunks` (prefill): the next pages, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Source pages of this chunk; they follow those of the chunk before.
    pub kv_indices: Indices,
    /// Source indices of each component; read with the last chunk only.
    #[serde(default)]
    pub state_indices: Vec<Option<Indices>>,
    /// Tokens in the whole request so far; only needed under DCP.
    #[serde(default)]
    pub num_kv_tokens: Option<u64>,
    /// With the last chunk: row of the aux buffers to send from, where the engine did not know it
    /// when it opened the room.
    #[serde(default)]
    pub aux_index: Option<u32>,
    /// Whether this is the last chunk: components and aux go with it.
    pub last: bool,
}

/// `POST /v1/ranks/{rank}/rooms/{room}/abort`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AbortRoom {
    /// Kept as the room's failure reason.
    #[serde(default)]
    pub reason: Option<String>,
}

/// `POST /v1/drain`, and `POST /v1/ranks/{rank}/drain`; the body may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// Seconds that open rooms have to finish; without it those of `--drain-timeout`.
    #[serde(default)]
    pub timeout_s: Option<u32>,
}

/// Answer to `POST /v1/ranks/{rank}/drain`, once the rank has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drained {
    /// Rooms that had not ended when time was up; they have failed.
    pub unfinished: usize,
}

/// Query of `GET /v1/ranks/{rank}/rooms/{room}`: a long poll.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoomQuery {
    /// Answer when the status is at least this one, or terminal; at once if absent.
    #[serde(default)]
    pub wait_for: Option<RoomStatus>,
    /// Answer at the latest after this time; default 30,000, at most 300,000.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// A room's status, by SGLang's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum RoomStatus {
    Failed,
    Bootstrapping,
    WaitingForInput,
    Transferring,
    Success,
}

/// A room as the engine sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RoomView {
    /// The room.
    pub room: u64,
    /// Grows with each use of the number. A rank that was started anew begins somewhere else.
    pub generation: u64,
    /// Its status.
    pub status: RoomStatus,
    /// First root cause, when it failed.
    #[serde(default)]
    pub reason: Option<String>,
    /// Prefill only: tokens that the decode side already holds, once announced.
    #[serde(default)]
    pub decode_prefix_len: Option<u64>,
    /// Prefill only: what each component of each decode endpoint has moved so far.
    #[serde(default)]
    pub transfers: Vec<TransferView>,
    /// Decode after an abort: whether every prefill rank has proved that its writes stopped.
    #[serde(default)]
    pub release_safe: bool,
    /// Whether its bytes were compared with checksums; absent where nobody asked for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification: Option<Verification>,
}

/// How far a room's bytes were compared with checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verification {
    /// Not, or not yet.
    Pending,
    /// One range of every 16 was, and they are equal.
    Sampled,
    /// Every byte was, and they are equal.
    Full,
    /// They differ; the room's reason says where.
    Mismatch,
    /// At least one peer cannot do so: it is none of Ferry's, or does not ask for it.
    Unavailable,
}

impl Verification {
    /// The word in the API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sampled => "sampled",
            Self::Full => "full",
            Self::Mismatch => "mismatch",
            Self::Unavailable => "unavailable",
        }
    }
}

impl From<common::check::CheckMode> for Verification {
    fn from(mode: common::check::CheckMode) -> Self {
        match mode {
            common::check::CheckMode::Sampled => Self::Sampled,
            common::check::CheckMode::Full => Self::Full,
        }
    }
}

/// One component of one room on its way to one decode endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferView {
    /// The component's label, for example `kv`.
    pub component: String,
    /// The decode rank's control socket, `host:port`.
    pub peer: String,
    /// The transport in use.
    pub transport: String,
    /// Bytes that are in the decode's memory.
    pub bytes: u64,
    /// Contiguous ranges written.
    pub ranges: u64,
    /// Seconds between submission and completion, summed over chunks.
    pub seconds: f64,
    /// `success`, `failed`, `aborted` or `pending`.
    pub outcome: String,
}

/// An error of the HTTP API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A stable word to match on, for example `unknown_room`.
    pub code: String,
    /// What happened, where, and what to do.
    pub message: String,
}
