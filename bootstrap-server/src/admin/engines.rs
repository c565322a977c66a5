//! Engines: what they are made of, and what operators do with them.

use std::ops::Bound;
use std::time::Instant;

use actix_web::web::{Data, Json, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use super::{Paging, change, checked_limit, known_engine, next, registrations, unknown_engine};
use crate::api;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::guard::Who;
use crate::probe::Place;
use crate::registry::{Command, Namespace, Rank, RankId};
use crate::writer::now;

/// Missing ranks that are listed; more are only counted.
const MAX_LISTED: usize = 1024;

/// Which engines are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct EngineFilter {
    /// Only complete engines, or only incomplete ones.
    complete: Option<bool>,
    /// Only engines that drain, or only those that do not.
    draining: Option<bool>,
    /// Only engines whose name begins so.
    prefix: Option<String>,
}

/// Which part of the list is wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct RankPaging {
    /// Ranks at most, 1 to 1000; 100 if absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Begins behind this rank: the `next` of the page before.
    #[param(pattern = "^dp[0-9]{1,9}[ -]cp[0-9]{1,9}[ -]tp[0-9]{1,9}[ -]pp[0-9]{1,9}$")]
    after: Option<String>,
}

/// Which ranks are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct RankFilter {
    /// Only ranks that answer probes, or only those that do not.
    reachable: Option<bool>,
}

/// Lists engines, by name. An engine is listed once anything of it has registered.
#[utoipa::path(
    get, path = "/v1/engines", tag = "engines", params(Paging, EngineFilter),
    responses((status = 200, description = "a page", body = api::EngineList), (status = 400, description = "bad query", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    paging: Query<Paging>,
    filter: Query<EngineFilter>,
) -> Result<HttpResponse, ApiError> {
    let limit = paging.limit()?;
    let state = fleet.registrations.state();
    let after = paging.after.as_deref().unwrap_or_default();
    let behind = (Bound::Excluded(after), Bound::Unbounded);
    let shown = state.namespaces.range::<str, _>(behind);
    let shown = shown.map(|(name, space)| summary(&fleet, name, space));
    let wanted = shown.filter(|engine| {
        filter
            .complete
            .is_none_or(|complete| complete == engine.complete)
            && filter
                .draining
                .is_none_or(|draining| draining == engine.draining_since.is_some())
            && filter
                .prefix
                .as_ref()
                .is_none_or(|prefix| engine.namespace.starts_with(prefix))
    });
    let engines: Vec<api::EngineSummary> = wanted.take(limit).collect();
    let next = next(&engines, limit, |engine| engine.namespace.clone());
    Ok(HttpResponse::Ok().json(api::EngineList { engines, next }))
}

fn summary(fleet: &Fleet, name: &str, space: &Namespace) -> api::EngineSummary {
    let generation = space.generation_opt.as_ref();
    let port_opt = fleet.port(name);
    let unreachable = fleet.unreachable_since(name, space);
    api::EngineSummary {
        namespace: name.to_owned(),
        listening: port_opt.is_some(),
        generation: generation.map(|generation| generation.number),
        generation_began_at: generation.map(|generation| generation.began_at),
        ranks_present: space.ranks.len(),
        ranks_expected: space.expected(),
        ranks_unreachable: unreachable.len(),
        complete: space.is_complete(),
        failing_since: space
            .incomplete_since()
            .into_iter()
            .chain(unreachable)
            .min(),
        draining_since: space.draining_since_opt,
        problem: fleet.unhealthy(name),
        registrations: space.registrations.len(),
        rooms: port_opt.map_or(0, |port| port.rooms().len()),
    }
}

/// Everything that is known of one engine.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}", tag = "engines", params(("namespace" = String, Path, description = "the engine's name")),
    responses((status = 200, description = "the engine", body = api::Engine), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn get(fleet: Data<Fleet>, path: Path<String>) -> Result<HttpResponse, ApiError> {
    known_engine(&fleet, &path)?;
    let state = fleet.registrations.state();
    let empty = Namespace::default();
    let space = state.get(&path).unwrap_or(&empty);
    Ok(HttpResponse::Ok().json(describe(&fleet, &path, space)))
}

/// Everything that is known of one engine.
pub(crate) fn describe(fleet: &Fleet, namespace: &str, space: &Namespace) -> api::Engine {
    let generation = space.generation_opt.as_ref();
    let ranks = space.ranks.iter();
    let registered = space.registrations.iter();
    api::Engine {
        namespace: namespace.to_owned(),
        listening: fleet.port(namespace).is_some(),
        generation: generation.map(|generation| generation.number),
        generation_began_at: generation.map(|generation| generation.began_at),
        release: generation.map(|_| space.release().name().to_owned()),
        topology: generation.map(|generation| json!(generation.shape)),
        retired_generations: generation.map_or(0, |generation| generation.retired.len()),
        complete: space.is_complete(),
        draining_since: space.draining_since_opt,
        problem: fleet.unhealthy(namespace),
        ranks_expected: space.expected(),
        ranks_present: ranks
            .map(|(id, rank)| describe_rank(fleet, namespace, *id, rank))
            .collect(),
        ranks_missing: missing(space),
        ranks_missing_count: space.expected().saturating_sub(space.ranks.len()),
        registrations: registered
            .map(|(key, known)| registrations::describe(fleet, namespace, key, known, false))
            .collect(),
        reports: fleet
            .reports
            .after(None, usize::MAX, Some(namespace), Instant::now()),
    }
}

fn missing(space: &Namespace) -> Vec<String> {
    let missing = space.missing(MAX_LISTED).into_iter();
    missing.map(|id| id.to_string()).collect()
}

fn describe_rank(fleet: &Fleet, namespace: &str, id: RankId, rank: &Rank) -> api::Rank {
    let place = Place::rank(namespace, id);
    api::Rank {
        rank: id.to_string(),
        dp: id.dp,
        cp: id.cp,
        tp: id.tp,
        pp: id.pp,
        instance: rank.instance(),
        prefill_http_port: rank.http_port,
        registered_at: rank.registered_at,
        age_seconds: now().saturating_sub(rank.registered_at),
        reachable: fleet.probes.is_reachable(&place, &rank.instance()),
        unreachable_since: fleet.probes.unreachable_since(&place, &rank.instance()),
        release: rank.release.name().to_owned(),
        unknown_fields: json!(rank.unknown_fields),
    }
}

/// Lists an engine's ranks: those that are there, and the names of those that are missing.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/ranks", tag = "engines", params(("namespace" = String, Path, description = "the engine's name"), RankPaging, RankFilter),
    responses((status = 200, description = "a page", body = api::RankList), (status = 400, description = "bad query", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn ranks(
    fleet: Data<Fleet>,
    path: Path<String>,
    paging: Query<RankPaging>,
    filter: Query<RankFilter>,
) -> Result<HttpResponse, ApiError> {
    let limit = checked_limit(paging.limit)?;
    known_engine(&fleet, &path)?;
    let from = match &paging.after {
        None => Bound::Unbounded,
        Some(after) => Bound::Excluded(rank_id(after)?),
    };
    let state = fleet.registrations.state();
    let empty = Namespace::default();
    let space = state.get(&path).unwrap_or(&empty);
    let behind = space.ranks.range((from, Bound::Unbounded));
    let shown = behind.map(|(id, rank)| describe_rank(&fleet, &path, *id, rank));
    let wanted = shown.filter(|rank| {
        filter
            .reachable
            .is_none_or(|wanted| rank.reachable == Some(wanted))
    });
    let ranks: Vec<api::Rank> = wanted.take(limit).collect();
    let list = api::RankList {
        ranks_expected: space.expected(),
        ranks_missing: missing(space),
        next: next(&ranks, limit, |rank| rank.rank.clone()),
        ranks,
    };
    Ok(HttpResponse::Ok().json(list))
}

fn rank_id(text: &str) -> Result<RankId, ApiError> {
    text.parse().map_err(|()| {
        let message =
            format!("{text:?} names no rank, as \"dp0 cp0 tp1 pp0\" or dp0-cp0-tp1-pp0 does");
        ApiError::new(400, "bad_rank", message)
    })
}

/// Lists an engine's generations, the present one first.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/generations", tag = "engines", params(("namespace" = String, Path, description = "the engine's name")),
    responses((status = 200, description = "all that are remembered", body = api::GenerationList), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn generations(
    fleet: Data<Fleet>,
    path: Path<String>,
) -> Result<HttpResponse, ApiError> {
    known_engine(&fleet, &path)?;
    let state = fleet.registrations.state();
    let mut generations = Vec::new();
    let space_opt = state.namespaces.get(path.as_str());
    if let Some((space, present)) =
        space_opt.and_then(|space| Some((space, space.generation_opt.as_ref()?)))
    {
        let instances = space
            .ranks
            .iter()
            .map(|(id, rank)| (id.to_string(), rank.instance()));
        generations.push(api::Generation {
            generation: present.number,
            present: true,
            began_at: Some(present.began_at),
            topology: json!(present.shape),
            instances: instances.collect(),
        });
        generations.extend(present.retired.iter().rev().map(|retired| {
            api::Generation {
                generation: retired.generation,
                present: false,
                began_at: None,
                topology: json!(retired.shape),
                instances: retired
                    .instances
                    .iter()
                    .map(|(instance, id)| (id.to_string(), instance.clone()))
                    .collect(),
            }
        }));
    }
    Ok(HttpResponse::Ok().json(api::GenerationList { generations }))
}

/// Removes an engine: its ranks, generations and registrations. Ranks that live may register again.
#[utoipa::path(
    delete, path = "/v1/engines/{namespace}", tag = "engines", params(("namespace" = String, Path, description = "the engine's name")),
    responses((status = 204, description = "removed"), (status = 404, description = "no such engine", body = api::ErrorBody), (status = 503, description = "not durable", body = api::ErrorBody))
)]
pub(crate) async fn delete(
    request: HttpRequest,
    fleet: Data<Fleet>,
    path: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let commands = vec![(path.to_string(), Command::DeleteEngine)];
    change(&fleet, commands, &Who::of(&request), || {
        unknown_engine(&path)
    })
    .await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Removes one rank, for example of a host that will not come back.
#[utoipa::path(
    delete, path = "/v1/engines/{namespace}/ranks/{rank}", tag = "engines",
    params(("namespace" = String, Path, description = "the engine's name"), ("rank" = String, Path, pattern = "^dp[0-9]{1,9}[ -]cp[0-9]{1,9}[ -]tp[0-9]{1,9}[ -]pp[0-9]{1,9}$", description = "its name, for example dp0-cp0-tp1-pp0")),
    responses((status = 204, description = "removed"), (status = 400, description = "no rank's name", body = api::ErrorBody), (status = 404, description = "no such rank", body = api::ErrorBody), (status = 503, description = "not durable", body = api::ErrorBody))
)]
pub(crate) async fn delete_rank(
    request: HttpRequest,
    fleet: Data<Fleet>,
    path: Path<(String, String)>,
) -> Result<HttpResponse, ApiError> {
    let (namespace, rank) = path.into_inner();
    let id = rank_id(&rank)?;
    let unknown = || {
        let message =
            format!("{namespace} has no rank {id}; GET /v1/engines/{namespace}/ranks lists them");
        ApiError::new(404, "unknown_rank", message)
    };
    let commands = vec![(namespace.clone(), Command::DeleteRank(id))];
    change(&fleet, commands, &Who::of(&request), unknown).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Maintenance: an engine that drains takes no new rooms. Rooms that it knows, its ranks'
/// registrations and everything that decodes read are served as before, and restarts change
/// nothing of it.
#[utoipa::path(
    put, path = "/v1/engines/{namespace}/drain", tag = "engines", params(("namespace" = String, Path, description = "the engine's name")), request_body = api::Drain,
    responses((status = 200, description = "as asked for", body = api::EngineSummary), (status = 400, description = "bad body", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody), (status = 413, description = "a long body", body = api::ErrorBody), (status = 503, description = "not durable", body = api::ErrorBody))
)]
pub(crate) async fn drain(
    request: HttpRequest,
    fleet: Data<Fleet>,
    path: Path<String>,
    body: Json<api::Drain>,
) -> Result<HttpResponse, ApiError> {
    known_engine(&fleet, &path)?;
    let commands = vec![(path.to_string(), Command::SetDraining(body.draining))];
    change(&fleet, commands, &Who::of(&request), || {
        unknown_engine(&path)
    })
    .await?;
    let state = fleet.registrations.state();
    let empty = Namespace::default();
    let space = state.get(&path).unwrap_or(&empty);
    Ok(HttpResponse::Ok().json(summary(&fleet, &path, space)))
}
