//! One rank under test, and what it wanted done.

use super::*;

/// A core and a clock that only the test moves.
#[derive(Debug)]
pub(super) struct Rank {
    pub core: RankCore,
    pub now: Instant,
}

impl Rank {
    pub fn new(core: RankCore) -> Self {
        Self {
            core,
            now: Instant::now(),
        }
    }

    /// An event that must not be refused.
    #[track_caller]
    pub fn event(&mut self, event: Event) -> Done {
        let reaction = self.core.handle(event, self.now);
        assert_eq!(reaction.error_opt, None);
        Done(reaction.effects)
    }

    /// An event that must be refused; the code, and what was done all the same.
    #[track_caller]
    pub fn refused(&mut self, event: Event) -> (&'static str, Done) {
        let reaction = self.core.handle(event, self.now);
        let error = reaction.error_opt.expect("a refusal");
        (error.code, Done(reaction.effects))
    }

    #[track_caller]
    pub fn message(&mut self, message: ControlMessage) -> Done {
        self.event(Event::Message(message, None))
    }

    #[track_caller]
    pub fn report(&mut self, key: &ComponentKey, outcome: ComponentOutcome) -> Done {
        let key = key.clone();
        self.event(Event::Component(ComponentReport { key, outcome }))
    }

    #[track_caller]
    pub fn pass(&mut self, time: Duration) -> Done {
        self.now += time;
        self.event(Event::Tick)
    }

    #[track_caller]
    pub fn view(&self, number: u64) -> RoomView {
        self.core.view(room(number)).expect("the room is known")
    }

    #[track_caller]
    pub fn status(&self, number: u64) -> RoomStatus {
        self.view(number).status
    }

    #[track_caller]
    pub fn reason(&self, number: u64) -> String {
        self.view(number).reason.expect("a reason")
    }

    pub fn is_known(&self, number: u64) -> bool {
        self.core.view(room(number)).is_some()
    }
}

/// What a core wanted done.
#[derive(Debug, Default)]
pub(super) struct Done(pub Vec<Effect>);

impl Done {
    pub fn sent(&self) -> impl Iterator<Item = (&Endpoint, &ControlMessage)> {
        self.0.iter().filter_map(|effect| match effect {
            Effect::Send { to, message, .. } => Some((to, message)),
            _ => None,
        })
    }

    pub fn statuses(&self) -> Vec<(Endpoint, KvPoll)> {
        let statuses = self.sent().filter_map(|(to, message)| match message {
            ControlMessage::Status(status) => Some((to.clone(), status.poll)),
            _ => None,
        });
        statuses.collect()
    }

    /// Acknowledged generations, by decode rank's endpoint.
    pub fn acks(&self) -> Vec<(Endpoint, i64)> {
        let acks = self.sent().filter_map(|(to, message)| match message {
            ControlMessage::AbortAck(ack) => Some((to.clone(), ack.generation?)),
            _ => None,
        });
        acks.collect()
    }

    pub fn kinds(&self) -> Vec<&'static str> {
        self.sent().map(|(_, message)| message.kind()).collect()
    }

    pub fn works(&self) -> Vec<ComponentKey> {
        self.keys(|effect| match effect {
            Effect::Work { key, .. } => Some(key),
            _ => None,
        })
    }

    pub fn starts(&self) -> Vec<ComponentKey> {
        self.keys(|effect| match effect {
            Effect::Start { key, .. } => Some(key),
            _ => None,
        })
    }

    pub fn cancels(&self) -> Vec<ComponentKey> {
        self.keys(|effect| match effect {
            Effect::Cancel { key } => Some(key),
            _ => None,
        })
    }

    pub fn stops(&self) -> Vec<ComponentKey> {
        self.keys(|effect| match effect {
            Effect::Stop { key } => Some(key),
            _ => None,
        })
    }

    pub fn keys(&self, pick: impl Fn(&Effect) -> Option<&ComponentKey>) -> Vec<ComponentKey> {
        self.0
            .iter()
            .filter_map(|effect| pick(effect).cloned())
            .collect()
    }

    pub fn late(&self) -> Vec<&'static str> {
        let late = self.0.iter().filter_map(|effect| match effect {
            Effect::Count(Counted::Late { kind }) => Some(*kind),
            _ => None,
        });
        late.collect()
    }

    pub fn finished(&self) -> Vec<KvPoll> {
        let finished = self.0.iter().filter_map(|effect| match effect {
            Effect::Count(Counted::RoomFinished { poll, .. }) => Some(*poll),
            _ => None,
        });
        finished.collect()
    }

    /// Whether whoever waits for a room is woken.
    pub fn wakes(&self, number: u64) -> bool {
        self.0.iter().any(
            |effect| matches!(effect, Effect::Changed { room: changed } if *changed == room(number)),
        )
    }
}

pub(super) fn components(keys: &[ComponentKey]) -> Vec<ComponentId> {
    keys.iter().map(|key| key.component).collect()
}
