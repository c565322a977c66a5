//! Arbitrary events in arbitrary order: what holds of one rank whatever its peers and engine do.

use std::collections::{HashMap, HashSet};

use common::wire::AuxData;
use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    rooms: 2,
    early_rooms: 2,
    early_bytes: usize::MAX,
    check_bytes: usize::MAX,
    peers: 2,
    tombstones: 2,
    rooms_per_peer: 2,
    in_flight_bytes: 256,
    in_flight_bytes_per_peer: 128,
    queued_chunks: 3,
    queued_chunks_per_peer: 2,
    when_full: WhenFull::Wait,
};
const ROOMS: u64 = 4;

/// One thing that happens; work is named by its place in the list of what is unreported.
#[derive(Clone, Debug)]
enum Step {
    Happens(Event),
    Ends(usize, ComponentOutcome),
    Passes(Duration),
}

fn rooms() -> impl Strategy<Value = u64> {
    0..ROOMS
}

fn infos() -> impl Strategy<Value = TransferInfo> {
    (rooms(), 0..3_u32, 1..3_u32, 0..20_usize).prop_map(|(number, rank, required, kind)| {
        let mut info = Engines::of(AttentionKind::Mha, 1, 2).info(number, rank);
        info.required_dst_info_num = required;
        match kind {
            0 => info.kv_indices = vec![99],
            1 => info.kv_indices = vec![1, 1],
            2..5 => info = dummy(info),
            _ => {}
        }
        info
    })
}

fn messages() -> impl Strategy<Value = ControlMessage> {
    let polls = proptest::sample::select(KvPoll::ALL.to_vec());
    let engines = Engines::of(AttentionKind::Mha, 1, 2);
    prop_oneof![
        2 => (0..3_u32).prop_map(move |rank| {
            ControlMessage::Register(Box::new(engines.register(rank)))
        }),
        6 => infos().prop_map(ControlMessage::TransferInfo),
        4 => (rooms(), 0..3_i64, polls)
            .prop_map(|(number, rank, poll)| status_message(number, rank, poll)),
        2 => (rooms(), 0..3_u32, 0..4_i64)
            .prop_map(|(number, rank, generation)| abort_message(number, rank, generation)),
        2 => (rooms(), 0..3_i64, 0..9_i64)
            .prop_map(|(number, rank, generation)| ack_message(number, rank, generation)),
        1 => (rooms(), 0..3_u32).prop_map(|(number, rank)| bootstrap_message(number, rank)),
        1 => (rooms(), 0..3_u32, 0..5_u32).prop_map(|(number, buffer_index, aux_index)| {
            ControlMessage::AuxData(AuxData {
                room: room(number),
                buffer_index,
                aux_index,
                data: vec![1; 16],
            })
        }),
    ]
}

fn commands() -> impl Strategy<Value = Event> {
    let chunks = (0..6_i32, 0..6_i32, any::<bool>())
        .prop_map(|(first, end, is_last)| chunk(first..end, is_last));
    prop_oneof![
        6 => rooms().prop_map(open),
        6 => (rooms(), chunks).prop_map(|(number, chunk)| {
            Event::Chunk { room: room(number), chunk }
        }),
        // The whole of what is announced.
        6 => rooms().prop_map(|number| {
            Event::Chunk { room: room(number), chunk: chunk(0..4, true) }
        }),
        4 => rooms().prop_map(|number| {
            Event::Announce { room: room(number), announcement: announcement() }
        }),
        1 => rooms().prop_map(|number| Event::PrefillComplete { room: room(number) }),
        1 => rooms().prop_map(|number| {
            Event::Abort { room: room(number), reason: "the engine gave up".to_owned() }
        }),
        3 => rooms().prop_map(|number| Event::Clear { room: room(number) }),
        4 => (rooms(), 1..9_u64, 0..2_u32).prop_map(|(number, generation, rank)| {
            let engines = Engines::of(AttentionKind::Mha, 2, 1);
            let result = Ok(ResolvedPrefill {
                is_only_dp_rank: rank == 0,
                ..engines.resolved(0)
            });
            Event::Resolved { room: room(number), generation: Generation(generation), result }
        }),
        1 => (rooms(), 1..9_u64, 0..2_u32).prop_map(|(number, generation, rank)| {
            Event::SendFailed {
                to: prefill_endpoint(rank),
                about_opt: Some((room(number), Generation(generation))),
                kind: "transfer_info",
                register_opt: None,
                reason: "connection reset".to_owned(),
            }
        }),
        1 => Just(Event::Shutdown { reason: "the engine has gone".to_owned() }),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let outcomes = proptest::sample::select(vec![
        moved(),
        moved(),
        moved(),
        failed(true),
        failed(false),
        ComponentOutcome::Died { panicked: true },
    ]);
    let step = prop_oneof![
        6 => messages().prop_map(|message| Step::Happens(Event::Message(message, None))),
        6 => commands().prop_map(Step::Happens),
        6 => (any::<usize>(), outcomes).prop_map(|(place, outcome)| Step::Ends(place, outcome)),
        1 => (0..40_u64).prop_map(|count| Step::Passes(seconds(count))),
    ];
    proptest::collection::vec(step, 0..120)
}

/// A rank beside a model of what its shell has to do.
struct Watched {
    rank: Rank,
    unreported: Vec<ComponentKey>,
    running: HashSet<ComponentKey>,
    stopped: HashSet<ComponentKey>,
    seen: HashMap<(u64, u64), RoomStatus>,
    failed_told: HashSet<(Room, Generation)>,
}

impl Watched {
    fn new(rank: Rank) -> Self {
        Self {
            rank,
            unreported: Vec::new(),
            running: HashSet::new(),
            stopped: HashSet::new(),
            seen: HashMap::new(),
            failed_told: HashSet::new(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Happens(event) => self.event(event),
            Step::Passes(time) => {
                self.rank.now += time;
                self.event(Event::Tick);
            }
            Step::Ends(_, _) if self.unreported.is_empty() => {}
            Step::Ends(place, outcome) => {
                let key = self.unreported.swap_remove(place % self.unreported.len());
                if matches!(outcome, ComponentOutcome::Died { .. }) {
                    self.unreported.retain(|other| *other != key);
                }
                self.event(Event::Component(ComponentReport { key, outcome }));
            }
        }
    }

    fn event(&mut self, event: Event) {
        let reaction = self.rank.core.handle(event, self.rank.now);
        for effect in reaction.effects {
            self.perform(effect);
        }
        let (pending, waiting) = (self.rank.core.pending_work(), self.rank.core.waiting_work());
        let known = self.unreported.len() + waiting;
        assert!(
            pending <= known,
            "{pending} pending, {waiting} of them wait"
        );
        assert!(self.rank.core.in_flight().1 <= LIMITS.queued_chunks);
        let census = self.rank.core.census();
        assert!(census.by_status.iter().sum::<usize>() <= LIMITS.rooms);
        assert!(census.early <= LIMITS.early_rooms && census.tombstones <= LIMITS.tombstones);
        for number in 0..ROOMS {
            let Some(view) = self.rank.core.view(room(number)) else {
                continue;
            };
            let before = self.seen.insert((number, view.generation), view.status);
            assert!(
                before.is_none_or(|before| before == view.status
                    || (before != RoomStatus::Failed
                        && (view.status == RoomStatus::Failed || view.status > before))),
                "{before:?} became {:?}",
                view.status
            );
            let is_open = view.status > RoomStatus::Failed && view.status < RoomStatus::Success;
            assert!(!(is_open && view.release_safe));
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Start { key, .. } => {
                assert!(self.running.insert(key.clone()), "{key:?} starts twice");
            }
            Effect::Stop { key } => {
                self.stopped.insert(key);
            }
            Effect::Work { key, .. } => {
                assert!(self.running.contains(&key), "{key:?} was not started");
                assert!(!self.stopped.contains(&key), "{key:?} was stopped");
                let view = self.rank.core.view(key.room).expect("it is open");
                assert_ne!(view.status, RoomStatus::Failed);
                self.unreported.push(key);
            }
            Effect::Send {
                to,
                message: ControlMessage::Status(status),
                about_opt: Some(about),
                ..
            } => {
                if status.poll == KvPoll::Failed {
                    self.failed_told.insert(about);
                }
                if status.poll == KvPoll::Success {
                    assert!(!self.failed_told.contains(&about), "{about:?} had failed");
                    let mut unreported = self.unreported.iter();
                    let is_running = unreported.any(|key| {
                        (key.room, key.generation, &key.endpoint) == (about.0, about.1, &to)
                    });
                    assert!(!is_running, "success of {about:?} while a write runs");
                }
            }
            Effect::Send {
                to,
                message: ControlMessage::AbortAck(ack),
                ..
            } => {
                let mut unreported = self.unreported.iter();
                let is_running = unreported.any(|key| key.room == ack.room && key.endpoint == to);
                assert!(!is_running, "{to} is promised quiet while a write runs");
            }
            _ => {}
        }
    }

    /// All work is reported and all rooms are cleared: nothing may be left.
    fn finish(&mut self) {
        while !self.unreported.is_empty() {
            self.step(Step::Ends(0, moved()));
        }
        for number in 0..ROOMS {
            if self.rank.is_known(number) {
                self.event(Event::Clear { room: room(number) });
            }
        }
        assert_eq!(self.rank.core.pending_work(), 0);
        assert_eq!(self.rank.core.census().by_status, [0; 5]);
    }
}

fn engines(policy: &'static str, prefill_tp: u32, decode_tp: u32) -> Engines {
    Engines {
        limits: LIMITS,
        policy,
        ..Engines::of(AttentionKind::Mha, prefill_tp, decode_tp)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_prefill_keeps_its_promises_whatever_happens(steps in steps(), is_deferred: bool) {
        let policy = if is_deferred { "prefill_complete" } else { "early" };
        let engines = engines(policy, 1, 2);
        let mut watched = Watched::new(engines.prefill(0));
        for rank in 0..2 {
            let register = Box::new(engines.register(rank));
            watched.event(Event::Message(ControlMessage::Register(register), None));
        }
        for step in steps {
            watched.step(step);
        }
        watched.finish();
    }

    #[test]
    fn a_decode_keeps_its_promises_whatever_happens(steps in steps(), is_deferred: bool) {
        let policy = if is_deferred { "prefill_complete" } else { "early" };
        let mut watched = Watched::new(engines(policy, 2, 1).decode(0));
        for step in steps {
            watched.step(step);
        }
        watched.finish();
    }
}
