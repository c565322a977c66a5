//! What the load must notice, shown on real ranks: each test breaks one promise by hand.

use tests::process::{signal, wait_for};

use super::*;
use crate::fleet::{Fleet, RANKS, Target};

struct Checked {
    fleet: Fleet,
    load: Arc<Load>,
    /// A request between the two ranks that run.
    request: Request,
    _folder: tempfile::TempDir,
}

impl Checked {
    /// Starts one prefill and one decode rank. The request's rooms may take `limit`.
    async fn start(prefill: usize, limit: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let transports = ["shm", "cma", "tcp"].map(str::to_owned);
        let fleet = Fleet::start(folder.path(), None, &transports, &[prefill, RANKS]);
        let random = Random::from_seed(1);
        let mut load = Load::new(RANKS, fleet.bootstrap_addresses(), random, 100);
        load.limit = limit;
        let load = Arc::new(load);
        let engine = |rank| {
            let engine = fleet.engine(&load, rank);
            async { Arc::new(engine.await.expect("the rank attaches")) }
        };
        let sender = engine(prefill).await;
        let receiver = engine(RANKS).await;
        let request = load.request((prefill, sender), receiver);
        Self {
            fleet,
            load,
            request,
            _folder: folder,
        }
    }

    /// Runs the request as far as its rooms' ends.
    async fn run(&self) -> (End, End, Place) {
        let request = &self.request;
        let src = request.prefill.take().expect("a free place");
        let dst = request.decode.take().expect("a free place");
        request.prefill.fill(&src, request.room);
        let driven = request.drive(&src, &dst).await;
        driven
            .map_err(|(_, what, error)| format!("{what}: {error}"))
            .expect("it is driven");
        let (sent, got) = tokio::join!(
            request.end_of(&request.prefill),
            request.end_of(&request.decode)
        );
        (sent, got, dst)
    }

    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.load.violations))
    }
}

fn assert_told(told: &[String], what: &str) {
    assert!(
        told.len() == 1 && told[0].contains(what),
        "{what}: {told:?}"
    );
}

#[tokio::test]
async fn a_wrong_byte_in_any_part_of_a_success_is_told() {
    for prefill in 0..3 {
        let checked = Checked::start(prefill, LIMIT).await;
        let (sent, got, dst) = checked.run().await;
        let request = &checked.request;
        assert!(request.judge(&sent, &got, &dst));
        assert_eq!(checked.told(), [""; 0]);
        for (part, name) in [
            (0, "kv tensor 0 page 0"),
            (31, "kv tensor 3 page 7"),
            (32, "mamba"),
            (33, "aux"),
        ] {
            request.decode.spoil(&dst, part);
            assert!(!request.judge(&sent, &got, &dst));
            assert_told(
                &checked.told(),
                &format!("success with a wrong byte in {name}"),
            );
            request.decode.spoil(&dst, part);
        }
        assert!(request.judge(&sent, &got, &dst));
        // One side's success alone is no success.
        let failed = |end: End| match end {
            End::Seen(view) => End::Seen(RoomView {
                status: RoomStatus::Failed,
                ..view
            }),
            End::Unknown => End::Unknown,
        };
        assert!(request.judge(&failed(sent), &got, &dst));
        assert_told(
            &checked.told(),
            "the decode succeeded and the prefill did not",
        );
    }
}

#[tokio::test]
async fn a_room_that_hangs_is_told() {
    let checked = Checked::start(0, Duration::from_millis(300)).await;
    let request = &checked.request;
    let open = OpenRoom {
        room: request.room,
        bootstrap: Some(request.bootstrap.clone()),
        prefill_dp_rank: None,
        aux_index: None,
    };
    let opened = request.decode.client.open(open).await;
    opened.expect("the room is opened");
    request.end_of(&request.decode).await;
    assert_told(&checked.told(), "decode 0: the room hangs");
}

#[tokio::test]
async fn places_that_do_not_become_safe_are_told() {
    let checked = Checked::start(0, LIMIT).await;
    let request = &checked.request;
    let prefill = &request.prefill;
    let now = Instant::now();
    let long_ago = now.checked_sub(SAFE_WITHIN).expect("it runs for longer");
    let is_overdue = |ended| request.is_overdue(ended);
    assert!(is_overdue(long_ago) && !is_overdue(now));
    prefill.strike(false);
    assert!(!is_overdue(long_ago), "a stopped process may still write");
    prefill.repaired();
    assert!(!is_overdue(long_ago), "it was put right just now");
}

#[tokio::test]
async fn a_failure_without_a_cause_is_told_and_one_after_a_strike_is_not() {
    let checked = Checked::start(0, LIMIT).await;
    let (_, _, dst) = checked.run().await;
    let request = &checked.request;
    let failed = || End::Unknown;
    assert!(!request.judge(&failed(), &failed(), &dst));
    assert_told(
        &checked.told(),
        "failed though nothing was done to its ranks",
    );
    request.prefill.strike(false);
    request.prefill.repaired();
    assert!(!request.judge(&failed(), &failed(), &dst));
    assert_eq!(checked.told(), [""; 0]);
}

#[tokio::test]
async fn a_rank_that_ends_by_itself_is_told() {
    let mut checked = Checked::start(0, LIMIT).await;
    assert_eq!(checked.fleet.ended(), [""; 0]);
    signal(checked.fleet.pid(Target::Rank(RANKS)), "KILL");
    let told = wait_for("the end of the decode", || {
        Some(checked.fleet.ended()).filter(|ended| !ended.is_empty())
    });
    assert_told(&told, "decode 0 ended: signal: 9");
    // And so does the request that was to use it.
    let request = &checked.request;
    let error = request.decode.client.open(OpenRoom {
        room: request.room,
        bootstrap: Some(request.bootstrap.clone()),
        prefill_dp_rank: None,
        aux_index: None,
    });
    let error = error.await.expect_err("nobody is there");
    request.judge_error(&request.decode, "open", &error);
    assert_told(&checked.told(), "decode 0: open:");
}
