//! The bootstrap server against what SGLang's own server answered, request by request.

use golden::{Tally, list};
use serde_json::Value;
use tests::bootstrap_model::{Answer, Body, Model};
use tests::http::{Reply, Request, exchange, exchange_and_hang_up};
use tests::process::BootstrapServer;

const FILE: &str = "bootstrap_http.json";

/// Rows of the specification that concern whole cases.
const ANY_TEXT: &str = "the wording of errors is free";

/// What a comparison holds for: statuses, types, bodies of successes and of the texts that the
/// specification names, and the methods that are allowed.
#[derive(Debug, PartialEq, Eq)]
struct Essence {
    status: u16,
    content_type: Option<String>,
    allow: Option<String>,
    body: Option<String>,
}

fn essence(status: u16, header: impl Fn(&str) -> Option<String>, body: String) -> Essence {
    let named = [
        "Missing inputs for bootstrap server.",
        "Prefill server not fully registered yet (",
        "Bootstrap info not found for ",
        "Inconsistent prefill allocation policies",
        "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks",
        "404: Not Found",
        "405: Method Not Allowed",
        "Method not allowed",
    ];
    let is_held = status == 200 || named.iter().any(|text| body.starts_with(text));
    Essence {
        status,
        content_type: is_held.then(|| header("Content-Type")).flatten(),
        allow: header("Allow"),
        body: is_held.then_some(body),
    }
}

fn recorded(response: &Value) -> Essence {
    let status = response["status"]
        .as_u64()
        .and_then(|status| u16::try_from(status).ok());
    let header = |name: &str| response["headers"][name].as_str().map(str::to_owned);
    let body = response["body"].as_str().unwrap_or_default().to_owned();
    essence(status.expect("a recorded status"), header, body)
}

fn answered(reply: &Reply) -> Essence {
    let header = |name: &str| reply.header(&name.to_ascii_lowercase()).map(str::to_owned);
    essence(reply.status, header, reply.text())
}

/// The recording shows bytes that are no UTF-8 as U+FFFD: at the start of a UTF-16 body, and in
/// the body of such bytes alone, those are its byte order mark.
fn body_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (at, character) in text.chars().enumerate() {
        match (character, at) {
            ('\u{fffd}', 1) => bytes.push(0xfe),
            ('\u{fffd}', _) => bytes.push(0xff),
            _ => bytes.extend(character.to_string().into_bytes()),
        }
    }
    bytes
}

fn request_of(value: &Value) -> Request {
    let text = |key: &str| value[key].as_str().unwrap_or_default();
    let body = value["body"].as_str().map(body_bytes);
    let mut request = Request::new(text("method"), text("path"), body);
    for (name, value) in value["extra_headers"].as_object().into_iter().flatten() {
        request
            .headers
            .push((name.clone(), value.as_str().unwrap_or_default().to_owned()));
    }
    request
}

fn fits(answer: &Answer, reply: &Reply) -> bool {
    let text = reply.text();
    let body_fits = match &answer.body {
        Body::Exact(body) => text == *body,
        Body::Contains(parts) => parts.iter().any(|part| text.contains(part.as_str())),
        Body::Topology(begin) => text.starts_with(begin.as_str()),
    };
    reply.status == answer.status && body_fits
}

/// Whether the rules ask for what was recorded.
fn agrees(answer: &Answer, recorded: &Essence) -> bool {
    let body = recorded.body.as_deref().unwrap_or_default();
    answer.status == recorded.status
        && match &answer.body {
            Body::Exact(text) => json_or_text(text) == json_or_text(body),
            Body::Contains(_) => recorded.status != 200,
            Body::Topology(begin) => body.starts_with(begin.as_str()),
        }
}

/// Escapes in JSON are compared by their meaning; the server's own bytes are compared elsewhere.
fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

#[test]
fn every_recorded_scenario_is_answered_alike_or_by_a_rule() {
    let file = golden::load(FILE);
    let mut tally = Tally::default();
    for scenario in list(&file, "scenarios") {
        let name = scenario["name"].as_str().unwrap_or_default();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let server = BootstrapServer::start(folder.path(), &[]);
        let mut model = Model::default();
        for (at, step) in list(scenario, "steps").iter().enumerate() {
            let request = request_of(&step["request"]);
            let case = format!("{name}, step {at}, {} {}", request.method, request.path);
            let recorded = recorded(&step["response"]);
            let reply = server.send(&request);
            match model
                .answer(&request)
                .filter(|answer| !agrees(answer, &recorded))
            {
                None => tally.compare(case, &recorded, &answered(&reply), None),
                Some(answer) if fits(&answer, &reply) => {
                    tally.compare(case, &recorded, &answered(&reply), Some(answer.rule));
                }
                Some(answer) => tally.wrong(format!("{case}: expected {answer:?}, got {reply:?}")),
            }
        }
    }
    tally.finish("bootstrap_http scenarios");
}

/// A body that registers the only rank of an engine.
fn single_rank() -> Vec<u8> {
    br#"{"attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": 41000, "page_size": 64, "kv_cache_dtype": "auto", "load_balance_method": "round_robin"}"#.to_vec()
}

/// What a raw case sends. The recording names it and keeps the answer only.
fn raw_request(name: &str, server: &BootstrapServer) -> Option<Vec<u8>> {
    let put = |body: Vec<u8>| Request::new("PUT", "/route", Some(body)).bytes(server.address());
    let text = |text: &str| Some(text.as_bytes().to_vec());
    match name {
        "body_over_1MiB" => Some(put(vec![b' '; (1 << 20) + 1])),
        "chunked_put" => {
            let mut bytes = b"PUT /route HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
                .to_vec();
            for chunk in single_rank().chunks(64) {
                bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                bytes.extend(chunk);
                bytes.extend(b"\r\n");
            }
            bytes.extend(b"0\r\n\r\n");
            Some(bytes)
        }
        "http10" => text("GET /health HTTP/1.0\r\n\r\n"),
        "connection_close" => text("GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
        "no_host_header" => text("GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"),
        "garbage" => text("GARBAGE\r\n\r\n"),
        "header_over_8190" => {
            let long = "a".repeat(8191);
            text(&format!(
                "GET /health HTTP/1.1\r\nHost: a\r\nX-Long: {long}\r\nConnection: close\r\n\r\n"
            ))
        }
        "pipelined_two" => text(
            "GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /nope HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        ),
        "query_20000_rooms" => {
            let rooms: Vec<u64> = (0..20_000).map(|room| (1 << 62) + room).collect();
            let body = serde_json::json!({ "bootstrap_rooms": rooms });
            Some(Request::post("/query_dp_ranks", &body).bytes(server.address()))
        }
        _ => None,
    }
}

/// Recorded answers: a document, a document under `response`, or several answers as text.
fn recorded_answers(case: &Value) -> Vec<Essence> {
    if let Some(text) = case.as_str() {
        return replies(text.as_bytes()).iter().map(answered).collect();
    }
    vec![recorded(case.get("response").unwrap_or(case))]
}

fn replies(mut bytes: &[u8]) -> Vec<Reply> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let (reply, taken) = Reply::parse(bytes, false).expect("an answer in HTTP");
        replies.push(reply);
        bytes = &bytes[taken..];
    }
    replies
}

#[test]
fn raw_http_is_answered_as_recorded() {
    let file = golden::load(FILE);
    let mut tally = Tally::default();
    for (name, case) in file
        .get("protocol_level")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let server = BootstrapServer::start(folder.path(), &[]);
        let Some(bytes) = raw_request(name, &server) else {
            tally.wrong(format!(
                "{name}: the test does not know what this case sends"
            ));
            continue;
        };
        let answer = exchange(server.address(), &bytes).expect("an answer");
        let ours: Vec<Essence> = replies(&answer).iter().map(answered).collect();
        tally.compare(name, &recorded_answers(case), &ours, None);
        assert_eq!(
            server.send(&Request::get("/health")).status,
            200,
            "after {name}"
        );
    }
    tally.finish("bootstrap_http protocol_level");
}

/// The rule of the recording's README, stated once: error texts that the specification does not
/// name carry no comparison, so an [`Essence`] must not hold them.
#[test]
fn unnamed_error_texts_are_free_and_named_ones_are_held() {
    let header = |_: &str| None;
    let free = essence(400, header, "rank_port is null".to_owned());
    assert_eq!(free.body, None, "{ANY_TEXT}");
    let named = essence(
        400,
        header,
        "Missing inputs for bootstrap server.".to_owned(),
    );
    assert!(named.body.is_some());
}

#[test]
fn bytes_that_are_no_request_never_take_the_server_down() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = BootstrapServer::start(folder.path(), &[]);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00".to_vec();
    let tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec();
    for bytes in [
        preface,
        tls,
        b"\r\n\r\n\r\n".to_vec(),
        vec![0; 100_000],
        Vec::new(),
    ] {
        let answer = exchange_and_hang_up(server.address(), &bytes).expect("a connection");
        let status = answer
            .starts_with(b"HTTP/1.")
            .then(|| replies(&answer)[0].status);
        assert!(status.is_none_or(|status| status >= 400), "{status:?}");
        assert_eq!(server.send(&Request::get("/health")).status, 200);
    }
}
