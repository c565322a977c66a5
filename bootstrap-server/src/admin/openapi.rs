//! The document that describes this API, made from the handlers and the shapes.

use actix_web::HttpResponse;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Content, Ref, ResponseBuilder};
use utoipa::{Modify, OpenApi};

use super::{engines, events, registrations, registry, reports, rooms};
use crate::health;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Ferry bootstrap server",
        description = "Who is registered, what happens, and what operators may do about it. Served on the admin port.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        engines::list, engines::get, engines::delete, engines::ranks, engines::delete_rank,
        engines::generations, engines::drain, rooms::list, registrations::list,
        registrations::get, registrations::delete, reports::list, events::list, events::stream,
        registry::export, registry::import, health::live, health::ready
    ),
    security((), ("token" = [])),
    modifiers(&Token, &Refusals),
)]
struct Document;

struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let token = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(token));
    }
}

/// What any request may be refused with, before it comes to its handler.
const REFUSALS: [(&str, &str); 4] = [
    (
        "400",
        "it breaks a rule of HTTP, or a query or body cannot be read",
    ),
    ("401", "the operators' token is missing or wrong"),
    ("408", "it did not arrive and end in time"),
    (
        "429",
        "too many requests from this address; see Retry-After",
    ),
];

struct Refusals;

impl Modify for Refusals {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let items = document.paths.paths.values_mut();
        let operations = items.flat_map(|item| {
            [
                &mut item.get,
                &mut item.put,
                &mut item.post,
                &mut item.delete,
            ]
        });
        for operation in operations.flatten() {
            for (status, why) in REFUSALS {
                let responses = &mut operation.responses.responses;
                responses.entry(status.to_owned()).or_insert_with(|| {
                    let body = Content::new(Some(Ref::from_schema_name("ErrorBody")));
                    let response = ResponseBuilder::new().description(why);
                    response.content("application/json", body).build().into()
                });
            }
        }
    }
}

/// The document, as JSON for people.
///
/// # Errors
/// When it cannot be written, which a test would have seen.
pub fn document() -> Result<String, serde_json::Error> {
    let mut text = Document::openapi().to_pretty_json()?;
    text.push('\n');
    Ok(text)
}

pub(super) async fn serve() -> HttpResponse {
    match document() {
        Ok(text) => HttpResponse::Ok()
            .content_type("application/json")
            .body(text),
        Err(error) => HttpResponse::InternalServerError().body(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    /// `FERRY_OVERWRITE=1` writes the document anew, to be reviewed as a change of the API.
    #[test]
    fn the_committed_document_is_the_present_one() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        let present = super::document().unwrap();
        if std::env::var_os("FERRY_OVERWRITE").is_some() {
            std::fs::write(file, &present).unwrap();
        }
        let committed = std::fs::read_to_string(file).unwrap_or_default();
        assert!(
            committed == present,
            "{file} is old; run this test with FERRY_OVERWRITE=1 and review what changes"
        );
    }
}
