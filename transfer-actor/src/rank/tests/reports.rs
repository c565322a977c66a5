//! What ranks tell the bootstrap server of themselves.

use super::*;

/// The report of a rank once it says something.
async fn reported(
    reports: &Reports,
    rank: &TestRank,
    what: &str,
    holds: impl Fn(&RankReport) -> bool,
) -> RankReport {
    let key = rank.rank.engine_key();
    let get = || reports.lock().expect("no panic").get(key).cloned();
    eventually(rank, what, |_| get().is_some_and(|report| holds(&report))).await;
    get().expect("it was there")
}

#[actix_rt::test]
async fn both_sides_report_what_moved_to_whom_and_why_rooms_failed() {
    let reports = Reports::default();
    let bootstrap = bootstrap_server_with(&reports);
    let fault = "fail:dsa:1".parse().expect("a fault");
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, Some(fault)).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    let report = reported(&reports, &prefill, "a first report", |_| true).await;
    assert_eq!(
        (report.role.as_str(), report.rank.as_str()),
        ("prefill", "dp0 cp0 tp0 pp0")
    );
    assert_eq!(report.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(report.instance, prefill.rank.control());
    for room in [7, 8] {
        prefill.open(room, &bootstrap).await;
        decode.open(room, &bootstrap).await;
        decode.announce(room).await;
        prefill.reach(room, RoomStatus::WaitingForInput).await;
        reported(&reports, &decode, "an open room", |report| {
            report.rooms_open == 1
        })
        .await;
        prefill.send(room, false).await;
        prefill.send(room, true).await;
        prefill.wait(room, RoomStatus::Success).await;
        decode.wait(room, RoomStatus::Success).await;
    }
    let has_failed = |report: &RankReport| !report.failures.is_empty();
    let of_prefill = reported(&reports, &prefill, "a failure", has_failed).await;
    let component = |name: &str| {
        let mut components = of_prefill.components.iter();
        let found = components.find(|component| component.component == name);
        let found = found.expect("it is reported");
        (found.bytes, found.failures)
    };
    assert_eq!(component("dsa"), (STATE_ROW, 1), "the second write failed");
    assert_eq!(component("kv").1, 0);
    assert!(component("kv").0 >= 4 * 2 * PAGE, "the first room's pages");
    let peers: Vec<&str> = of_prefill
        .peers
        .iter()
        .map(|peer| peer.engine_key.as_str())
        .collect();
    assert_eq!(peers, [decode.rank.engine_key()]);
    assert!(!of_prefill.peers[0].transport.is_empty());
    for report in [
        of_prefill,
        reported(&reports, &decode, "a failure", has_failed).await,
    ] {
        let failure = &report.failures[0];
        assert_eq!(failure.room, 8);
        let reason = &failure.reason;
        assert!(
            reason.contains("injected fault failed a write of dsa"),
            "{reason}"
        );
        assert_eq!(report.rooms_open, 0);
    }
}
