//! A stream of events, taken up again where it broke.

use std::time::Duration;

use reqwest::Method;
use reqwest::header::ACCEPT;

use super::client::Client;
use super::{EventArguments, Failure, commands};
use crate::api::Event;

/// Before a broken stream is taken up again.
const PAUSE: Duration = Duration::from_secs(1);
/// Bytes of one event at most.
const MAX_LINE: usize = 1 << 20;

/// Shows events as they happen, until it is interrupted or nobody reads. A stream that breaks is
/// taken up again, so that a server may restart; only the first connection must succeed.
pub(super) async fn run(
    client: &Client,
    arguments: &EventArguments,
    mut show: impl FnMut(&Event) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut last_opt = arguments.since;
    let mut has_begun = false;
    loop {
        let streamed = stream(client, arguments, &mut last_opt, &mut has_begun, &mut show).await;
        match streamed {
            Ok(()) => tracing::debug!("the stream ended"),
            Err(Failure::NoAnswer(reason)) if has_begun => {
                tracing::debug!(reason, "the stream broke");
            }
            Err(failure) => return Err(failure),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn stream(
    client: &Client,
    arguments: &EventArguments,
    last_opt: &mut Option<u64>,
    has_begun: &mut bool,
    show: &mut impl FnMut(&Event) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let request = client.request(Method::GET, &["events", "stream"]);
    let mut request = request
        .header(ACCEPT, "text/event-stream")
        .query(&commands::event_filter(arguments));
    if let Some(last) = last_opt {
        request = request.header("last-event-id", last.to_string());
    }
    let mut response = client.send(request).await?;
    *has_begun = true;
    let mut rest: Vec<u8> = Vec::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| client.lost(&error))?
    {
        rest.extend_from_slice(&chunk);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            // An event's data is one line here, and holds its number too.
            let Some(data) = line.strip_prefix("data:") else {
                continue;
            };
            let event: Event = serde_json::from_str(data.trim()).map_err(|error| {
                Failure::NoAnswer(format!("{} sent no event: {error}", client.server()))
            })?;
            *last_opt = Some(event.id);
            show(&event)?;
        }
        if rest.len() > MAX_LINE {
            let server = client.server();
            return Err(Failure::NoAnswer(format!("{server} sends no events")));
        }
    }
    Ok(())
}
