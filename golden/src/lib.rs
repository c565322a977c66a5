//! Golden data: where it is, and how a test says how much of it matched.
//!
//! Only tests depend on this; it knows nothing of the formats.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

/// The folder: `FERRY_GOLDEN`, else `tests/golden` of the workspace.
pub fn folder() -> PathBuf {
    std::env::var_os("FERRY_GOLDEN").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")),
        PathBuf::from,
    )
}

/// A file's content; `Null`, so no cases, when the folder has no such file.
pub fn load(name: &str) -> Value {
    let path = folder().join(name);
    match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).expect("golden data is JSON"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("no {}: 0 cases", path.display());
            Value::Null
        }
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// Counts what matched, what deviates by a rule, and collects what is wrong.
#[derive(Debug, Default)]
pub struct Tally {
    matched: usize,
    deviations: BTreeMap<&'static str, usize>,
    wrong: Vec<String>,
}

impl Tally {
    /// A case that gave the recorded result.
    pub fn matched(&mut self) {
        self.matched += 1;
    }

    /// A case that differs by a rule of the specification.
    pub fn deviates(&mut self, rule: &'static str) {
        *self.deviations.entry(rule).or_default() += 1;
    }

    /// A case that differs although no rule says so.
    pub fn wrong(&mut self, case: impl std::fmt::Display) {
        self.wrong.push(case.to_string());
    }

    /// Takes the recorded and our result: equal is a match (a rule that claims a deviation would
    /// then be stale, which is wrong), different must be claimed by a rule.
    pub fn compare<T: PartialEq + std::fmt::Debug>(
        &mut self,
        case: impl std::fmt::Display,
        recorded: &T,
        ours: &T,
        rule: Option<&'static str>,
    ) {
        match (recorded == ours, rule) {
            (true, None) => self.matched(),
            (false, Some(rule)) => self.deviates(rule),
            (true, Some(rule)) => self.wrong(format!("{case}: no longer deviates by rule: {rule}")),
            (false, None) => {
                self.wrong(format!(
                    "{case}:\n  recorded {recorded:?}\n  ours     {ours:?}"
                ));
            }
        }
    }

    /// Prints the counts and fails when anything was wrong.
    pub fn finish(self, section: &str) {
        println!("{section}: {} matched", self.matched);
        for (rule, cases) in &self.deviations {
            println!("{section}: {cases} deviate by rule: {rule}");
        }
        assert!(
            self.wrong.is_empty(),
            "{section}: {} wrong\n{}",
            self.wrong.len(),
            self.wrong.join("\n")
        );
    }
}

/// The elements of a list that may be absent.
pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// A number that golden data keeps as a number or as a decimal string.
pub fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Number(number) => number
            .as_i64()
            .map(i128::from)
            .or(number.as_u64().map(i128::from)),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}
