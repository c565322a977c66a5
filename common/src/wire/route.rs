//! The JSON of the bootstrap server (`spec/bootstrap-http.md`), in SGLang 0.5.23's key order.

use serde::{Deserialize, Serialize};

/// Body of `PUT /route`: one prefill rank registers itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct RouteRegistration {
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
    pub rank_ip: String,
    pub rank_port: u16,
    pub page_size: u32,
    pub kv_cache_dtype: String,
    pub kv_layout: Option<String>,
    pub dsv41_spec_layout: Option<serde_json::Value>,
    pub load_balance_method: String,
    pub enable_dsa_cache_layer_split: bool,
    pub enable_kv_cache_sharding: bool,
    pub prefill_http_port: Option<u16>,
    pub decode_allocation_policy: String,
}

/// Answer of `GET /route` with all four ranks -1. Keys that this release does not know are
/// ignored; keys that an older release does not send take SGLang's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct TopologyReply {
    pub attn_tp_size: u32,
    pub attn_cp_size: u32,
    pub dp_size: u32,
    pub pp_size: u32,
    pub page_size: Option<u32>,
    pub kv_cache_dtype: Option<String>,
    pub follow_bootstrap_room: bool,
    #[serde(default)]
    pub enable_dsa_cache_layer_split: bool,
    #[serde(default)]
    pub dsv41_spec_layout: Option<serde_json::Value>,
    #[serde(default)]
    pub kv_layout: Option<String>,
    #[serde(default = "early")]
    pub decode_allocation_policy: String,
    #[serde(default)]
    pub enable_kv_cache_sharding: bool,
    #[serde(default)]
    pub prefill_http_port: Option<u16>,
}

fn early() -> String {
    "early".to_owned()
}

/// Answer of `GET /route` for one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAddress {
    /// The rank's control socket: IPv4, bare IPv6 or a name.
    pub rank_ip: String,
    /// Its port.
    pub rank_port: u16,
}

/// Body of `PUT /v1/registrations/{mori engine key}`: what a rank registered, for people to see
/// and for peers that restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegistrationBody {
    /// `decode` (a rank's own registration) or `prefill` (what a prefill rank observed).
    pub role: String,
    /// Which process this is: `host:port` of the rank's control socket.
    pub instance: String,
    /// The registered rank's number in its engine.
    pub rank: u32,
    /// The frames of its REGISTER, hex.
    pub register_frames: Vec<String>,
    /// SGLang's name of each state component, in the order of the frames; a REGISTER carries none.
    #[serde(default)]
    pub component_types: Vec<String>,
}

/// Items of each list of a [`RankReport`] at most.
pub const MAX_REPORT_ITEMS: usize = 1024;

/// Body of `PUT /v1/reports/{mori engine key}`: how a rank actor fares, sent every few seconds.
/// Counts are since the rank started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RankReport {
    /// Ferry's version.
    pub version: String,
    /// `prefill` or `decode`.
    pub role: String,
    /// The rank's name, for example `dp0 cp0 tp1 pp0`.
    pub rank: String,
    /// `host:port` of its control socket.
    pub instance: String,
    /// Seconds until the next report.
    pub interval_seconds: u64,
    /// Rooms that have not ended.
    pub rooms_open: u64,
    /// Engines on the other side.
    #[serde(default)]
    pub peers: Vec<ReportedPeer>,
    /// By name.
    #[serde(default)]
    pub components: Vec<ReportedComponent>,
    /// First causes of the last failures, the newest last.
    #[serde(default)]
    pub failures: Vec<ReportedFailure>,
}

/// An engine on the other side of a reporting rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReportedPeer {
    /// Its io engine's key.
    pub engine_key: String,
    /// The transport of the session with it.
    pub transport: String,
}

/// What a reporting rank has moved of one component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReportedComponent {
    /// `kv`, a state's type, or `aux`.
    pub component: String,
    /// Bytes in the decode's memory.
    pub bytes: u64,
    /// Transfers that failed.
    pub failures: u64,
}

/// Why a room failed at a reporting rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReportedFailure {
    /// When, in seconds since 1970.
    pub at: u64,
    /// The room.
    pub room: u64,
    /// The first cause.
    pub reason: String,
}
