//! A decode's room up to its Success: whom it tells and whom it believes.

use common::wire::AuxData;

use super::*;

pub(super) fn resolve(rank: &mut Rank, engines: &Engines, number: u64) -> Done {
    let generation = Generation(rank.view(number).generation);
    rank.event(Event::Resolved {
        room: room(number),
        generation,
        result: Ok(engines.resolved(0)),
    })
}

pub(super) fn announce(number: u64) -> Event {
    Event::Announce {
        room: room(number),
        announcement: announcement(),
    }
}

pub(super) fn clear(number: u64) -> Event {
    Event::Clear { room: room(number) }
}

/// A decode rank whose room 7 is published.
pub(super) fn published_of(engines: Engines) -> Rank {
    let mut rank = engines.decode(0);
    rank.event(open(7));
    resolve(&mut rank, &engines, 7);
    rank.event(announce(7));
    rank
}

pub(super) fn published() -> Rank {
    published_of(Engines::one_to_one())
}

/// Two prefill ranks write to one decode rank.
pub(super) fn two_writers() -> Engines {
    Engines::of(AttentionKind::Mha, 2, 1)
}

#[test]
fn a_room_lives_from_opening_to_its_tombstone() {
    let engines = two_writers();
    let mut rank = engines.decode(0);
    let done = rank.event(open(7));
    assert!(matches!(done.0.last(), Some(Effect::Resolve { .. })));
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);
    let done = resolve(&mut rank, &engines, 7);
    assert_eq!(done.kinds(), ["register", "register"]);
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    assert!(!rank.view(7).release_safe);

    let done = rank.event(announce(7));
    let told: Vec<_> = done.sent().map(|(to, _)| to.clone()).collect();
    assert_eq!(told, [prefill_endpoint(0), prefill_endpoint(1)]);
    for (_, message) in done.sent() {
        assert_eq!(*message, ControlMessage::TransferInfo(engines.info(7, 0)));
    }

    rank.message(status_message(7, 1, KvPoll::Success));
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    rank.message(status_message(7, 1, KvPoll::Success));
    assert_eq!(
        rank.status(7),
        RoomStatus::Transferring,
        "one of two, twice"
    );
    let done = rank.message(status_message(7, 0, KvPoll::Success));
    assert!(done.wakes(7));
    assert_eq!(done.finished(), [KvPoll::Success]);
    assert!(rank.view(7).release_safe);

    let done = rank.event(clear(7));
    assert_eq!(done.kinds(), [""; 0]);
    assert!(!rank.is_known(7));
    assert_eq!(rank.core.census().tombstones, 1);
    assert_eq!(
        rank.message(status_message(7, 0, KvPoll::Failed)).late(),
        ["status"]
    );
}

#[test]
fn it_registers_once_and_asks_the_bootstrap_server_once() {
    let engines = Engines::one_to_one();
    let mut rank = published();
    let done = rank.event(open(8));
    assert!(
        !done
            .0
            .iter()
            .any(|effect| matches!(effect, Effect::Resolve { .. }))
    );
    assert_eq!(done.kinds(), [""; 0]);
    assert_eq!(rank.event(announce(8)).kinds(), ["transfer_info"]);
    // The answer to an older question comes for a room that is gone.
    rank.event(open(9));
    rank.event(clear(9));
    let done = rank.event(Event::Resolved {
        room: room(9),
        generation: Generation(3),
        result: Ok(engines.resolved(0)),
    });
    assert_eq!(done.late(), ["resolved"]);
    assert!(!rank.is_known(9));
}

#[test]
fn an_answer_of_the_bootstrap_server_counts_once() {
    let engines = Engines::one_to_one();
    let mut rank = published();
    let mut other = engines.resolved(0);
    other.targets[0].unique_rank = 9;
    let done = rank.event(Event::Resolved {
        room: room(7),
        generation: Generation(1),
        result: Ok(other),
    });
    assert_eq!(done.late(), ["resolved"]);
    rank.message(status_message(7, 0, KvPoll::Success));
    assert_eq!(
        rank.status(7),
        RoomStatus::Success,
        "the ranks that were told count"
    );
}

#[test]
fn announcement_and_topology_may_come_in_either_order() {
    let engines = Engines::one_to_one();
    let mut rank = engines.decode(0);
    rank.event(open(7));
    assert_eq!(rank.event(announce(7)).kinds(), [""; 0]);
    assert_eq!(
        resolve(&mut rank, &engines, 7).kinds(),
        ["register", "transfer_info"]
    );
    assert_eq!(rank.refused(announce(7)).0, "room_announced");
}

#[test]
fn a_dummy_message_carries_nothing_and_its_sender_is_not_believed() {
    let engines = Engines::of(AttentionKind::Mla, 2, 1);
    let mut rank = engines.decode(0);
    rank.event(open(7));
    resolve(&mut rank, &engines, 7);
    let done = rank.event(Event::Announce {
        room: room(7),
        announcement: Announcement {
            decode_prefix_len_opt: Some(64),
            ..announcement()
        },
    });
    let infos: Vec<_> = done.sent().map(|(_, message)| message.clone()).collect();
    let ControlMessage::TransferInfo(real) = &infos[0] else {
        panic!("{infos:?}");
    };
    assert_eq!(real.decode_prefix_len, Some(64));
    let empty = ControlMessage::TransferInfo(dummy(engines.info(7, 0)));
    assert_eq!(infos[1], empty, "the prefix too is left out");

    // 0.5.23 takes a dummy for real: its Success says nothing of the bytes.
    rank.message(status_message(7, 1, KvPoll::Success));
    assert_ne!(rank.status(7), RoomStatus::Success);
    rank.message(status_message(7, 0, KvPoll::Success));
    assert_eq!(rank.status(7), RoomStatus::Success);
}

#[test]
fn messages_that_nobody_waits_for_are_counted_and_change_nothing() {
    let mut rank = Engines::one_to_one().decode(0);
    let aux = |number| {
        ControlMessage::AuxData(AuxData {
            room: room(number),
            buffer_index: 0,
            aux_index: 3,
            data: vec![1; 16],
        })
    };
    assert_eq!(
        rank.message(status_message(7, 0, KvPoll::Success)).late(),
        ["status"]
    );
    assert_eq!(rank.message(ack_message(7, 0, 1)).late(), ["abort_ack"]);
    assert_eq!(rank.message(aux(7)).late(), ["aux_data"]);
    let info = ControlMessage::TransferInfo(Engines::one_to_one().info(7, 0));
    assert_eq!(rank.message(info).late(), ["transfer_info"]);
    assert!(!rank.is_known(7));

    rank.event(open(7));
    assert_eq!(
        rank.message(status_message(7, 0, KvPoll::Failed)).late(),
        ["status"]
    );
    resolve(&mut rank, &Engines::one_to_one(), 7);
    for early in [KvPoll::Success, KvPoll::Transferring] {
        let done = rank.message(status_message(7, 0, early));
        assert_eq!(done.late(), ["status"], "nobody knows yet where to write");
    }
    assert_eq!(rank.message(aux(7)).late(), ["aux_data"]);
    assert_eq!(rank.message(ack_message(7, 0, 1)).late(), ["abort_ack"]);
    assert_eq!(rank.event(announce(7)).kinds(), ["transfer_info"]);
    let stranger = rank.message(status_message(7, 4, KvPoll::Failed));
    assert_eq!(stranger.late(), ["status"]);
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);

    let done = rank.message(aux(7));
    assert!(matches!(&done.0[..], [Effect::WriteAux { row: 3, .. }]));
    let elsewhere = ControlMessage::AuxData(AuxData {
        room: room(7),
        buffer_index: 0,
        aux_index: 2,
        data: vec![1; 16],
    });
    assert_eq!(
        rank.message(elsewhere).late(),
        ["aux_data"],
        "not the announced row"
    );
}

#[test]
fn a_status_never_goes_back() {
    let mut rank = published_of(two_writers());
    rank.message(status_message(7, 0, KvPoll::Success));
    for poll in [
        KvPoll::Bootstrapping,
        KvPoll::WaitingForInput,
        KvPoll::Transferring,
    ] {
        rank.message(status_message(7, 1, poll));
        assert_eq!(rank.status(7), RoomStatus::Transferring);
    }
    rank.message(status_message(7, 1, KvPoll::Success));
    assert_eq!(
        rank.message(status_message(7, 1, KvPoll::Failed)).late(),
        ["status"]
    );
    assert_eq!(rank.status(7), RoomStatus::Success);
}

#[test]
fn success_after_failure_is_never_reported() {
    let mut rank = published_of(two_writers());
    let done = rank.message(status_message(7, 0, KvPoll::Failed));
    assert_eq!(
        done.kinds(),
        ["abort", "abort"],
        "also to the one that runs"
    );
    assert!(
        rank.reason(7).starts_with("prefill rank 0"),
        "{}",
        rank.reason(7)
    );
    for prefill_rank in [0, 1] {
        let done = rank.message(status_message(7, prefill_rank, KvPoll::Success));
        assert_eq!(done.late(), ["status"]);
    }
    assert_eq!(rank.status(7), RoomStatus::Failed);
}

#[test]
fn the_engines_own_mistakes_are_refused_and_can_be_corrected() {
    let mut rank = Engines::one_to_one().decode(0);
    assert_eq!(rank.refused(announce(7)).0, "unknown_room");
    assert_eq!(rank.refused(clear(7)).0, "unknown_room");
    let nowhere = Event::Open(OpenCommand {
        room: room(7),
        bootstrap_opt: None,
        prefill_dp_rank_opt: None,
        aux_index_opt: None,
    });
    assert_eq!(rank.refused(nowhere).0, "bootstrap_missing");
    rank.event(open(7));
    assert_eq!(rank.refused(open(7)).0, "room_exists");
    let changes: [fn(&mut Announcement); 6] = [
        |announcement| announcement.kv_indices = vec![16],
        |announcement| announcement.kv_indices = vec![-1],
        |announcement| announcement.kv_indices = vec![3, 3],
        |announcement| announcement.state_indices = vec![vec![8]],
        |announcement| announcement.state_indices = vec![vec![1], vec![1]],
        |announcement| announcement.aux_index_opt = Some(4),
    ];
    for change in changes {
        let mut announcement = announcement();
        change(&mut announcement);
        let bad = Event::Announce {
            room: room(7),
            announcement,
        };
        assert_eq!(rank.refused(bad).0, "bad_indices");
    }
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);
    rank.event(announce(7));
    let chunk_of_7 = Event::Chunk {
        room: room(7),
        chunk: chunk([0], true),
    };
    assert_eq!(rank.refused(chunk_of_7).0, "wrong_role");
    assert_eq!(
        rank.refused(Event::PrefillComplete { room: room(7) }).0,
        "wrong_role"
    );
}

#[test]
fn prefill_complete_announces_only_after_the_prefill_is_complete() {
    let engines = Engines::deferred();
    let mut rank = engines.decode(0);
    rank.event(open(7));
    let done = resolve(&mut rank, &engines, 7);
    assert_eq!(done.kinds(), ["register", "bootstrap"]);
    assert_eq!(rank.event(announce(7)).kinds(), [""; 0]);
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);
    let done = rank.message(status_message(7, 0, KvPoll::WaitingForInput));
    assert_eq!(done.kinds(), ["transfer_info"]);
    assert_eq!(
        rank.message(status_message(7, 0, KvPoll::WaitingForInput))
            .kinds(),
        [""; 0]
    );
    rank.message(status_message(7, 0, KvPoll::Success));
    assert_eq!(rank.status(7), RoomStatus::Success);
}
