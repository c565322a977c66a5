//! Which process is behind a rank, and what its exit proves.

use super::*;

fn hello(register: u64, key: &str) -> Event {
    let hello = Hello {
        endpoint: prefill_endpoint(0),
        engine: EngineDesc {
            key: key.to_owned(),
            ..EngineDesc::default()
        },
        register,
        checks: None,
    };
    Event::Message(ControlMessage::Hello(Box::new(hello)), None)
}

fn exit(life: u64) -> Event {
    Event::PeerExited {
        endpoint: prefill_endpoint(0),
        life: Life(life),
        reason: "its process 1 has exited".to_owned(),
    }
}

/// The numbers of the REGISTERs, and the generation of each announcement.
fn sent(effects: &[Effect]) -> (Vec<u64>, Vec<Option<Generation>>) {
    let (mut registers, mut generations) = (Vec::new(), Vec::new());
    for effect in effects {
        match effect {
            Effect::Send {
                message: ControlMessage::Register(register),
                ..
            } => registers.extend(register.engine.rank_tag()),
            Effect::Send {
                message: ControlMessage::TransferInfo(_),
                generation_opt,
                ..
            } => generations.push(*generation_opt),
            _ => {}
        }
    }
    (registers, generations)
}

/// A decode rank, its clock, and all that it has done.
pub(super) struct Decode(pub(super) RankCore, pub(super) Instant);

impl Decode {
    pub(super) fn new() -> Self {
        Self(
            Engines::of(AttentionKind::Mha, 1, 1).decode(0).core,
            Instant::now(),
        )
    }

    /// Room 1 is announced, and the prefill has answered.
    fn acquainted() -> Self {
        let mut decode = Self::new();
        let (registers, _) = decode.begin(1);
        decode.event(hello(registers[0], "engine"));
        decode
    }

    pub(super) fn event(&mut self, event: Event) -> Vec<Effect> {
        let reaction = self.0.handle(event, self.1);
        assert!(reaction.error_opt.is_none(), "{:?}", reaction.error_opt);
        reaction.effects
    }

    /// Opens, resolves and announces a room.
    pub(super) fn begin(&mut self, number: u64) -> (Vec<u64>, Vec<Option<Generation>>) {
        let engines = Engines::of(AttentionKind::Mha, 1, 1);
        let mut effects = self.event(Event::Open(OpenCommand {
            room: room(number),
            bootstrap_opt: Some(BOOTSTRAP.to_owned()),
            prefill_dp_rank_opt: None,
            aux_index_opt: None,
        }));
        let asked = effects.iter().find_map(|effect| match effect {
            Effect::Resolve { generation, .. } => Some(*generation),
            _ => None,
        });
        if let Some(generation) = asked {
            effects.extend(self.event(Event::Resolved {
                room: room(number),
                generation,
                result: Ok(engines.resolved(0)),
            }));
        }
        effects.extend(self.event(Event::Announce {
            room: room(number),
            announcement: Announcement {
                kv_indices: vec![1, 2],
                ..Announcement::default()
            },
        }));
        sent(&effects)
    }

    pub(super) fn view(&self, number: u64) -> RoomView {
        self.0.view(room(number)).expect("it is known")
    }
}

#[test]
fn generations_are_sent_once_the_prefill_has_answered() {
    let mut decode = Decode::new();
    let (registers, generations) = decode.begin(1);
    assert_eq!(generations, [None], "nobody knows yet who reads it");
    let [register] = registers[..] else {
        panic!("one REGISTER: {registers:?}");
    };
    let effects = decode.event(hello(register + 1, "engine"));
    assert!(
        matches!(
            effects[..],
            [Effect::Count(Counted::Late { kind: "hello" })]
        ),
        "an answer to nothing: {effects:?}"
    );
    let effects = decode.event(hello(register, "engine"));
    assert!(matches!(effects[..], [Effect::Met { .. }]), "{effects:?}");
    assert!(decode.event(hello(register, "engine")).is_empty());
    let (registers, generations) = decode.begin(2);
    assert!(registers.is_empty());
    let generation = Generation(decode.view(2).generation);
    assert_eq!(generations, [Some(generation)]);
}

#[test]
fn the_exit_of_the_process_that_was_told_frees_its_places() {
    let mut decode = Decode::acquainted();
    decode.event(exit(2));
    assert_eq!(decode.view(1).status, RoomStatus::WaitingForInput);
    decode.event(exit(1));
    let view = decode.view(1);
    assert_eq!((view.status, view.release_safe), (RoomStatus::Failed, true));
    let reason = view.reason.expect("a reason");
    assert!(reason.contains("has exited"), "{reason}");
}

#[test]
fn a_lost_connection_frees_nothing() {
    let mut decode = Decode::acquainted();
    decode.event(Event::PeerLost {
        endpoint: prefill_endpoint(0),
        reason: "refused".to_owned(),
    });
    let view = decode.view(1);
    assert_eq!(
        (view.status, view.release_safe),
        (RoomStatus::Failed, false)
    );
    // The proof may come later.
    decode.event(exit(1));
    assert!(decode.view(1).release_safe);
}

#[test]
fn an_exit_proves_nothing_once_another_process_may_have_been_told() {
    let mut decode = Decode::acquainted();
    decode.event(Event::PeerLost {
        endpoint: prefill_endpoint(0),
        reason: "refused".to_owned(),
    });
    // The next room registers again, and perhaps at a successor that still has the first room's
    // announcement.
    let (registers, _) = decode.begin(2);
    assert_eq!(registers.len(), 1);
    decode.event(exit(1));
    assert!(!decode.view(1).release_safe);
    assert_eq!(decode.view(2).status, RoomStatus::WaitingForInput);
}

fn not_registered(number: u64) -> Event {
    Event::SendFailed {
        to: prefill_endpoint(0),
        about_opt: None,
        kind: "register",
        register_opt: Some(number),
        reason: "connection refused".to_owned(),
    }
}

/// A prefill is killed; a bootstrap server that has not heard of it names the dead address again,
/// and the REGISTER for the next room goes nowhere.
#[test]
fn a_register_that_was_never_sent_told_no_other_process() {
    for is_exit_first in [false, true] {
        let mut decode = Decode::acquainted();
        decode.event(Event::PeerLost {
            endpoint: prefill_endpoint(0),
            reason: "refused".to_owned(),
        });
        let (registers, _) = decode.begin(2);
        let events = [exit(1), not_registered(registers[0])];
        let events = match is_exit_first {
            true => events,
            false => {
                let [exit, failed] = events;
                [failed, exit]
            }
        };
        for event in events {
            assert!(!decode.view(1).release_safe);
            decode.event(event);
        }
        let view = decode.view(1);
        assert_eq!((view.status, view.release_safe), (RoomStatus::Failed, true));
    }
}

/// Of two such REGISTERs only one is known to have reached nobody.
#[test]
fn each_register_is_counted_by_itself() {
    let mut decode = Decode::acquainted();
    let mut numbers = Vec::new();
    for number in [2, 3] {
        decode.event(Event::PeerLost {
            endpoint: prefill_endpoint(0),
            reason: "refused".to_owned(),
        });
        numbers.extend(decode.begin(number).0);
    }
    assert_eq!(numbers.len(), 2);
    decode.event(exit(1));
    decode.event(not_registered(numbers[1]));
    assert!(!decode.view(1).release_safe);
    decode.event(not_registered(numbers[0] + 100));
    assert!(!decode.view(1).release_safe, "nothing is known of it");
    decode.event(not_registered(numbers[0]));
    assert!(decode.view(1).release_safe);
}

/// So many that the one which was answered is forgotten: then its process's exit proves nothing.
#[test]
fn a_register_that_is_forgotten_proves_nothing() {
    let mut decode = Decode::acquainted();
    let mut numbers = Vec::new();
    for number in 2..12 {
        decode.event(Event::PeerLost {
            endpoint: prefill_endpoint(0),
            reason: "refused".to_owned(),
        });
        numbers.extend(decode.begin(number).0);
    }
    assert_eq!(numbers.len(), 10);
    decode.event(exit(1));
    for number in numbers {
        decode.event(not_registered(number));
    }
    assert!(!decode.view(1).release_safe);
}

#[test]
fn a_stock_decode_rank_is_sent_what_sglang_sends() {
    let engines = Engines::of(AttentionKind::Mha, 1, 1);
    for (tag_opt, greetings) in [(None, 0), (Some(5), 1)] {
        let mut prefill = engines.prefill(0).core;
        let mut register = engines.register(0);
        if let Some(number) = tag_opt {
            register.engine = register.engine.with_rank_tag(number, None);
        }
        let message = ControlMessage::Register(Box::new(register));
        let reaction = prefill.handle(Event::Message(message, None), Instant::now());
        let greeted = reaction.effects.iter().filter(|effect| {
            matches!(effect, Effect::Send { message: ControlMessage::Hello(hello), .. }
                if Some(hello.register) == tag_opt)
        });
        assert_eq!(greeted.count(), greetings);
    }
}

#[test]
fn a_decode_rank_that_is_gone_ends_its_rooms_at_the_prefill() {
    let engines = Engines::of(AttentionKind::Mha, 1, 1);
    let (mut prefill, now) = (engines.prefill(0).core, Instant::now());
    let mut register = engines.register(0);
    register.engine = register.engine.with_rank_tag(1, None);
    let messages = [
        ControlMessage::Register(Box::new(register)),
        ControlMessage::TransferInfo(engines.info(1, 0)),
    ];
    prefill.handle(
        Event::Open(OpenCommand {
            room: room(1),
            bootstrap_opt: None,
            prefill_dp_rank_opt: None,
            aux_index_opt: Some(0),
        }),
        now,
    );
    for message in messages {
        prefill.handle(Event::Message(message, None), now);
    }
    let view = prefill.view(room(1)).expect("it is open");
    assert_eq!(view.status, RoomStatus::WaitingForInput);
    let event = |life| Event::PeerExited {
        endpoint: decode_endpoint(0),
        life: Life(life),
        reason: "its process 1 has exited".to_owned(),
    };
    prefill.handle(event(2), now);
    let view = prefill.view(room(1)).expect("it is open");
    assert_eq!(view.status, RoomStatus::WaitingForInput, "another process");
    prefill.handle(event(1), now);
    let view = prefill.view(room(1)).expect("it is open");
    assert_eq!((view.status, view.release_safe), (RoomStatus::Failed, true));
}
