//! The JSON of the bootstrap server (`spec/bootstrap-http.md`), in SGLang 0.5.23's key order.

use std::collections::BTreeSet;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Releases that register the same fields and know the same keys of the topology JSON
/// (`spec/bootstrap-http.md`, last table). Ordered by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteRelease {
    /// 0.5.12 to 0.5.15.
    V0512,
    /// 0.5.17 to 0.5.20.
    V0517,
    /// 0.5.21.
    V0521,
    /// 0.5.22.
    V0522,
    /// 0.5.23, and every field set that no known release sends.
    V0523,
}

const BASE_FIELDS: [&str; 15] = [
    "attn_tp_size",
    "attn_tp_rank",
    "attn_cp_size",
    "attn_cp_rank",
    "attn_dp_size",
    "attn_dp_rank",
    "pp_size",
    "pp_rank",
    "system_dp_size",
    "system_dp_rank",
    "rank_ip",
    "rank_port",
    "page_size",
    "kv_cache_dtype",
    "load_balance_method",
];

/// What each release adds to the one before it.
const ADDED_FIELDS: [(RouteRelease, &[&str]); 4] = [
    (
        RouteRelease::V0517,
        &["enable_dsa_cache_layer_split", "prefill_http_port"],
    ),
    (RouteRelease::V0521, &["dsv41_spec_layout"]),
    (RouteRelease::V0522, &["decode_allocation_policy"]),
    (
        RouteRelease::V0523,
        &["kv_layout", "enable_kv_cache_sharding"],
    ),
];

impl RouteRelease {
    /// What Ferry registers unless its peers are older.
    pub const NEWEST: Self = Self::V0523;

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V0512 => "0.5.12 to 0.5.15",
            Self::V0517 => "0.5.17 to 0.5.20",
            Self::V0521 => "0.5.21",
            Self::V0522 => "0.5.22",
            Self::V0523 => "0.5.23",
        }
    }

    /// Whether any known release registers a field of this name.
    pub fn knows_field(name: &str) -> bool {
        BASE_FIELDS.contains(&name) || ADDED_FIELDS.iter().any(|(_, added)| added.contains(&name))
    }

    /// The release that registers exactly these fields, else the newest.
    pub fn of_fields<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut known: BTreeSet<&str> = BASE_FIELDS.into();
        let sent: BTreeSet<&str> = names.collect();
        if sent == known {
            return Self::V0512;
        }
        for (release, added) in ADDED_FIELDS {
            known.extend(added);
            if sent == known {
                return release;
            }
        }
        Self::NEWEST
    }
}

impl FromStr for RouteRelease {
    type Err = String;

    /// Reads a release of SGLang, for example `0.5.18` or `0.5.13.post1`.
    fn from_str(version: &str) -> Result<Self, String> {
        let mut numbers = version.split('.').map(str::parse::<u32>);
        let series = [numbers.next(), numbers.next()];
        let (series, patch) = match (series, numbers.next()) {
            ([Some(Ok(major)), Some(Ok(minor))], Some(Ok(patch))) => ((major, minor), patch),
            _ => {
                return Err(format!(
                    "{version:?} is no release of SGLang, expected for example 0.5.18"
                ));
            }
        };
        match (series, patch) {
            (older, _) if older < (0, 5) => Err(format!(
                "sglang {version} sends flat state, 0.5.13 is the oldest that can be served"
            )),
            ((0, 5), ..13) => Err(format!(
                "sglang {version} sends flat state, 0.5.13 is the oldest that can be served"
            )),
            ((0, 5), 13..17) => Ok(Self::V0512),
            ((0, 5), 17..21) => Ok(Self::V0517),
            ((0, 5), 21) => Ok(Self::V0521),
            ((0, 5), 22) => Ok(Self::V0522),
            _ => Ok(Self::V0523),
        }
    }
}

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

impl RouteRegistration {
    /// The body as a release sends it: its bootstrap server tells by the fields which keys the
    /// topology may have, since a decode of an older release refuses a key that it does not know.
    pub fn for_release(&self, release: RouteRelease) -> Map<String, Value> {
        let mut body = match serde_json::to_value(self) {
            Ok(Value::Object(body)) => body,
            _ => Map::new(),
        };
        for (added_by, fields) in ADDED_FIELDS {
            if added_by > release {
                fields.iter().for_each(|field| {
                    body.remove(*field);
                });
            }
        }
        body
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn registration() -> RouteRegistration {
        RouteRegistration {
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
            rank_ip: "10.0.0.1".to_owned(),
            rank_port: 4000,
            page_size: 64,
            kv_cache_dtype: "auto".to_owned(),
            kv_layout: None,
            dsv41_spec_layout: None,
            load_balance_method: "round_robin".to_owned(),
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            prefill_http_port: None,
            decode_allocation_policy: "early".to_owned(),
        }
    }

    #[test]
    fn a_registration_is_told_by_the_fields_of_its_release() {
        for release in [
            RouteRelease::V0512,
            RouteRelease::V0517,
            RouteRelease::V0521,
            RouteRelease::V0522,
            RouteRelease::V0523,
        ] {
            let body = registration().for_release(release);
            let told = RouteRelease::of_fields(body.keys().map(String::as_str));
            assert_eq!(told, release);
        }
        let mut body = registration().for_release(RouteRelease::V0512);
        body.insert("of_the_future".to_owned(), Value::Null);
        let of =
            |body: &Map<String, Value>| RouteRelease::of_fields(body.keys().map(String::as_str));
        assert_eq!(of(&body), RouteRelease::NEWEST);
        body.remove("of_the_future");
        body.remove("page_size");
        assert_eq!(of(&body), RouteRelease::NEWEST);
    }

    #[test]
    fn versions_are_read() {
        for (version, release) in [
            ("0.5.13.post1", RouteRelease::V0512),
            ("0.5.15", RouteRelease::V0512),
            ("0.5.17", RouteRelease::V0517),
            ("0.5.20", RouteRelease::V0517),
            ("0.5.21", RouteRelease::V0521),
            ("0.5.22", RouteRelease::V0522),
            ("0.5.23", RouteRelease::V0523),
            ("0.6.0", RouteRelease::V0523),
            ("1.0.0", RouteRelease::V0523),
        ] {
            assert_eq!(version.parse(), Ok(release), "{version}");
        }
        for bad in ["", "0.5", "0.5.x", "latest", "0.5.12", "0.4.23"] {
            assert!(bad.parse::<RouteRelease>().is_err(), "{bad}");
        }
    }
}
