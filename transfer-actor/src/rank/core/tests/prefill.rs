//! A prefill's room up to its Success: messages in every order, chunks, what is refused.

use super::*;

/// A prefill rank with one registered decode rank.
fn registered() -> Rank {
    registered_of(Engines::one_to_one())
}

fn registered_of(engines: Engines) -> Rank {
    let mut rank = engines.prefill(0);
    for decode_rank in 0..engines.decode_tp {
        let register = Box::new(engines.register(decode_rank));
        rank.message(ControlMessage::Register(register));
    }
    rank
}

/// The same with room 7 open and announced by every decode rank.
pub(super) fn announced() -> Rank {
    announced_of(Engines::one_to_one())
}

pub(super) fn announced_of(engines: Engines) -> Rank {
    let mut rank = registered_of(engines);
    rank.event(open(7));
    for decode_rank in 0..engines.decode_tp {
        rank.message(ControlMessage::TransferInfo(engines.info(7, decode_rank)));
    }
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    rank
}

#[track_caller]
pub(super) fn send(rank: &mut Rank, chunk: ChunkCommand) -> Done {
    rank.event(Event::Chunk {
        room: room(7),
        chunk,
    })
}

/// The code of the refusal of a chunk for room 7.
#[track_caller]
fn send_refused(rank: &mut Rank, chunk: ChunkCommand) -> (&'static str, Done) {
    rank.refused(Event::Chunk {
        room: room(7),
        chunk,
    })
}

fn info(number: u64) -> ControlMessage {
    ControlMessage::TransferInfo(Engines::one_to_one().info(number, 0))
}

#[test]
fn a_room_lives_from_opening_to_its_tombstone() {
    let mut rank = registered();
    assert!(rank.event(open(7)).wakes(7));
    assert_eq!(rank.status(7), RoomStatus::Bootstrapping);

    let done = rank.message(info(7));
    let all = [ComponentId::Kv, ComponentId::State(0), ComponentId::Aux];
    assert_eq!(components(&done.starts()), all);
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);

    let first = send(&mut rank, chunk([0, 1], false)).works();
    assert_eq!(components(&first), [ComponentId::Kv]);
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    rank.report(&first[0], moved());
    assert_eq!(rank.core.pending_work(), 0);
    assert_eq!(
        rank.status(7),
        RoomStatus::Transferring,
        "the last is to come"
    );

    let last = send(&mut rank, chunk([2, 3], true)).works();
    assert_eq!(components(&last), all);
    for (position, key) in last.iter().enumerate() {
        assert_eq!(rank.core.pending_work(), last.len() - position);
        assert_eq!(rank.status(7), RoomStatus::Transferring);
        let done = rank.report(key, moved());
        let is_last = position + 1 == last.len();
        assert_eq!(done.statuses().len(), usize::from(is_last));
        if is_last {
            assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Success)]);
            assert_eq!(done.finished(), [KvPoll::Success]);
            assert_eq!(done.stops().len(), all.len(), "its actors end");
        }
    }
    let view = rank.view(7);
    assert_eq!(view.status, RoomStatus::Success);
    assert!(view.release_safe && view.reason.is_none());
    let kv = &view.transfers[0];
    assert_eq!(
        (kv.component.as_str(), kv.bytes, kv.outcome.as_str()),
        ("kv", 128, "success")
    );

    let done = rank.event(Event::Clear { room: room(7) });
    assert_eq!(done.statuses(), [], "the decode has heard of it");
    assert!(!rank.is_known(7));
    let census = rank.core.census();
    assert_eq!((census.by_status, census.tombstones), ([0; 5], 1));
}

#[test]
fn a_room_may_be_announced_before_it_is_opened_and_before_its_peer_registers() {
    let engines = Engines::one_to_one();
    let mut rank = engines.prefill(0);
    assert_eq!(rank.message(info(7)).kinds(), [""; 0]);
    rank.message(info(7));
    assert_eq!((rank.core.census().early, rank.is_known(7)), (1, false));
    rank.message(ControlMessage::Register(Box::new(engines.register(0))));
    rank.event(open(7));
    assert_eq!(rank.status(7), RoomStatus::WaitingForInput);
    assert_eq!(rank.core.census().early, 0);
}

#[test]
fn a_room_of_a_peer_that_never_registered_fails_and_the_peer_is_told() {
    let mut rank = Engines::one_to_one().prefill(0);
    rank.event(open(7));
    let done = rank.message(info(7));
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert!(
        rank.reason(7).contains("not registered"),
        "{}",
        rank.reason(7)
    );
    assert_eq!(done.starts(), []);
}

#[test]
fn a_peer_that_cannot_be_served_hears_why_in_each_of_its_rooms() {
    let engines = Engines::one_to_one();
    let mut rank = engines.prefill(0);
    let mut register = engines.register(0);
    register.kv_item_len += 2;
    rank.message(ControlMessage::Register(Box::new(register)));
    for number in [7, 8] {
        rank.event(open(number));
        let done = rank.message(info(number));
        assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
        assert!(rank.reason(number).contains("a page has 128 bytes"));
    }
    let RankCore::Prefill(core) = &rank.core else {
        panic!("a prefill");
    };
    assert!(core.peers()[0].refused.is_some());
}

#[test]
fn every_decode_rank_of_a_room_must_announce_it() {
    let engines = Engines::of(AttentionKind::Mha, 1, 2);
    let mut rank = registered_of(engines);
    rank.event(open(7));
    let first = ControlMessage::TransferInfo(engines.info(7, 1));
    rank.message(first.clone());
    assert_eq!(rank.message(first).late(), ["transfer_info"]);
    assert_eq!(
        rank.status(7),
        RoomStatus::Bootstrapping,
        "one of two, twice"
    );
    assert_eq!(send_refused(&mut rank, chunk([0], false)).0, "not_ready");
    let done = rank.message(ControlMessage::TransferInfo(engines.info(7, 0)));
    assert_eq!(done.starts().len(), 6, "three components to each of two");
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    assert_eq!(works.len(), 6);
    let mut statuses = Vec::new();
    for key in &works {
        statuses.extend(rank.report(key, moved()).statuses());
    }
    let told = [1, 0].map(|rank| (decode_endpoint(rank), KvPoll::Success));
    assert_eq!(statuses, told, "both hear of it, and only at the end");
}

#[test]
fn a_decode_rank_too_many_is_refused_and_harms_nobody() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1], false)).works();
    let mut stranger = Engines::one_to_one().info(7, 0);
    stranger.endpoint = decode_endpoint(5);
    let done = rank.message(ControlMessage::TransferInfo(stranger));
    assert_eq!(done.statuses(), [(decode_endpoint(5), KvPoll::Failed)]);
    assert_eq!(
        done.starts(),
        [],
        "the actors that run are not started again"
    );
    assert_eq!(rank.status(7), RoomStatus::Transferring);
    rank.report(&works[0], moved());
    let mut statuses = Vec::new();
    for key in send(&mut rank, chunk([2, 3], true)).works() {
        statuses.extend(rank.report(&key, moved()).statuses());
    }
    assert_eq!(statuses, [(decode_endpoint(0), KvPoll::Success)]);
}

#[test]
fn announcements_that_contradict_each_other_fail_the_room() {
    let engines = Engines::of(AttentionKind::Mha, 1, 2);
    let mut rank = registered_of(engines);
    rank.event(open(7));
    rank.message(ControlMessage::TransferInfo(engines.info(7, 0)));
    let mut other = engines.info(7, 0);
    other.kv_indices = vec![0, 1, 2, 3];
    let done = rank.message(ControlMessage::TransferInfo(other));
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
    assert!(rank.reason(7).contains("twice"));

    rank.event(open(8));
    rank.message(ControlMessage::TransferInfo(engines.info(8, 0)));
    let mut other = engines.info(8, 1);
    other.required_dst_info_num = 1;
    let done = rank.message(ControlMessage::TransferInfo(other));
    let told = [0, 1].map(|rank| (decode_endpoint(rank), KvPoll::Failed));
    assert_eq!(done.statuses(), told, "both are told");
}

#[test]
fn destinations_out_of_their_region_fail_the_room_before_it_begins() {
    for (change, what) in [
        (
            (|info: &mut TransferInfo| info.kv_indices = vec![4, 16]) as fn(&mut TransferInfo),
            "index 16",
        ),
        (|info| info.kv_indices = vec![4, -1], "index -1"),
        (|info| info.kv_indices = vec![4, 4], "twice"),
        (|info| info.state_indices = vec![vec![8]], "index 8"),
        (|info| info.aux_index = Some(4), "index 4"),
        (|info| info.aux_index = Some(u32::MAX), "aux"),
    ] {
        let mut rank = registered();
        rank.event(open(7));
        let mut bad = Engines::one_to_one().info(7, 0);
        change(&mut bad);
        let done = rank.message(ControlMessage::TransferInfo(bad));
        assert_eq!(
            done.statuses(),
            [(decode_endpoint(0), KvPoll::Failed)],
            "{what}"
        );
        assert_eq!(done.starts(), []);
        assert!(rank.reason(7).contains(what), "{what}: {}", rank.reason(7));
        assert_eq!(send_refused(&mut rank, chunk([0], false)).0, "room_failed");
    }
}

#[test]
fn a_chunk_with_bad_indices_fails_the_room_before_any_of_it_is_written() {
    let beyond = ChunkCommand {
        state_indices: vec![vec![8]],
        ..chunk([2, 3], true)
    };
    let without_state = ChunkCommand {
        state_indices: Vec::new(),
        ..chunk([2, 3], true)
    };
    for (bad, what) in [
        (chunk([2, 16], false), "index 16"),
        (chunk([-1], false), "index -1"),
        (chunk([2, 3, 8], false), "announced"),
        (chunk([2], true), "ends after 3 pages"),
        (beyond, "index 8"),
        (without_state, "does not send it"),
    ] {
        let mut rank = announced();
        let running = send(&mut rank, chunk([0, 1], false)).works();
        let (code, done) = send_refused(&mut rank, bad);
        assert_eq!(code, "bad_indices", "{what}");
        assert_eq!(done.works(), [], "{what}");
        assert_eq!(done.cancels(), running, "what runs is stopped");
        assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
        assert!(rank.reason(7).contains(what), "{what}: {}", rank.reason(7));
        assert!(!rank.view(7).release_safe, "a write runs");
        rank.report(&running[0], moved());
        assert!(rank.view(7).release_safe);
        assert_eq!(rank.status(7), RoomStatus::Failed);
    }
}

#[test]
fn one_bad_decode_rank_stops_the_chunk_for_all() {
    let engines = Engines::of(AttentionKind::Mha, 1, 2);
    let mut rank = registered_of(engines);
    rank.event(open(7));
    rank.message(ControlMessage::TransferInfo(engines.info(7, 0)));
    let mut short = engines.info(7, 1);
    short.kv_indices.pop();
    rank.message(ControlMessage::TransferInfo(short));
    let (code, done) = send_refused(&mut rank, chunk([0, 1, 2, 3], true));
    assert_eq!((code, done.works()), ("bad_indices", Vec::new()));
}

#[test]
fn the_last_chunk_is_taken_once() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    assert_eq!(
        send_refused(&mut rank, chunk([0, 1, 2, 3], true)).0,
        "room_complete"
    );
    assert_eq!(rank.core.pending_work(), works.len());
    works.iter().for_each(|key| drop(rank.report(key, moved())));
    assert_eq!(
        rank.status(7),
        RoomStatus::Success,
        "the refusal changed nothing"
    );
    assert_eq!(send_refused(&mut rank, chunk([0], true)).0, "room_complete");
}

#[test]
fn a_report_counts_once_and_only_for_its_own_use_of_the_room() {
    let mut rank = announced();
    let works = send(&mut rank, chunk([0, 1, 2, 3], true)).works();
    rank.report(&works[0], moved());
    rank.report(&works[0], moved());
    rank.report(&works[0], failed(false));
    assert_eq!(rank.core.pending_work(), works.len() - 1);
    let mut older = works[1].clone();
    older.generation = Generation(0);
    assert_eq!(
        rank.report(&older, failed(false)).late(),
        ["component_report"]
    );
    let mut elsewhere = works[1].clone();
    elsewhere.room = room(8);
    assert_eq!(
        rank.report(&elsewhere, moved()).late(),
        ["component_report"]
    );
    assert_eq!(rank.core.pending_work(), works.len() - 1);
    assert_eq!(rank.status(7), RoomStatus::Transferring);
}

#[test]
fn commands_for_the_wrong_room_or_role_are_refused_and_change_nothing() {
    let mut rank = announced();
    let before = rank.core.census();
    let chunk_of_8 = Event::Chunk {
        room: room(8),
        chunk: chunk([0], false),
    };
    let reason = "no".to_owned();
    for (event, expected) in [
        (chunk_of_8, "unknown_room"),
        (Event::PrefillComplete { room: room(8) }, "unknown_room"),
        (Event::Clear { room: room(8) }, "unknown_room"),
        (
            Event::Abort {
                room: room(8),
                reason,
            },
            "unknown_room",
        ),
        (open(7), "room_exists"),
        (
            Event::Announce {
                room: room(7),
                announcement: announcement(),
            },
            "wrong_role",
        ),
    ] {
        let (code, done) = rank.refused(event);
        assert_eq!((code, done.0.len()), (expected, 0));
    }
    assert_eq!(
        rank.message(status_message(7, 0, KvPoll::Failed)).late(),
        ["status"]
    );
    assert_eq!(rank.core.census(), before);
}

#[test]
fn a_dummy_gets_nothing_and_hears_of_no_success() {
    // MLA, two prefill ranks to one decode rank: the second has nothing to deliver.
    let engines = Engines::of(AttentionKind::Mla, 2, 1);
    for prefix in [None, Some(64)] {
        let mut rank = registered_of(engines);
        rank.event(open(7));
        // 0.5.23 puts the prefix into dummy messages.
        let mut info = dummy(engines.info(7, 0));
        info.decode_prefix_len = prefix;
        let done = rank.message(ControlMessage::TransferInfo(info));
        assert_eq!(done.starts(), []);
        assert_eq!(rank.view(7).decode_prefix_len, None);
        let done = send(&mut rank, chunk([0, 1, 2, 3], true));
        assert_eq!((done.works(), done.statuses()), (Vec::new(), Vec::new()));
        assert_eq!(rank.status(7), RoomStatus::Success);
    }
}

#[test]
fn a_dummy_is_told_of_a_failure() {
    let engines = Engines::of(AttentionKind::Mla, 2, 1);
    let mut rank = registered_of(engines);
    rank.event(open(7));
    rank.message(ControlMessage::TransferInfo(dummy(engines.info(7, 0))));
    let reason = "out of memory".to_owned();
    let done = rank.event(Event::Abort {
        room: room(7),
        reason,
    });
    assert_eq!(done.statuses(), [(decode_endpoint(0), KvPoll::Failed)]);
}

#[test]
fn rooms_peers_and_early_rooms_are_bounded() {
    let limits = Limits {
        rooms: 2,
        early_rooms: 2,
        early_bytes: usize::MAX,
        check_bytes: usize::MAX,
        peers: 1,
        tombstones: 2,
        ..Limits::default()
    };
    let engines = Engines {
        limits,
        ..Engines::one_to_one()
    };
    let mut rank = registered_of(engines);
    let mut other = engines.register(0);
    other.engine.key = "another".to_owned();
    other.endpoint = decode_endpoint(1);
    rank.message(ControlMessage::Register(Box::new(other)));
    let RankCore::Prefill(core) = &rank.core else {
        panic!("a prefill");
    };
    assert_eq!(core.peers()[0].engine_key, engine_key(0));
    assert_eq!(core.peers().len(), 1);

    for number in 0..4 {
        rank.pass(Duration::from_millis(1));
        rank.message(info(number));
    }
    assert_eq!(rank.core.census().early, 2);
    rank.event(open(3));
    rank.event(open(0));
    assert_eq!(rank.status(3), RoomStatus::WaitingForInput);
    assert_eq!(
        rank.status(0),
        RoomStatus::Bootstrapping,
        "the oldest was dropped"
    );
    assert_eq!(rank.refused(open(9)).0, "too_many_rooms");
    for number in [3, 0] {
        rank.event(Event::Clear { room: room(number) });
    }
    rank.event(open(9));
    rank.event(Event::Clear { room: room(9) });
    assert_eq!(rank.core.census().tombstones, 2);
}

#[test]
fn what_a_decode_rank_announced_before_it_was_started_anew_is_void() {
    let mut rank = registered();
    rank.message(info(1));
    rank.event(open(2));
    rank.message(info(2));
    assert_eq!(rank.status(2), RoomStatus::WaitingForInput);
    let mut anew = Engines::one_to_one().register(0);
    anew.engine.key = "its next life".to_owned();
    let done = rank.message(ControlMessage::Register(Box::new(anew)));
    assert_eq!(rank.status(2), RoomStatus::Failed);
    assert!(
        rank.reason(2).contains("was started anew"),
        "{}",
        rank.reason(2)
    );
    assert_eq!(done.statuses(), [], "it may use the same numbers by now");
    rank.event(open(1));
    assert_eq!(rank.status(1), RoomStatus::Bootstrapping);
    let RankCore::Prefill(core) = &rank.core else {
        panic!("a prefill");
    };
    assert_eq!(core.peers().len(), 1, "its former engine is forgotten");
}
