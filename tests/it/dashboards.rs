//! Every metric and label that a dashboard or a rule asks for exists.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../dashboards"))
}

/// All PromQL in a dashboard: expressions and variables' queries.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match inner {
                    Value::String(text) if key == "expr" || key == "query" => {
                        found.push(text.clone())
                    }
                    _ => queries(inner, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|inner| queries(inner, found)),
        _ => {}
    }
}

fn names_in(query: &str) -> BTreeSet<String> {
    let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let words = query.split(|character| !is_name(character));
    words
        .filter(|word| word.starts_with("ferry_"))
        .map(str::to_owned)
        .collect()
}

/// The families that the two kinds of processes serve; histograms also as their parts.
fn served() -> BTreeSet<String> {
    let registry = common::metrics::ALL.iter().map(|name| (*name).to_owned());
    let histograms = common::metrics::ALL
        .iter()
        .filter(|name| name.ends_with("_seconds"));
    let parts = histograms
        .flat_map(|name| ["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
    registry.chain(parts).collect()
}

#[test]
fn every_query_of_the_dashboards_names_metrics_that_exist() {
    let served = served();
    let mut asked = 0;
    for entry in std::fs::read_dir(folder()).expect("the folder exists") {
        let path = entry.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("text");
        let mut found = Vec::new();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => queries(&serde_json::from_str(&text).expect("json"), &mut found),
            Some("yml") => found.push(text),
            _ => continue,
        }
        for query in &found {
            for name in names_in(query) {
                assert!(
                    served.contains(&name),
                    "{}: {name} does not exist: {query}",
                    path.display()
                );
                asked += 1;
            }
        }
    }
    println!("{asked} metrics asked for, all exist");
    assert!(asked > 40);
}

#[test]
fn every_declared_metric_is_registered_by_a_process() {
    let transfer = prometheus::Registry::new();
    let transfer_metrics =
        transfer_actor::metrics::TransferMetrics::new(&transfer).expect("registered");
    let bootstrap = bootstrap_server::metrics::Metrics::new().expect("registered");
    drop((transfer_metrics, bootstrap));
    // A name that is declared and registered by neither would be asked for in vain: registering
    // it a second time must fail for every one.
    let bootstrap = bootstrap_server::metrics::Metrics::new()
        .expect("registered")
        .registry;
    for name in common::metrics::ALL {
        let again = |registry: &prometheus::Registry| {
            let counter = prometheus::IntCounter::new(*name, "a second one").expect("a counter");
            registry.register(Box::new(counter)).is_err()
        };
        assert!(
            again(&transfer) || again(&bootstrap),
            "{name} is declared, and nobody serves it"
        );
    }
}
