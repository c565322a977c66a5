//! What happened: to read, and to follow.

use std::convert::Infallible;
use std::time::Duration;

use actix_web::web::{Bytes, Data, Query};
use actix_web::{HttpRequest, HttpResponse};
use futures::{Stream, stream as streams};
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;
use utoipa::IntoParams;

use super::{checked_limit, checked_number};
use crate::api::{self, Event, EventKind};
use crate::error::ApiError;
use crate::fleet::Fleet;

/// A follower that hears nothing for so long is told that all is well.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Which events are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventFilter {
    /// Only those after this number.
    #[param(minimum = 0, maximum = 9_223_372_036_854_775_807_i64)]
    since: Option<u64>,
    /// Only those of this engine.
    namespace: Option<String>,
    /// Only those of this kind.
    kind: Option<EventKind>,
}

impl EventFilter {
    fn wants(&self, event: &Event) -> bool {
        self.kind.is_none_or(|kind| kind == event.kind)
            && self
                .namespace
                .as_ref()
                .is_none_or(|only| event.namespace.as_ref() == Some(only))
    }
}

/// How many are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventPaging {
    /// Events at most, 1 to 1000; 100 if absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Lists what happened, the oldest first. The last 4,096 events are remembered.
#[utoipa::path(
    get, path = "/v1/events", tag = "events", params(EventPaging, EventFilter),
    responses((status = 200, description = "a page", body = api::EventList), (status = 400, description = "bad query", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    paging: Query<EventPaging>,
    filter: Query<EventFilter>,
) -> Result<HttpResponse, ApiError> {
    let limit = checked_limit(paging.limit)?;
    let since = checked_number("since", filter.since)?.unwrap_or_default();
    Ok(HttpResponse::Ok().json(
        fleet
            .events
            .after(since, limit, |event| filter.wants(event)),
    ))
}

/// Follows what happens, as server-sent events whose data are as those of the list. Begins behind
/// `since` or the header Last-Event-ID, else with what happens next. Who reads too slowly is cut
/// off and may begin again.
#[utoipa::path(
    get, path = "/v1/events/stream", tag = "events", params(EventFilter),
    responses((status = 200, description = "a stream", content_type = "text/event-stream", body = String), (status = 400, description = "bad query", body = api::ErrorBody))
)]
pub(crate) async fn stream(
    request: HttpRequest,
    fleet: Data<Fleet>,
    filter: Query<EventFilter>,
) -> Result<HttpResponse, ApiError> {
    checked_number("since", filter.since)?;
    let last_id = request.headers().get("last-event-id");
    let last_id: Option<u64> = last_id.and_then(|id| id.to_str().ok()?.parse().ok());
    let body = follow(fleet, filter.into_inner(), last_id);
    Ok(HttpResponse::Ok()
        .content_type("text/event-stream")
        .insert_header(("cache-control", "no-store"))
        .streaming(body))
}

fn follow(
    fleet: Data<Fleet>,
    filter: EventFilter,
    last_id: Option<u64>,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let follower = fleet.events.follow();
    let since_opt = last_id.or(filter.since);
    let history = since_opt.map(|since| fleet.events.after(since, usize::MAX, |_| true));
    let shown_to = history.as_ref().map_or(0, |history| history.next);
    // Something is sent at once, so that proxies and clients know that it works.
    let mut first = String::from(": following\n\n");
    for event in history.iter().flat_map(|history| &history.events) {
        first.push_str(&written(&filter, event));
    }
    let begun = streams::once(async move { Ok(Bytes::from(first)) });
    let later = streams::unfold(
        (follower, filter),
        move |(mut follower, filter)| async move {
            loop {
                match tokio::time::timeout(HEARTBEAT, follower.recv()).await {
                    Err(_) => {
                        return Some((Ok(Bytes::from_static(b": well\n\n")), (follower, filter)));
                    }
                    Ok(Err(RecvError::Closed | RecvError::Lagged(_))) => return None,
                    Ok(Ok(event)) if event.id <= shown_to => {}
                    Ok(Ok(event)) => {
                        let text = written(&filter, &event);
                        if !text.is_empty() {
                            return Some((Ok(Bytes::from(text)), (follower, filter)));
                        }
                    }
                }
            }
        },
    );
    streams::StreamExt::chain(begun, later)
}

fn written(filter: &EventFilter, event: &Event) -> String {
    if !filter.wants(event) {
        return String::new();
    }
    // Numbers and text always become JSON, on one line.
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {}\ndata: {data}\n\n", event.id)
}
