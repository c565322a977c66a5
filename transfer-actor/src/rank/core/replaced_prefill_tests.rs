//! A decode remembers its prefills; these are its rooms when a remembered one is gone.

use std::time::{Duration, Instant};

use common::ids::{Endpoint, Generation, Room};
use common::schema::{AttentionKind, KvLayout, RankLayout};
use common::topology::RankMapping;
use common::wire::{EngineDesc, Register, Release};

use super::*;

const BOOTSTRAP: &str = "prefill:8998";

fn endpoint(port: u16) -> Endpoint {
    Endpoint::new("127.0.0.1".to_owned(), port)
}

fn decode() -> RankCore {
    let register = Register {
        endpoint: endpoint(1),
        engine: EngineDesc::default(),
        kv: Vec::new(),
        aux: Vec::new(),
        states: Vec::new(),
        gpu_id: 0,
        tp_size: 1,
        engine_rank: 0,
        kv_item_len: 0,
        state_item_lens: Vec::new(),
        state_dims: Vec::new(),
        dcp_size: 1,
        dcp_rank: 0,
        state_layer_ids: Vec::new(),
        kv_layer_ids: Vec::new(),
        release: Release::NEWEST,
    };
    let layout = RankLayout {
        page_size: 4,
        kv: KvLayout {
            tensors: Vec::new(),
            layer_ids: Vec::new(),
            start_layer: 0,
            num_draft_entries: 0,
            attention: AttentionKind::Mha,
            head_num: 1,
            total_head_num: 1,
        },
        aux: Vec::new(),
        states: Vec::new(),
    };
    let identity = DecodeIdentity {
        layout,
        register,
        allocation_policy: "early".to_owned(),
        checks_opt: None,
        first_generation: 0,
        is_only_way_in: |_, peer| peer.hostname == "tcp only",
    };
    let core = DecodeCore::new(identity, Timeouts::default(), Limits::default());
    RankCore::Decode(Box::new(core))
}

/// An engine of two ranks at these ports.
fn prefill(ports: [u16; 2]) -> ResolvedPrefill {
    let targets = ports.into_iter().zip(0..);
    ResolvedPrefill {
        bootstrap: BOOTSTRAP.to_owned(),
        dp_rank: 0,
        is_only_dp_rank: true,
        mapping: RankMapping {
            target_tp_rank: None,
            target_tp_ranks: vec![0, 1],
            target_cp_ranks: vec![0],
            target_pp_ranks: vec![0],
            required_dst_info_num: 1,
            required_prefill_response_num: 2,
        },
        targets: targets
            .map(|(port, unique_rank)| PrefillTarget {
                endpoint: endpoint(port),
                is_dummy: false,
                unique_rank,
                is_ferry: false,
            })
            .collect(),
        decode_allocation_policy: "early".to_owned(),
    }
}

fn room(number: u64) -> Room {
    Room::new(number).expect("a room")
}

fn open(core: &mut RankCore, number: u64, now: Instant) -> Vec<Effect> {
    let command = OpenCommand {
        room: room(number),
        bootstrap_opt: Some(BOOTSTRAP.to_owned()),
        prefill_dp_rank_opt: None,
        aux_index_opt: None,
    };
    core.handle(Event::Open(command), now).effects
}

fn resolved(
    core: &mut RankCore,
    number: u64,
    generation: u64,
    ports: [u16; 2],
    now: Instant,
) -> Vec<Effect> {
    let event = Event::Resolved {
        room: room(number),
        generation: Generation(generation),
        result: Ok(prefill(ports)),
    };
    core.handle(event, now).effects
}

/// A room that uses a prefill which an earlier room has found, and is announced.
fn remembered(now: Instant) -> RankCore {
    let mut core = decode();
    assert!(asks(&open(&mut core, 1, now)));
    resolved(&mut core, 1, 1, [10, 11], now);
    assert!(!asks(&open(&mut core, 2, now)), "the prefill is known");
    let event = Event::Announce {
        room: room(2),
        announcement: Announcement::default(),
    };
    assert_eq!(infos(&core.handle(event, now).effects), [10, 11]);
    core
}

fn asks(effects: &[Effect]) -> bool {
    let is_question = |effect: &Effect| matches!(effect, Effect::Resolve { .. });
    effects.iter().any(is_question)
}

/// Ports of the ranks that are told where to write.
fn infos(effects: &[Effect]) -> Vec<u16> {
    let port = |effect: &Effect| match effect {
        Effect::Send { to, message, .. } if message.kind() == "transfer_info" => Some(to.port),
        _ => None,
    };
    effects.iter().filter_map(port).collect()
}

fn send_failed(core: &mut RankCore, port: u16, now: Instant) -> Vec<Effect> {
    let event = Event::SendFailed {
        to: endpoint(port),
        about_opt: Some((room(2), Generation(2))),
        kind: "transfer_info",
        register_opt: None,
        reason: "connection refused".to_owned(),
    };
    core.handle(event, now).effects
}

fn status(core: &RankCore) -> RoomStatus {
    core.view(room(2)).expect("it is open").status
}

#[test]
fn once_no_rank_of_it_was_reached_the_bootstrap_server_is_asked_again() {
    let now = Instant::now();
    let mut core = remembered(now);
    assert!(!asks(&send_failed(&mut core, 10, now)));
    assert!(asks(&send_failed(&mut core, 11, now)));
    // A second message to an old address fails, too; it is not the room's any more.
    assert!(send_failed(&mut core, 10, now).is_empty());
    let effects = resolved(&mut core, 2, 2, [20, 21], now);
    assert_eq!(infos(&effects), [20, 21]);
    assert_eq!(status(&core), RoomStatus::WaitingForInput);
    // What was just asked for is believed: it is not asked for twice.
    assert!(!asks(&send_failed(&mut core, 20, now)));
    assert_eq!(status(&core), RoomStatus::Failed);
}

/// Places that a rank was never told of wait for nothing from it, however late that is known.
#[test]
fn a_rank_that_the_announcement_did_not_reach_writes_nothing() {
    let now = Instant::now();
    let mut core = remembered(now);
    send_failed(&mut core, 10, now);
    send_failed(&mut core, 11, now);
    resolved(&mut core, 2, 2, [20, 21], now);
    let is_safe = |core: &RankCore| core.view(room(2)).expect("it is open").release_safe;
    send_failed(&mut core, 20, now);
    assert_eq!(status(&core), RoomStatus::Failed);
    assert!(!is_safe(&core), "the rank at 21 may have heard of it");
    let effects = send_failed(&mut core, 21, now);
    assert!(is_safe(&core));
    let is_told = |effect: &Effect| matches!(effect, Effect::Changed { .. });
    assert!(effects.iter().any(is_told), "the engine waits for it");
}

/// What failed before a room was announced says nothing of what it is told then.
#[test]
fn a_rank_that_is_told_after_all_is_waited_for() {
    let now = Instant::now();
    let mut core = decode();
    open(&mut core, 1, now);
    resolved(&mut core, 1, 1, [10, 11], now);
    open(&mut core, 2, now);
    send_failed(&mut core, 10, now);
    let event = Event::Announce {
        room: room(2),
        announcement: Announcement::default(),
    };
    assert_eq!(infos(&core.handle(event, now).effects), [10, 11]);
    assert!(
        !asks(&send_failed(&mut core, 11, now)),
        "the rank at 10 may write there"
    );
}

/// The other rank may be writing to the announced pages: they are not given to anybody else.
#[test]
fn a_room_that_one_rank_of_it_has_heard_of_fails_with_the_rank_that_has_not() {
    let now = Instant::now();
    let mut core = remembered(now);
    send_failed(&mut core, 10, now);
    let event = core.handle(Event::Tick, now + Duration::from_secs(1));
    assert!(event.effects.is_empty());
    assert_eq!(status(&core), RoomStatus::WaitingForInput);
    let effects = core
        .handle(Event::Tick, now + Duration::from_secs(2))
        .effects;
    let aborts = effects.iter().filter(
        |effect| matches!(effect, Effect::Send { message, .. } if message.kind() == "abort"),
    );
    assert_eq!(aborts.count(), 2);
    let view = core.view(room(2)).expect("it is open");
    assert_eq!(view.status, RoomStatus::Failed);
    let reason = view.reason.unwrap_or_default();
    assert!(
        reason.contains("127.0.0.1:10 cannot be reached"),
        "{reason}"
    );
    assert!(!view.release_safe);
}
