//! The five routes that SGLang calls (`spec/bootstrap-http.md`), byte for byte.

use common::wire::route::RouteRelease;
use std::time::Instant;

use actix_web::http::{Method, StatusCode, header};
use actix_web::web::Bytes;
use actix_web::{HttpMessage, HttpRequest, HttpResponse};
use serde_json::Value;

use crate::fields;
use crate::fleet::ByPort;
use crate::guard::Who;
use crate::guard::audit::Reason;
use crate::probe::may_probe;
use crate::registry::{Command, Namespace, RankId, Refused, Registration, Shape};
use crate::writer::{WriteError, now};

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json; charset=utf-8";
const GENERATION_HEADER: &str = "x-ferry-generation";
const MAX_ROOM: u64 = i64::MAX as u64;
/// Rooms of one query at most; SGLang asks for those of one scheduling step.
const MAX_QUERY_ROOMS: usize = 65_536;

pub(crate) fn text(status: StatusCode, body: impl Into<String>) -> HttpResponse {
    HttpResponse::build(status)
        .content_type(TEXT)
        .body(body.into())
}

fn bad_request(reason: impl Into<String>) -> HttpResponse {
    text(StatusCode::BAD_REQUEST, reason)
}

pub(crate) fn not_allowed(allowed: &'static str) -> HttpResponse {
    HttpResponse::MethodNotAllowed()
        .insert_header((header::ALLOW, allowed))
        .content_type(TEXT)
        .body("405: Method Not Allowed")
}

/// Says in a header which generation of the engine an answer is about. Decodes of older releases
/// fail on a key that they do not know, so it is never in the JSON.
fn with_generation(mut response: HttpResponse, space_opt: Option<&Namespace>) -> HttpResponse {
    if let Some(generation) = space_opt.and_then(|space| space.generation_opt.as_ref()) {
        let name = header::HeaderName::from_static(GENERATION_HEADER);
        response
            .headers_mut()
            .insert(name, generation.number.into());
    }
    response
}

/// `/route`, every method.
pub(crate) async fn route(request: HttpRequest, port: ByPort, body: Bytes) -> HttpResponse {
    match *request.method() {
        Method::PUT => put_route(&request, &port, &body).await,
        Method::GET => get_route(&request, &port),
        _ => HttpResponse::MethodNotAllowed()
            .content_type(JSON)
            .body("Method not allowed"),
    }
}

async fn put_route(request: &HttpRequest, port: &ByPort, body: &[u8]) -> HttpResponse {
    let who = Who::of(request);
    let peer_opt = request.peer_addr().map(|peer| peer.ip());
    let parsed = fields::object(body).and_then(|map| {
        let dialled = map
            .get("rank_ip")
            .and_then(Value::as_str)
            .is_some_and(|ip| may_probe(ip, peer_opt));
        Registration::parse(&map, dialled, now())
    });
    let registration = match parsed {
        Ok(registration) => registration,
        Err(reason) => return refused(request, StatusCode::BAD_REQUEST, reason),
    };
    let command = Command::PutRank(Box::new(registration));
    let written = port
        .fleet
        .registrations
        .change(&port.namespace, command, &who)
        .await;
    match written {
        Ok(_) => text(StatusCode::OK, "OK"),
        Err(error) => write_error(request, error),
    }
}

/// The answer to a write that is refused; the audit log gets the reason, too.
fn refused(request: &HttpRequest, status: StatusCode, reason: impl Into<String>) -> HttpResponse {
    let reason = reason.into();
    request.extensions_mut().insert(Reason(reason.clone()));
    text(status, reason)
}

fn write_error(request: &HttpRequest, error: WriteError) -> HttpResponse {
    let status = match &error {
        WriteError::Refused(Refused::Inconsistent(_)) => StatusCode::BAD_REQUEST,
        WriteError::Refused(Refused::Retired(_)) => StatusCode::CONFLICT,
        WriteError::Refused(Refused::Unknown) => StatusCode::NOT_FOUND,
        WriteError::ReadOnly(_) | WriteError::Busy => StatusCode::SERVICE_UNAVAILABLE,
    };
    refused(request, status, error.to_string())
}

/// The first value of a query parameter, percent-decoded.
fn parameter(request: &HttpRequest, name: &str) -> Option<String> {
    let pairs =
        actix_web::web::Query::<Vec<(String, String)>>::from_query(request.query_string()).ok()?;
    let found = pairs.iter().find(|(key, _)| key == name);
    found
        .map(|(_, value)| value.clone())
        .filter(|value| !value.is_empty())
}

fn rank_number(name: &str, value: &str) -> Result<i64, String> {
    let digits = value.strip_prefix('-').unwrap_or(value);
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|_| plain);
    number.ok_or_else(|| format!("{name} is {value:?}, expected an integer"))
}

fn get_route(request: &HttpRequest, port: &ByPort) -> HttpResponse {
    let names = [
        "prefill_dp_rank",
        "prefill_cp_rank",
        "target_tp_rank",
        "target_pp_rank",
    ];
    let values = names.map(|name| parameter(request, name));
    if values.iter().any(Option::is_none) {
        return bad_request("Missing inputs for bootstrap server.");
    }
    let mut ranks = [0; 4];
    for ((slot, name), value) in ranks.iter_mut().zip(names).zip(values) {
        match rank_number(name, &value.unwrap_or_default()) {
            Ok(number) => *slot = number,
            Err(reason) => return bad_request(reason),
        }
    }
    let state = port.fleet.registrations.state();
    let space = state.get(&port.namespace);
    with_generation(known_route(space, ranks), space)
}

fn known_route(space: Option<&Namespace>, ranks: [i64; 4]) -> HttpResponse {
    let complete = space.filter(|space| space.is_complete());
    let generation = complete.and_then(|space| Some((space, space.generation_opt.as_ref()?)));
    let Some((space, generation)) = generation else {
        let registered = space.map_or(0, |space| space.ranks.len());
        let reason =
            format!("Prefill server not fully registered yet ({registered} workers registered).");
        return text(StatusCode::SERVICE_UNAVAILABLE, reason);
    };
    if ranks == [-1; 4] {
        let topology = topology(&generation.shape, space.release(), generation.http_port);
        return HttpResponse::Ok().content_type(JSON).body(topology);
    }
    let [dp, cp, tp, pp] = ranks;
    let narrow = |rank: i64| u32::try_from(rank).ok();
    let id = (|| {
        Some(RankId {
            dp: narrow(dp)?,
            cp: narrow(cp)?,
            tp: narrow(tp)?,
            pp: narrow(pp)?,
        })
    })();
    match id.and_then(|id| space.ranks.get(&id)) {
        Some(rank) => {
            let ip = python_string(&rank.ip);
            let body = format!("{{\"rank_ip\": {ip}, \"rank_port\": {}}}", rank.port);
            HttpResponse::Ok().content_type(JSON).body(body)
        }
        None => {
            let reason = format!(
                "Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            );
            text(StatusCode::NOT_FOUND, reason)
        }
    }
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

/// `POST /register_dp_rank`.
pub(crate) async fn register_dp_rank(
    request: HttpRequest,
    port: ByPort,
    body: Bytes,
) -> HttpResponse {
    if *request.method() != Method::POST {
        return not_allowed("POST");
    }
    let parsed = fields::object(&body).and_then(|map| {
        let room = fields::integer(&map, "bootstrap_room", 0, MAX_ROOM)?;
        Ok((
            room,
            fields::integer(&map, "dp_rank", 0, u64::from(u32::MAX) - 1)?,
        ))
    });
    match parsed {
        Ok((room, dp_rank)) => {
            let (mut rooms, now) = (port.rooms(), Instant::now());
            if rooms.get(room, now).is_none() && port.is_draining() {
                let reason = format!("engine {} drains: it takes no new rooms", port.namespace);
                return text(StatusCode::SERVICE_UNAVAILABLE, reason);
            }
            // The bound above makes it fit.
            let dp_rank = u32::try_from(dp_rank).unwrap_or(u32::MAX);
            let before = rooms.put(room, dp_rank, now);
            drop(rooms);
            port.fleet.bound_rooms();
            // One for each request of the engine: too many to be shown by default.
            tracing::debug!(target: "audit", who = %Who::of(&request), namespace = port.namespace, room, before, after = dp_rank, "room bound");
            text(StatusCode::OK, "OK")
        }
        Err(reason) => refused(&request, StatusCode::BAD_REQUEST, reason),
    }
}

/// `POST /query_dp_ranks`.
pub(crate) async fn query_dp_ranks(
    request: HttpRequest,
    port: ByPort,
    body: Bytes,
) -> HttpResponse {
    if *request.method() != Method::POST {
        return not_allowed("POST");
    }
    let parsed = fields::object(&body).and_then(|map| {
        let rooms = map
            .get("bootstrap_rooms")
            .ok_or("bootstrap_rooms is missing")?;
        let rooms = rooms.as_array().ok_or("bootstrap_rooms is no list")?;
        if rooms.len() > MAX_QUERY_ROOMS {
            return Err(format!(
                "{} rooms, at most {MAX_QUERY_ROOMS} can be asked for",
                rooms.len()
            ));
        }
        rooms
            .iter()
            .map(|room| fields::whole(room, "a room", 0, MAX_ROOM))
            .collect()
    });
    let asked: Vec<u64> = match parsed {
        Ok(asked) => asked,
        Err(reason) => return bad_request(reason),
    };
    let (rooms, now) = (port.rooms(), Instant::now());
    let mut seen = std::collections::HashSet::new();
    let known = asked
        .iter()
        .filter(|room| seen.insert(**room))
        .filter_map(|room| {
            let dp_rank = rooms.get(*room, now)?;
            Some(format!("\"{room}\": {dp_rank}"))
        });
    let body = format!("{{{}}}", known.collect::<Vec<_>>().join(", "));
    let state = port.fleet.registrations.state();
    let response = HttpResponse::Ok().content_type(JSON).body(body);
    with_generation(response, state.get(&port.namespace))
}

/// `GET /health`. A stock decode tells a dead prefill by this call alone.
pub(crate) async fn health(request: HttpRequest, port: ByPort) -> HttpResponse {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return not_allowed("GET,HEAD");
    }
    let response = match port.fleet.unhealthy(&port.namespace) {
        None => text(StatusCode::OK, "OK"),
        Some(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason),
    };
    let state = port.fleet.registrations.state();
    with_generation(response, state.get(&port.namespace))
}
