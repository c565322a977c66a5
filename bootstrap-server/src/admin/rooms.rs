//! Rooms that are bound to a dp rank.

use std::time::Instant;

use actix_web::HttpResponse;
use actix_web::web::{Data, Path, Query};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{checked_limit, checked_number, known_engine, next};
use crate::api;
use crate::error::ApiError;
use crate::fleet::Fleet;

/// Which part of the list is wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct RoomPaging {
    /// Rooms at most, 1 to 1000; 100 if absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Begins behind this room: the `next` of the page before.
    #[param(minimum = 0, maximum = 9_223_372_036_854_775_807_i64)]
    after: Option<u64>,
}

/// Lists the rooms of an engine, by number. They are kept in memory, by the server that listens.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/rooms", tag = "engines", params(("namespace" = String, Path, description = "the engine's name"), RoomPaging),
    responses((status = 200, description = "a page", body = api::RoomList), (status = 400, description = "bad query", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    path: Path<String>,
    paging: Query<RoomPaging>,
) -> Result<HttpResponse, ApiError> {
    let limit = checked_limit(paging.limit)?;
    known_engine(&fleet, &path)?;
    let after_opt = checked_number("after", paging.after)?;
    let now = Instant::now();
    let listed = fleet
        .port(&path)
        .map(|port| port.rooms().after(after_opt, limit, now));
    let rooms = listed
        .unwrap_or_default()
        .into_iter()
        .map(|(room, dp_rank, age)| api::Room {
            room,
            dp_rank,
            age_seconds: age.as_secs(),
        });
    let rooms: Vec<api::Room> = rooms.collect();
    let next = next(&rooms, limit, |room| room.room.to_string());
    Ok(HttpResponse::Ok().json(api::RoomList { rooms, next }))
}
