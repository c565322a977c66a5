//! Rooms that are bound to a dp rank.

use std::time::Instant;

use actix_web::HttpResponse;
use actix_web::web::{Data, Path, Query};

use super::{Paging, known_engine, next};
use crate::api;
use crate::error::ApiError;
use crate::fleet::Fleet;

/// Lists the rooms of an engine, by number. They are kept in memory, by the server that listens.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/rooms", tag = "engines", params(("namespace" = String, Path, description = "the engine's name"), Paging),
    responses((status = 200, description = "a page", body = api::RoomList), (status = 400, description = "bad query", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    path: Path<String>,
    paging: Query<Paging>,
) -> Result<HttpResponse, ApiError> {
    let limit = paging.limit()?;
    known_engine(&fleet, &path)?;
    let after_opt = paging.after.as_deref().map(|after| {
        after.parse().map_err(|_| {
            ApiError::new(
                400,
                "bad_query",
                format!("after is {after:?}, expected a room's number"),
            )
        })
    });
    let after_opt: Option<u64> = after_opt.transpose()?;
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
