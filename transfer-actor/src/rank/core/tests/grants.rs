//! Permissions to write: to whom they are given, and what taking them back proves.

use super::lives::Decode;
use super::*;

const LATER: Duration = Duration::from_secs(1);

fn hello(decode: &mut Decode, register: u64, hostname: &str) {
    let hello = Hello {
        endpoint: prefill_endpoint(0),
        engine: EngineDesc {
            key: "engine".to_owned(),
            hostname: hostname.to_owned(),
            ..EngineDesc::default()
        },
        register,
        checks: None,
    };
    decode.event(Event::Message(ControlMessage::Hello(Box::new(hello)), None));
}

/// A decode whose prefill, reached by nothing but tcp or otherwise too, has answered.
fn acquainted(is_tcp_only: bool) -> Decode {
    let mut decode = Decode::new();
    let (registers, _) = decode.begin(1);
    let hostname = if is_tcp_only { "tcp only" } else { "here" };
    hello(&mut decode, registers[0], hostname);
    decode
}

fn taken_back(effects: &[Effect]) -> Vec<(Room, Generation, bool)> {
    let taken_back = effects.iter().filter_map(|effect| match effect {
        Effect::TakeBack {
            room,
            generation,
            endpoint,
            is_lost,
        } => {
            assert_eq!(*endpoint, prefill_endpoint(0));
            Some((*room, *generation, *is_lost))
        }
        _ => None,
    });
    taken_back.collect()
}

fn generation(decode: &Decode, number: u64) -> Generation {
    Generation(decode.view(number).generation)
}

fn over(decode: &mut Decode, number: u64, generation: Generation) -> Vec<Effect> {
    decode.event(Event::TakenBack {
        room: room(number),
        generation,
        endpoint: prefill_endpoint(0),
    })
}

fn abort(decode: &mut Decode, number: u64) -> Vec<Effect> {
    decode.event(Event::Abort {
        room: room(number),
        reason: "the user went away".to_owned(),
    })
}

fn later(decode: &mut Decode, by: Duration) -> Vec<Effect> {
    decode.1 += by;
    decode.event(Event::Tick)
}

#[test]
fn a_permission_is_taken_back_a_second_after_a_failure_without_an_answer() {
    let mut decode = acquainted(true);
    decode.begin(2);
    let generation = generation(&decode, 2);
    assert!(taken_back(&abort(&mut decode, 2)).is_empty());
    let early = later(&mut decode, LATER - Duration::from_millis(1));
    assert!(taken_back(&early).is_empty(), "an answer is waited for");
    let due = later(&mut decode, Duration::from_millis(1));
    assert_eq!(taken_back(&due), [(room(2), generation, false)]);
    assert!(taken_back(&later(&mut decode, LATER)).is_empty(), "once");
    assert!(!decode.view(2).release_safe, "something may be under way");
    let older = Generation(generation.get() - 1);
    let late = over(&mut decode, 2, older);
    assert!(matches!(late[..], [Effect::Count(Counted::Late { .. })]));
    assert!(!decode.view(2).release_safe);
    over(&mut decode, 2, generation);
    assert!(decode.view(2).release_safe);
}

#[test]
fn what_has_ended_or_was_acknowledged_needs_no_taking_back() {
    let mut decode = acquainted(true);
    for number in [2, 3] {
        decode.begin(number);
    }
    let generation = generation(&decode, 2);
    abort(&mut decode, 2);
    let ack = AbortAck {
        room: room(2),
        prefill_rank: 0,
        generation: i64::try_from(generation.get()).ok(),
    };
    decode.event(Event::Message(ControlMessage::AbortAck(ack), None));
    assert!(decode.view(2).release_safe);
    assert!(
        taken_back(&later(&mut decode, LATER)).is_empty(),
        "room 3 goes on"
    );
    assert!(!decode.view(3).release_safe);
}

#[test]
fn a_lost_ranks_permissions_are_taken_back_at_once_and_for_good() {
    let mut decode = acquainted(true);
    for number in [2, 3] {
        decode.begin(number);
    }
    let [second, third] = [2, 3].map(|number| generation(&decode, number));
    abort(&mut decode, 2);
    let asked = later(&mut decode, LATER);
    assert_eq!(taken_back(&asked), [(room(2), second, false)]);
    let lost = decode.event(Event::PeerLost {
        endpoint: prefill_endpoint(0),
        reason: "nobody answers".to_owned(),
    });
    // What is asked for already is now ended, too, where something is still coming in.
    let expected = [(room(2), second, true), (room(3), third, true)];
    assert_eq!(taken_back(&lost), expected);
    over(&mut decode, 3, third);
    assert!(decode.view(3).release_safe && !decode.view(2).release_safe);
}

#[test]
fn a_rank_with_other_ways_in_or_that_has_not_answered_gets_none() {
    // Room 1 was announced before the prefill had answered.
    for (mut decode, number) in [(acquainted(false), 2), (acquainted(true), 1)] {
        if number == 2 {
            decode.begin(number);
        }
        abort(&mut decode, number);
        assert!(taken_back(&later(&mut decode, LATER)).is_empty());
        let generation = generation(&decode, number);
        over(&mut decode, number, generation);
        assert!(!decode.view(number).release_safe, "it proves nothing");
    }
    // Nor one of which it is not known that it is the same process as before.
    let mut decode = acquainted(true);
    decode.event(Event::SendFailed {
        to: prefill_endpoint(0),
        about_opt: None,
        kind: "abort",
        register_opt: None,
        reason: "it broke".to_owned(),
    });
    decode.begin(2);
    abort(&mut decode, 2);
    assert!(taken_back(&later(&mut decode, LATER)).is_empty());
}

#[test]
fn what_was_announced_to_another_process_is_refused() {
    let engines = Engines::one_to_one();
    let (mut prefill, now) = (engines.prefill(0).core, Instant::now());
    let mut handle = |event| prefill.handle(event, now).effects;
    handle(Event::Message(
        ControlMessage::Register(Box::new(engines.register(0))),
        None,
    ));
    let own = EngineDesc::default().key;
    for (engine, is_taken) in [("another", false), (own.as_str(), true)] {
        let info = TransferInfo {
            grant_opt: Some(common::wire::Grant {
                engine: engine.to_owned(),
                key: Some([7; 16]),
            }),
            ..engines.info(5, 0)
        };
        let effects = handle(Event::Message(
            ControlMessage::TransferInfo(info),
            Some(Generation(9)),
        ));
        let is_refused = effects.iter().any(|effect| {
            matches!(
                effect,
                Effect::Send {
                    message: ControlMessage::Status(Status {
                        poll: KvPoll::Failed,
                        ..
                    }),
                    generation_opt: Some(Generation(9)),
                    ..
                }
            )
        });
        assert_eq!(is_refused, !is_taken, "{effects:?}");
    }
    // What is taken reaches whoever writes.
    let effects = handle(open(5));
    let keys = effects.iter().filter_map(|effect| match effect {
        Effect::Start { grant_opt, .. } => Some(grant_opt.as_ref()?.key),
        _ => None,
    });
    assert_eq!(keys.collect::<Vec<_>>(), [Some([7; 16]); 3]);
}
