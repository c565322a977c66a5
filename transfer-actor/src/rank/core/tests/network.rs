//! Several prefill and decode ranks on a network in memory, driven by a seed: their engines, their
//! writes, and what must hold at every step.

use std::collections::{HashMap, HashSet};

use super::*;

const ROOMS: u64 = 3;
/// Far beyond what any run takes; one that is not over by then is stuck.
const MAX_STEPS: usize = 50_000;

/// A small generator, so that a failing seed can be run again.
#[derive(Debug)]
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((self.0 >> 33) % bound as u64) as usize
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}

/// What the network and the engines may do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weather {
    /// Messages overtake each other and come twice.
    pub is_chaotic: bool,
    /// Messages get lost, writes fail, actors die, engines give up, time passes.
    pub has_faults: bool,
    /// How often each room's number is used.
    pub rounds: usize,
}

/// Which rank: prefill ranks first.
type Number = usize;

/// Where a rank's engine stands with one room.
#[derive(Clone, Copy, Debug, Default)]
struct Script {
    round: usize,
    is_open: bool,
    is_announced: bool,
    pages_sent: i32,
    is_last_sent: bool,
    is_completed: bool,
}

/// A write that has not been reported.
#[derive(Debug)]
struct Running {
    rank: Number,
    key: ComponentKey,
    is_cancelled: bool,
}

/// What a prefill rank has done in one use of a room for one decode rank.
#[derive(Debug, Default)]
struct Delivery {
    issued: usize,
    moved: usize,
    is_last_sent: bool,
}

#[derive(Debug)]
pub(super) struct Network {
    engines: Engines,
    weather: Weather,
    random: Random,
    ranks: Vec<Rank>,
    scripts: HashMap<(Number, u64), Script>,
    mail: Vec<(Number, Number, ControlMessage)>,
    running: Vec<Running>,
    deliveries: HashMap<(Number, u64, usize, Endpoint), Delivery>,
    /// Writes that nobody can vouch for.
    lost: HashSet<(Room, Endpoint)>,
    /// Places that a decode's engine was told to be free.
    released: HashSet<(Room, Endpoint)>,
    seen: HashMap<(Number, u64, u64), RoomStatus>,
    pub successes: usize,
    pub failures: usize,
}

impl Network {
    pub fn new(engines: Engines, weather: Weather, seed: u64) -> Self {
        let prefills = (0..engines.prefill_tp).map(|rank| engines.prefill(rank));
        let decodes = (0..engines.decode_tp).map(|rank| engines.decode(rank));
        let mut ranks: Vec<Rank> = prefills.chain(decodes).collect();
        let now = Instant::now();
        ranks.iter_mut().for_each(|rank| rank.now = now);
        Self {
            engines,
            weather,
            random: Random(seed),
            ranks,
            scripts: HashMap::new(),
            mail: Vec::new(),
            running: Vec::new(),
            deliveries: HashMap::new(),
            lost: HashSet::new(),
            released: HashSet::new(),
            seen: HashMap::new(),
            successes: 0,
            failures: 0,
        }
    }

    /// Runs until every engine is through with every room and nothing is on its way.
    pub fn run(&mut self) {
        for _ in 0..MAX_STEPS {
            if self.is_over() {
                return self.finish();
            }
            self.step();
            self.check();
        }
        panic!("stuck: {self:#?}");
    }

    fn is_over(&self) -> bool {
        let is_through = |number| {
            let script = |room| self.scripts.get(&(number, room));
            (0..ROOMS)
                .all(|room| script(room).is_some_and(|script| script.round >= self.weather.rounds))
        };
        self.mail.is_empty() && self.running.is_empty() && (0..self.ranks.len()).all(is_through)
    }

    /// Nothing is left of rooms that are over, and in time nothing of their traces.
    fn finish(&mut self) {
        let longest = TIMEOUTS.retention.max(TIMEOUTS.tombstone);
        for rank in &mut self.ranks {
            let census = rank.core.census();
            assert_eq!((census.by_status, rank.core.pending_work()), ([0; 5], 0));
            rank.now += longest;
            rank.core.handle(Event::Tick, rank.now);
            let census = rank.core.census();
            assert_eq!((census.early, census.tombstones), (0, 0));
        }
    }

    fn step(&mut self) {
        let has_faults = self.weather.has_faults;
        match self.random.below(10) {
            0..4 if !self.mail.is_empty() => self.deliver(),
            4..6 if !self.running.is_empty() => self.end_work(),
            9 if has_faults && self.random.percent(10) => self.pass_time(),
            _ => {
                let number = self.random.below(self.ranks.len());
                let room = self.random.below(ROOMS as usize) as u64;
                let is_idle = !self.drive(number, room) && self.is_quiet();
                if is_idle && has_faults {
                    self.pass_time();
                }
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.mail.is_empty() && self.running.is_empty()
    }

    fn pass_time(&mut self) {
        let time = Duration::from_millis(self.random.below(3000) as u64);
        for number in 0..self.ranks.len() {
            self.ranks[number].now += time;
            self.event(number, Event::Tick);
        }
    }

    fn deliver(&mut self) {
        let mut index = self.random.below(self.mail.len());
        if !self.weather.is_chaotic {
            // One connection keeps its order.
            let (from, to, _) = self.mail[index];
            let is_first = |mail: &(Number, Number, ControlMessage)| (mail.0, mail.1) == (from, to);
            index = self.mail.iter().position(is_first).expect("it is there");
        }
        let (from, to, message) = self.mail.remove(index);
        if self.weather.is_chaotic && self.random.percent(15) {
            self.mail.push((from, to, message.clone()));
        }
        if self.weather.has_faults && self.random.percent(4) {
            if self.random.percent(50) {
                let endpoint = self.endpoint(to);
                let about = message.room().and_then(|room| {
                    let view = self.ranks[from].core.view(room)?;
                    Some((room, Generation(view.generation)))
                });
                let event = Event::SendFailed {
                    to: endpoint,
                    about_opt: about,
                    kind: message.kind(),
                    register_opt: message.register_number(),
                    reason: "connection reset".to_owned(),
                };
                self.event(from, event);
            }
            return;
        }
        self.event(to, Event::Message(message, None));
    }

    fn end_work(&mut self) {
        let index = self.random.below(self.running.len());
        let is_cancelled = self.running[index].is_cancelled;
        let Running { rank, key, .. } = self.running.swap_remove(index);
        let fate = if self.weather.has_faults {
            self.random.below(100)
        } else {
            99
        };
        let place = (key.room, key.endpoint.clone());
        let outcome = match fate {
            0..2 => {
                self.running
                    .retain(|other| other.rank != rank || other.key != key);
                self.lost.insert(place);
                ComponentOutcome::Died { panicked: true }
            }
            2..4 => {
                self.lost.insert(place);
                failed(false)
            }
            4..8 => failed(true),
            8..50 if is_cancelled => failed(true),
            _ => {
                let round = self.scripts[&(rank, key.room.get())].round;
                let delivery = (rank, key.room.get(), round, key.endpoint.clone());
                self.deliveries.entry(delivery).or_default().moved += 1;
                moved()
            }
        };
        self.event(rank, Event::Component(ComponentReport { key, outcome }));
    }

    /// Lets a rank's engine do its next step with a room; whether it had one.
    fn drive(&mut self, number: Number, number_of_room: u64) -> bool {
        let script = *self.scripts.entry((number, number_of_room)).or_default();
        if script.round >= self.weather.rounds {
            return false;
        }
        let room = room(number_of_room);
        let view_opt = self.ranks[number].core.view(room);
        let is_prefill = number < self.engines.prefill_tp as usize;
        let mut next = script;
        let event = match view_opt.map(|view| view.status) {
            None if script.is_open => {
                // It was never cleared and is forgotten, or its last writes drain.
                self.scripts
                    .insert((number, number_of_room), Script::of_round(script.round + 1));
                return true;
            }
            None if !self.may_reuse(number, number_of_room, script.round) => return false,
            None => {
                next.is_open = true;
                open(number_of_room)
            }
            Some(RoomStatus::Failed | RoomStatus::Success) => {
                next = Script::of_round(script.round + 1);
                Event::Clear { room }
            }
            Some(_) if self.weather.has_faults && self.random.percent(2) => {
                let reason = "the engine gave up".to_owned();
                Event::Abort { room, reason }
            }
            Some(_) if !is_prefill && !script.is_announced => {
                next.is_announced = true;
                let announcement = announcement();
                Event::Announce { room, announcement }
            }
            Some(RoomStatus::Bootstrapping) if is_prefill && !script.is_completed => {
                next.is_completed = true;
                Event::PrefillComplete { room }
            }
            Some(RoomStatus::WaitingForInput | RoomStatus::Transferring)
                if is_prefill && !script.is_last_sent =>
            {
                let first = script.pages_sent;
                next.pages_sent = (first + self.random.below(4) as i32).min(4);
                next.is_last_sent = next.pages_sent == 4;
                let mut chunk = chunk(first..next.pages_sent, next.is_last_sent);
                if self.weather.has_faults && self.random.percent(2) {
                    chunk.kv_indices.push(-1);
                }
                Event::Chunk { room, chunk }
            }
            Some(_) => return false,
        };
        let is_chunk = matches!(event, Event::Chunk { .. });
        if self.event(number, event) {
            self.scripts.insert((number, number_of_room), next);
            if is_chunk && next.is_last_sent {
                self.mark_last(number, number_of_room, next.round);
            }
        }
        true
    }

    /// A decode does not wait for the Success of a rank with nothing to deliver. Such a rank could
    /// not tell the next use's announcement from a second one of this use, so the number is used
    /// again only when it is through too.
    fn may_reuse(&self, number: Number, room: u64, round: usize) -> bool {
        let Some(decode) = number.checked_sub(self.engines.prefill_tp as usize) else {
            return true;
        };
        let resolved = self.engines.resolved(decode as u32);
        let mut dummies = resolved.targets.iter().filter(|target| target.is_dummy);
        dummies.all(|target| {
            let script = self.scripts.get(&(target.unique_rank as usize, room));
            script.map_or(0, |script| script.round) >= round
        })
    }

    fn mark_last(&mut self, number: Number, room: u64, round: usize) {
        for decode in 0..self.engines.decode_tp {
            let delivery = (number, room, round, decode_endpoint(decode));
            self.deliveries.entry(delivery).or_default().is_last_sent = true;
        }
    }

    fn endpoint(&self, number: Number) -> Endpoint {
        match number.checked_sub(self.engines.prefill_tp as usize) {
            None => prefill_endpoint(number as u32),
            Some(decode) => decode_endpoint(decode as u32),
        }
    }

    /// Applies an event and does what follows; whether it was accepted.
    fn event(&mut self, number: Number, event: Event) -> bool {
        let rank = &mut self.ranks[number];
        let reaction = rank.core.handle(event, rank.now);
        for effect in reaction.effects {
            self.perform(number, effect);
        }
        reaction.error_opt.is_none()
    }

    fn perform(&mut self, number: Number, effect: Effect) {
        match effect {
            // These ranks speak as stock ones do: without trailers, and without what announces them.
            Effect::Send {
                message: ControlMessage::Hello(_),
                ..
            } => {}
            Effect::Send { to, message, .. } => {
                let receiver = (0..self.ranks.len()).find(|other| self.endpoint(*other) == to);
                let receiver = receiver.expect("a rank of the network");
                self.mail.push((number, receiver, message));
            }
            Effect::Resolve {
                room, generation, ..
            } => {
                let decode = number - self.engines.prefill_tp as usize;
                let result = Ok(self.engines.resolved(decode as u32));
                let event = Event::Resolved {
                    room,
                    generation,
                    result,
                };
                self.event(number, event);
            }
            Effect::Work { key, .. } => {
                let is_released = self.released.contains(&(key.room, key.endpoint.clone()));
                assert!(
                    !is_released,
                    "a write to a place that is free begins: {key:?}"
                );
                let round = self.scripts[&(number, key.room.get())].round;
                let delivery = (number, key.room.get(), round, key.endpoint.clone());
                self.deliveries.entry(delivery).or_default().issued += 1;
                self.running.push(Running {
                    rank: number,
                    key,
                    is_cancelled: false,
                });
            }
            Effect::Cancel { key } => {
                let theirs = self.running.iter_mut();
                theirs
                    .filter(|running| running.rank == number && running.key == key)
                    .for_each(|running| running.is_cancelled = true);
            }
            _ => {}
        }
    }

    fn check(&mut self) {
        for number in 0..self.ranks.len() {
            for number_of_room in 0..ROOMS {
                let Some(view) = self.ranks[number].core.view(room(number_of_room)) else {
                    continue;
                };
                let seen = (number, number_of_room, view.generation);
                let before = self.seen.insert(seen, view.status);
                if before == Some(view.status) {
                    self.check_release(number, &view);
                    continue;
                }
                let is_forward = before.is_none_or(|before| {
                    before != RoomStatus::Failed
                        && (view.status == RoomStatus::Failed || view.status > before)
                });
                assert!(is_forward, "{before:?} became {:?}", view.status);
                match view.status {
                    RoomStatus::Success => self.successes += 1,
                    RoomStatus::Failed => self.failures += 1,
                    _ => {}
                }
                self.check_success(number, &view);
                self.check_release(number, &view);
            }
        }
        let reported: usize = self.ranks.iter().map(|rank| rank.core.pending_work()).sum();
        assert!(
            reported <= self.running.len(),
            "{reported} of {}",
            self.running.len()
        );
    }

    /// A decode's Success means that every byte is there.
    fn check_success(&self, number: Number, view: &RoomView) {
        let Some(decode) = number.checked_sub(self.engines.prefill_tp as usize) else {
            return;
        };
        if view.status != RoomStatus::Success {
            return;
        }
        let round = self.scripts[&(number, view.room)].round;
        let resolved = self.engines.resolved(decode as u32);
        for target in resolved.targets.iter().filter(|target| !target.is_dummy) {
            let delivery = (
                target.unique_rank as usize,
                view.room,
                round,
                self.endpoint(number),
            );
            let delivery = self
                .deliveries
                .get(&delivery)
                .expect("something was written");
            assert!(delivery.is_last_sent && delivery.issued > 0, "{delivery:?}");
            assert_eq!(delivery.issued, delivery.moved);
        }
    }

    /// Places that are said to be free are: nothing is being written there, nor ever will be.
    fn check_release(&mut self, number: Number, view: &RoomView) {
        let is_decode = number >= self.engines.prefill_tp as usize;
        // Across connections that reorder, no message could prove it.
        if !is_decode || !view.release_safe || self.weather.is_chaotic || self.weather.rounds > 1 {
            return;
        }
        let place = (room(view.room), self.endpoint(number));
        assert!(
            !self.lost.contains(&place),
            "nobody can vouch for {place:?}"
        );
        let mut running = self.running.iter();
        let is_running =
            running.any(|running| (running.key.room, &running.key.endpoint) == (place.0, &place.1));
        assert!(!is_running, "a write to {place:?} runs");
        self.released.insert(place);
    }
}

impl Script {
    fn of_round(round: usize) -> Self {
        Self {
            round,
            ..Self::default()
        }
    }
}
