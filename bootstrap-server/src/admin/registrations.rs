//! Registered io engines: what ranks put on their engine's port, and what operators see of it.

use std::ops::Bound;
use std::sync::Arc;

use actix_web::web::{Data, Json, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use common::wire::descriptor::{MemoryDesc, MemoryLocation};
use common::wire::route::RegistrationBody;
use common::wire::{ControlMessage, Register, decode_message};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use super::{Paging, change, known_engine, next};
use crate::api;
use crate::error::ApiError;
use crate::fleet::{ByPort, Fleet};
use crate::guard::Who;
use crate::probe::{Place, may_probe};
use crate::registry::{Command, EngineRegistration};
use crate::writer::now;

/// Which registrations are wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct RegistrationFilter {
    /// Only `prefill` or only `decode`.
    role: Option<String>,
}

/// What is shown of a registration, with or without each of its buffers. The frames themselves
/// hold the keys of the engine's regions.
pub(crate) fn describe(
    fleet: &Fleet,
    namespace: &str,
    key: &str,
    registration: &EngineRegistration,
    is_whole: bool,
) -> api::Registration {
    let body = &registration.body;
    // It was decoded before it was stored; a later release of this server may be stricter.
    let register_opt = decode_register(body).ok();
    let place = Place::registration(namespace, key);
    api::Registration {
        engine_key: key.to_owned(),
        role: body.role.clone(),
        rank: body.rank,
        instance: body.instance.clone(),
        reachable: fleet.probes.is_reachable(&place, &body.instance),
        unreachable_since: fleet.probes.unreachable_since(&place, &body.instance),
        registered_at: registration.registered_at,
        age_seconds: now().saturating_sub(registration.registered_at),
        sglang_release: register_opt
            .as_ref()
            .map(|register| register.release.name().to_owned()),
        tp_size: register_opt.as_ref().map(|register| register.tp_size),
        components: register_opt
            .map(|register| components(&register, &body.component_types, is_whole)),
    }
}

pub(super) fn components(
    register: &Register,
    types: &[String],
    is_whole: bool,
) -> Vec<api::Component> {
    let present = |descs: &[MemoryDesc]| descs.iter().cloned().map(Some).collect::<Vec<_>>();
    let mut components = vec![api::Component {
        item_lengths: vec![register.kv_item_len],
        layer_ids: register.kv_layer_ids.clone(),
        ..component("kv", &present(&register.kv), is_whole)
    }];
    for (at, state) in register.states.iter().enumerate() {
        let kind = types.get(at).map_or("unknown", String::as_str);
        let lengths = register.state_item_lens.get(at).into_iter().flatten();
        let dims_opt = register.state_dims.get(at);
        let layer_ids_opt = register.state_layer_ids.get(at);
        components.push(api::Component {
            item_lengths: lengths.copied().map(u64::from).collect(),
            dims: dims_opt.cloned().unwrap_or_default(),
            layer_ids: layer_ids_opt.cloned().unwrap_or_default(),
            ..component(kind, state, is_whole)
        });
    }
    components.push(component("aux", &present(&register.aux), is_whole));
    components
}

fn component(kind: &str, descs: &[Option<MemoryDesc>], is_whole: bool) -> api::Component {
    let present = || descs.iter().flatten();
    let buffers = || descs.iter().map(|desc_opt| desc_opt.as_ref().map(buffer));
    api::Component {
        kind: kind.to_owned(),
        tensors: descs.len(),
        elided_tensors: descs.len() - present().count(),
        bytes: present().fold(0, |bytes, desc| desc.size.saturating_add(bytes)),
        item_lengths: Vec::new(),
        dims: Vec::new(),
        layer_ids: Vec::new(),
        buffers: is_whole.then(|| buffers().collect()),
    }
}

fn buffer(desc: &MemoryDesc) -> api::Buffer {
    let location = match desc.location {
        MemoryLocation::Host => "host",
        MemoryLocation::Device => "device",
        MemoryLocation::Unknown(_) => "unknown",
    };
    api::Buffer {
        id: desc.id,
        address: format!("{:#x}", desc.data),
        bytes: desc.size,
        location: location.to_owned(),
        device: Some(desc.device_id).filter(|device| *device >= 0),
        numa_node: Some(desc.numa_node).filter(|node| *node >= 0),
    }
}

/// Reads the REGISTER message of a registration.
///
/// # Errors
/// What is wrong with its frames.
pub(crate) fn decode_register(body: &RegistrationBody) -> Result<Register, String> {
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

fn page(
    fleet: &Fleet,
    namespace: &str,
    paging: &Paging,
    filter: &RegistrationFilter,
) -> Result<HttpResponse, ApiError> {
    let limit = paging.limit()?;
    let state = fleet.registrations.state();
    let from = paging
        .after
        .as_deref()
        .map_or(Bound::Unbounded, Bound::Excluded);
    let known = state
        .namespaces
        .get(namespace)
        .map(|space| &space.registrations);
    let behind = known.map(|known| known.range::<str, _>((from, Bound::Unbounded)));
    let wanted = behind.into_iter().flatten().filter(|(_, known)| {
        filter
            .role
            .as_ref()
            .is_none_or(|role| *role == known.body.role)
    });
    let shown = wanted.map(|(key, known)| describe(fleet, namespace, key, known, false));
    let registrations: Vec<api::Registration> = shown.take(limit).collect();
    let next = next(&registrations, limit, |known| known.engine_key.clone());
    Ok(HttpResponse::Ok().json(api::RegistrationList {
        registrations,
        next,
    }))
}

fn one(fleet: &Fleet, namespace: &str, key: &str) -> Result<HttpResponse, ApiError> {
    let state = fleet.registrations.state();
    let space_opt = state.namespaces.get(namespace);
    let known = space_opt.and_then(|space| space.registrations.get(key));
    let registration = known.ok_or_else(|| unknown_registration(key))?;
    Ok(HttpResponse::Ok().json(describe(fleet, namespace, key, registration, true)))
}

async fn remove(
    fleet: &Fleet,
    namespace: &str,
    key: &str,
    who: &Who,
) -> Result<HttpResponse, ApiError> {
    let commands = vec![(
        namespace.to_owned(),
        Command::DeleteRegistration(key.to_owned()),
    )];
    change(fleet, commands, who, || unknown_registration(key)).await?;
    Ok(HttpResponse::NoContent().finish())
}

/// Lists an engine's registrations, by key.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/registrations", tag = "engines", params(("namespace" = String, Path, description = "the engine's name"), Paging, RegistrationFilter),
    responses((status = 200, description = "a page", body = api::RegistrationList), (status = 400, description = "bad query", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn list(
    fleet: Data<Fleet>,
    path: Path<String>,
    paging: Query<Paging>,
    filter: Query<RegistrationFilter>,
) -> Result<HttpResponse, ApiError> {
    known_engine(&fleet, &path)?;
    page(&fleet, &path, &paging, &filter)
}

/// One registration, with each component's buffers.
#[utoipa::path(
    get, path = "/v1/engines/{namespace}/registrations/{key}", tag = "engines",
    params(("namespace" = String, Path, description = "the engine's name"), ("key" = String, Path, description = "the io engine's key")),
    responses((status = 200, description = "the registration", body = api::Registration), (status = 404, description = "no such registration", body = api::ErrorBody))
)]
pub(crate) async fn get(
    fleet: Data<Fleet>,
    path: Path<(String, String)>,
) -> Result<HttpResponse, ApiError> {
    let (namespace, key) = path.into_inner();
    one(&fleet, &namespace, &key)
}

/// Removes a registration.
#[utoipa::path(
    delete, path = "/v1/engines/{namespace}/registrations/{key}", tag = "engines",
    params(("namespace" = String, Path, description = "the engine's name"), ("key" = String, Path, description = "the io engine's key")),
    responses((status = 204, description = "removed"), (status = 404, description = "no such registration", body = api::ErrorBody), (status = 503, description = "not durable", body = api::ErrorBody))
)]
pub(crate) async fn delete(
    request: HttpRequest,
    fleet: Data<Fleet>,
    path: Path<(String, String)>,
) -> Result<HttpResponse, ApiError> {
    let (namespace, key) = path.into_inner();
    remove(&fleet, &namespace, &key, &Who::of(&request)).await
}

/// As [`list`], on the engine's own port.
pub(crate) async fn own_list(
    port: ByPort,
    paging: Query<Paging>,
    filter: Query<RegistrationFilter>,
) -> Result<HttpResponse, ApiError> {
    page(&port.fleet, &port.namespace, &paging, &filter)
}

/// As [`get`], on the engine's own port.
pub(crate) async fn own(port: ByPort, path: Path<String>) -> Result<HttpResponse, ApiError> {
    one(&port.fleet, &port.namespace, &path)
}

/// As [`delete`], on the engine's own port.
pub(crate) async fn delete_own(
    request: HttpRequest,
    port: ByPort,
    path: Path<String>,
) -> Result<HttpResponse, ApiError> {
    remove(&port.fleet, &port.namespace, &path, &Who::of(&request)).await
}

/// A rank registers its io engine, or what it knows of a peer's.
pub(crate) async fn put(
    request: HttpRequest,
    port: ByPort,
    path: Path<String>,
    body: Json<RegistrationBody>,
) -> Result<HttpResponse, ApiError> {
    let bad_request = |message: String| ApiError::new(400, "bad_registration", message);
    let body = body.into_inner();
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
    let commands = vec![(port.namespace.clone(), command)];
    change(&port.fleet, commands, &Who::of(&request), || {
        unknown_registration(&key)
    })
    .await?;
    Ok(HttpResponse::Ok().json(json!({ "engine_key": key })))
}

fn unknown_registration(key: &str) -> ApiError {
    let message = format!("there is no registration {key:?}; GET /v1/engines lists where they are");
    ApiError::new(404, "unknown_registration", message)
}
