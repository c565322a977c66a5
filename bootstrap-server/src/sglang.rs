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
/// Digits of [`MAX_ROOM`].
const MAX_ROOM_DIGITS: usize = 19;
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
    // The table is not locked any more when the answer is written.
    let ranks = port.rooms().get_all(&asked, Instant::now());
    let response = json(dp_ranks(&asked, &ranks).into());
    with_generation(response, port.answers().as_deref())
}

/// What SGLang sends is read in one pass; a body that has anything else is read again by the same
/// rules as all others, which find what is wrong with it.
fn asked_rooms(body: &[u8]) -> Result<Vec<u64>, fields::FieldError> {
    match plain_rooms(body) {
        Some(rooms) => Ok(rooms),
        None => any_rooms(body),
    }
}

/// The rooms that are asked for, by the rules of all bodies.
fn any_rooms(body: &[u8]) -> Result<Vec<u64>, fields::FieldError> {
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

/// Reads any bytes as a question for rooms: the one pass finds what the rules of all bodies find.
#[cfg(fuzzing)]
pub fn read_any_rooms(body: &[u8]) {
    if let Some(rooms) = plain_rooms(body) {
        assert_eq!(any_rooms(body), Ok(rooms));
    }
    let _ = any_rooms(body);
}

/// Reads `{"bootstrap_rooms": [1, 2, 3]}` with any spacing: good rooms only, and nothing else in it.
fn plain_rooms(body: &[u8]) -> Option<Vec<u64>> {
    let mut list = trimmed(body);
    for opening in [b"{".as_slice(), b"\"bootstrap_rooms\"", b":", b"["] {
        list = trimmed(list.strip_prefix(opening)?);
    }
    for closing in [b"}", b"]"] {
        list = trimmed(list.strip_suffix(closing)?);
    }
    if list.is_empty() {
        return Some(Vec::new());
    }
    let rooms = list.split(|byte| *byte == b',').map(plain_room);
    // One more than may be asked for is enough to tell.
    let rooms: Vec<u64> = rooms.take(MAX_QUERY_ROOMS + 1).collect::<Option<_>>()?;
    (rooms.len() <= MAX_QUERY_ROOMS).then_some(rooms)
}

fn plain_room(text: &[u8]) -> Option<u64> {
    let digits = trimmed(text);
    let is_plain =
        (1..=MAX_ROOM_DIGITS).contains(&digits.len()) && (digits[0] != b'0' || digits.len() == 1);
    if !is_plain {
        return None;
    }
    // Real rooms have 18 or 19 digits, and each query has many.
    let (eights, rest) = digits.as_chunks::<8>();
    let mut room = 0;
    for eight in eights {
        room = room * 100_000_000 + eight_digits(*eight)?;
    }
    for digit in rest {
        let value = digit.is_ascii_digit().then(|| digit - b'0')?;
        room = room * 10 + u64::from(value);
    }
    (room <= MAX_ROOM).then_some(room)
}

/// The number that eight decimal digits write: pairs, then fours, then all of them are joined.
fn eight_digits(text: [u8; 8]) -> Option<u64> {
    const HIGH: u64 = 0xf0f0_f0f0_f0f0_f0f0;
    const ZEROS: u64 = 0x3030_3030_3030_3030;
    let text = u64::from_le_bytes(text);
    // Bytes from '0' to '?' have this high half, and of these only digits keep it with 6 added.
    let above_nine = text.wrapping_add(0x0606_0606_0606_0606);
    if text & HIGH != ZEROS || above_nine & HIGH != ZEROS {
        return None;
    }
    let digits = text - ZEROS;
    let pairs = (digits.wrapping_mul(10 << 8 | 1) >> 8) & 0x00ff_00ff_00ff_00ff;
    let fours = (pairs.wrapping_mul(100 << 16 | 1) >> 16) & 0x0000_ffff_0000_ffff;
    Some(fours.wrapping_mul(10_000 << 32 | 1) >> 32)
}

/// Without the spaces of JSON around it.
fn trimmed(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t' | b'\n' | b'\r', rest @ ..]
    | [rest @ .., b' ' | b'\t' | b'\n' | b'\r'] = text
    {
        text = rest;
    }
    text
}

/// The rooms that are known with their ranks as JSON, in the order in which they are asked for;
/// one that is asked for again is told once.
fn dp_ranks(asked: &[u64], ranks: &[Option<u32>]) -> Vec<u8> {
    // SGLang asks for rooms as they came, which are often in order; then none is there twice.
    let mut seen_opt = (!asked.is_sorted_by(|left, right| left < right))
        .then(HashSet::<u64, RandomState>::default);
    let mut body = Vec::with_capacity(asked.len() * ROOM_BYTES + 2);
    let mut number = itoa::Buffer::new();
    for (room, dp_rank_opt) in asked.iter().zip(ranks) {
        let Some(dp_rank) = *dp_rank_opt else {
            continue;
        };
        if let Some(seen) = &mut seen_opt
            && !seen.insert(*room)
        {
            continue;
        }
        // Pieces of a known length cost no call to copy them.
        body.extend_from_slice(b", \"");
        body.extend_from_slice(number.format(*room).as_bytes());
        body.extend_from_slice(b"\": ");
        match u8::try_from(dp_rank) {
            Ok(digit @ 0..=9) => body.push(b'0' + digit),
            _ => body.extend_from_slice(number.format(dp_rank).as_bytes()),
        }
    }
    // The first entry needs no comma.
    body.splice(..body.len().min(2), [b'{']);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_list_of_rooms_is_read_as_json_reads_it() {
        for (body, rooms) in [
            (
                r#"{"bootstrap_rooms": [7, 0, 9223372036854775807]}"#,
                Some(vec![7, 0, MAX_ROOM]),
            ),
            (" {\n\"bootstrap_rooms\" :[ 7 ,7]\t} ", Some(vec![7, 7])),
            (r#"{"bootstrap_rooms":[]}"#, Some(Vec::new())),
            (r#"{"bootstrap_rooms": [9223372036854775808]}"#, None),
            (r#"{"bootstrap_rooms": [10000000000000000000000]}"#, None),
            (r#"{"bootstrap_rooms": [07]}"#, None),
            (r#"{"bootstrap_rooms": [-7]}"#, None),
            (r#"{"bootstrap_rooms": [7.0]}"#, None),
            (r#"{"bootstrap_rooms": [7,]}"#, None),
            (r#"{"bootstrap_rooms": [7"#, None),
            (r#"{"bootstrap_rooms": [7]"#, None),
            (r#"{"bootstrap_rooms": [7]} x"#, None),
            (r#"{"bootstrap_rooms": [7], "more": 1}"#, None),
            (r#"{"bootstrap_rooms": "7"}"#, None),
            (r#"{"bootstrap_rooms": [7 7]}"#, None),
            ("{\"bootstrap_rooms\": [7]}\u{c}", None),
            ("", None),
        ] {
            assert_eq!(plain_rooms(body.as_bytes()), rooms, "{body}");
        }
    }

    #[test]
    fn a_room_of_any_length_is_read_and_only_digits_are() {
        let mut digits = String::new();
        for at in 1..=MAX_ROOM_DIGITS {
            digits.push(char::from(b'0' + (at % 10) as u8));
            let value = digits.parse::<u64>().ok().filter(|room| *room <= MAX_ROOM);
            assert_eq!(plain_room(digits.as_bytes()), value, "{digits}");
            for place in 0..digits.len() {
                for byte in 0..=u8::MAX {
                    let mut other = digits.clone().into_bytes();
                    other[place] = byte;
                    let text = std::str::from_utf8(&other).ok();
                    let text = text.map(|text| text.trim_matches([' ', '\t', '\n', '\r']));
                    let plain = text.filter(|text| {
                        text.bytes().all(|byte| byte.is_ascii_digit())
                            && (*text == "0" || !text.starts_with('0'))
                    });
                    let value = plain.and_then(|text| text.parse::<u64>().ok());
                    let value = value.filter(|room| *room <= MAX_ROOM);
                    assert_eq!(plain_room(&other), value, "{other:?}");
                }
            }
        }
    }

    #[test]
    fn a_room_that_is_asked_for_twice_is_told_once() {
        let told = |asked: &[u64], ranks: &[Option<u32>]| {
            String::from_utf8(dp_ranks(asked, ranks)).expect("text")
        };
        let ranks = [Some(1), None, Some(1), Some(2)];
        assert_eq!(told(&[5, 6, 5, 4], &ranks), r#"{"5": 1, "4": 2}"#);
        assert_eq!(told(&[5, 6, 7, 8], &ranks), r#"{"5": 1, "7": 1, "8": 2}"#);
        assert_eq!(
            told(&[5, 6], &[None, Some(4_000_000_000)]),
            r#"{"6": 4000000000}"#
        );
        assert_eq!(told(&[5, 6], &[Some(10), Some(9)]), r#"{"5": 10, "6": 9}"#);
        assert_eq!(
            (told(&[], &[]), told(&[5], &[None])),
            ("{}".to_owned(), "{}".to_owned())
        );
    }
}
