//! The five routes that SGLang calls (`spec/bootstrap-http.md`), byte for byte.

use std::collections::HashSet;
use std::time::Instant;

use actix_web::http::{Method, StatusCode, header};
use actix_web::web::Bytes;
use actix_web::{HttpMessage, HttpRequest, HttpResponse};
use foldhash::fast::RandomState;
use serde_json::Value;

use crate::answers::{Answers, Complete};
use crate::fields;
use crate::fleet::ByPort;
use crate::guard::Who;
use crate::guard::audit::Reason;
use crate::probe::may_probe;
use crate::registry::{Command, RankId, Refused, Registration};
use crate::rooms::Rooms;
use crate::writer::{WriteError, now};

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json; charset=utf-8";
static GENERATION_HEADER: header::HeaderName =
    header::HeaderName::from_static("x-ferry-generation");
const RANK_NAMES: [&str; 4] = [
    "prefill_dp_rank",
    "prefill_cp_rank",
    "target_tp_rank",
    "target_pp_rank",
];
const MAX_ROOM: u64 = i64::MAX as u64;
/// Rooms of one query at most; SGLang asks for those of one scheduling step.
const MAX_QUERY_ROOMS: usize = 65_536;
/// Bytes of a room and its rank in an answer, usually.
const ROOM_BYTES: usize = 28;

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
fn with_generation(mut response: HttpResponse, answers_opt: Option<&Answers>) -> HttpResponse {
    if let Some(number) = answers_opt.and_then(|answers| answers.generation_opt.clone()) {
        response
            .headers_mut()
            .insert(GENERATION_HEADER.clone(), number);
    }
    response
}

fn json(body: Bytes) -> HttpResponse {
    let content_type = (header::CONTENT_TYPE, header::HeaderValue::from_static(JSON));
    HttpResponse::Ok().insert_header(content_type).body(body)
}

/// The methods of `/route` that there are not.
pub(crate) async fn no_route() -> HttpResponse {
    HttpResponse::MethodNotAllowed()
        .content_type(JSON)
        .body("Method not allowed")
}

/// `PUT /route`.
pub(crate) async fn put_route(request: HttpRequest, port: ByPort, body: Bytes) -> HttpResponse {
    let who = Who::of(&request);
    let peer_opt = request.peer_addr().map(|peer| peer.ip());
    let parsed = fields::object(&body).and_then(|map| {
        let dialled = map
            .get("rank_ip")
            .and_then(Value::as_str)
            .is_some_and(|ip| may_probe(ip, peer_opt));
        Registration::parse(&map, dialled, now())
    });
    let registration = match parsed {
        Ok(registration) => registration,
        Err(reason) => return refused(&request, StatusCode::BAD_REQUEST, reason),
    };
    let command = Command::PutRank(Box::new(registration));
    let written = port
        .fleet
        .registrations
        .change(&port.namespace, command, &who)
        .await;
    match written {
        Ok(_) => text(StatusCode::OK, "OK"),
        Err(error) => write_error(&request, error),
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

fn rank_number(name: &str, value: &str) -> Result<i64, String> {
    let digits = value.strip_prefix('-').unwrap_or(value);
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|_| plain);
    number.ok_or_else(|| format!("{name} is {value:?}, expected an integer"))
}

/// The four ranks of a query: the first value of each name counts, and none may be empty.
fn asked_ranks(query: &str) -> Result<[i64; 4], String> {
    let mut values = [const { None }; 4];
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        if let Some(at) = RANK_NAMES.iter().position(|known| *known == name)
            && let slot @ None = &mut values[at]
        {
            *slot = Some(value);
        }
    }
    let values = values.map(|value_opt| value_opt.filter(|value| !value.is_empty()));
    if values.iter().any(Option::is_none) {
        return Err("Missing inputs for bootstrap server.".to_owned());
    }
    let mut ranks = [0; 4];
    for ((slot, name), value) in ranks
        .iter_mut()
        .zip(RANK_NAMES)
        .zip(values.iter().flatten())
    {
        *slot = rank_number(name, value)?;
    }
    Ok(ranks)
}

/// `GET /route`.
pub(crate) async fn get_route(request: HttpRequest, port: ByPort) -> HttpResponse {
    let ranks = match asked_ranks(request.query_string()) {
        Ok(ranks) => ranks,
        Err(reason) => return bad_request(reason),
    };
    let answers_opt = port.answers();
    let answers = answers_opt.as_deref();
    let response = match answers.and_then(|answers| answers.complete_opt.as_ref()) {
        Some(complete) if ranks == [-1; 4] => json(complete.topology.clone()),
        Some(complete) => rank_address(complete, ranks),
        None => {
            let registered = answers.map_or(0, |answers| answers.registered);
            text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "Prefill server not fully registered yet ({registered} workers registered)."
                ),
            )
        }
    };
    with_generation(response, answers)
}

fn rank_address(complete: &Complete, ranks: [i64; 4]) -> HttpResponse {
    let narrow = |rank: i64| u32::try_from(rank).ok();
    let [dp, cp, tp, pp] = ranks;
    let id = (|| {
        Some(RankId {
            dp: narrow(dp)?,
            cp: narrow(cp)?,
            tp: narrow(tp)?,
            pp: narrow(pp)?,
        })
    })();
    match id.and_then(|id| complete.ranks.get(&id)) {
        Some(address) => json(address.clone()),
        None => text(
            StatusCode::NOT_FOUND,
            format!(
                "Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            ),
        ),
    }
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
    let asked = match asked_rooms(&body) {
        Ok(asked) => asked,
        Err(reason) => return bad_request(reason),
    };
    let response = json(dp_ranks(&asked, &port.rooms()).into());
    with_generation(response, port.answers().as_deref())
}

#[derive(serde::Deserialize)]
struct RoomQuery {
    bootstrap_rooms: Vec<u64>,
}

/// What SGLang sends is read in one pass; a body that has anything else is read again by the same
/// rules as all others, which find what is wrong with it.
fn asked_rooms(body: &[u8]) -> Result<Vec<u64>, fields::FieldError> {
    if body.starts_with(b"{")
        && let Ok(RoomQuery { bootstrap_rooms }) = serde_json::from_slice(body)
        && bootstrap_rooms.len() <= MAX_QUERY_ROOMS
        && bootstrap_rooms.iter().all(|room| *room <= MAX_ROOM)
    {
        return Ok(bootstrap_rooms);
    }
    let map = fields::object(body)?;
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
}

/// The rooms that are known with their ranks as JSON, in the order in which they are asked for.
fn dp_ranks(asked: &[u64], rooms: &Rooms) -> Vec<u8> {
    let now = Instant::now();
    let mut seen: HashSet<u64, RandomState> =
        HashSet::with_capacity_and_hasher(asked.len(), RandomState::default());
    let mut body = Vec::with_capacity(asked.len() * ROOM_BYTES + 2);
    let mut numbers = (itoa::Buffer::new(), itoa::Buffer::new());
    body.push(b'{');
    for room in asked {
        let Some(dp_rank) = rooms.get(*room, now).filter(|_| seen.insert(*room)) else {
            continue;
        };
        body.extend_from_slice(if body.len() == 1 { b"\"" } else { b", \"" });
        body.extend_from_slice(numbers.0.format(*room).as_bytes());
        body.extend_from_slice(b"\": ");
        body.extend_from_slice(numbers.1.format(dp_rank).as_bytes());
    }
    body.push(b'}');
    body
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
    with_generation(response, port.answers().as_deref())
}
