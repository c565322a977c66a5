//! An engine that dies takes its rank and its rooms with it, and nothing else.

use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tests::http::Request;
use tests::process::wait_for;
use tests::service::{TransferService, memfd};
use transfer_actor::api::RoomStatus;

use super::{
    POOL_BYTES, Pair, SmallEngine, attach_raw, attach_request, begin, bootstrap, cross,
    first_content, lend, whole_chunk,
};

fn assert_healthy(service: &TransferService) {
    let reply = service.send_to_metrics_port(&Request::get("/health"));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

fn wait_until_gone(service: &TransferService) {
    wait_for("the rank to go", || {
        service.ranks().is_empty().then_some(())
    });
}

/// Whether anything of a pool is mapped in the service.
fn holds_a_pool(service: &TransferService) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", service.pid()));
    maps.expect("it is running").contains("memfd:pool")
}

/// An engine's process: it holds the attach connection and nothing else.
fn engine_process(service: &TransferService) -> Child {
    let pool = memfd(POOL_BYTES);
    let (reply, stream) = attach_raw(service, &attach_request("decode", None), &lend(&pool));
    assert!(reply["attached"]["rank"].is_u64(), "{reply}");
    Command::new("sleep")
        .arg("3600")
        .stdin(Stdio::from(OwnedFd::from(stream)))
        .spawn()
        .expect("sleep starts")
}

#[test]
fn the_rank_of_a_killed_process_goes_and_its_memory_is_let_go() {
    let service = TransferService::start(&[]);
    let mut engine = engine_process(&service);
    assert_eq!(service.ranks(), [0]);
    assert!(holds_a_pool(&service));
    engine.kill().expect("it is running");
    engine.wait().expect("it can be waited for");
    wait_until_gone(&service);
    wait_for("the pool to be let go", || {
        (!holds_a_pool(&service)).then_some(())
    });
    let reply = service.send(&Request::get("/v1/ranks/0"));
    assert!(reply.text().contains("unknown_rank"), "{}", reply.text());
    for gauge in ["ferry_rank_current_count", "ferry_room_current_count"] {
        assert_eq!(service.metric(gauge, &[]), 0.0, "{gauge}");
    }
    assert_healthy(&service);
}

#[test]
fn a_dead_decode_stops_its_prefills_writes_and_can_come_back() {
    let mut pair = Pair::start(&["--inject-fault", "stall:kv"]);
    begin(&pair.prefill, &pair.decode, 1);
    pair.prefill.send(1, whole_chunk()).expect("it is accepted");
    let sending = pair.prefill.wait(1, RoomStatus::Transferring);
    assert_eq!(sending.status, RoomStatus::Transferring, "the write stalls");
    let (control, key) = (
        pair.decode.client.control().to_owned(),
        pair.decode.client.engine_key().to_owned(),
    );
    let begun = Instant::now();
    let pool = pair.decode.pool.try_clone().expect("a descriptor");
    pair.decode = SmallEngine::decode(&pair.decode_service, &pair.server);
    let failed = pair.prefill.wait(1, RoomStatus::Success);
    assert_eq!(failed.status, RoomStatus::Failed);
    let reason = failed.reason.clone().unwrap_or_default();
    assert!(reason.contains(&control), "{reason:?} names {control}");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "it took {:?}",
        begun.elapsed()
    );
    wait_for("the write to stop", || {
        let view = pair.prefill.view(1).expect("it is known");
        view.release_safe.then_some(())
    });
    let kv = failed
        .transfers
        .iter()
        .find(|transfer| transfer.component == "kv");
    assert_eq!(kv.map(|transfer| transfer.bytes), Some(0), "{failed:?}");
    let mut content = vec![0; POOL_BYTES as usize];
    std::os::unix::fs::FileExt::read_exact_at(&pool, &mut content, 0).expect("it can be read");
    let first = first_content("decode");
    assert_eq!(
        content[..super::MAMBA],
        first[..super::MAMBA],
        "no page has come"
    );
    wait_for("the old rank to go", || {
        (pair.decode_service.ranks() == [1]).then_some(())
    });
    assert_healthy(&pair.decode_service);
    // What is durable stays and shows its age; a probe says whether anybody is there.
    let registrations = || -> Vec<Value> {
        let listed = pair.server.json("/v1/registrations");
        listed["registrations"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    };
    wait_for("the old registration to be seen dead", || {
        let old = registrations()
            .into_iter()
            .find(|one| one["engine_key"] == key.as_str())?;
        (old["reachable"] == false).then_some(())
    });
    pair.prefill.clear(1);
    cross(&pair.prefill, &pair.decode, 2);
    let new = pair.decode.client.engine_key();
    wait_for("the new registration", || {
        registrations()
            .into_iter()
            .find(|one| one["engine_key"] == new)
    });
}

#[test]
fn a_dead_prefill_fails_its_rooms_at_once_and_can_come_back() {
    let mut pair = Pair::start(&[]);
    cross(&pair.prefill, &pair.decode, 1);
    // Used again below: the same bytes must come from the next prefill.
    let rank = || pair.server.json("/v1/engines/default")["ranks_present"][0].clone();
    let old_address = rank()["instance"].clone();
    begin(&pair.prefill, &pair.decode, 2);
    let begun = Instant::now();
    let server = pair.server.address().to_string();
    drop(pair.prefill);
    let failed = pair.decode.wait(2, RoomStatus::Success);
    assert_eq!(failed.status, RoomStatus::Failed);
    let reason = failed.reason.unwrap_or_default();
    assert_eq!(reason, "prefill rank 0: its engine has gone");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "it took {:?}",
        begun.elapsed()
    );
    wait_until_gone(&pair.prefill_service);
    assert_healthy(&pair.prefill_service);
    wait_for("the bootstrap server to see it", || {
        let rank = rank();
        assert_eq!(rank["instance"], old_address, "the registration is durable");
        (rank["reachable"] == false).then_some(())
    });
    pair.prefill = SmallEngine::attach(&pair.prefill_service, "prefill", &server)
        .expect("it is attached again");
    assert_ne!(rank()["instance"], old_address);
    pair.decode.clear(2);
    cross(&pair.prefill, &pair.decode, 3);
}

/// Nothing was open when the prefill died, so nobody told the decode of it.
#[test]
fn the_next_request_after_an_idle_prefill_was_replaced_works() {
    let mut pair = Pair::start(&[]);
    cross(&pair.prefill, &pair.decode, 1);
    drop(pair.prefill);
    wait_until_gone(&pair.prefill_service);
    pair.prefill = SmallEngine::prefill(&pair.prefill_service, &pair.server);
    cross(&pair.prefill, &pair.decode, 2);
}

/// Ranks that ended gave back their threads, descriptors and ports.
#[test]
fn engines_may_come_and_go_for_ever() {
    let (server, _folder) = bootstrap(&[]);
    let prefill_service = TransferService::start(&[]);
    let decode_service = TransferService::start(&[]);
    let prefill = SmallEngine::prefill(&prefill_service, &server);
    let come_and_go = |room| {
        let decode = SmallEngine::decode(&decode_service, &server);
        cross(&prefill, &decode, room);
        drop(decode);
        wait_until_gone(&decode_service);
    };
    come_and_go(1);
    let (threads, descriptors) = decode_service.resources();
    (2..8).for_each(come_and_go);
    wait_for("threads and descriptors to be given back", || {
        let now = decode_service.resources();
        (now.0 <= threads + 2 && now.1 <= descriptors + 2).then_some(())
    });
    assert_eq!(decode_service.metric("ferry_rank_current_count", &[]), 0.0);
}
