//! Rooms that do not end well between SGLang's ranks over our Python module: a write that fails or
//! never ends, a side that dies.

use super::*;
use crate::conformance::ends::{check_first_chunk, wait_for_pages};

const ROOM: u64 = 700;

async fn start(module_fault: &'static str) -> Cluster {
    let setting = Setting {
        module_fault,
        ..setting()
    };
    Cluster::start(&setting, Direction::SglangToSglang, ALONE).await
}

fn request(room: u64) -> Request {
    Request::new(&setting().model, room, &[2, 4])
}

/// Sends the first chunk and waits until it has landed.
async fn send_first_chunk(cluster: &mut Cluster, request: &Request) {
    cluster.send_chunk(request, 0).await;
    wait_for_pages(cluster, request);
}

/// Both sides of a request end with the reason of the fault that was injected. The fault was in one
/// transfer, so the next request is served.
async fn fails_once(cluster: &mut Cluster, failed: &Request) {
    for side in [&mut cluster.prefills[0], &mut cluster.decodes[0]] {
        let reason = side.reach(failed.room, RoomStatus::Failed).await;
        assert!(reason.contains("an injected fault failed"), "{reason}");
    }
    cluster.decodes[0].prepare(None);
    let next = request(failed.room + 1);
    cluster.transfer(&next).await;
}

/// Each tensor of a layer is a transfer: the first chunk has four, of which the third fails.
#[actix_rt::test]
async fn a_failed_write_of_our_module() {
    if !Direction::SglangToSglang.can_run("a_failed_write_of_our_module", &setting()) {
        return;
    }
    let mut cluster = start("fail:memory:2").await;
    let failed = request(ROOM);
    cluster.open(&failed).await;
    cluster.send(&failed).await;
    fails_once(&mut cluster, &failed).await;
}

/// The decode gives up while a write is under way that never ends: nothing claims that its pages
/// are free.
#[actix_rt::test]
async fn a_stalled_write_of_our_module() {
    if !Direction::SglangToSglang.can_run("a_stalled_write_of_our_module", &setting()) {
        return;
    }
    let mut cluster = start("stall:memory:0").await;
    let stalled = request(ROOM);
    cluster.open(&stalled).await;
    cluster.send_chunk(&stalled, 0).await;
    cluster.prefills[0]
        .reach(ROOM, RoomStatus::Transferring)
        .await;
    cluster.decodes[0].abort(ROOM).await;
    cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
    assert!(!cluster.decodes[0].is_release_safe(ROOM).await);
}

/// Declares each test for SGLang's manager on both sides, and for our plugin's on either and both.
macro_rules! every_manager {
    ($($tests:tt)+) => {
        one_direction! { sglang_over_our_module, SglangToSglang, $($tests)+ }
        one_direction! { our_manager_to_sglang, ManagerToSglang, $($tests)+ }
        one_direction! { sglang_to_our_manager, SglangToManager, $($tests)+ }
        one_direction! { our_manager_to_itself, ManagerToManager, $($tests)+ }
    };
}

fn heard_often() -> Setting {
    Setting {
        environment: vec![("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2".to_owned())],
        ..setting()
    }
}

every_manager! {
    // SGLang's decode notices by the heartbeats of the bootstrap server that dies with its prefill.
    the_prefill_dies => |direction| async move {
        let mut cluster = Cluster::start(&heard_often(), direction, ALONE).await;
        let request = request(ROOM);
        cluster.open(&request).await;
        send_first_chunk(&mut cluster, &request).await;
        cluster.prefills[0].kill();
        cluster.decodes[0].reach(ROOM, RoomStatus::Failed).await;
        check_first_chunk(&mut cluster, &request);
    };
    the_decode_dies => |direction| async move {
        let mut cluster = Cluster::start(&heard_often(), direction, ALONE).await;
        let request = request(ROOM);
        cluster.open(&request).await;
        send_first_chunk(&mut cluster, &request).await;
        cluster.decodes[0].kill();
        cluster.send_chunk(&request, 1).await;
        cluster.prefills[0].reach(ROOM, RoomStatus::Failed).await;
    };
}

/// A failed write of our manager's prefill is known to have stopped: both sides end with its reason,
/// the pages may be used again, and the next request is served.
#[actix_rt::test]
async fn a_failed_write_of_our_manager() {
    for direction in [Direction::ManagerToSglang, Direction::ManagerToManager] {
        let setting = Setting {
            module_fault: "fail:kv:0",
            ..setting()
        };
        if !direction.can_run("a_failed_write_of_our_manager", &setting) {
            return;
        }
        let mut cluster = Cluster::start(&setting, direction, ALONE).await;
        let failed = request(ROOM);
        cluster.open(&failed).await;
        cluster.send_chunk(&failed, 0).await;
        fails_once(&mut cluster, &failed).await;
    }
}
