//! What the bootstrap server must answer where `spec/bootstrap-http.md` differs from SGLang's
//! server, derived from the requests alone: a second, independent statement of those rows.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::http::Request;

/// The rows of the specification, as tests name them.
pub mod rules {
    /// "non-integer, missing key, bad JSON: 400 with what is wrong and where".
    pub const BAD_JSON: &str = "bad JSON is 400, not 500";
    /// Likewise.
    pub const MISSING_KEY: &str = "a missing key is 400, not 500";
    /// Likewise.
    pub const NO_INTEGER: &str = "what is no integer is 400, not 500 and not accepted";
    /// "bools and floats pass, Arabic digits pass".
    pub const LOOSE_INTEGER: &str = "bools, floats and other loose integers are 400";
    /// "`rank_port` and `page_size` also come as numeric strings", and nothing else does.
    pub const STRING_INTEGER: &str = "only rank_port and page_size may be numeric strings";
    /// "ints are unbounded".
    pub const OUT_OF_BOUNDS: &str =
        "rooms are 0 to 2^63-1, ranks within their size, ports are ports";
    /// An address is text.
    pub const NO_TEXT: &str = "an address that is no text is 400";
    /// "readiness counts PUTs".
    pub const DISTINCT_RANKS: &str = "readiness counts distinct ranks";
    /// "a restart with another shape is mixed into the old one".
    pub const GENERATIONS: &str = "another shape or address begins a generation";
    /// "an exception after the first assignments leaves half a registration behind".
    pub const UNCHANGED: &str = "a refused request leaves the table unchanged";
    /// "no inspection".
    pub const PAGE: &str = "the server has a page to look at";
}

/// What must be answered by a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// Exactly this.
    Exact(String),
    /// Something that contains one of these, usually the names of the fields that are wrong.
    Contains(Vec<String>),
    /// The topology JSON with these leading pairs.
    Topology(String),
}

/// What must be answered, and by which rule, if it is not as recorded.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The body.
    pub body: Body,
    /// The row that says so.
    pub rule: &'static str,
}

type Rank = [u64; 4];

/// A server's table, as the rules make it from requests.
#[derive(Debug, Default)]
pub struct Model {
    shape: Option<Vec<Value>>,
    topology: String,
    expected: u64,
    ranks: BTreeMap<Rank, (String, u64)>,
    retired: BTreeSet<(String, u64)>,
    rooms: BTreeMap<u64, u64>,
    /// The first row by which this table differs from the recorded server's.
    diverged: Option<&'static str>,
}

const INTEGERS: [&str; 12] = [
    "attn_tp_size",
    "attn_cp_size",
    "attn_dp_size",
    "pp_size",
    "system_dp_size",
    "attn_tp_rank",
    "attn_cp_rank",
    "attn_dp_rank",
    "pp_rank",
    "system_dp_rank",
    "rank_port",
    "page_size",
];
const SHAPE: [&str; 13] = [
    "attn_tp_size",
    "attn_cp_size",
    "attn_dp_size",
    "pp_size",
    "system_dp_size",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "dsv41_spec_layout",
    "load_balance_method",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    "decode_allocation_policy",
];
const QUERY: [&str; 4] = [
    "prefill_dp_rank",
    "prefill_cp_rank",
    "target_tp_rank",
    "target_pp_rank",
];

impl Model {
    /// What a request must get when a rule decides that, whatever was recorded; the table changes
    /// as the rules say. `None`: no rule of this model applies.
    pub fn answer(&mut self, request: &Request) -> Option<Answer> {
        let path = request.path.split('?').next().unwrap_or_default();
        match (request.method.as_str(), path) {
            ("PUT", "/route") => self.put(&object(request)),
            ("GET", "/route") => self.get(&request.path),
            ("POST", "/register_dp_rank") => self.bind(&object(request)),
            ("POST", "/query_dp_ranks") => self.query(&object(request)),
            ("GET" | "HEAD", "/") => {
                let body = Body::Contains(vec!["Ferry bootstrap server".to_owned()]);
                Some(Answer {
                    status: 200,
                    body,
                    rule: rules::PAGE,
                })
            }
            _ => None,
        }
    }

    fn refuse(&mut self, rule: &'static str, named: &str) -> Option<Answer> {
        self.diverged.get_or_insert(rules::UNCHANGED);
        Some(Answer {
            status: 400,
            body: Body::Contains(vec![named.to_owned()]),
            rule,
        })
    }

    fn put(&mut self, body: &Result<Map<String, Value>, String>) -> Option<Answer> {
        let body = match body {
            Ok(body) => body,
            Err(named) => return self.refuse(rules::BAD_JSON, named),
        };
        let wrong = problems(body);
        if let Some((rule, _)) = wrong.first() {
            self.diverged.get_or_insert(rules::UNCHANGED);
            let names = wrong.iter().map(|(_, name)| name.clone()).collect();
            return Some(Answer {
                status: 400,
                body: Body::Contains(names),
                rule,
            });
        }
        let number = |name: &str| integer(&body[name], true).unwrap_or_default();
        let data_parallel = if number("system_dp_size") == 1 {
            "attn_dp"
        } else {
            "system_dp"
        };
        let of = |what: &str| {
            let data = number(&format!("{data_parallel}_{what}"));
            let tensor = number(&format!("attn_tp_{what}"));
            [
                data,
                number(&format!("attn_cp_{what}")),
                tensor,
                number(&format!("pp_{what}")),
            ]
        };
        let (rank, sizes) = (of("rank"), of("size"));
        let address = (
            body["rank_ip"].as_str().unwrap_or_default().to_owned(),
            number("rank_port"),
        );
        let shape: Vec<Value> = SHAPE.iter().map(|name| shaped(body, name)).collect();
        self.admit(rank, sizes, address, shape, body)
    }

    fn admit(
        &mut self,
        rank: Rank,
        sizes: Rank,
        address: (String, u64),
        shape: Vec<Value>,
        body: &Map<String, Value>,
    ) -> Option<Answer> {
        let complete = self.is_complete();
        let at = |name: &str| {
            SHAPE
                .iter()
                .position(|known| *known == name)
                .unwrap_or_default()
        };
        let known = self.shape.clone();
        let same_shape = known.as_ref().is_none_or(|known| *known == shape);
        if let Some(known) = known.as_ref().filter(|_| !complete) {
            for (name, text) in [
                (
                    "decode_allocation_policy",
                    "Inconsistent prefill allocation policies",
                ),
                (
                    "dsv41_spec_layout",
                    "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks",
                ),
            ] {
                if known[at(name)] != shape[at(name)] {
                    let (status, body) = (400, Body::Exact(text.to_owned()));
                    return Some(Answer {
                        status,
                        body,
                        rule: rules::GENERATIONS,
                    });
                }
            }
        }
        if self.retired.contains(&address) && Some(&shape) != known.as_ref() {
            let body = Body::Contains(vec![format!("{}:{}", address.0, address.1)]);
            return Some(Answer {
                status: 409,
                body,
                rule: rules::GENERATIONS,
            });
        }
        let moved = self.ranks.get(&rank).is_some_and(|known| *known != address);
        if known.is_some() && (!same_shape || (complete && moved)) {
            self.diverged.get_or_insert(rules::GENERATIONS);
            let old = std::mem::take(&mut self.ranks);
            self.retired
                .extend(old.into_values().filter(|old| *old != address));
        }
        if self.ranks.contains_key(&rank) {
            self.diverged.get_or_insert(rules::DISTINCT_RANKS);
        }
        self.expected = sizes.iter().product();
        self.topology = format!(
            "{{\"attn_tp_size\": {}, \"attn_cp_size\": {}, \"dp_size\": {}, \"pp_size\": {}, \
             \"page_size\": {}, \"kv_cache_dtype\": {}, ",
            sizes[2],
            sizes[1],
            sizes[0],
            sizes[3],
            body["page_size"]
                .as_str()
                .map_or_else(|| body["page_size"].to_string(), str::to_owned),
            body["kv_cache_dtype"],
        );
        self.shape = Some(shape);
        self.ranks.insert(rank, address);
        Some(Answer {
            status: 200,
            body: Body::Exact("OK".to_owned()),
            rule: rules::GENERATIONS,
        })
    }

    fn is_complete(&self) -> bool {
        self.shape.is_some() && self.ranks.len() as u64 == self.expected
    }

    fn get(&self, path: &str) -> Option<Answer> {
        let query = path.split_once('?').map_or("", |(_, query)| query);
        let mut asked = [0; 4];
        for (slot, name) in asked.iter_mut().zip(QUERY) {
            let value = query
                .split('&')
                .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            let value = value.filter(|value| !value.is_empty())?;
            let digits = value.strip_prefix('-').unwrap_or(value);
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            match value.parse::<i64>().ok().filter(|_| plain) {
                Some(number) => *slot = number,
                None => {
                    let body = Body::Contains(vec![name.to_owned()]);
                    return Some(Answer {
                        status: 400,
                        body,
                        rule: rules::NO_INTEGER,
                    });
                }
            }
        }
        let rule = self.diverged.unwrap_or(rules::DISTINCT_RANKS);
        if !self.is_complete() {
            let number = self.ranks.len();
            let text =
                format!("Prefill server not fully registered yet ({number} workers registered).");
            return Some(Answer {
                status: 503,
                body: Body::Exact(text),
                rule,
            });
        }
        if asked == [-1; 4] {
            let body = Body::Topology(self.topology.clone());
            return Some(Answer {
                status: 200,
                body,
                rule,
            });
        }
        let rank = asked.map(|number| u64::try_from(number).unwrap_or(u64::MAX));
        let [dp, cp, tp, pp] = asked;
        Some(match self.ranks.get(&rank) {
            None => {
                let text = format!(
                    "Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
                );
                Answer {
                    status: 404,
                    body: Body::Exact(text),
                    rule,
                }
            }
            Some((ip, port)) => {
                let text = format!(
                    "{{\"rank_ip\": {}, \"rank_port\": {port}}}",
                    Value::from(&**ip)
                );
                Answer {
                    status: 200,
                    body: Body::Exact(text),
                    rule,
                }
            }
        })
    }

    fn bind(&mut self, body: &Result<Map<String, Value>, String>) -> Option<Answer> {
        let mut numbers = [0; 2];
        let body = match body {
            Ok(body) => body,
            Err(named) => return self.refuse(rules::BAD_JSON, named),
        };
        for (slot, name) in numbers.iter_mut().zip(["bootstrap_room", "dp_rank"]) {
            let Some(value) = body.get(name) else {
                return self.refuse(rules::MISSING_KEY, name);
            };
            match integer(value, false) {
                Ok(number) => *slot = number,
                Err(rule) => return self.refuse(rule, name),
            }
        }
        let [room, dp_rank] = numbers;
        if room > i64::MAX.unsigned_abs() {
            return self.refuse(rules::OUT_OF_BOUNDS, "bootstrap_room");
        }
        self.rooms.insert(room, dp_rank);
        Some(Answer {
            status: 200,
            body: Body::Exact("OK".to_owned()),
            rule: rules::UNCHANGED,
        })
    }

    fn query(&mut self, body: &Result<Map<String, Value>, String>) -> Option<Answer> {
        let body = match body {
            Ok(body) => body,
            Err(named) => return self.refuse(rules::BAD_JSON, named),
        };
        let Some(asked) = body.get("bootstrap_rooms") else {
            return self.refuse(rules::MISSING_KEY, "bootstrap_rooms");
        };
        let Some(asked) = asked.as_array() else {
            return self.refuse(rules::NO_INTEGER, "bootstrap_rooms");
        };
        let mut rooms: Vec<u64> = Vec::new();
        for room in asked {
            match integer(room, false) {
                Ok(room) if room > i64::MAX.unsigned_abs() => {
                    return self.refuse(rules::OUT_OF_BOUNDS, "room");
                }
                Ok(room) if rooms.contains(&room) => {}
                Ok(room) => rooms.push(room),
                Err(rule) => return self.refuse(rule, "room"),
            }
        }
        let pairs = rooms.iter().filter_map(|room| {
            let dp_rank = self.rooms.get(room)?;
            Some(format!("\"{room}\": {dp_rank}"))
        });
        let body = Body::Exact(format!("{{{}}}", pairs.collect::<Vec<_>>().join(", ")));
        Some(Answer {
            status: 200,
            body,
            rule: rules::UNCHANGED,
        })
    }
}

/// The body as an object, else what the refusal must say.
fn object(request: &Request) -> Result<Map<String, Value>, String> {
    let bytes = request.body.as_deref().unwrap_or_default();
    let text = match bytes {
        [0xff, 0xfe, rest @ ..] => {
            let units: Vec<u16> = rest
                .chunks(2)
                .map(|unit| u16::from_le_bytes([unit[0], *unit.get(1).unwrap_or(&0)]))
                .collect();
            String::from_utf16_lossy(&units)
        }
        _ => String::from_utf8_lossy(bytes).into_owned(),
    };
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(map),
        _ => Err("body".to_owned()),
    }
}

/// The row and the field of everything that is wrong with a registration.
fn problems(body: &Map<String, Value>) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    let mut numbers = BTreeMap::new();
    for name in INTEGERS {
        let strings_pass = ["rank_port", "page_size"].contains(&name);
        match body.get(name).map(|value| integer(value, strings_pass)) {
            None => wrong.push((rules::MISSING_KEY, name.to_owned())),
            Some(Err(rule)) => wrong.push((rule, name.to_owned())),
            Some(Ok(number)) => {
                numbers.insert(name.to_owned(), number);
            }
        }
    }
    for name in ["rank_ip", "kv_cache_dtype"] {
        match body.get(name) {
            None => wrong.push((rules::MISSING_KEY, name.to_owned())),
            Some(value) if !value.is_string() => wrong.push((rules::NO_TEXT, name.to_owned())),
            Some(_) => {}
        }
    }
    let http_port = body.get("prefill_http_port").filter(|port| !port.is_null());
    if let Some(Err(rule)) = http_port.map(|port| integer(port, false)) {
        wrong.push((rule, "prefill_http_port".to_owned()));
    }
    for part in ["attn_tp", "attn_cp", "attn_dp", "pp", "system_dp"] {
        let (size, rank) = (format!("{part}_size"), format!("{part}_rank"));
        let outside = match (numbers.get(&size), numbers.get(&rank)) {
            (Some(0), _) => Some(size),
            (Some(size), Some(at)) if at >= size => Some(rank),
            _ => None,
        };
        wrong.extend(outside.map(|name| (rules::OUT_OF_BOUNDS, name)));
    }
    if numbers
        .get("rank_port")
        .is_some_and(|port| !(1..=65535).contains(port))
    {
        wrong.push((rules::OUT_OF_BOUNDS, "rank_port".to_owned()));
    }
    wrong
}

fn integer(value: &Value, strings_pass: bool) -> Result<u64, &'static str> {
    match value {
        Value::Bool(_) => Err(rules::LOOSE_INTEGER),
        Value::Number(number) if number.is_f64() => Err(rules::LOOSE_INTEGER),
        Value::Number(number) => number.as_u64().ok_or(rules::OUT_OF_BOUNDS),
        Value::String(text) if text.trim().parse::<i64>().is_err() => Err(rules::NO_INTEGER),
        Value::String(_) if !strings_pass => Err(rules::STRING_INTEGER),
        Value::String(text) => {
            let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse()
                .ok()
                .filter(|_| plain)
                .ok_or(rules::LOOSE_INTEGER)
        }
        _ => Err(rules::NO_INTEGER),
    }
}

/// A field of the shape, with what stands for its absence.
fn shaped(body: &Map<String, Value>, name: &str) -> Value {
    let value = body.get(name).filter(|value| !value.is_null()).cloned();
    match name {
        "page_size" => value.map_or(Value::Null, |value| {
            integer(&value, true).map_or(value, Value::from)
        }),
        "load_balance_method" => {
            Value::from(value.is_none_or(|method| method == "follow_bootstrap_room"))
        }
        "enable_dsa_cache_layer_split" | "enable_kv_cache_sharding" => {
            value.unwrap_or(Value::Bool(false))
        }
        "decode_allocation_policy" => value.unwrap_or_else(|| Value::from("early")),
        _ => value.unwrap_or(Value::Null),
    }
}
