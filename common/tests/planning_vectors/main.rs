//! Every case of `planning_vectors.json`: SGLang's own arithmetic, function by function, and whole
//! requests with every range that was written.

mod layers;
mod pages;
mod requests;
mod sharding;
mod topology;

use common::plan::PlanError;
use golden::{Tally, integer, list};
use serde_json::Value;

const FILE: &str = "planning_vectors.json";

/// The recorded value, or `Null` for an error: its words are free.
fn recorded(case: &Value) -> Value {
    if case.get("error").is_some() {
        Value::Null
    } else {
        case["out"].clone()
    }
}

fn or_null<T>(result: Result<T, PlanError>, value: impl FnOnce(T) -> Value) -> Value {
    result.map_or(Value::Null, value)
}

fn number<T: TryFrom<i128>>(value: &Value) -> T {
    integer(value)
        .and_then(|number| T::try_from(number).ok())
        .unwrap_or_else(|| panic!("an integer that fits: {value}"))
}

fn numbers<T: TryFrom<i128>>(value: &Value) -> Vec<T> {
    value
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(number)
        .collect()
}

fn optional<T: TryFrom<i128>>(value: &Value) -> Option<T> {
    integer(value).and_then(|number| T::try_from(number).ok())
}

/// Runs one section: `ours` gives our result and the rule, if one says that it deviates.
fn section(name: &str, ours: impl Fn(&Value) -> (Value, Option<&'static str>)) {
    let golden = golden::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, name) {
        let (result, rule) = ours(&case["in"]);
        tally.compare(&case["in"], &recorded(case), &result, rule);
    }
    tally.finish(name);
}
