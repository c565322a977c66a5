//! In the place of the PD router: the same request to a prefill and a decode engine, with the same
//! bootstrap host, port and room.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use transfer_actor::bootstrap_access::plain_http;

use super::plan::RunPlan;
use super::progress::Progress;
use super::report::Totals;
use crate::engine::{Checked, Moved, Request};
use crate::layout::Side;

/// How long the other side may take to say why, once one has failed.
const SECOND_OPINION_TIMEOUT: Duration = Duration::from_secs(3);

/// Where the engines are.
#[derive(Clone, Debug)]
pub struct Engines {
    /// URL of the prefill engine.
    pub prefill: String,
    /// URL of the decode engine.
    pub decode: String,
    /// The prefill's bootstrap server.
    pub bootstrap_host: String,
    /// Its port.
    pub bootstrap_port: u16,
}

/// Sends every request, so many at once; stops at the first that fails.
pub async fn send_all(plan: &RunPlan, engines: &Engines) -> Result<Totals> {
    let client = plain_http()
        .no_proxy()
        // A room has several states to pass, each with the timeout of a request.
        .timeout(Duration::from_secs(
            plan.args.request_timeout.saturating_mul(3),
        ))
        .build()
        .context("building the http client")?;
    let mut totals = Totals::new(plan);
    let mut progress = Progress::new(plan.requests.len());
    let sends = plan
        .requests
        .iter()
        .map(|request| send(&client, engines, *request));
    let mut answers = futures::stream::iter(sends).buffer_unordered(plan.args.concurrency as usize);
    let mut done = 0;
    while let Some(answer) = answers.next().await {
        let (sent, received) = answer.inspect_err(|_| progress.interrupt())?;
        totals
            .add(sent, received)
            .inspect_err(|_| progress.interrupt())?;
        done += 1;
        progress.update(done, totals.received_bytes());
    }
    totals.finish(progress.elapsed());
    Ok(totals)
}

/// Has both engines compare their whole pools; prefill first.
pub async fn check_idle(engines: &Engines) -> Result<[Vec<Checked>; 2]> {
    let client = plain_http().no_proxy().build()?;
    let prefill = post(
        &client,
        Side::Prefill,
        &engines.prefill,
        "/check",
        &Value::Null,
    );
    let decode = post(
        &client,
        Side::Decode,
        &engines.decode,
        "/check",
        &Value::Null,
    );
    let (prefill, decode) = futures::try_join!(prefill, decode)?;
    Ok([prefill, decode])
}

/// The body that SGLang's router sends to both workers for `/generate`.
fn body(engines: &Engines, request: Request) -> Value {
    let mut text = "token ".repeat(request.tokens as usize);
    text.pop();
    json!({
        "text": text,
        "model": null,
        "sampling_params": {"max_new_tokens": 1},
        "return_text_in_logprobs": false,
        "stream": false,
        "log_metrics": true,
        "return_hidden_states": false,
        "background": false,
        "no_logs": false,
        "return_bytes": false,
        "return_entropy": false,
        "bootstrap_host": engines.bootstrap_host,
        "bootstrap_port": engines.bootstrap_port,
        "bootstrap_room": request.room,
    })
}

#[derive(Deserialize)]
struct Generated {
    meta_info: MetaInfo,
}

#[derive(Deserialize)]
struct MetaInfo {
    moved: Vec<Moved>,
}

/// Sends one request to both sides; what the prefill sent and what the decode found.
async fn send(
    client: &reqwest::Client,
    engines: &Engines,
    request: Request,
) -> Result<(Vec<Moved>, Vec<Moved>)> {
    let body = body(engines, request);
    let prefill = post::<Generated>(client, Side::Prefill, &engines.prefill, "/generate", &body);
    let decode = post::<Generated>(client, Side::Decode, &engines.decode, "/generate", &body);
    let (mut prefill, mut decode) = (std::pin::pin!(prefill), std::pin::pin!(decode));
    let later = SECOND_OPINION_TIMEOUT;
    let (sent, received) = tokio::select! {
        sent = &mut prefill => match sent {
            Ok(sent) => (sent, decode.await?),
            Err(error) => {
                let other = tokio::time::timeout(later, decode).await;
                return Err(both(error, other.ok().and_then(Result::err)));
            }
        },
        received = &mut decode => match received {
            Ok(received) => (prefill.await?, received),
            Err(error) => {
                let other = tokio::time::timeout(later, prefill).await;
                return Err(both(error, other.ok().and_then(Result::err)));
            }
        },
    };
    Ok((sent.meta_info.moved, received.meta_info.moved))
}

/// The first failure is the cause; what the other side says may help.
fn both(first: anyhow::Error, second_opt: Option<anyhow::Error>) -> anyhow::Error {
    match second_opt {
        None => first,
        Some(second) => anyhow!("{first:#}\nthe other side says: {second:#}"),
    }
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: ErrorMessage,
}

#[derive(Deserialize)]
struct ErrorMessage {
    message: String,
}

async fn post<T: DeserializeOwned>(
    client: &reqwest::Client,
    side: Side,
    base: &str,
    path: &str,
    body: &Value,
) -> Result<T> {
    let url = format!("{base}{path}");
    let response = client.post(&url).json(body).send().await;
    let response = response.with_context(|| format!("asking the {side} engine at {url}"))?;
    let status = response.status();
    let bytes = response
        .bytes()
        .await
        .with_context(|| format!("reading from {url}"))?;
    if !status.is_success() {
        let message = serde_json::from_slice::<ErrorAnswer>(&bytes).map_or_else(
            |_| String::from_utf8_lossy(&bytes).into_owned(),
            |answer| answer.error.message,
        );
        bail!("{side}: {message}");
    }
    serde_json::from_slice(&bytes).with_context(|| format!("understanding {url}"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// The recorded requests of SGLang's router, if the folder has them.
    fn recorded_cases() -> Vec<Value> {
        let default = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let folder = std::env::var_os("FERRY_GOLDEN").map_or(default, PathBuf::from);
        let Ok(text) = std::fs::read_to_string(folder.join("pd_router.json")) else {
            return Vec::new();
        };
        let file: Value = serde_json::from_str(&text).expect("the golden file is json");
        file["cases"].as_array().cloned().unwrap_or_default()
    }

    #[test]
    fn the_body_is_that_of_the_recorded_router() {
        let mut matched = 0;
        for case in recorded_cases() {
            let client = &case["client_body"];
            let plain = json!({"text": "hi", "sampling_params": {"max_new_tokens": 1}});
            if case["client_path"] != "/generate" || *client != plain {
                continue;
            }
            for seen in case["workers_saw"].as_array().expect("a list") {
                let recorded = &seen["body"];
                let engines = Engines {
                    prefill: String::new(),
                    decode: String::new(),
                    bootstrap_host: "127.0.0.1".to_owned(),
                    bootstrap_port: 8998,
                };
                let room = recorded["bootstrap_room"].as_u64().expect("a room");
                let mut ours = body(&engines, Request { room, tokens: 1 });
                ours["text"] = json!("hi");
                // As text, so that the order of the keys counts too.
                assert_eq!(ours.to_string(), recorded.to_string(), "{}", seen["worker"]);
                matched += 1;
            }
        }
        println!("pd_router.json: {matched} recorded requests matched");
    }
}
