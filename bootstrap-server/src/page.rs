//! A page to look at: which ranks are there, which are missing, what is registered.

use actix_web::HttpResponse;
use actix_web::web::Data;
use serde_json::Value;

use crate::admin::describe;
use crate::fleet::Fleet;

const STYLE: &str = "body{font:15px system-ui;margin:2em;max-width:70em}table{border-collapse:collapse;\
                     margin:.5em 0 1.5em}td,th{border:1px solid #ccc;padding:.3em .7em;text-align:left}\
                     .bad{color:#b00}.good{color:#070}";

/// `GET /`.
pub(crate) async fn page(fleet: Data<Fleet>) -> HttpResponse {
    let state = fleet.registrations.state();
    let mut html = format!(
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5><title>Ferry bootstrap \
         server</title><style>{STYLE}</style><h1>Ferry bootstrap server</h1>"
    );
    if state.namespaces.is_empty() {
        html.push_str("<p>No engine has registered yet. Ranks register with PUT /route.</p>");
    }
    for (name, space) in &state.namespaces {
        let engine = describe(&fleet, name, space);
        if let Some(reason) = fleet.unhealthy(name) {
            html.push_str(&format!("<p class=bad>{}</p>", escaped(&reason)));
        }
        let class = if space.is_complete() { "good" } else { "bad" };
        html.push_str(&format!(
            "<h2>{}</h2><p class={class}>{} of {} ranks, generation {}, SGLang {}</p>",
            escaped(name),
            space.ranks.len(),
            space.expected(),
            shown(engine.get("generation")),
            shown(engine.get("release")),
        ));
        table(
            &mut html,
            &engine,
            "ranks_present",
            &["rank", "instance", "age_seconds", "reachable"],
        );
        let missing = engine
            .get("ranks_missing")
            .and_then(Value::as_array)
            .filter(|list| !list.is_empty());
        if let Some(missing) = missing {
            let missing: Vec<String> = missing.iter().map(|rank| shown(Some(rank))).collect();
            html.push_str(&format!("<p class=bad>missing: {}</p>", missing.join(", ")));
        }
        table(
            &mut html,
            &engine,
            "registrations",
            &["engine_key", "role", "instance", "age_seconds", "reachable"],
        );
    }
    html.push_str("<p><a href=/v1/engines>/v1/engines</a> <a href=/metrics>/metrics</a></p>");
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .body(html)
}

fn table(html: &mut String, engine: &Value, list: &str, columns: &[&str]) {
    let Some(rows) = engine
        .get(list)
        .and_then(Value::as_array)
        .filter(|rows| !rows.is_empty())
    else {
        return;
    };
    html.push_str("<table><tr>");
    columns
        .iter()
        .for_each(|column| html.push_str(&format!("<th>{column}</th>")));
    html.push_str("</tr>");
    for row in rows {
        html.push_str("<tr>");
        columns
            .iter()
            .for_each(|column| html.push_str(&format!("<td>{}</td>", shown(row.get(column)))));
        html.push_str("</tr>");
    }
    html.push_str("</table>");
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => escaped(text),
        Some(other) => escaped(&other.to_string()),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
