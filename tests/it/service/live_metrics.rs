//! What a running pair serves is what the dashboards ask for.

use std::collections::{BTreeMap, BTreeSet};

use common::metrics as names;
use serde_json::Value;
use tests::process::wait_for;
use transfer_actor::api::RoomStatus;

use super::{AUX_BYTES, KV_BYTES, MAMBA_BYTES, Pair, begin, cross, whole_chunk};

/// All PromQL in a dashboard.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                match inner {
                    Value::String(text) if key == "expr" => found.push(text.clone()),
                    _ => expressions(inner, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|inner| expressions(inner, found)),
        _ => {}
    }
}

fn is_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

/// The labels that a query needs of each of its metrics: those of its matchers and those that it
/// groups by. Prometheus itself adds `instance`.
fn asked_of(query: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut grouped: BTreeSet<String> = BTreeSet::new();
    for rest in query.split("by (").skip(1) {
        let list = rest.split(')').next().unwrap_or_default();
        grouped.extend(list.split(',').map(|label| label.trim().to_owned()));
    }
    let mut asked = BTreeMap::new();
    for (at, _) in query.match_indices("ferry_") {
        let rest = &query[at..];
        let name: String = rest.chars().take_while(|next| is_word(*next)).collect();
        let matchers = rest[name.len()..]
            .strip_prefix('{')
            .and_then(|rest| rest.split('}').next());
        let matchers = matchers.unwrap_or_default().split(',');
        let matched =
            matchers.filter_map(|matcher| Some(matcher.split_once('=')?.0.trim().to_owned()));
        let labels: &mut BTreeSet<String> = asked.entry(name).or_default();
        labels.extend(matched);
        labels.extend(grouped.iter().cloned());
        labels.remove("instance");
    }
    asked
}

/// The label sets under which each series is served.
fn served(text: &str) -> BTreeMap<String, Vec<BTreeSet<String>>> {
    let mut served: BTreeMap<String, Vec<BTreeSet<String>>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let series = line.rsplit_once(' ').map_or(line, |(series, _)| series);
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let labels = labels.trim_end_matches('}').split("\",");
        let labels = labels.filter_map(|label| Some(label.split_once('=')?.0.to_owned()));
        served
            .entry(name.to_owned())
            .or_default()
            .push(labels.collect());
    }
    served
}

/// Makes everything happen that has a metric: a write that fails, a message that is none, a late
/// one, and one to a peer that is gone. Returns what both services then served.
fn make_everything_happen(pair: &mut Pair) -> [String; 2] {
    begin(&pair.prefill, &pair.decode, 2);
    pair.prefill.send(2, whole_chunk()).expect("it is accepted");
    for engine in [&pair.prefill, &pair.decode] {
        let failed = engine.wait(2, RoomStatus::Success);
        let reason = failed.reason.unwrap_or_default();
        assert!(reason.contains("an injected fault"), "{reason}");
    }
    let control = pair.prefill.client.control().to_owned();
    let garbage = async {
        let peer = zmtp::PushPeer::new(&control, zmtp::PushOptions::default());
        peer.send(&[b"garbage".to_vec()]).await
    };
    let sent = pair.prefill.runtime.block_on(garbage);
    sent.expect("it is sent");
    // The decode gives a room up that its prefill has forgotten.
    begin(&pair.prefill, &pair.decode, 3);
    pair.prefill.clear(3);
    pair.decode.wait(3, RoomStatus::Success);
    let prefill = wait_for("the prefill's metrics", || {
        let counted = |name| pair.prefill_service.metric(name, &[]) > 0.0;
        let names = [
            names::ROOM_LATE_MESSAGES,
            names::CONTROL_MALFORMED,
            names::PEERS,
        ];
        let is_there = names.into_iter().all(counted);
        is_there.then(|| pair.prefill_service.metrics())
    });
    pair.prefill_service.kill();
    pair.decode.open(4);
    pair.decode.announce(4);
    pair.decode.wait(4, RoomStatus::Success);
    let decode = wait_for("the decode's metrics", || {
        let failed = pair
            .decode_service
            .metric(names::CONTROL_SEND_FAILURES, &[]);
        (failed > 0.0).then(|| pair.decode_service.metrics())
    });
    [prefill, decode]
}

/// What only a service with network devices serves.
pub(super) const RDMA_DEVICE_NAMES: [&str; 4] = [
    names::RDMA_DEVICE_BYTES,
    names::RDMA_DEVICE_FAILURES,
    names::RDMA_DEVICE_LEFT,
    names::RDMA_DEVICE_UP,
];

#[test]
fn the_bytes_that_moved_are_counted_once_under_their_component() {
    let pair = Pair::start(&[]);
    for room in 1..=3 {
        cross(&pair.prefill, &pair.decode, room);
        let bytes = |labels: &[&str]| {
            let service = &pair.prefill_service;
            service.metric(names::TRANSFER_BYTES, labels)
        };
        for (component, moved) in [
            ("component=\"kv\"", KV_BYTES),
            ("component=\"mamba\"", MAMBA_BYTES),
            ("component=\"aux\"", AUX_BYTES),
        ] {
            let labels = [component, "transport=\"tcp\"", "role=\"prefill\""];
            assert_eq!(bytes(&labels), (room * moved) as f64, "{component}");
        }
        let all = KV_BYTES + MAMBA_BYTES + AUX_BYTES;
        assert_eq!(bytes(&[]), (room * all) as f64, "nothing else is counted");
        let at_decode = pair.decode_service.metric(names::TRANSFER_BYTES, &[]);
        assert_eq!(at_decode, 0.0, "only the writer counts");
    }
}

#[test]
fn every_query_of_the_transfer_dashboard_finds_a_series_with_its_labels() {
    let fault = ["--inject-fault", "fail:kv:1"];
    let mut pair = Pair::start_over("tcp", &fault, &["--verify", "sampled"]);
    cross(&pair.prefill, &pair.decode, 1);
    let texts = make_everything_happen(&mut pair);
    let served = served(&texts.join("\n"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../dashboards/transfers.json");
    let dashboard = std::fs::read(path).expect("the dashboard is there");
    let dashboard = serde_json::from_slice(&dashboard).expect("JSON");
    let mut queries = Vec::new();
    expressions(&dashboard, &mut queries);
    let mut asked_for = BTreeSet::new();
    let mut missing = Vec::new();
    for query in &queries {
        for (name, labels) in asked_of(query) {
            // `rdma_links` has network devices.
            if RDMA_DEVICE_NAMES.contains(&name.as_str()) {
                continue;
            }
            let found = served.get(&name).into_iter().flatten();
            if !found.clone().any(|series| series.is_superset(&labels)) {
                let found: BTreeSet<_> = found.collect();
                missing.push(format!("{name} with {labels:?}; served with {found:?}"));
            }
            asked_for.insert(name);
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(asked_for.len() >= 14, "{asked_for:?}");
}

#[test]
fn labels_are_read_from_queries_and_series() {
    let query = "histogram_quantile(0.5, sum by (role, le) (rate(ferry_a_bucket{instance=~\"$i\", kind=\"x\"}[5m]))) / ferry_b";
    let asked = asked_of(query);
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(asked["ferry_a_bucket"], set(&["kind", "le", "role"]));
    assert_eq!(asked["ferry_b"], set(&["le", "role"]));
    let served = served("# HELP ferry_b\nferry_b{role=\"x\",kind=\"y, z=\"} 1\nferry_c 2");
    assert_eq!(served["ferry_b"], [set(&["kind", "role"])]);
    assert_eq!(served["ferry_c"], [set(&[])]);
}
