//! How a decode's room ends other than by Success, and when its places may be used again.

use super::decode::{announce, clear, published, published_of, resolve, two_writers};
use super::*;

#[test]
fn places_are_safe_only_after_every_writer_has_proved_that_it_stopped() {
    let mut rank = published_of(two_writers());
    let reason = "the request was cancelled".to_owned();
    rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    assert!(!rank.view(7).release_safe);
    rank.message(ack_message(7, 0, 1));
    rank.message(ack_message(7, 0, 1));
    assert!(!rank.view(7).release_safe, "one of two, twice");
    for foreign in [ack_message(7, 1, 9), ack_message(7, 4, 1)] {
        assert_eq!(rank.message(foreign).late(), ["abort_ack"]);
    }
    let without_generation = ControlMessage::AbortAck(AbortAck {
        room: room(7),
        prefill_rank: 1,
        generation: None,
    });
    assert_eq!(rank.message(without_generation).late(), ["abort_ack"]);
    assert!(!rank.view(7).release_safe);
    assert!(rank.message(ack_message(7, 1, 1)).wakes(7));
    assert!(rank.view(7).release_safe);
    assert_eq!(rank.status(7), RoomStatus::Failed);
}

#[test]
fn a_success_proves_as_much_as_an_acknowledgement_and_a_dummy_proves_nothing() {
    let mut rank = published_of(two_writers());
    rank.message(status_message(7, 0, KvPoll::Success));
    let reason = "cancelled".to_owned();
    rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    assert!(!rank.view(7).release_safe);
    rank.message(ack_message(7, 1, 1));
    assert!(rank.view(7).release_safe);

    let mut rank = published_of(Engines::of(AttentionKind::Mla, 2, 1));
    let reason = "cancelled".to_owned();
    rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    rank.message(ack_message(7, 1, 1));
    assert!(!rank.view(7).release_safe);
    rank.message(ack_message(7, 0, 1));
    assert!(rank.view(7).release_safe);
}

#[test]
fn what_no_prefill_was_told_is_safe_at_once() {
    let engines = Engines::one_to_one();
    let mut rank = engines.decode(0);
    rank.event(open(7));
    let reason = "cancelled".to_owned();
    rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    assert!(rank.view(7).release_safe);
    let done = resolve(&mut rank, &engines, 7);
    assert_eq!(done.kinds(), [""; 0], "the room has ended");
    assert_eq!(rank.refused(announce(7)).0, "room_failed");
}

#[test]
fn a_bootstrap_server_that_refuses_fails_the_room() {
    let engines = Engines::one_to_one();
    let mut rank = engines.decode(0);
    rank.event(open(7));
    rank.event(Event::Resolved {
        room: room(7),
        generation: Generation(1),
        result: Err("page size is 64 at the prefill and 2 here".to_owned()),
    });
    assert!(rank.reason(7).contains("page size"));
    let mut other = engines.resolved(0);
    other.decode_allocation_policy = "prefill_complete".to_owned();
    rank.event(open(8));
    rank.event(Event::Resolved {
        room: room(8),
        generation: Generation(2),
        result: Ok(other),
    });
    assert!(rank.reason(8).contains("policy"));
}

#[test]
fn every_state_has_a_timeout() {
    let engines = Engines::one_to_one();
    // The bootstrap server does not answer.
    let mut rank = engines.decode(0);
    rank.event(open(7));
    rank.pass(TIMEOUTS.bootstrap - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);
    assert!(rank.pass(seconds(1)).wakes(7));
    assert!(rank.reason(7).contains("not ready"), "{}", rank.reason(7));

    // The engine does not announce.
    let mut rank = engines.decode(0);
    rank.event(open(7));
    resolve(&mut rank, &engines, 7);
    rank.pass(TIMEOUTS.waiting - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    assert_eq!(rank.pass(seconds(1)).kinds(), ["abort"]);
    assert!(rank.reason(7).contains("announce"), "{}", rank.reason(7));

    // The prefill does not finish, at first or after one of two has.
    let mut rank = published();
    rank.pass(TIMEOUTS.waiting);
    assert!(rank.reason(7).contains("finish"), "{}", rank.reason(7));
    assert!(!rank.view(7).release_safe, "a timeout proves nothing");
    let mut rank = published_of(two_writers());
    rank.pass(TIMEOUTS.waiting - seconds(1));
    rank.message(status_message(7, 0, KvPoll::Success));
    rank.pass(TIMEOUTS.waiting - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    rank.pass(seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Failed);

    // The engine does not clear.
    rank.pass(TIMEOUTS.retention - seconds(1));
    assert!(rank.is_known(7));
    assert!(rank.pass(seconds(1)).wakes(7));
    assert!(!rank.is_known(7));
    assert_eq!(rank.core.census().tombstones, 1);
    rank.pass(TIMEOUTS.tombstone);
    assert_eq!(rank.core.census().tombstones, 0);
}

#[test]
fn a_prefill_that_cannot_be_reached_fails_its_rooms_and_is_asked_for_again() {
    let mut rank = published();
    let send_failed = |generation| Event::SendFailed {
        to: prefill_endpoint(0),
        about_opt: Some((room(7), Generation(generation))),
        kind: "transfer_info",
        register_opt: None,
        reason: "connection refused".to_owned(),
    };
    rank.event(send_failed(9));
    assert_eq!(
        rank.status(7),
        RoomStatus::WaitingForInput,
        "another use of the room"
    );
    rank.event(send_failed(1));
    assert!(
        rank.reason(7).contains("cannot be reached"),
        "{}",
        rank.reason(7)
    );
    let done = rank.event(open(8));
    assert!(matches!(done.0.last(), Some(Effect::Resolve { .. })));
    let done = resolve(&mut rank, &Engines::one_to_one(), 8);
    assert_eq!(done.kinds(), ["register"]);
}

#[test]
fn a_prefill_that_has_restarted_at_its_address_is_registered_with_again() {
    let engines = Engines::one_to_one();
    let mut decode = published();
    let mut restarted = engines.prefill(0);
    restarted.event(open(7));
    let info = ControlMessage::TransferInfo(engines.info(7, 0));
    let done = restarted.message(info);
    let (_, told) = done.sent().next().expect("a status");
    decode.message(told.clone());
    assert_eq!(decode.status(7), RoomStatus::Failed);

    restarted.event(open(8));
    let mut sent: Vec<ControlMessage> = Vec::new();
    for event in [open(8), announce(8)] {
        let done = decode.event(event);
        sent.extend(done.sent().map(|(_, message)| message.clone()));
    }
    for message in sent {
        restarted.message(message);
    }
    assert_eq!(restarted.status(8), RoomStatus::WaitingForInput);
}

#[test]
fn rooms_and_tombstones_are_bounded() {
    let engines = Engines {
        limits: Limits {
            rooms: 2,
            tombstones: 3,
            ..Limits::default()
        },
        ..Engines::one_to_one()
    };
    let mut rank = engines.decode(0);
    for number in 0..10 {
        rank.event(open(number));
        rank.event(open(number + 100));
        assert_eq!(rank.refused(open(number + 200)).0, "too_many_rooms");
        rank.event(clear(number));
        rank.event(clear(number + 100));
        assert!(rank.core.census().tombstones <= 3);
    }
}

#[test]
fn shutdown_fails_every_open_room_and_asks_the_prefills_to_stop() {
    let mut rank = published();
    rank.event(open(8));
    let reason = "the engine has gone".to_owned();
    let done = rank.event(Event::Shutdown { reason });
    assert_eq!(done.kinds(), ["abort", "abort"]);
    for number in [7, 8] {
        assert_eq!(rank.reason(number), "the engine has gone");
    }
}
