//! Rooms that do not end well: given up, failed, left by a side that died. Whatever happens, the
//! next request is served.

use serde_json::json;
use tests::process::wait_for;

use super::*;
use crate::conformance::rank::transports_opt;

const ROOM: u64 = 500;

fn request(room: u64) -> Request {
    Request::new(&setting().model, room, &[2, 4])
}

/// Serves a request that has nothing to do with what happened before.
async fn next_request(cluster: &mut Cluster) {
    cluster.decodes[0].prepare(None);
    let next = request(ROOM + 1);
    cluster.transfer(&next).await;
    cluster.clear(&next).await;
}

/// Waits until the decode may use an aborted room's pages again.
async fn wait_for_release(cluster: &mut Cluster) {
    let deadline = std::time::Instant::now() + DEADLINE;
    while !cluster.decodes[0].is_release_safe(ROOM).await {
        assert!(
            std::time::Instant::now() < deadline,
            "no acknowledgement came"
        );
    }
}

every_direction! {
    a_decode_gives_up_before_the_transfer => |direction| async move {
        let mut cluster = Cluster::start(&setting(), direction, ALONE).await;
        let request = request(ROOM);
        cluster.open(&request).await;
        cluster.decodes[0].abort(ROOM).await;
        cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
        wait_for_release(&mut cluster).await;
        cluster.decodes[0].check(None);
        next_request(&mut cluster).await;
    };
    a_decode_gives_up_between_two_chunks => |direction| async move {
        let mut cluster = Cluster::start(&setting(), direction, ALONE).await;
        let request = request(ROOM);
        cluster.open(&request).await;
        cluster.send_chunk(&request, 0).await;
        // The first chunk has landed, so what comes after it would be seen.
        wait_for_pages(&mut cluster, &request);
        cluster.decodes[0].abort(ROOM).await;
        cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
        if !cluster.prefills[0].is_ours() {
            // Ours refuses the chunk of a failed room; SGLang takes it and leaves it.
            cluster.send_chunk(&request, 1).await;
        }
        wait_for_release(&mut cluster).await;
        check_first_chunk(&mut cluster, &request);
        next_request(&mut cluster).await;
    };
    a_decode_gives_up_after_the_transfer => |direction| async move {
        let mut cluster = Cluster::start(&setting(), direction, ALONE).await;
        let request = request(ROOM);
        cluster.transfer(&request).await;
        cluster.decodes[0].abort(ROOM).await;
        wait_for_release(&mut cluster).await;
        assert_eq!(cluster.prefills[0].status(ROOM).await, RoomStatus::Success);
        cluster.check_landed(&request);
        cluster.clear(&request).await;
        next_request(&mut cluster).await;
    };
}

/// What a decode holds when only the first chunk has come.
fn first_chunk(request: &Request) -> Placement {
    Placement {
        pages: request.target.pages[..request.chunks[0]].to_vec(),
        states: vec![Vec::new(); request.target.states.len()],
        aux: -1,
    }
}

pub(super) fn wait_for_pages(cluster: &mut Cluster, request: &Request) {
    let landed = first_chunk(request);
    let decode = &mut cluster.decodes[0];
    wait_for("the first chunk", || {
        decode.holds((request.room, &landed, 0)).then_some(())
    });
}

pub(super) fn check_first_chunk(cluster: &mut Cluster, request: &Request) {
    let landed = first_chunk(request);
    cluster.decodes[0].check(Some((request.room, &landed, 0)));
}

/// SGLang's prefill has writes under way when our decode gives up: nothing is acknowledged before
/// they have drained, and what they wrote is where it was announced.
#[actix_rt::test]
async fn a_decode_gives_up_while_sglang_writes() {
    if !can_run("a_decode_gives_up_while_sglang_writes", &setting()) {
        return;
    }
    let mut cluster = Cluster::start(&setting(), Direction::SglangToOurs, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.prefills[0].ask("hold_writes", json!({}));
    cluster.send_chunk(&request, 0).await;
    cluster.prefills[0]
        .reach(ROOM, RoomStatus::Transferring)
        .await;
    cluster.decodes[0].abort(ROOM).await;
    cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    assert!(
        !cluster.decodes[0].is_release_safe(ROOM).await,
        "a write is under way"
    );
    cluster.prefills[0].ask("release_writes", json!({}));
    wait_for_release(&mut cluster).await;
    check_first_chunk(&mut cluster, &request);
    next_request(&mut cluster).await;
}

/// Our prefill has a write under way that never ends: it is cancelled, and that is acknowledged.
#[actix_rt::test]
async fn sglang_gives_up_while_we_write() {
    let setting = Setting {
        fault_opt: Some("stall:kv:1".parse().expect("a fault")),
        ..setting()
    };
    if !can_run("sglang_gives_up_while_we_write", &setting) {
        return;
    }
    let mut cluster = Cluster::start(&setting, Direction::OursToSglang, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.send_chunk(&request, 0).await;
    wait_for_pages(&mut cluster, &request);
    cluster.send_chunk(&request, 1).await;
    // The pages of this chunk are submitted before its states and aux, which land.
    let landed = Placement {
        pages: first_chunk(&request).pages,
        ..request.target.clone()
    };
    let decode = &mut cluster.decodes[0];
    wait_for("states and aux", || {
        decode.holds((ROOM, &landed, 0)).then_some(())
    });
    decode.abort(ROOM).await;
    cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    wait_for_release(&mut cluster).await;
    cluster.decodes[0].check(Some((ROOM, &landed, 0)));
    next_request(&mut cluster).await;
}

/// 0.5.23's prefill tells nobody when it gives a room up, so only ours is tested: SGLang's decode
/// fails with our reason.
#[actix_rt::test]
async fn our_prefill_gives_up() {
    if !can_run("our_prefill_gives_up", &setting()) {
        return;
    }
    let mut cluster = Cluster::start(&setting(), Direction::OursToSglang, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.send_chunk(&request, 0).await;
    wait_for_pages(&mut cluster, &request);
    cluster.prefills[0].abort(ROOM).await;
    let reason = cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
    assert_eq!(reason, "aborted by the engine");
    check_first_chunk(&mut cluster, &request);
    next_request(&mut cluster).await;
}

/// A write fails: both sides end with its reason, and nothing claims that the pages are free.
#[actix_rt::test]
async fn a_failed_write_of_sglang() {
    if !can_run("a_failed_write_of_sglang", &setting()) {
        return;
    }
    let mut cluster = Cluster::start(&setting(), Direction::SglangToOurs, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.prefills[0].ask("fail_writes", json!({ "reason": "the wire burnt" }));
    cluster.send(&request).await;
    let reason = cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
    assert!(reason.contains("the wire burnt"), "{reason}");
    let reason = cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    assert!(reason.contains("the wire burnt"), "{reason}");
    cluster.decodes[0].check(None);
    cluster.prefills[0].ask("mend_writes", json!({}));
    next_request(&mut cluster).await;
    // Messages of one sender keep their order, so an acknowledgement would have come before.
    assert!(!cluster.decodes[0].is_release_safe(ROOM).await);
}

/// The same with a write of ours; that one is known to have stopped.
#[actix_rt::test]
async fn a_failed_write_of_ours() {
    let setting = Setting {
        fault_opt: Some("fail:kv:1".parse().expect("a fault")),
        ..setting()
    };
    if !can_run("a_failed_write_of_ours", &setting) {
        return;
    }
    let mut cluster = Cluster::start(&setting, Direction::OursToSglang, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.send_chunk(&request, 0).await;
    wait_for_pages(&mut cluster, &request);
    // States and aux go with this chunk, whose pages fail.
    cluster.send_chunk(&request, 1).await;
    for side in [&mut cluster.prefills[0], &mut cluster.decodes[0]] {
        let reason = side.reach(ROOM, RoomStatus::Failed).await;
        assert!(
            reason.contains("an injected fault failed a write of kv"),
            "{reason}"
        );
    }
    next_request(&mut cluster).await;
}

#[actix_rt::test]
async fn sglangs_prefill_dies() {
    if !can_run("sglangs_prefill_dies", &setting()) {
        return;
    }
    let mut cluster = Cluster::start(&setting(), Direction::SglangToOurs, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.send_chunk(&request, 0).await;
    wait_for_pages(&mut cluster, &request);
    cluster.prefills[0].kill();
    let reason = cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
    assert!(reason.contains("is gone"), "{reason}");
    check_first_chunk(&mut cluster, &request);
}

#[actix_rt::test]
async fn sglangs_decode_dies() {
    if !can_run("sglangs_decode_dies", &setting()) {
        return;
    }
    let mut cluster = Cluster::start(&setting(), Direction::OursToSglang, ALONE).await;
    let request = request(ROOM);
    cluster.open(&request).await;
    cluster.send_chunk(&request, 0).await;
    wait_for_pages(&mut cluster, &request);
    cluster.decodes[0].kill();
    cluster.send_chunk(&request, 1).await;
    let reason = cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    // `cma` knows the process; what others know is that nobody is there.
    let words = match transports_opt() {
        None => "has exited",
        Some(_) => "to decode rank",
    };
    assert!(reason.contains(words), "{reason}");
}
