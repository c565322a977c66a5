//! The whole registry as one document: backup and migration.

use std::collections::BTreeMap;

use actix_web::web::{Data, Json, Query};
use actix_web::{HttpRequest, HttpResponse};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::{change, registrations, unknown_engine};
use crate::api;
use crate::config::is_namespace;
use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::guard::Who;
use crate::registry::{Command, ExportedEngine, Namespace};
use crate::writer::now;

/// The version of the document.
const VERSION: u32 = 1;

/// What becomes of engines that an import does not name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ImportMode {
    /// They stay.
    #[default]
    Merge,
    /// They are removed.
    Replace,
}

/// How to import.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ImportOptions {
    /// What becomes of engines that the document does not name; they stay if absent.
    #[serde(default)]
    #[param(inline, required = false)]
    mode: ImportMode,
}

/// What to export.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ExportFilter {
    /// Only this engine.
    namespace: Option<String>,
}

/// The whole registry, or one engine of it. It holds what engines registered in full, the keys of
/// their regions included: whoever has it may write into their memory.
#[utoipa::path(
    get, path = "/v1/export", tag = "registry", params(ExportFilter),
    responses((status = 200, description = "the registry", body = api::Export), (status = 400, description = "bad query", body = api::ErrorBody), (status = 404, description = "no such engine", body = api::ErrorBody))
)]
pub(crate) async fn export(
    fleet: Data<Fleet>,
    filter: Query<ExportFilter>,
) -> Result<HttpResponse, ApiError> {
    let state = fleet.registrations.state();
    let only_opt = filter.namespace.as_ref();
    if let Some(only) = only_opt.filter(|only| !state.namespaces.contains_key(*only)) {
        return Err(unknown_engine(only));
    }
    let wanted = state.namespaces.iter();
    let wanted = wanted.filter(|(name, _)| only_opt.is_none_or(|only| only == *name));
    let engines = wanted.map(|(name, space)| {
        let value = serde_json::to_value(ExportedEngine::from(&**space));
        let value = value.map_err(|error| ApiError::new(500, "export", error.to_string()))?;
        Ok((name.clone(), value))
    });
    Ok(HttpResponse::Ok().json(api::Export {
        version: VERSION,
        exported_at: now(),
        engines: engines.collect::<Result<_, ApiError>>()?,
    }))
}

/// Takes engines from an export, all of them or, if anything is wrong, none. Engines of the same
/// name are replaced.
#[utoipa::path(
    post, path = "/v1/import", tag = "registry", params(ImportOptions), request_body = api::Export,
    responses((status = 200, description = "imported", body = api::Imported), (status = 400, description = "bad document", body = api::ErrorBody), (status = 413, description = "a long body", body = api::ErrorBody), (status = 503, description = "not durable", body = api::ErrorBody))
)]
pub(crate) async fn import(
    request: HttpRequest,
    fleet: Data<Fleet>,
    options: Query<ImportOptions>,
    document: Json<api::Export>,
) -> Result<HttpResponse, ApiError> {
    if document.version != VERSION {
        let message = format!(
            "a document of version {}, this server knows {VERSION}",
            document.version
        );
        return Err(ApiError::new(400, "bad_import", message));
    }
    if i64::try_from(document.exported_at).is_err() {
        let message = format!("exported_at is {}, no time", document.exported_at);
        return Err(ApiError::new(400, "bad_import", message));
    }
    let mut engines = BTreeMap::new();
    for (name, value) in document.into_inner().engines {
        let space = checked(&name, value).map_err(|reason| {
            ApiError::new(400, "bad_import", format!("engine {name:?}: {reason}"))
        })?;
        engines.insert(name, space);
    }
    let state = fleet.registrations.state();
    let others = state
        .namespaces
        .keys()
        .filter(|name| !engines.contains_key(*name));
    let others = others.filter(|_| options.mode == ImportMode::Replace);
    let removed: Vec<String> = others.cloned().collect();
    let names: Vec<String> = engines.keys().cloned().collect();
    let removals = removed
        .iter()
        .map(|name| (name.clone(), Command::Replace(Box::default())));
    let replaced = engines
        .into_iter()
        .map(|(name, space)| (name, Command::Replace(Box::new(space))));
    let commands = removals.chain(replaced).collect();
    change(&fleet, commands, &Who::of(&request), || {
        unknown_engine("import")
    })
    .await?;
    Ok(HttpResponse::Ok().json(api::Imported {
        engines: names,
        removed,
    }))
}

fn checked(name: &str, value: serde_json::Value) -> Result<Namespace, String> {
    if !is_namespace(name) {
        return Err("it is no engine's name".to_owned());
    }
    let engine: ExportedEngine =
        serde_json::from_value(value).map_err(|error| error.to_string())?;
    for (key, known) in &engine.registrations {
        let register = registrations::decode_register(&known.body)?;
        if register.engine.key != *key {
            return Err(format!(
                "the frames of {key} are of engine {}",
                register.engine.key
            ));
        }
    }
    Namespace::try_from(engine)
}

/// What is taken can be exported, and is then taken as the same.
#[cfg(fuzzing)]
pub(super) fn check_any(name: &str, value: serde_json::Value) {
    let Ok(space) = checked(name, value) else {
        return;
    };
    let exported = serde_json::to_value(ExportedEngine::from(&space)).expect("a document");
    assert_eq!(checked(name, exported), Ok(space));
}
