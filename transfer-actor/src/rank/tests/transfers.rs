//! Bytes from prefill ranks to decode ranks.

use super::*;

/// What a decode's buffers must hold: the announced items, and nothing else touched.
fn expected(prefills: &[TestRank], decode: usize, decodes: usize) -> [Vec<u8>; 4] {
    let sources: Vec<[Vec<u8>; 4]> = prefills
        .iter()
        .map(|prefill| prefill.pool.contents())
        .collect();
    let page_len = PAGE as usize / decodes;
    let paged = |buffer: usize| {
        let mut bytes = vec![UNTOUCHED; PAGES as usize * page_len];
        for (src, dst) in [(0, 6), (1, 5), (2, 4), (3, 3)] {
            // All heads of the page, then those that this decode rank holds.
            let src_len = PAGE as usize / prefills.len();
            let all = sources
                .iter()
                .flat_map(|source| &source[buffer][src * src_len..][..src_len]);
            let all: Vec<u8> = all.copied().collect();
            let own = &all[(decode * page_len) % all.len()..][..page_len];
            bytes[dst * page_len..][..page_len].copy_from_slice(own);
        }
        bytes
    };
    let row = |buffer: usize, row_len: usize, dst: usize| {
        let mut bytes = vec![UNTOUCHED; ROWS as usize * row_len];
        bytes[dst * row_len..][..row_len]
            .copy_from_slice(&sources[0][buffer][row_len..][..row_len]);
        bytes
    };
    [
        paged(0),
        paged(1),
        row(2, STATE_ROW as usize, 2),
        row(3, AUX_ROW as usize, 3),
    ]
}

/// Moves two rooms between engines of these sizes and compares every byte.
async fn check(prefill_tp: u32, decode_tp: u32) {
    let bootstrap = bootstrap_server();
    let mut prefills = Vec::new();
    for rank in 0..prefill_tp {
        prefills.push(start(Role::Prefill, (prefill_tp, rank), &bootstrap, None).await);
    }
    let mut decodes = Vec::new();
    for rank in 0..decode_tp {
        decodes.push(start(Role::Decode, (decode_tp, rank), &bootstrap, None).await);
    }
    for room in [7, 8] {
        decodes
            .iter()
            .for_each(|decode| decode.pool.fill(|_| UNTOUCHED));
        for prefill in &prefills {
            prefill.open(room, &bootstrap).await;
        }
        for decode in &decodes {
            decode.open(room, &bootstrap).await;
            decode.announce(room).await;
        }
        for prefill in &prefills {
            prefill.reach(room, RoomStatus::WaitingForInput).await;
            prefill.send(room, false).await;
            prefill.send(room, true).await;
        }
        for (number, decode) in decodes.iter().enumerate() {
            let view = decode.reach(room, RoomStatus::Success).await;
            assert!(view.release_safe);
            let expected = expected(&prefills, number, decodes.len());
            assert_eq!(
                decode.pool.contents(),
                expected,
                "room {room}, decode rank {number}"
            );
        }
        for prefill in &prefills {
            let view = prefill.reach(room, RoomStatus::Success).await;
            assert!(!view.transfers.is_empty());
            assert!(
                view.transfers
                    .iter()
                    .all(|transfer| transfer.outcome == "success")
            );
        }
        for rank in prefills.iter().chain(&decodes) {
            rank.rank.clear(room).await.expect("it is known");
        }
    }
    for rank in prefills.iter().chain(&decodes) {
        let snapshot = rank.rank.observe().await.expect("it runs");
        assert_eq!(
            (snapshot.rooms.by_status, snapshot.rooms.tombstones),
            ([0; 5], 2)
        );
        assert_eq!(snapshot.components, 0);
        rank.rank.stop("the test is over").await;
    }
}

#[actix_rt::test]
async fn bytes_of_every_component_arrive_from_one_rank_at_one() {
    check(1, 1).await;
}

#[actix_rt::test]
async fn bytes_of_every_component_arrive_from_two_ranks_at_one() {
    check(2, 1).await;
}

#[actix_rt::test]
async fn bytes_of_every_component_arrive_from_one_rank_at_two() {
    check(1, 2).await;
}

#[actix_rt::test]
async fn a_failed_write_fails_the_room_on_both_sides_and_the_places_are_free_after_the_proof() {
    let bootstrap = bootstrap_server();
    let fault = "fail:dsa".parse().expect("a fault");
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, Some(fault)).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    prefill.open(7, &bootstrap).await;
    decode.open(7, &bootstrap).await;
    decode.announce(7).await;
    prefill.reach(7, RoomStatus::WaitingForInput).await;
    prefill.send(7, false).await;
    prefill.send(7, true).await;
    for rank in [&prefill, &decode] {
        let view = rank.wait(7, RoomStatus::Success).await;
        assert_eq!(view.status, RoomStatus::Failed);
        let reason = view.reason.expect("a reason");
        assert!(
            reason.contains("injected fault failed a write of dsa"),
            "{reason}"
        );
    }
    let deadline = Instant::now() + DEADLINE;
    while !decode.wait(7, RoomStatus::Success).await.release_safe {
        assert!(
            Instant::now() < deadline,
            "the prefill does not acknowledge"
        );
    }
}

#[actix_rt::test]
async fn a_decode_that_ends_fails_its_rooms_at_the_prefill() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    let decode = start(Role::Decode, (1, 0), &bootstrap, None).await;
    prefill.open(7, &bootstrap).await;
    decode.open(7, &bootstrap).await;
    decode.announce(7).await;
    prefill.reach(7, RoomStatus::WaitingForInput).await;
    decode.rank.stop("the engine has gone").await;
    assert!(!decode.rank.is_alive());
    let view = prefill.wait(7, RoomStatus::Success).await;
    assert_eq!(view.status, RoomStatus::Failed);
    let error = decode.rank.clear(7).await.expect_err("it has ended");
    assert_eq!(error.code, "rank_gone");
}

#[actix_rt::test]
async fn a_rank_that_has_ended_frees_its_port() {
    let bootstrap = bootstrap_server();
    let prefill = start(Role::Prefill, (1, 0), &bootstrap, None).await;
    prefill.rank.stop("the test is over").await;
    let deadline = Instant::now() + DEADLINE;
    while tokio::net::TcpStream::connect(prefill.rank.control())
        .await
        .is_ok()
    {
        assert!(Instant::now() < deadline, "somebody still listens");
    }
}
