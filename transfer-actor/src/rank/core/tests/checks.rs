//! Checksums: what is held in memory for them, and what places that are read are not.

use common::check::CheckRun;
use common::ids::ByteOffset;
use common::wire::CheckGroup;

use super::lives::Decode;
use super::*;

/// A decode rank that asks for checksums and whose prefill, a Ferry rank, has answered.
fn asking(check_bytes: usize) -> Decode {
    let engines = Engines {
        checks_opt: Some(CheckMode::Full),
        limits: Limits {
            check_bytes,
            ..Limits::default()
        },
        ..Engines::one_to_one()
    };
    let mut decode = Decode(engines.decode(0).core, Instant::now());
    let (registers, _) = decode.begin(1);
    answer(&mut decode, registers[0]);
    decode
}

/// The prefill answers a REGISTER, and lets its bytes be compared.
fn answer(decode: &mut Decode, register: u64) {
    let hello = Hello {
        endpoint: prefill_endpoint(0),
        engine: EngineDesc::default(),
        register,
        checks: Some(CheckMode::Full),
    };
    decode.event(Event::Message(ControlMessage::Hello(Box::new(hello)), None));
}

fn group() -> CheckGroup {
    CheckGroup {
        component: ComponentId::Kv,
        tensors: vec![0, 1],
        runs: vec![CheckRun {
            offset: ByteOffset(128),
            len: ByteLen(256),
            stride: 0,
            count: 1,
        }],
        sums: vec![1, 2],
    }
}

fn generation(decode: &Decode, number: u64) -> Generation {
    Generation(decode.view(number).generation)
}

fn say(decode: &mut Decode, number: u64) -> Vec<Effect> {
    let checks = Checks {
        room: room(number),
        prefill_rank: 0,
        token: 5,
        mode: CheckMode::Full,
        groups: vec![group()],
    };
    let generation = generation(decode, number);
    let message = ControlMessage::Checks(Box::new(checks));
    decode.event(Event::Message(message, Some(generation)))
}

fn compared(decode: &mut Decode, number: u64, result: Result<(), Mismatch>) -> Vec<Effect> {
    let generation = generation(decode, number);
    decode.event(Event::Compared {
        room: room(number),
        generation,
        prefill_rank: 0,
        result,
    })
}

fn is_compared(effects: &[Effect]) -> bool {
    let is_it = |effect: &Effect| matches!(effect, Effect::Compare { .. });
    effects.iter().any(is_it)
}

#[test]
fn places_are_not_free_before_the_comparison_that_reads_them_is_over() {
    let mut decode = asking(usize::MAX);
    decode.begin(2);
    assert!(is_compared(&say(&mut decode, 2)));
    decode.event(Event::Abort {
        room: room(2),
        reason: "the user went away".to_owned(),
    });
    let ack = AbortAck {
        room: room(2),
        prefill_rank: 0,
        generation: i64::try_from(generation(&decode, 2).get()).ok(),
    };
    decode.event(Event::Message(ControlMessage::AbortAck(ack), None));
    assert!(!decode.view(2).release_safe, "it reads them");
    let mismatch = Mismatch {
        component: "kv",
        reason: "something else stands there".to_owned(),
    };
    let effects = compared(&mut decode, 2, Err(mismatch));
    let is_told = |effect: &Effect| matches!(effect, Effect::Changed { .. });
    assert!(effects.iter().any(is_told), "who waits for it looks again");
    let is_counted = |effect: &Effect| matches!(effect, Effect::Count(Counted::Mismatched { .. }));
    assert!(!effects.iter().any(is_counted), "nobody asks any more");
    let view = decode.view(2);
    assert!(view.release_safe);
    assert_eq!(view.reason.as_deref(), Some("the user went away"));
}

#[test]
fn checksums_that_wait_are_bounded_in_bytes() {
    let mut decode = asking(group().wire_bytes() * 2);
    for number in 2..=5 {
        decode.begin(number);
    }
    assert!(is_compared(&say(&mut decode, 2)));
    assert!(is_compared(&say(&mut decode, 3)));
    let effects = say(&mut decode, 4);
    assert!(!is_compared(&effects));
    let answered = effects.iter().find_map(|effect| match effect {
        Effect::Send {
            message: ControlMessage::Checked(checked),
            ..
        } => Some(checked.clone()),
        _ => None,
    });
    let answered = answered.expect("the prefill is told");
    assert_eq!(answered.token, 5);
    let view = decode.view(4);
    assert_eq!(view.status, RoomStatus::Failed);
    let reason = view.reason.expect("a reason");
    assert!(reason.contains("this rank holds at most"), "{reason}");
    assert_eq!(answered.mismatch, Some(reason));
    // What is over leaves room for others.
    compared(&mut decode, 2, Ok(()));
    assert!(is_compared(&say(&mut decode, 5)));
    assert_eq!(decode.view(3).status, RoomStatus::Transferring);
}

#[test]
fn a_panic_forgets_comparisons_that_nobody_tells_of() {
    let mut decode = asking(group().wire_bytes());
    decode.begin(2);
    assert!(is_compared(&say(&mut decode, 2)));
    decode.event(Event::Restarted {
        reason: "the rank's actor panicked".to_owned(),
    });
    let (registers, _) = decode.begin(3);
    answer(&mut decode, registers[0]);
    decode.begin(4);
    assert!(is_compared(&say(&mut decode, 4)));
}
