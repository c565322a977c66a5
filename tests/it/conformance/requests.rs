//! Requests between one rank and one rank: components, chunks, prefixes, policies.

use std::net::Ipv6Addr;

use super::*;

/// Moves one request after another and compares every byte of each.
async fn requests(setting: Setting, direction: Direction, chunks: &[&[usize]]) {
    let mut cluster = Cluster::start(&setting, direction, ALONE).await;
    for (number, chunks) in (0..).zip(chunks) {
        let request = Request::new(&setting.model, ROOM + number, chunks);
        cluster.transfer(&request).await;
        cluster.clear(&request).await;
        cluster.decodes[0].prepare(None);
    }
}

/// The largest rooms that SGLang makes.
const ROOM: u64 = (1 << 63) - 9;

every_direction! {
    a_hybrid_request_in_one_chunk => |direction| async move {
        requests(setting(), direction, &[&[6]]).await;
    };
    a_hybrid_request_in_two_chunks => |direction| async move {
        requests(setting(), direction, &[&[2, 4]]).await;
    };
    requests_one_after_another => |direction| async move {
        requests(setting(), direction, &[&[6], &[1, 1], &[5, 1], &[3]]).await;
    };
    aux_by_write => |direction| async move {
        let setting = Setting { aux_by_write: true, ..setting() };
        requests(setting, direction, &[&[6], &[2, 3]]).await;
    };
    latent_kv_with_indexer_pages => |direction| async move {
        let setting = Setting { model: Model::latent(), ..setting() };
        requests(setting, direction, &[&[6], &[2, 3]]).await;
    };
    over_ipv6 => |direction| async move {
        let setting = Setting { host: IpAddr::V6(Ipv6Addr::LOCALHOST), ..setting() };
        requests(setting, direction, &[&[2, 4]]).await;
    };
    a_prefix_hit => |direction| async move {
        let mut request = Request::new(&setting().model, ROOM, &[2, 2]);
        request.prefix_pages = 3;
        Cluster::start(&setting(), direction, ALONE).await.transfer(&request).await;
    };
    a_full_prefix_hit => |direction| async move {
        let mut request = Request::new(&setting().model, ROOM, &[0]);
        request.prefix_pages = 5;
        Cluster::start(&setting(), direction, ALONE).await.transfer(&request).await;
    };
    the_policy_prefill_complete => |direction| async move {
        // 0.5.23 has it for KV alone, or with indexer pages.
        let setting = Setting {
            allocation_policy: "prefill_complete".to_owned(),
            model: Model::latent(),
            ..setting()
        };
        let mut cluster = Cluster::start(&setting, direction, ALONE).await;
        for chunks in [[2, 4], [5, 1]] {
            let request = Request::new(&setting.model, ROOM, &chunks);
            complete_first(&mut cluster, &request).await;
            cluster.decodes[0].prepare(None);
        }
    };
    a_room_number_used_again => |direction| async move {
        let mut cluster = Cluster::start(&setting(), direction, ALONE).await;
        for chunks in [[2, 4], [3, 1]] {
            let request = Request::new(&setting().model, ROOM, &chunks);
            cluster.transfer(&request).await;
            cluster.clear(&request).await;
            cluster.decodes[0].prepare(None);
        }
    };
}

/// The decode is told where nothing is needed before the prefill is complete; it may use the room
/// again once the prefill has cleared it.
async fn complete_first(cluster: &mut Cluster, request: &Request) {
    let (prefill, decode) = (&mut cluster.prefills[0], &mut cluster.decodes[0]);
    let room = request.room;
    prefill.prepare(Some((room, &request.source, 0)));
    prefill.open(room, request.source.aux).await;
    decode.open(room, 0).await;
    prefill.prefill_complete(room).await;
    decode.reach(room, RoomStatus::WaitingForInput).await;
    decode.announce(room, &request.target, 0).await;
    prefill.reach(room, RoomStatus::WaitingForInput).await;
    prefill.begin_send(room, request.source.pages.len(), request.source.aux);
    cluster.send(request).await;
    let (prefill, decode) = (&mut cluster.prefills[0], &mut cluster.decodes[0]);
    prefill.reach(room, RoomStatus::Success).await;
    assert_ne!(decode.status(room).await, RoomStatus::Success);
    prefill.clear(room).await;
    decode.reach(room, RoomStatus::Success).await;
    cluster.check_landed(request);
    cluster.decodes[0].clear(room).await;
}

/// The comparison itself: a page that lands beside its place, or a state that never leaves, is
/// seen, though both sides report Success.
#[actix_rt::test]
async fn a_wrong_byte_would_be_seen() {
    for fault in ["misdirect:kv", "drop-write:state", "drop-write:aux"] {
        let setting = Setting {
            fault_opt: Some(fault.parse().expect("a fault")),
            ..setting()
        };
        if !can_run("a_wrong_byte_would_be_seen", &setting) {
            return;
        }
        let mut cluster = Cluster::start(&setting, Direction::OursToSglang, ALONE).await;
        let request = Request::new(&setting.model, ROOM, &[6]);
        cluster.open(&request).await;
        cluster.send(&request).await;
        cluster.decodes[0].reach(ROOM, RoomStatus::Success).await;
        let landed = (ROOM, &request.target, 0);
        assert!(!cluster.decodes[0].holds(landed), "{fault}");
    }
}
