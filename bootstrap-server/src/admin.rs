//! The admin API under `/v1`.

use std::sync::Arc;

use actix_web::web::{self, Bytes, Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use common::wire::descriptor::MemoryDesc;
use common::wire::route::RegistrationBody;
use common::wire::{ControlMessage, Register, decode_message};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fleet::{ByPort, Fleet};
use crate::guard::Who;
use crate::probe::{Place, may_probe};
use crate::registry::{Command, EngineRegistration, Namespace, Rank, RankId, Refused};

use crate::writer::{STORE_BUSY, STORE_READ_ONLY, WriteError, now};

/// Missing ranks that are listed; more are only counted.
const MAX_LISTED: usize = 1024;

/// What ranks write, and read back, on their engine's port.
pub(crate) fn configure_engine(config: &mut web::ServiceConfig) {
    config
        .route("/v1/registrations", web::get().to(registrations))
        .route("/v1/registrations/{key:.+}", web::get().to(registration))
        .route(
            "/v1/registrations/{key:.+}",
            web::put().to(put_registration),
        )
        .route(
            "/v1/registrations/{key:.+}",
            web::delete().to(delete_registration),
        );
}

/// What operators read and write, of every engine.
pub(crate) fn configure_admin(config: &mut web::ServiceConfig) {
    config
        .route("/v1/engines", web::get().to(engines))
        .route("/v1/engines/{namespace}", web::get().to(engine))
        .route("/v1/engines/{namespace}", web::delete().to(delete_engine));
}

async fn engines(fleet: Data<Fleet>) -> HttpResponse {
    let state = fleet.registrations.state();
    let engines = state.namespaces.iter().map(|(name, space)| {
        json!({
            "namespace": name,
            "generation": space.generation_opt.as_ref().map(|generation| generation.number),
            "ranks_present": space.ranks.len(),
            "ranks_expected": space.expected(),
            "complete": space.is_complete(),
            "registrations": space.registrations.len(),
        })
    });
    HttpResponse::Ok().json(json!({ "engines": engines.collect::<Vec<_>>() }))
}

async fn engine(fleet: Data<Fleet>, path: Path<String>) -> Result<HttpResponse, ApiError> {
    let state = fleet.registrations.state();
    let space = state
        .namespaces
        .get(path.as_str())
        .ok_or_else(|| unknown_engine(&path))?;
    Ok(HttpResponse::Ok().json(describe(&fleet, &path, space)))
}

/// Everything that is known of one engine.
pub(crate) fn describe(fleet: &Fleet, namespace: &str, space: &Namespace) -> Value {
    let misses = fleet.config.probe_misses;
    let ranks = space.ranks.iter().map(|(id, rank)| {
        let place = Place::rank(namespace, *id);
        let reachable_opt = fleet.probes.is_reachable(&place, &rank.instance(), misses);
        describe_rank(*id, rank, reachable_opt)
    });
    let missing = space
        .missing(MAX_LISTED)
        .into_iter()
        .map(|id| json!(id.to_string()));
    let generation = space.generation_opt.as_ref();
    json!({
        "namespace": namespace,
        "generation": generation.map(|generation| generation.number),
        "generation_began_at": generation.map(|generation| generation.began_at),
        "release": generation.map(|_| space.release().name()),
        "topology": generation.map(|generation| json!(generation.shape)),
        "retired_generations": generation.map_or(0, |generation| generation.retired.len()),
        "complete": space.is_complete(),
        "ranks_expected": space.expected(),
        "ranks_present": ranks.collect::<Vec<_>>(),
        "ranks_missing": missing.collect::<Vec<_>>(),
        "ranks_missing_count": space.expected().saturating_sub(space.ranks.len()),
        "registrations": space.registrations.iter()
            .map(|(key, registration)| describe_registration(fleet, namespace, key, registration))
            .collect::<Vec<_>>(),
    })
}

fn describe_rank(id: RankId, rank: &Rank, reachable_opt: Option<bool>) -> Value {
    json!({
        "rank": id.to_string(),
        "dp": id.dp, "cp": id.cp, "tp": id.tp, "pp": id.pp,
        "instance": rank.instance(),
        "prefill_http_port": rank.http_port,
        "registered_at": rank.registered_at,
        "age_seconds": now().saturating_sub(rank.registered_at),
        "reachable": reachable_opt,
        "release": rank.release.name(),
        "unknown_fields": rank.unknown_fields,
    })
}

fn describe_registration(
    fleet: &Fleet,
    namespace: &str,
    key: &str,
    registration: &EngineRegistration,
) -> Value {
    let body = &registration.body;
    // It was decoded before it was stored; a later release of this server may be stricter.
    let register = decode_register(body).ok();
    json!({
        "engine_key": key,
        "role": body.role,
        "rank": body.rank,
        "instance": body.instance,
        "reachable": fleet.probes.is_reachable(
            &Place::registration(namespace, key), &body.instance, fleet.config.probe_misses),
        "registered_at": registration.registered_at,
        "age_seconds": now().saturating_sub(registration.registered_at),
        "sglang_release": register.as_ref().map(|register| register.release.name()),
        "tp_size": register.as_ref().map(|register| register.tp_size),
        "components": register.map(|register| components(&register, &body.component_types)),
    })
}

fn components(register: &Register, types: &[String]) -> Vec<Value> {
    let bytes = |descs: &[MemoryDesc]| descs.iter().map(|desc| desc.size).sum::<u64>();
    let mut components = vec![json!({
        "type": "kv",
        "tensors": register.kv.len(),
        "item_lengths": [register.kv_item_len],
        "layer_ids": register.kv_layer_ids,
        "bytes": bytes(&register.kv),
    })];
    for (at, state) in register.states.iter().enumerate() {
        let present: Vec<MemoryDesc> = state.iter().flatten().cloned().collect();
        components.push(json!({
            "type": types.get(at).map_or("unknown", String::as_str),
            "tensors": state.len(),
            "elided_tensors": state.len() - present.len(),
            "item_lengths": register.state_item_lens.get(at),
            "dims": register.state_dims.get(at),
            "layer_ids": register.state_layer_ids.get(at),
            "bytes": bytes(&present),
        }));
    }
    components.push(json!({
        "type": "aux",
        "tensors": register.aux.len(),
        "bytes": bytes(&register.aux),
    }));
    components
}

fn decode_register(body: &RegistrationBody) -> Result<Register, String> {
    let frames: Result<Vec<Vec<u8>>, _> = body.register_frames.iter().map(hex::decode).collect();
    let frames = frames.map_err(|error| format!("register_frames are no hex: {error}"))?;
    match decode_message(&frames)
        .map_err(|error| format!("register_frames: {error}"))?
        .message
    {
        ControlMessage::Register(register) => Ok(*register),
        other => Err(format!(
            "register_frames are a {}, expected a register",
            other.kind()
        )),
    }
}

async fn registrations(port: ByPort) -> HttpResponse {
    let state = port.fleet.registrations.state();
    let listed = state.namespaces.get(&port.namespace).map(|space| {
        let all = space.registrations.iter();
        all.map(|(key, registration)| {
            describe_registration(&port.fleet, &port.namespace, key, registration)
        })
        .collect::<Vec<_>>()
    });
    HttpResponse::Ok().json(json!({ "registrations": listed.unwrap_or_default() }))
}

async fn registration(port: ByPort, path: Path<String>) -> Result<HttpResponse, ApiError> {
    let state = port.fleet.registrations.state();
    let known = state
        .namespaces
        .get(&port.namespace)
        .and_then(|space| space.registrations.get(path.as_str()));
    let registration = known.ok_or_else(|| unknown_registration(&path))?;
    // The frames themselves hold the keys of the engine's regions, so they are not shown.
    let described = describe_registration(&port.fleet, &port.namespace, &path, registration);
    Ok(HttpResponse::Ok().json(described))
}

async fn put_registration(
    request: HttpRequest,
    port: ByPort,
    path: Path<String>,
    body: Bytes,
) -> Result<HttpResponse, ApiError> {
    let bad_request = |message: String| ApiError::new(400, "bad_registration", message);
    let body: RegistrationBody =
        serde_json::from_slice(&body).map_err(|error| bad_request(format!("the body: {error}")))?;
    if !["prefill", "decode"].contains(&body.role.as_str()) {
        return Err(bad_request(format!(
            "role {:?}: there are prefill and decode",
            body.role
        )));
    }
    let register = decode_register(&body).map_err(bad_request)?;
    let key = path.into_inner();
    if register.engine.key != key {
        let message = format!(
            "the path names engine {key}, the frames engine {}",
            register.engine.key
        );
        return Err(bad_request(message));
    }
    let peer_opt = request.peer_addr().map(|peer| peer.ip());
    let host = body.instance.rsplit_once(':').map_or("", |(host, _)| host);
    let registration = EngineRegistration {
        may_probe: may_probe(host, peer_opt),
        body,
        registered_at: now(),
    };
    let command = Command::PutRegistration(key.clone(), Arc::new(registration));
    change(
        &port.fleet,
        &port.namespace,
        command,
        &Who::of(&request),
        || unknown_registration(&key),
    )
    .await?;
    Ok(HttpResponse::Ok().json(json!({ "engine_key": key })))
}

async fn delete_registration(
    request: HttpRequest,
    port: ByPort,
    path: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let key = path.into_inner();
    let command = Command::DeleteRegistration(key.clone());
    change(
        &port.fleet,
        &port.namespace,
        command,
        &Who::of(&request),
        || unknown_registration(&key),
    )
    .await?;
    Ok(HttpResponse::NoContent().finish())
}

async fn delete_engine(
    request: HttpRequest,
    fleet: Data<Fleet>,
    path: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let namespace = path.into_inner();
    if !fleet
        .registrations
        .state()
        .namespaces
        .contains_key(&namespace)
    {
        return Err(unknown_engine(&namespace));
    }
    change(
        &fleet,
        &namespace,
        Command::DeleteEngine,
        &Who::of(&request),
        || unknown_engine(&namespace),
    )
    .await?;
    Ok(HttpResponse::NoContent().finish())
}

async fn change(
    fleet: &Fleet,
    namespace: &str,
    command: Command,
    who: &Who,
    unknown: impl FnOnce() -> ApiError,
) -> Result<(), ApiError> {
    match fleet.registrations.change(namespace, command, who).await {
        Ok(_) => Ok(()),
        Err(WriteError::Refused(Refused::Unknown)) => Err(unknown()),
        Err(WriteError::Refused(Refused::Inconsistent(reason))) => {
            Err(ApiError::new(400, "inconsistent", reason))
        }
        Err(WriteError::Refused(Refused::Retired(reason))) => {
            Err(ApiError::new(409, "retired", reason))
        }
        Err(error @ WriteError::ReadOnly(_)) => {
            Err(ApiError::new(503, STORE_READ_ONLY, error.to_string()))
        }
        Err(error @ WriteError::Busy) => Err(ApiError::new(503, STORE_BUSY, error.to_string())),
    }
}

fn unknown_engine(namespace: &str) -> ApiError {
    let message = format!("there is no engine {namespace:?}; GET /v1/engines lists them");
    ApiError::new(404, "unknown_engine", message)
}

fn unknown_registration(key: &str) -> ApiError {
    let message = format!("there is no registration {key:?}; GET /v1/registrations lists them");
    ApiError::new(404, "unknown_registration", message)
}
