//! What operators see of running ranks: transports, bytes by component, why rooms failed.

use tests::http::Request;
use tests::process::wait_for;

use super::*;

/// The report of one side once it says something.
fn report_of(pair: &Pair, role: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    wait_for(&format!("a report of the {role}: {what}"), || {
        let reports = pair.server.json("/v1/reports?namespace=default")["reports"].take();
        let mut of_role = reports.as_array().into_iter().flatten();
        of_role
            .find(|report| report["report"]["role"] == role && holds(report))
            .cloned()
    })
}

#[test]
fn operators_see_what_both_sides_moved_and_why_a_room_failed() {
    let pair = Pair::start(&["--report-interval", "1"]);
    cross(&pair.prefill, &pair.decode, 71);
    let report = report_of(&pair, "prefill", "what moved", |report| {
        report["report"]["components"].as_array().map(Vec::len) == Some(3)
    });
    assert_eq!(report["namespace"], "default");
    assert_eq!(report["stale"], false);
    assert_eq!(report["report"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["report"]["rank"], "dp0 cp0 tp0 pp0");
    assert_eq!(
        report["report"]["components"],
        json!([
            { "component": "aux", "bytes": AUX_BYTES, "failures": 0 },
            { "component": "kv", "bytes": KV_BYTES, "failures": 0 },
            { "component": "mamba", "bytes": MAMBA_BYTES, "failures": 0 },
        ])
    );
    let peers = report["report"]["peers"].as_array().expect("a list");
    assert_eq!(peers.len(), 1, "{peers:?}");
    assert_eq!(peers[0]["transport"], "tcp");

    begin(&pair.prefill, &pair.decode, 72);
    pair.prefill.abort(72, "the reader went away");
    for role in ["prefill", "decode"] {
        let report = report_of(&pair, role, "a failure", |report| {
            report["report"]["failures"][0]["room"] == 72
        });
        let reason = report["report"]["failures"][0]["reason"].as_str();
        let reason = reason.expect("a text");
        assert!(reason.contains("the reader went away"), "{role}: {reason}");
    }
    let events = pair.server.json("/v1/events?kind=failure")["events"].take();
    let told = events.as_array().expect("a list");
    let is_told = told.iter().any(|event| {
        let text = event.to_string();
        text.contains("room 72 failed") && text.contains("the reader went away")
    });
    assert!(is_told, "{told:?}");
    let metrics = Request::get("/metrics")
        .send(pair.server.admin())
        .expect("an answer")
        .text();
    for line in [
        "ferry_bootstrap_reports_current_count{namespace=\"default\",state=\"fresh\"} 2",
        "ferry_bootstrap_events_total{kind=\"failure\"}",
        "ferry_bootstrap_draining_state{namespace=\"default\"} 0",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
}
