//! How a prefill's room ends other than by Success, and what is left of it.

use super::prefill::{announced, announced_of, send};
use super::*;

fn abort_of_7(rank: &mut Rank) -> Done {
    rank.message(abort_message(7, 0, 5))
}

fn clear_7(rank: &mut Rank) -> Done {
    rank.event(Event::Clear { room: room(7) })
}

fn info(number: u64) -> ControlMessage {
    ControlMessage::TransferInfo(Engines::one_to_one().info(number, 0))
}

const ACK: i64 = 5;

#[test]
fn one_failed_write_fails_the_room_with_its_reason_and_success_never_follows() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    let done = rank.report(&works[1], failed(true));
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert_eq!(done.cancels(), [works[0].clone(), works[2].clone()]);
    let first = rank.reason(7);
    assert!(
        first.contains("dsa") && first.contains("the peer reset"),
        "{first}"
    );
    let mut statuses = rank.report(&works[2], failed(true)).statuses();
    statuses.extend(rank.report(&works[0], moved()).statuses());
    assert_eq!(statuses, [], "neither a second failure nor a success");
    assert_eq!(rank.status(7), RoomStatus::Failed);
    assert_eq!(rank.reason(7), first, "the first cause is kept");
    assert!(rank.view(7).release_safe);
    assert_eq!(rank.core.pending_work(), 0);
}

#[test]
fn an_abort_in_every_state_is_acknowledged_once_nothing_is_written() {
    // Opened and not announced.
    let mut rank = Engines::one_to_one().prefill(0);
    rank.event(open(7));
    let done = abort_of_7(&mut rank);
    assert_eq!(done.acks(), [(decode_endpoint(0), ACK)]);
    assert_eq!(done.statuses(), [], "it knows");
    assert_eq!(rank.status(7), RoomStatus::Failed);

    // Announced and idle.
    let mut rank = announced();
    assert_eq!(abort_of_7(&mut rank).acks(), [(decode_endpoint(0), ACK)]);
    assert_eq!(rank.status(7), RoomStatus::Failed);

    // Between two chunks.
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    rank.report(&works[0], moved());
    assert_eq!(abort_of_7(&mut rank).acks(), [(decode_endpoint(0), ACK)]);

    // While two writes run: after the last of them.
    let mut rank = announced();
    let mut works = send(&mut rank, chunk([0], false)).works();
    works.extend(send(&mut rank, chunk([1], false)).works());
    let done = abort_of_7(&mut rank);
    assert_eq!(done.acks(), []);
    assert_eq!(done.cancels().len(), 1, "one actor does both");
    assert_eq!(abort_of_7(&mut rank).acks(), [], "asked twice");
    assert_eq!(rank.report(&works[0], failed(true)).acks(), []);
    assert!(!rank.view(7).release_safe);
    let done = rank.report(&works[1], moved());
    assert_eq!(done.acks(), [(decode_endpoint(0), ACK)], "once");
    assert!(rank.view(7).release_safe);

    // After Success and after a failure.
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    works.iter().for_each(|key| drop(rank.report(key, moved())));
    assert_eq!(abort_of_7(&mut rank).acks(), [(decode_endpoint(0), ACK)]);
    assert_eq!(rank.status(7), RoomStatus::Success);
}

#[test]
fn no_write_starts_after_an_abort() {
    let mut rank = announced();
    abort_of_7(&mut rank);
    let command = Event::Chunk {
        room: room(7),
        chunk: chunk([0], false),
    };
    let (code, done) = rank.refused(command);
    assert_eq!((code, done.works()), ("room_failed", Vec::new()));
}

#[test]
fn every_decode_rank_that_asks_is_acknowledged_and_the_others_are_told() {
    let mut rank = announced_of(Engines::of(AttentionKind::Mha, 1, 2));
    let works = send(&mut rank, chunk([0], false)).works();
    let done = rank.message(abort_message(7, 0, 1));
    assert_eq!(done.statuses(), [(decode_endpoint(1), KvPoll::Failed)]);
    rank.message(abort_message(7, 1, 9));
    assert_eq!(rank.report(&works[0], failed(true)).acks(), []);
    let done = rank.report(&works[1], failed(true));
    assert_eq!(
        done.acks(),
        [(decode_endpoint(0), 1), (decode_endpoint(1), 9)]
    );
}

#[test]
fn an_abort_without_a_generation_gets_no_acknowledgement() {
    let mut rank = announced();
    let done = rank.message(ControlMessage::Abort(Abort {
        room: room(7),
        reply_to: Some(decode_endpoint(0)),
        generation: None,
    }));
    assert_eq!(done.kinds(), [""; 0]);
    assert_eq!(rank.status(7), RoomStatus::Failed);
}

#[test]
fn a_write_that_may_still_run_poisons_the_room() {
    let ends = [
        failed(false),
        ComponentOutcome::Died { panicked: true },
        ComponentOutcome::Died { panicked: false },
    ];
    for end in ends {
        for abort_first in [true, false] {
            let mut rank = announced();
            let works = send(&mut rank, chunk([0], false)).works();
            let mut acks = Vec::new();
            if abort_first {
                acks.extend(abort_of_7(&mut rank).acks());
            }
            acks.extend(rank.report(&works[0], end.clone()).acks());
            acks.extend(abort_of_7(&mut rank).acks());
            acks.extend(clear_7(&mut rank).acks());
            acks.extend(abort_of_7(&mut rank).acks());
            assert_eq!(acks, [], "{end:?}, abort first: {abort_first}");
            assert_eq!(rank.core.pending_work(), 0);
            assert!(!rank.is_known(7));
        }
    }
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    rank.report(&works[0], failed(false));
    assert!(!rank.view(7).release_safe);
}

#[test]
fn the_death_of_an_actor_takes_all_of_its_work_and_nobody_elses() {
    let mut rank = announced();
    let mut works = send(&mut rank, chunk([0], false)).works();
    works.extend(send(&mut rank, chunk([1, 2, 3], true)).works());
    assert_eq!(rank.core.pending_work(), 4, "two of kv, one of each other");
    let died = ComponentOutcome::Died { panicked: true };
    let done = rank.report(&works[0], died.clone());
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert!(rank.reason(7).contains("panicked"), "{}", rank.reason(7));
    assert_eq!(rank.core.pending_work(), 2);
    rank.report(&works[0], died);
    assert_eq!(rank.core.pending_work(), 2);
}

#[test]
fn after_a_panic_every_actor_with_work_is_retired_and_its_answer_is_the_proof() {
    for is_quiesced in [true, false] {
        let mut rank = announced();
        let mut works = send(&mut rank, chunk([0], false)).works();
        works.extend(send(&mut rank, chunk([1, 2, 3], true)).works());
        rank.report(&works[0], moved());
        let reason = "its actor panicked".to_owned();
        let done = rank.event(Event::Restarted { reason });
        assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
        let retired = |effect: &Effect| match effect {
            Effect::Retire { key } => Some(key.clone()),
            _ => None,
        };
        let retired: Vec<_> = done.0.iter().filter_map(retired).collect();
        assert_eq!(
            retired.len(),
            3,
            "one for each component, not for each work"
        );
        abort_of_7(&mut rank);
        assert!(!rank.view(7).release_safe);
        // A report from before the panic that comes twice counts once: that of the retired ends
        // the matter.
        let over = ComponentOutcome::Retired { is_quiesced };
        let mut acks = Vec::new();
        for key in &retired {
            acks.extend(rank.report(key, over.clone()).acks());
            rank.report(key, failed(true));
        }
        assert_eq!(rank.core.pending_work(), 0);
        assert_eq!(acks.len(), usize::from(is_quiesced));
        assert_eq!(rank.view(7).release_safe, is_quiesced);
        assert!(rank.reason(7).contains("panicked"), "{}", rank.reason(7));
    }
}

#[test]
fn an_idle_actor_may_end_without_harm() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    for key in &works {
        rank.report(key, moved());
        rank.report(key, ComponentOutcome::Died { panicked: false });
    }
    assert_eq!(rank.status(7), RoomStatus::Success);
    assert!(rank.view(7).release_safe);
}

#[test]
fn every_state_has_a_timeout() {
    // Opened: the decode side does not come.
    let mut rank = Engines::one_to_one().prefill(0);
    rank.event(open(7));
    rank.pass(TIMEOUTS.bootstrap - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);
    assert!(rank.pass(seconds(1)).wakes(7));
    assert!(rank.reason(7).contains("announce"), "{}", rank.reason(7));

    // Announced: the engine does not begin.
    let mut rank = announced();
    rank.pass(TIMEOUTS.waiting - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    let done = rank.pass(seconds(1));
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);

    // A chunk is written: no further one comes. Each step of progress starts the time anew.
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    rank.pass(TIMEOUTS.waiting - seconds(1));
    rank.report(&works[0], moved());
    rank.pass(TIMEOUTS.waiting - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    rank.pass(seconds(1));
    assert!(
        rank.reason(7).contains("no further chunk"),
        "{}",
        rank.reason(7)
    );

    // A write does not end: it is cancelled, and until it has ended nobody is told that it has.
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    rank.pass(TIMEOUTS.transfer - seconds(1));
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    assert_eq!(rank.pass(seconds(1)).cancels(), works);
    assert!(!rank.view(7).release_safe);
    assert_eq!(rank.pass(seconds(1)).finished(), [], "a room ends once");

    // Ended, and the engine does not clear it.
    rank.report(&works[0], failed(true));
    rank.pass(TIMEOUTS.retention - seconds(1));
    assert!(rank.is_known(7));
    rank.pass(seconds(1));
    assert!(!rank.is_known(7));
    assert_eq!(rank.core.census().tombstones, 1);
    rank.pass(TIMEOUTS.tombstone);
    assert_eq!(rank.core.census().tombstones, 0);

    // Announced, and the engine does not open it.
    rank.message(info(8));
    rank.pass(TIMEOUTS.bootstrap - seconds(1));
    assert_eq!(rank.core.census().early, 1);
    rank.pass(seconds(1));
    assert_eq!(rank.core.census().early, 0);
}

#[test]
fn a_room_whose_write_never_ends_is_forgotten_without_an_acknowledgement() {
    for is_cleared in [false, true] {
        let mut rank = announced();
        send(&mut rank, chunk([0], false));
        abort_of_7(&mut rank);
        if is_cleared {
            clear_7(&mut rank);
        }
        let done = rank.pass(TIMEOUTS.retention);
        assert_eq!(
            done.acks(),
            [],
            "nobody has proved that the write has stopped"
        );
        assert_eq!(rank.core.pending_work(), 0);
        assert_eq!(rank.core.census().by_status, [0; 5]);
    }
}

#[test]
fn a_cleared_room_stays_until_its_last_write_has_ended() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    let done = clear_7(&mut rank);
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert!(!rank.is_known(7));
    assert_eq!(rank.core.pending_work(), 1);
    assert_eq!(rank.refused(open(7)).0, "room_exists");
    assert_eq!(
        rank.refused(Event::Clear { room: room(7) }).0,
        "unknown_room"
    );
    assert_eq!(abort_of_7(&mut rank).acks(), []);
    let done = rank.report(&works[0], failed(true));
    assert_eq!(done.acks(), [(decode_endpoint(0), ACK)]);
    assert_eq!(rank.core.pending_work(), 0);
    rank.event(open(7));
    assert_eq!(rank.view(7).generation, 2);
}

#[test]
fn an_unknown_rooms_abort_is_remembered_for_its_opening() {
    let mut rank = Engines::one_to_one().prefill(0);
    assert_eq!(abort_of_7(&mut rank).acks(), [(decode_endpoint(0), ACK)]);
    rank.event(open(7));
    assert_eq!(rank.status(7), RoomStatus::Failed);

    let mut rank = Engines::one_to_one().prefill(0);
    abort_of_7(&mut rank);
    rank.pass(TIMEOUTS.tombstone);
    rank.event(open(7));
    assert_eq!(
        rank.status(7),
        RoomStatus::Bootstrapping,
        "it was another use"
    );
}

#[test]
fn what_comes_late_for_a_room_that_is_gone_is_counted_and_changes_nothing() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    works.iter().for_each(|key| drop(rank.report(key, moved())));
    clear_7(&mut rank);
    let done = abort_of_7(&mut rank);
    assert_eq!((done.late(), done.acks().len()), (vec!["abort"], 1));
    assert_eq!(rank.report(&works[0], moved()).late(), ["component_report"]);
    // The next use may be announced before it is opened: it waits, counted.
    assert_eq!(rank.message(info(7)).late(), ["transfer_info"]);
    assert_eq!(rank.core.census().early, 1);
    rank.event(open(7));
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    assert_eq!(rank.view(7).generation, 2);
    assert_eq!(rank.core.census().tombstones, 0);
}

#[test]
fn a_room_announced_and_given_up_before_its_opening_starts_nothing() {
    let mut rank = announced();
    rank.message(info(8));
    assert_eq!(rank.message(abort_message(8, 0, 3)).acks().len(), 1);
    let done = rank.event(open(8));
    assert_eq!(rank.status(8), RoomStatus::Failed);
    assert_eq!(done.acks(), [], "it was acknowledged");

    // Announced anew after the abort: that is the next use.
    rank.message(info(9));
    rank.message(abort_message(9, 0, 3));
    rank.message(info(9));
    rank.event(open(9));
    assert_eq!(rank.status(9), RoomStatus::WaitingForInput);
}

#[test]
fn an_early_abort_of_one_decode_rank_survives_the_announcement_of_another() {
    let engines = Engines::of(AttentionKind::Mha, 1, 2);
    let mut rank = announced_of(engines);
    rank.message(ControlMessage::TransferInfo(engines.info(8, 0)));
    assert_eq!(rank.message(abort_message(8, 0, 3)).acks().len(), 1);
    rank.message(ControlMessage::TransferInfo(engines.info(8, 1)));
    let done = rank.event(open(8));
    assert_eq!(
        rank.status(8),
        RoomStatus::Failed,
        "rank 0 was promised that nothing is written"
    );
    assert_eq!(done.statuses(), [(decode_endpoint(1), KvPoll::Failed)]);
}

#[test]
fn an_abort_of_the_next_use_is_not_lost_on_the_one_that_has_ended() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    works.iter().for_each(|key| drop(rank.report(key, moved())));
    // The decode has gone on to its next use of the number, and gives that up.
    assert_eq!(rank.message(info(7)).kinds(), [""; 0]);
    assert_eq!(rank.message(abort_message(7, 0, 6)).acks().len(), 1);
    clear_7(&mut rank);
    rank.event(open(7));
    assert_eq!(
        rank.status(7),
        RoomStatus::Failed,
        "nothing may be written after the acknowledgement"
    );
}

#[test]
fn prefill_complete_is_told_when_both_halves_are_there_in_either_order() {
    for bootstrap_first in [true, false] {
        let mut rank = Engines::deferred().prefill(0);
        rank.event(open(7));
        let complete = Event::PrefillComplete { room: room(7) };
        let (early, done) = if bootstrap_first {
            let early = rank.message(bootstrap_message(7, 0));
            (early, rank.event(complete))
        } else {
            let early = rank.event(complete);
            (early, rank.message(bootstrap_message(7, 0)))
        };
        assert_eq!(early.statuses(), []);
        assert_eq!(
            done.statuses(),
            [(decode_endpoint(0), KvPoll::WaitingForInput)]
        );
        let again = rank.event(Event::PrefillComplete { room: room(7) });
        assert_eq!(again.statuses(), [], "once");
    }
}

#[test]
fn prefill_complete_has_success_only_after_all_is_written_and_cleared() {
    let engines = Engines::deferred();
    let mut rank = engines.prefill(0);
    rank.message(ControlMessage::Register(Box::new(engines.register(0))));
    rank.message(bootstrap_message(7, 0));
    rank.event(open(7));
    rank.event(Event::PrefillComplete { room: room(7) });
    rank.message(info(7));
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    for key in &works {
        assert_eq!(rank.report(key, moved()).statuses(), []);
    }
    assert_eq!(rank.status(7), RoomStatus::Success, "the engine knows");
    let done = clear_7(&mut rank);
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Success)]);
}

#[test]
fn prefill_complete_tells_of_a_failure_and_refuses_a_second_decode() {
    let mut rank = Engines::deferred().prefill(0);
    rank.event(open(7));
    rank.message(bootstrap_message(7, 0));
    let done = rank.message(bootstrap_message(7, 1));
    assert_eq!(done.statuses(), [(decode_endpoint(1), KvPoll::Failed)]);
    let reason = "out of memory".to_owned();
    let done = rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    let done = rank.event(Event::PrefillComplete { room: room(7) });
    assert_eq!(done.statuses(), []);
    let done = rank.message(bootstrap_message(7, 0));
    assert_eq!(
        done.statuses(),
        [(decode_endpoint(0), KvPoll::Failed)],
        "it asks late"
    );
}

#[test]
fn a_deferred_bootstrap_of_the_next_use_is_not_lost_on_the_one_that_has_ended() {
    let engines = Engines::deferred();
    let mut rank = announced_of(engines);
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    works.iter().for_each(|key| drop(rank.report(key, moved())));
    assert_eq!(rank.message(bootstrap_message(7, 1)).statuses(), []);
    clear_7(&mut rank);
    rank.event(open(7));
    let done = rank.event(Event::PrefillComplete { room: room(7) });
    assert_eq!(
        done.statuses(),
        [(decode_endpoint(1), KvPoll::WaitingForInput)]
    );
}

#[test]
fn shutdown_fails_every_open_room_and_acknowledges_after_the_last_write() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0], false)).works();
    rank.event(open(8));
    let reason = "the engine has gone".to_owned();
    let done = rank.event(Event::Shutdown { reason });
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert_eq!(done.cancels(), works);
    assert_eq!(rank.reason(8), "the engine has gone");
    assert_eq!(abort_of_7(&mut rank).acks(), []);
    assert_eq!(rank.report(&works[0], failed(true)).acks().len(), 1);
    assert_eq!(rank.core.pending_work(), 0);
}

fn unreadable(rank: &mut Rank, room_opt: Option<u64>) -> Done {
    rank.event(Event::Unreadable {
        sender: UnreadableSender {
            endpoint: decode_endpoint(0),
            room_opt: room_opt.map(room),
        },
        reason: "a flat list was seen".to_owned(),
    })
}

#[test]
fn a_decode_rank_that_cannot_be_understood_is_told_so_for_each_of_its_rooms() {
    let failed = [(decode_endpoint(0), KvPoll::Failed)];
    let mut rank = Engines::one_to_one().prefill(0);
    rank.event(open(7));
    assert_eq!(unreadable(&mut rank, None).statuses(), []);
    // Whether or not the announcement itself can be read.
    assert_eq!(unreadable(&mut rank, Some(7)).statuses(), failed);
    assert_eq!(rank.message(info(8)).statuses(), failed);
    assert_eq!(rank.status(7), RoomStatus::Failed);
    rank.event(open(8));
    assert_eq!(rank.status(8), RoomStatus::Failed);
    for number in [7, 8] {
        let reason = rank.reason(number);
        assert!(reason.contains("a flat list was seen"), "{reason}");
    }
    // It comes back with a release that is known.
    rank.message(ControlMessage::Register(Box::new(
        Engines::one_to_one().register(0),
    )));
    rank.event(open(9));
    rank.message(info(9));
    assert_eq!(rank.status(9), RoomStatus::WaitingForInput);
}

#[test]
fn a_message_that_cannot_be_read_from_a_known_rank_changes_nothing() {
    let mut rank = announced();
    assert_eq!(unreadable(&mut rank, Some(7)).statuses(), []);
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
}
