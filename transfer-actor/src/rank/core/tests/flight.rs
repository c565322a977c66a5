//! What a rank has on its way and open with one peer is bounded; what is beyond waits or is refused.

use std::collections::HashSet;

use super::*;

/// Nothing of two chunks fits beside each other, so each goes alone.
const ONE_AT_A_TIME: Limits = Limits {
    in_flight_bytes: u64::MAX,
    in_flight_bytes_per_peer: 1,
    ..ROOMY
};

const ROOMY: Limits = Limits {
    rooms: 100,
    early_rooms: 100,
    early_bytes: usize::MAX,
    check_bytes: usize::MAX,
    peers: 100,
    tombstones: 100,
    rooms_per_peer: 100,
    in_flight_bytes: u64::MAX,
    in_flight_bytes_per_peer: u64::MAX,
    queued_chunks: 100,
    queued_chunks_per_peer: 100,
    when_full: WhenFull::Wait,
};

fn engines(limits: Limits) -> Engines {
    Engines {
        limits,
        ..Engines::one_to_one()
    }
}

/// Rooms 0 to 4, each announced by a decode rank of its own or by one, as `peer_of` says.
fn announced_by(limits: Limits, peer_of: impl Fn(u64) -> u32) -> Rank {
    let engines = engines(limits);
    let mut rank = engines.prefill(0);
    for number in 0..4 {
        let peer = peer_of(number);
        let mut register = engines.register(0);
        register.endpoint = decode_endpoint(peer);
        register.engine.key = engine_key(peer);
        rank.message(ControlMessage::Register(Box::new(register)));
        rank.event(open(number));
        let mut info = engines.info(number, 0);
        info.endpoint = decode_endpoint(peer);
        info.engine_key = engine_key(peer);
        rank.message(ControlMessage::TransferInfo(info));
    }
    rank
}

fn give(number: u64, pages: std::ops::Range<i32>, is_last: bool) -> Event {
    Event::Chunk {
        room: room(number),
        chunk: chunk(pages, is_last),
    }
}

fn report_all(rank: &mut Rank, keys: &[ComponentKey]) -> Vec<ComponentKey> {
    let done = keys.iter().map(|key| rank.report(key, moved()).works());
    done.flatten().collect()
}

fn rooms_of(keys: &[ComponentKey]) -> Vec<u64> {
    let mut rooms: Vec<u64> = keys.iter().map(|key| key.room.get()).collect();
    rooms.dedup();
    rooms
}

#[test]
fn chunks_beyond_the_bytes_wait_and_begin_in_order_as_others_arrive() {
    let mut rank = announced_by(ONE_AT_A_TIME, |_| 0);
    let first = rank.event(give(0, 0..4, true)).works();
    assert_eq!(first.len(), 3, "a chunk beyond the limit goes alone");
    for number in 1..4 {
        let done = rank.event(give(number, 0..4, true));
        assert_eq!(done.works(), []);
        let is_counted =
            |effect: &Effect| matches!(effect, Effect::Count(Counted::Waiting { portions: 1 }));
        assert!(done.0.iter().any(is_counted));
        assert_eq!(rank.status(number), RoomStatus::Transferring);
    }
    let (bytes, waiting) = rank.core.in_flight();
    assert!(bytes > 0);
    assert_eq!(waiting, 3);
    let mut under_way = first;
    for number in 0..4 {
        assert_eq!(rooms_of(&under_way), [number]);
        let (last, others) = under_way.split_last().expect("some work");
        assert_eq!(
            report_all(&mut rank, others),
            [],
            "its bytes are under way still"
        );
        let begun = rank.report(last, moved()).works();
        assert_eq!(rank.status(number), RoomStatus::Success);
        under_way = begun;
    }
    assert_eq!(under_way, []);
    assert_eq!(rank.core.in_flight(), (0, 0));
}

#[test]
fn a_decode_rank_that_is_full_does_not_hold_up_another() {
    let mut rank = announced_by(ONE_AT_A_TIME, |number| number as u32 % 2);
    assert_eq!(rooms_of(&rank.event(give(0, 0..4, true)).works()), [0]);
    assert_eq!(
        rank.event(give(2, 0..4, true)).works(),
        [],
        "it is the same rank's"
    );
    let other = rank.event(give(1, 0..4, true)).works();
    assert_eq!(rooms_of(&other), [1]);
    assert_eq!(rank.event(give(3, 0..4, true)).works(), []);
    assert_eq!(rooms_of(&report_all(&mut rank, &other)), [3]);
}

#[test]
fn nobody_passes_a_chunk_that_waits_for_all_others() {
    let limits = Limits {
        in_flight_bytes: 1,
        ..ROOMY
    };
    let mut rank = announced_by(limits, |number| number as u32);
    let first = rank.event(give(0, 0..1, false)).works();
    assert_eq!(rank.event(give(1, 0..4, true)).works(), []);
    assert_eq!(rank.event(give(2, 0..1, false)).works(), []);
    let second = report_all(&mut rank, &first);
    assert_eq!(rooms_of(&second), [1]);
    assert_eq!(rank.event(give(0, 1..4, true)).works(), []);
    assert_eq!(rooms_of(&report_all(&mut rank, &second)), [2]);
}

#[test]
fn chunks_beyond_the_queue_are_refused_and_change_nothing() {
    for (limits, peers) in [
        (
            Limits {
                queued_chunks_per_peer: 1,
                ..ONE_AT_A_TIME
            },
            1,
        ),
        (
            Limits {
                in_flight_bytes: 1,
                queued_chunks: 1,
                ..ROOMY
            },
            4,
        ),
    ] {
        let mut rank = announced_by(limits, |number| number as u32 % peers);
        let first = rank.event(give(0, 0..4, true)).works();
        rank.event(give(1, 0..4, true));
        let (before, pending) = (rank.view(2), rank.core.pending_work());
        let (code, done) = rank.refused(give(2, 0..4, true));
        assert_eq!((code, done.0.len()), ("too_many_chunks", 0));
        assert_eq!((rank.view(2), rank.core.pending_work()), (before, pending));
        let second = report_all(&mut rank, &first);
        rank.event(give(2, 0..4, true));
        let third = report_all(&mut rank, &second);
        report_all(&mut rank, &third);
        assert_eq!(rank.status(2), RoomStatus::Success);
    }
}

#[test]
fn where_chunks_do_not_wait_one_without_space_is_refused_and_may_come_again() {
    let limits = Limits {
        when_full: WhenFull::Refuse,
        ..ONE_AT_A_TIME
    };
    let mut rank = announced_by(limits, |_| 0);
    let first = rank.event(give(0, 0..4, true)).works();
    let (code, done) = rank.refused(give(1, 0..4, true));
    assert_eq!((code, done.0.len()), ("in_flight_limit", 0));
    assert_eq!(rank.status(1), RoomStatus::WaitingForInput);
    report_all(&mut rank, &first);
    let second = rank.event(give(1, 0..4, true)).works();
    report_all(&mut rank, &second);
    assert_eq!(rank.status(1), RoomStatus::Success);
}

#[test]
fn a_chunk_for_several_decode_ranks_that_is_too_large_goes_alone_where_none_waits() {
    let limits = Limits {
        when_full: WhenFull::Refuse,
        in_flight_bytes: 1,
        ..ROOMY
    };
    let engines = Engines {
        limits,
        ..Engines::of(AttentionKind::Mha, 1, 2)
    };
    let mut rank = engines.prefill(0);
    for number in 0..2 {
        rank.event(open(number));
        for decode_rank in 0..2 {
            let register = Box::new(engines.register(decode_rank));
            rank.message(ControlMessage::Register(register));
            let info = engines.info(number, decode_rank);
            rank.message(ControlMessage::TransferInfo(info));
        }
    }
    let first = rank.event(give(0, 0..4, true)).works();
    let endpoints: HashSet<&Endpoint> = first.iter().map(|key| &key.endpoint).collect();
    assert_eq!(endpoints.len(), 2);
    let (code, _) = rank.refused(give(1, 0..4, true));
    assert_eq!(code, "in_flight_limit");
    report_all(&mut rank, &first);
    assert_eq!(rank.status(0), RoomStatus::Success);
    assert!(!rank.event(give(1, 0..4, true)).works().is_empty());
}

#[test]
fn what_waits_for_a_room_that_fails_is_given_up() {
    let mut rank = announced_by(ONE_AT_A_TIME, |_| 0);
    let first = rank.event(give(0, 0..4, true)).works();
    rank.event(give(1, 0..4, true));
    rank.event(give(2, 0..4, true));
    let done = rank.message(abort_message(1, 0, 5));
    assert_eq!(
        done.acks(),
        [(decode_endpoint(0), 5)],
        "nothing of it has begun"
    );
    assert!(rank.view(1).release_safe);
    assert_eq!(rank.core.in_flight().1, 1);
    assert_eq!(rooms_of(&report_all(&mut rank, &first)), [2]);
}

#[test]
fn bytes_of_an_actor_that_died_are_under_way_no_more() {
    let mut rank = announced_by(ONE_AT_A_TIME, |_| 0);
    let first = rank.event(give(0, 0..4, true)).works();
    rank.event(give(1, 0..4, true));
    let died = ComponentOutcome::Died { panicked: true };
    let mut begun = Vec::new();
    for key in &first {
        begun.extend(rank.report(key, died.clone()).works());
    }
    assert_eq!(rooms_of(&begun), [1]);
}

#[test]
fn a_chunk_that_waits_for_others_too_long_fails_its_room_with_that_reason() {
    let mut rank = announced_by(ONE_AT_A_TIME, |_| 0);
    rank.event(give(0, 0..4, true));
    rank.event(give(1, 0..4, true));
    rank.pass(TIMEOUTS.waiting);
    let reason = rank.reason(1);
    assert!(reason.contains("no chunk began"), "{reason}");
}

#[test]
fn rooms_with_one_decode_rank_are_bounded() {
    let limits = Limits {
        rooms_per_peer: 2,
        ..ROOMY
    };
    let mut rank = announced_by(limits, |number| number as u32 / 3);
    let statuses = [0, 1, 2, 3].map(|number| rank.status(number));
    let waiting = RoomStatus::WaitingForInput;
    assert_eq!(statuses, [waiting, waiting, RoomStatus::Failed, waiting]);
    let reason = rank.reason(2);
    assert!(reason.contains("the limit for one peer"), "{reason}");
    // Said again, it is no further room.
    let again = engines(limits).info(1, 0);
    rank.message(ControlMessage::TransferInfo(again));
    assert_eq!(rank.status(1), waiting);
    let reason = "it is not needed".to_owned();
    rank.event(Event::Abort {
        room: room(1),
        reason,
    });
    rank.event(Event::Clear { room: room(2) });
    rank.event(open(2));
    rank.message(ControlMessage::TransferInfo(engines(limits).info(2, 0)));
    assert_eq!(rank.status(2), waiting);
}

#[test]
fn rooms_with_one_prefill_engine_are_bounded() {
    let limits = Limits {
        rooms_per_peer: 2,
        ..ROOMY
    };
    let mut rank = engines(limits).decode(0);
    rank.event(open(0));
    rank.event(open(1));
    let (code, done) = rank.refused(open(2));
    assert_eq!((code, done.0.len()), ("too_many_rooms_with_peer", 0));
    let elsewhere = Event::Open(OpenCommand {
        room: room(3),
        bootstrap_opt: Some("another:1".to_owned()),
        prefill_dp_rank_opt: None,
        aux_index_opt: None,
    });
    rank.event(elsewhere);
    rank.event(Event::Clear { room: room(0) });
    rank.event(open(2));
}
