//! The admin API under `/v1`: what operators read and change, and what ranks write on their
//! engine's port.

mod engines;
mod events;
mod openapi;
mod registrations;
mod registry;
mod reports;
mod rooms;

use actix_web::error::{JsonPayloadError, PathError, PayloadError, QueryPayloadError};
use actix_web::http::{Method, header};
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse, Resource, ResponseError, Route};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::error::ApiError;
use crate::fleet::Fleet;
use crate::guard::Who;
use crate::registry::{Command, Refused};
use crate::writer::{STORE_BUSY, STORE_READ_ONLY, WriteError};

pub use openapi::document;

/// Entries of one page, unless fewer or more are asked for.
const DEFAULT_LIMIT: usize = 100;
/// Bytes of an import at most: some 1,000 engines of 64 ranks and as many registrations.
const MAX_IMPORT_BYTES: usize = 256 << 20;
/// Entries of one page at most.
const MAX_LIMIT: usize = 1000;

/// Which part of a list is wanted.
#[derive(Clone, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct Paging {
    /// Entries at most, 1 to 1000; 100 if absent.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Begins behind this entry: the `next` of the page before.
    after: Option<String>,
}

impl Paging {
    fn limit(&self) -> Result<usize, ApiError> {
        checked_limit(self.limit)
    }
}

fn checked_limit(limit_opt: Option<usize>) -> Result<usize, ApiError> {
    let limit = limit_opt.unwrap_or(DEFAULT_LIMIT);
    if (1..=MAX_LIMIT).contains(&limit) {
        return Ok(limit);
    }
    let message = format!("limit is {limit}, it must be 1 to {MAX_LIMIT}");
    Err(ApiError::new(400, "bad_query", message))
}

/// Numbers of this API fit a signed integer of 64 bits, as its document says.
fn checked_number(name: &str, number_opt: Option<u64>) -> Result<Option<u64>, ApiError> {
    if number_opt.is_none_or(|number| i64::try_from(number).is_ok()) {
        return Ok(number_opt);
    }
    let message = format!("{name} is above {}", i64::MAX);
    Err(ApiError::new(400, "bad_query", message))
}

/// The last entry's name, if the page is full and there may be more.
fn next<T>(page: &[T], limit: usize, name: impl Fn(&T) -> String) -> Option<String> {
    page.last().filter(|_| page.len() == limit).map(name)
}

/// What ranks write, and read back, on their engine's port.
pub(crate) fn configure_engine(config: &mut web::ServiceConfig) {
    config
        .configure(refusals)
        .service(resource(
            "/v1/registrations",
            [(Method::GET, web::to(registrations::own_list))],
        ))
        .service(resource(
            "/v1/registrations/{key:.+}",
            [
                (Method::GET, web::to(registrations::own)),
                (Method::PUT, web::to(registrations::put)),
                (Method::DELETE, web::to(registrations::delete_own)),
            ],
        ))
        .service(resource(
            "/v1/reports/{key:.+}",
            [(Method::PUT, web::to(reports::put))],
        ));
}

/// What operators read and write, of every engine.
pub(crate) fn configure_admin(config: &mut web::ServiceConfig) {
    config
        .configure(refusals)
        .service(resource(
            "/v1/openapi.json",
            [(Method::GET, web::to(openapi::serve))],
        ))
        .service(resource(
            "/v1/engines",
            [(Method::GET, web::to(engines::list))],
        ))
        .service(resource(
            "/v1/engines/{namespace}",
            [
                (Method::GET, web::to(engines::get)),
                (Method::DELETE, web::to(engines::delete)),
            ],
        ))
        .service(resource(
            "/v1/engines/{namespace}/ranks",
            [(Method::GET, web::to(engines::ranks))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/ranks/{rank}",
            [(Method::DELETE, web::to(engines::delete_rank))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/generations",
            [(Method::GET, web::to(engines::generations))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/drain",
            [(Method::PUT, web::to(engines::drain))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/rooms",
            [(Method::GET, web::to(rooms::list))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/registrations",
            [(Method::GET, web::to(registrations::list))],
        ))
        .service(resource(
            "/v1/engines/{namespace}/registrations/{key:.+}",
            [
                (Method::GET, web::to(registrations::get)),
                (Method::DELETE, web::to(registrations::delete)),
            ],
        ))
        .service(resource(
            "/v1/reports",
            [(Method::GET, web::to(reports::list))],
        ))
        .service(resource(
            "/v1/events",
            [(Method::GET, web::to(events::list))],
        ))
        .service(resource(
            "/v1/events/stream",
            [(Method::GET, web::to(events::stream))],
        ))
        .service(resource(
            "/v1/export",
            [(Method::GET, web::to(registry::export))],
        ))
        .service(
            resource("/v1/import", [(Method::POST, web::to(registry::import))])
                .app_data(json_of_at_most(MAX_IMPORT_BYTES)),
        );
}

/// A path with the methods that it has; the others are refused as RFC 9110 wants it.
pub(crate) fn resource<const N: usize>(path: &str, routes: [(Method, Route); N]) -> Resource {
    let allowed = routes
        .each_ref()
        .map(|(method, _)| method.as_str())
        .join(", ");
    let resource = routes
        .into_iter()
        .fold(web::resource(path), |resource, (method, route)| {
            resource.route(route.method(method))
        });
    resource.default_service(web::to(move |request: HttpRequest| {
        let refused = refuse_method(&request, &allowed);
        async move { refused }
    }))
}

fn refuse_method(request: &HttpRequest, allowed: &str) -> HttpResponse {
    let message = format!(
        "{} is no method of {}, it has {allowed}",
        request.method(),
        request.path()
    );
    let mut response = ApiError::new(405, "method_not_allowed", message).error_response();
    if let Ok(allowed) = header::HeaderValue::from_str(allowed) {
        response.headers_mut().insert(header::ALLOW, allowed);
    }
    response
}

/// A path that is no part of this API.
pub(crate) async fn unknown_path(request: HttpRequest) -> Result<HttpResponse, ApiError> {
    let message = format!(
        "there is no {}; GET /v1/openapi.json lists what there is",
        request.path()
    );
    Err(ApiError::new(404, "unknown_path", message))
}

/// What cannot be read is told as every other error of this API.
fn refusals(config: &mut web::ServiceConfig) {
    let query = web::QueryConfig::default().error_handler(|error: QueryPayloadError, _| {
        let message = "the query has a value that this path does not take";
        ApiError::new(400, "bad_query", message)
            .with_detail(error)
            .into()
    });
    let path = web::PathConfig::default().error_handler(|error: PathError, _| {
        let message = "the path cannot be read";
        ApiError::new(404, "unknown_path", message)
            .with_detail(error)
            .into()
    });
    let json = json_of_at_most(crate::routes::MAX_BODY_BYTES);
    config.app_data(query).app_data(path).app_data(json);
}

fn json_of_at_most(limit: usize) -> web::JsonConfig {
    web::JsonConfig::default()
        .limit(limit)
        .content_type_required(false)
        .error_handler(move |error, _| refused_body(&error, limit).into())
}

fn refused_body(error: &JsonPayloadError, limit: usize) -> ApiError {
    let is_long = matches!(
        error,
        JsonPayloadError::Overflow { .. }
            | JsonPayloadError::OverflowKnownLength { .. }
            | JsonPayloadError::Payload(PayloadError::Overflow)
    );
    if is_long {
        let message = format!("a body has at most {limit} bytes here");
        return ApiError::new(413, "body_too_long", message);
    }
    let message = "the body is no JSON that this path takes; GET /v1/openapi.json describes it";
    ApiError::new(400, "bad_body", message).with_detail(error)
}

/// Makes changes, all or none of them.
async fn change(
    fleet: &Fleet,
    commands: Vec<(String, Command)>,
    who: &Who,
    unknown: impl FnOnce() -> ApiError,
) -> Result<(), ApiError> {
    match fleet.registrations.change_all(commands, who).await {
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

/// An engine must have registered, or this server must listen for it.
fn known_engine(fleet: &Data<Fleet>, namespace: &str) -> Result<(), ApiError> {
    let is_known = fleet
        .registrations
        .state()
        .namespaces
        .contains_key(namespace)
        || fleet.port(namespace).is_some();
    if is_known {
        Ok(())
    } else {
        Err(unknown_engine(namespace))
    }
}

/// Reads any bytes as each body that the API takes.
#[cfg(fuzzing)]
pub fn read_any_body(bytes: &[u8]) {
    use common::wire::route::{RankReport, RegistrationBody};

    let _ = serde_json::from_slice::<RankReport>(bytes);
    let _ = serde_json::from_slice::<crate::api::Drain>(bytes);
    if let Ok(body) = serde_json::from_slice::<RegistrationBody>(bytes)
        && let Ok(register) = registrations::decode_register(&body)
    {
        let shown = registrations::components(&register, &body.component_types, true);
        assert_eq!(shown.len(), register.states.len() + 2);
    }
    if let Ok(document) = serde_json::from_slice::<crate::api::Export>(bytes) {
        for (name, value) in document.engines {
            registry::check_any(&name, value);
        }
    }
}
