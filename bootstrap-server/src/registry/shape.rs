//! What a `PUT /route` says: a rank's place, its address, and the shape that it shares with the
//! other ranks of its generation.

use common::topology::MAX_RANKS;
use common::wire::route::RouteRelease;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::fields::{self, FieldError};

const MAX_SIZE: u64 = 1 << 16;
/// Bytes of one text at most.
const MAX_TEXT: usize = 1024;
/// Bytes of the fields that no known release sends, together, at most.
const MAX_UNKNOWN: usize = 64 << 10;

/// A rank's place in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct RankId {
    pub dp: u32,
    pub cp: u32,
    pub tp: u32,
    pub pp: u32,
}

impl std::str::FromStr for RankId {
    type Err = ();

    /// Reads what `Display` writes, or the same with dashes for spaces.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split([' ', '-']);
        let mut number = |prefix: &str| {
            let digits = words
                .next()
                .and_then(|word| word.strip_prefix(prefix))
                .ok_or(())?;
            let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| is_plain).ok_or(())
        };
        let id = Self {
            dp: number("dp")?,
            cp: number("cp")?,
            tp: number("tp")?,
            pp: number("pp")?,
        };
        if words.next().is_some() {
            Err(())
        } else {
            Ok(id)
        }
    }
}

impl std::fmt::Display for RankId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            formatter,
            "dp{} cp{} tp{} pp{}",
            self.dp, self.cp, self.tp, self.pp
        )
    }
}

/// What all ranks of a generation have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Shape {
    pub tp_size: u32,
    pub cp_size: u32,
    pub dp_size: u32,
    pub pp_size: u32,
    pub page_size: u32,
    pub kv_cache_dtype: String,
    pub kv_layout: Option<String>,
    pub dsv41_spec_layout: Option<Value>,
    pub follow_bootstrap_room: bool,
    pub enable_dsa_cache_layer_split: bool,
    pub enable_kv_cache_sharding: bool,
    pub decode_allocation_policy: String,
}

/// One registered rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// Its address, as it came.
    pub ip: String,
    /// Its port.
    pub port: u16,
    /// The engine's HTTP port, if it said so.
    pub http_port: Option<u16>,
    /// Which keys its release's topology JSON has, as its fields tell.
    pub release: RouteRelease,
    /// Fields that no known release sends; kept, shown, never echoed.
    pub unknown_fields: Map<String, Value>,
    /// Whether its address may be dialled by the prober.
    pub may_probe: bool,
    /// Seconds since 1970.
    pub registered_at: u64,
}

impl Rank {
    /// The rank's instance.
    pub fn instance(&self) -> String {
        if self.ip.contains(':') && !self.ip.starts_with('[') {
            format!("[{}]:{}", self.ip, self.port)
        } else {
            format!("{}:{}", self.ip, self.port)
        }
    }
}

/// A `PUT /route`, read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    /// The rank's place.
    pub id: RankId,
    /// What it shares with the others.
    pub shape: Shape,
    /// The rank.
    pub rank: Rank,
}

impl Registration {
    /// Reads a body.
    ///
    /// # Errors
    /// What is wrong with which field.
    pub fn parse(map: &Map<String, Value>, may_probe: bool, now: u64) -> Result<Self, FieldError> {
        let size = |name: &str| narrow(fields::integer(map, name, 1, MAX_SIZE));
        let (tp_size, cp_size, pp_size) = (
            size("attn_tp_size")?,
            size("attn_cp_size")?,
            size("pp_size")?,
        );
        let (attn_dp_size, system_dp_size) = (size("attn_dp_size")?, size("system_dp_size")?);
        let rank = |name: &str, size: u32| {
            narrow(fields::integer(
                map,
                name,
                0,
                u64::from(size).saturating_sub(1),
            ))
        };
        let attn_dp_rank = rank("attn_dp_rank", attn_dp_size)?;
        let system_dp_rank = rank("system_dp_rank", system_dp_size)?;
        let (dp_size, dp) = if system_dp_size == 1 {
            (attn_dp_size, attn_dp_rank)
        } else {
            (system_dp_size, system_dp_rank)
        };
        let id = RankId {
            dp,
            cp: rank("attn_cp_rank", cp_size)?,
            tp: rank("attn_tp_rank", tp_size)?,
            pp: rank("pp_rank", pp_size)?,
        };
        let total = [tp_size, cp_size, dp_size, pp_size]
            .into_iter()
            .try_fold(1u64, |total, size| total.checked_mul(u64::from(size)));
        if total.is_none_or(|total| total > MAX_RANKS) {
            return Err(format!("the sizes make more than {MAX_RANKS} ranks"));
        }
        for name in [
            "rank_ip",
            "kv_cache_dtype",
            "kv_layout",
            "decode_allocation_policy",
        ] {
            let text_opt = map.get(name).and_then(Value::as_str);
            if text_opt.is_some_and(|text| text.len() > MAX_TEXT) {
                return Err(format!("{name} is longer than {MAX_TEXT} bytes"));
            }
        }
        let method = fields::optional_text(map, "load_balance_method")?;
        let policy = fields::optional_text(map, "decode_allocation_policy")?;
        let shape = Shape {
            tp_size,
            cp_size,
            dp_size,
            pp_size,
            page_size: narrow(fields::integer_or_digits(
                map,
                "page_size",
                1,
                u64::from(u32::MAX),
            ))?,
            kv_cache_dtype: fields::text(map, "kv_cache_dtype")?,
            kv_layout: fields::optional_text(map, "kv_layout")?,
            dsv41_spec_layout: map
                .get("dsv41_spec_layout")
                .filter(|value| !value.is_null())
                .cloned(),
            follow_bootstrap_room: method.is_none_or(|method| method == "follow_bootstrap_room"),
            enable_dsa_cache_layer_split: fields::flag(map, "enable_dsa_cache_layer_split")?,
            enable_kv_cache_sharding: fields::flag(map, "enable_kv_cache_sharding")?,
            decode_allocation_policy: policy.unwrap_or_else(|| "early".to_owned()),
        };
        let unknown_fields: Map<String, Value> = map
            .iter()
            .filter(|(name, _)| !RouteRelease::knows_field(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let unknown_bytes = unknown_fields.iter();
        let unknown_bytes: usize = unknown_bytes
            .map(|(name, value)| name.len() + value.to_string().len())
            .sum();
        if unknown_bytes > MAX_UNKNOWN {
            return Err(format!(
                "the unknown fields take more than {MAX_UNKNOWN} bytes"
            ));
        }
        let port = fields::integer_or_digits(map, "rank_port", 1, u64::from(u16::MAX))?;
        Ok(Self {
            id,
            shape,
            rank: Rank {
                ip: fields::text(map, "rank_ip")?,
                port: u16::try_from(port).unwrap_or_default(),
                http_port: fields::optional_port(map, "prefill_http_port")?,
                release: RouteRelease::of_fields(map.keys().map(String::as_str)),
                unknown_fields,
                may_probe,
                registered_at: now,
            },
        })
    }
}

fn narrow(number: Result<u64, FieldError>) -> Result<u32, FieldError> {
    number.and_then(|number| u32::try_from(number).map_err(|error| error.to_string()))
}
