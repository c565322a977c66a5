//! What an engine's lookups are answered, made once for each change of its registrations.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use actix_web::http::header::HeaderValue;
use actix_web::web::Bytes;
use common::wire::route::RouteRelease;
use serde_json::Value;

use crate::registry::{Namespace, Rank, RankId, Shape};

/// The answers of one state of an engine.
#[derive(Debug)]
pub(crate) struct Answers {
    /// The generation's number.
    pub(crate) generation_opt: Option<HeaderValue>,
    /// How many ranks have registered.
    pub(crate) registered: usize,
    /// Bodies, once all ranks have registered.
    pub(crate) complete_opt: Option<Complete>,
}

/// The bodies of a complete engine.
#[derive(Debug)]
pub(crate) struct Complete {
    /// What the engine is like.
    pub(crate) topology: Bytes,
    /// Each rank's address.
    pub(crate) ranks: HashMap<RankId, Bytes>,
}

/// The last answers that were made, and what of.
#[derive(Debug, Default)]
pub(crate) struct AnswerCache(Mutex<Option<(Arc<Namespace>, Arc<Answers>)>>);

impl AnswerCache {
    /// The answers of a state; they are made if the last ones are of another.
    pub(crate) fn of(&self, space: &Arc<Namespace>) -> Arc<Answers> {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, answers)) = &*cached
            && Arc::ptr_eq(known, space)
        {
            return Arc::clone(answers);
        }
        let answers = Arc::new(Answers::of(space));
        *cached = Some((Arc::clone(space), Arc::clone(&answers)));
        answers
    }
}

impl Answers {
    fn of(space: &Namespace) -> Self {
        let generation_opt = space.generation_opt.as_ref();
        let complete = generation_opt.filter(|_| space.is_complete());
        Self {
            generation_opt: generation_opt.map(|generation| generation.number.into()),
            registered: space.ranks.len(),
            complete_opt: complete.map(|generation| {
                let ranks = space.ranks.iter();
                Complete {
                    topology: topology(&generation.shape, space.release(), generation.http_port)
                        .into(),
                    ranks: ranks.map(|(id, rank)| (*id, address(rank))).collect(),
                }
            }),
        }
    }
}

fn address(rank: &Rank) -> Bytes {
    let ip = python_string(&rank.ip);
    format!("{{\"rank_ip\": {ip}, \"rank_port\": {}}}", rank.port).into()
}

/// The topology in the key order and spacing of SGLang's server, with the keys that the release
/// which registered knows.
fn topology(shape: &Shape, release: RouteRelease, http_port: Option<u16>) -> String {
    let mut pairs: Vec<(&str, String)> = vec![
        ("attn_tp_size", shape.tp_size.to_string()),
        ("attn_cp_size", shape.cp_size.to_string()),
        ("dp_size", shape.dp_size.to_string()),
        ("pp_size", shape.pp_size.to_string()),
        ("page_size", shape.page_size.to_string()),
        ("kv_cache_dtype", python_string(&shape.kv_cache_dtype)),
        (
            "follow_bootstrap_room",
            shape.follow_bootstrap_room.to_string(),
        ),
    ];
    if release >= RouteRelease::V0517 {
        pairs.push((
            "enable_dsa_cache_layer_split",
            shape.enable_dsa_cache_layer_split.to_string(),
        ));
    }
    if release >= RouteRelease::V0521
        && let Some(layout) = &shape.dsv41_spec_layout
    {
        pairs.push(("dsv41_spec_layout", python_json(layout)));
    }
    if release >= RouteRelease::V0523
        && let Some(layout) = &shape.kv_layout
    {
        pairs.push(("kv_layout", python_string(layout)));
    }
    if release >= RouteRelease::V0522 {
        pairs.push((
            "decode_allocation_policy",
            python_string(&shape.decode_allocation_policy),
        ));
    }
    if release >= RouteRelease::V0523 {
        pairs.push((
            "enable_kv_cache_sharding",
            shape.enable_kv_cache_sharding.to_string(),
        ));
    }
    if release >= RouteRelease::V0517 {
        let port = http_port.map_or_else(|| "null".to_owned(), |port| port.to_string());
        pairs.push(("prefill_http_port", port));
    }
    let absent = [
        "target_tp_rank",
        "target_tp_ranks",
        "target_cp_ranks",
        "target_pp_ranks",
        "required_dst_info_num",
        "required_prefill_response_num",
    ];
    pairs.extend(absent.map(|name| (name, "null".to_owned())));
    let pairs = pairs
        .iter()
        .map(|(name, value)| format!("\"{name}\": {value}"));
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
}

/// JSON as Python's `json.dumps` writes it: a space behind separators, ASCII only.
fn python_json(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items = items.iter().map(python_json).collect::<Vec<_>>();
            format!("[{}]", items.join(", "))
        }
        Value::Object(map) => {
            let pairs = map
                .iter()
                .map(|(key, value)| format!("{}: {}", python_string(key), python_json(value)));
            format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => python_string(text),
        other => other.to_string(),
    }
}

fn python_string(text: &str) -> String {
    let json = Value::from(text).to_string();
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            escaped.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    escaped
}
