//! Ranks, their clocks and what happens to them, in the order of a seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};

use super::coverage::{Pair, kind_of, state_of};
use super::engines::{STALE_ANSWERS, Script};
use super::io::Running;
use super::memory::{Memory, Request};
use super::random::Random;
use crate::rank::core::tests::*;

pub type Site = usize;
/// A decode rank, and its own generation of the room that it was fed.
pub type Fed = (Endpoint, Option<Generation>);

/// Timeouts, shorter than in the field, in the same order.
const TIMES: Timeouts = Timeouts {
    bootstrap: Duration::from_secs(4),
    waiting: Duration::from_secs(5),
    transfer: Duration::from_secs(6),
    retention: Duration::from_secs(15),
    tombstone: Duration::from_secs(40),
    heartbeat: Duration::from_secs(1),
    heartbeat_misses: 2,
    report: Duration::from_secs(5),
};
pub const TICK: Duration = Duration::from_secs(1);
/// A run goes on until this much has happened.
const LEAST_EVENTS: usize = 220;
/// By then everything that was begun has to be over.
const SETTLING: Duration = Duration::from_secs(70);
/// Numbers of rooms; few, so that they are used again and again.
pub const ROOMS: u64 = 4;

/// What may go wrong in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    /// Both sides are Ferry's, so messages carry generations.
    pub is_ferry: bool,
    /// Messages come twice and overtake each other.
    pub is_chaotic: bool,
    /// Messages that are lost, in percent.
    pub loss: usize,
    /// Messages that take seconds, in percent.
    pub delays: usize,
    /// Writes that fail, end late, or never, in percent.
    pub io_faults: usize,
    /// Processes are killed and stopped, and links are cut.
    pub has_outages: bool,
    /// Decode ranks ask for checksums.
    pub verifies: bool,
    /// Writes that spoil a byte on their way, in percent; only where that is looked for.
    pub spoilt: usize,
    /// Engines make mistakes, give up and forget, in percent.
    pub engine_faults: usize,
    /// How much a rank holds.
    pub limits: Tightness,
}

/// How much a rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tightness {
    /// More than there ever is.
    #[default]
    Loose,
    /// Few bytes may be on their way; what is beyond waits.
    Waiting,
    /// Few of everything; what is beyond is refused.
    Refusing,
}

fn limits_of(tightness: Tightness, random: &mut Random) -> Limits {
    if tightness == Tightness::Loose {
        return Limits::default();
    }
    let bytes = Limits {
        in_flight_bytes: random.pick(&[1, 600, 1500]),
        in_flight_bytes_per_peer: random.pick(&[1, 300, 900]),
        ..Limits::default()
    };
    if tightness == Tightness::Waiting {
        return bytes;
    }
    Limits {
        rooms: random.pick(&[2, 3, 4]),
        rooms_per_peer: random.pick(&[1, 2]),
        queued_chunks: random.pick(&[1, 3]),
        queued_chunks_per_peer: random.pick(&[1, 2]),
        when_full: random.pick(&[WhenFull::Wait, WhenFull::Refuse]),
        ..bytes
    }
}

#[derive(Debug)]
pub enum Happening {
    Router,
    Engine(Site, u32),
    Tick(Site, u32),
    Deliver(Site, u32, ControlMessage, Option<Generation>),
    Event(Site, u32, Event),
    /// A rank of this life learns that the process with this engine has exited.
    Exit(Site, u32, (String, Endpoint, Life)),
    Land(u64),
    Sent(u64),
    Report(u64, ComponentOutcome),
    /// A component actor of a rank that has panicked says that its work is over.
    Retired(Site, u32, ComponentReport),
    Answer(Site, u32, Room, Generation, usize),
    /// A comparison that was begun after so many panics of its rank's actor ends.
    Compare(Site, u32, u32, Generation, Box<Checks>),
    Outage,
    /// A rank that drains ends.
    Leave(Site, u32),
    Restart(Site),
}

struct Scheduled(Duration, u64, Happening);

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        (self.0, self.1) == (other.0, other.1)
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

/// The place of one rank, through all of its lives.
pub struct Place {
    pub is_prefill: bool,
    pub engine: usize,
    pub rank: u32,
    pub life: u32,
    pub is_alive: bool,
    pub died: Duration,
    pub stopped_until: Duration,
    pub endpoint: Endpoint,
    /// Its first life at that address.
    pub moved: u32,
    pub core: RankCore,
    pub memory: Memory,
    pub scripts: BTreeMap<u64, Script>,
    pub links: HashMap<ComponentKey, (std::sync::Arc<crate::rank::core::PeerLink>, bool)>,
    pub misses: HashMap<Endpoint, u32>,
    /// Processes that it watches, by the keys of their engines.
    pub met: Vec<(String, Endpoint, Life)>,
    /// How often its actor has panicked.
    pub panics: u32,
    /// When a room last got on: with a chunk, or with a report of one.
    pub progress: HashMap<Room, Duration>,
    is_woken: bool,
}

pub struct World {
    pub weather: Weather,
    pub engines: Engines,
    pub times: Timeouts,
    pub random: Random,
    pub places: Vec<Place>,
    pub now: Duration,
    pub requests: Vec<RequestState>,
    pub works: BTreeMap<u64, Running>,
    /// Messages that the kernel has taken for a process that is stopped: they end with it.
    taken: HashSet<u64>,
    /// Requests with a byte that was spoilt on its way.
    pub spoilt: HashSet<Request>,
    /// Requests whose items an engine has taken back as safe.
    pub freed: HashSet<(Site, Request)>,
    pub outcomes: HashMap<(Site, Request), (RoomStatus, Duration)>,
    /// Component actors that were retired: when their work is over, and whether that is proved.
    pub retired: HashMap<(Site, u32, ComponentKey), (Duration, bool)>,
    /// Whom a prefill rank fed that has succeeded, and their own generations of the room.
    pub fed: HashMap<(Site, Request), Vec<Fed>>,
    pub bound: HashMap<(Site, u32, Room, Generation), Request>,
    /// Permissions that were taken back.
    pub closed: HashSet<Permission>,
    pub lanes: HashMap<(Site, u32, Endpoint), Duration>,
    pub cuts: HashMap<(Site, Site), Duration>,
    pub covered: HashSet<Pair>,
    pub events: usize,
    pub successes: usize,
    pub failures: usize,
    pub trace_opt: Option<Vec<String>>,
    start: Instant,
    queue: BinaryHeap<Reverse<Scheduled>>,
    sequence: u64,
}

/// A request as the router sent it out.
#[derive(Clone, Debug)]
pub struct RequestState {
    pub room: u64,
    pub prefill: usize,
    pub decode: usize,
    pub is_cancelled: bool,
}

impl World {
    pub fn new(seed: u64, weather: Weather, is_traced: bool) -> Self {
        let mut random = Random::new(seed);
        let (prefill_tp, decode_tp) =
            random.pick(&[(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (1, 4)]);
        let attention = random.pick(&[AttentionKind::Mha, AttentionKind::Mla]);
        let mut engines = Engines::of(attention, prefill_tp, decode_tp);
        if (prefill_tp, decode_tp) == (1, 1) && random.percent(50) {
            engines.policy = "prefill_complete";
        }
        engines.limits = limits_of(weather.limits, &mut random);
        let transfer = Duration::from_secs(random.pick(&[2, 6]));
        let times = Timeouts { transfer, ..TIMES };
        let prefills = 1 + random.below(2);
        let decodes = 1 + random.below(2);
        let mut world = Self {
            weather,
            engines,
            times,
            random,
            places: Vec::new(),
            now: Duration::ZERO,
            requests: Vec::new(),
            works: BTreeMap::new(),
            taken: HashSet::new(),
            spoilt: HashSet::new(),
            freed: HashSet::new(),
            outcomes: HashMap::new(),
            retired: HashMap::new(),
            fed: HashMap::new(),
            bound: HashMap::new(),
            closed: HashSet::new(),
            lanes: HashMap::new(),
            cuts: HashMap::new(),
            covered: HashSet::new(),
            events: 0,
            successes: 0,
            failures: 0,
            trace_opt: is_traced.then(Vec::new),
            start: Instant::now(),
            queue: BinaryHeap::new(),
            sequence: 0,
        };
        let sides = [(true, prefills, prefill_tp), (false, decodes, decode_tp)];
        for (is_prefill, count, tp_size) in sides {
            for (engine, rank) in
                (0..count).flat_map(|engine| (0..tp_size).map(move |rank| (engine, rank)))
            {
                let place = world.place(is_prefill, engine, rank, world.places.len(), 0, 0);
                world.places.push(place);
                let phase = world.random.between(0, 1000);
                world.at(phase, Happening::Tick(world.places.len() - 1, 0));
            }
        }
        world.at(Duration::ZERO, Happening::Router);
        if weather.has_outages {
            let first = world.random.between(100, 3000);
            world.at(first, Happening::Outage);
        }
        world
    }

    fn place(
        &mut self,
        is_prefill: bool,
        engine: usize,
        rank: u32,
        site: Site,
        life: u32,
        port: u16,
    ) -> Place {
        let endpoint = Endpoint::new(format!("host-{site}"), 1 + port);
        let tp_size = match is_prefill {
            true => self.engines.prefill_tp,
            false => self.engines.decode_tp,
        };
        let layout = layout(self.engines.attention, tp_size);
        let core = if is_prefill {
            let identity = PrefillIdentity {
                layout: layout.clone(),
                parallel: ParallelConfig {
                    tp_size,
                    tp_rank: rank,
                    ..ParallelConfig::default()
                },
                planner: PlannerOptions::default(),
                unique_rank: i64::from(rank),
                is_deferred: self.engines.policy == "prefill_complete",
                contact: (endpoint.clone(), engine_desc(site, life)),
                checks_opt: None,
            };
            let core = PrefillCore::new(identity, self.times, self.engines.limits);
            RankCore::Prefill(Box::new(core))
        } else {
            let mut register = self.engines.register(rank);
            register.endpoint = endpoint.clone();
            register.engine.key = engine_key(site, life);
            let identity = DecodeIdentity {
                layout: layout.clone(),
                register,
                allocation_policy: self.engines.policy.to_owned(),
                first_generation: u64::from(life) << 32,
                is_only_way_in: |_, peer| is_only_way_in(&peer.key),
                checks_opt: self.weather.verifies.then_some(CheckMode::Full),
            };
            let core = DecodeCore::new(identity, self.times, self.engines.limits);
            RankCore::Decode(Box::new(core))
        };
        Place {
            is_prefill,
            engine,
            rank,
            life,
            moved: life,
            is_alive: true,
            died: Duration::ZERO,
            stopped_until: Duration::ZERO,
            endpoint,
            core,
            memory: Memory::new(&layout),
            scripts: BTreeMap::new(),
            links: HashMap::new(),
            misses: HashMap::new(),
            met: Vec::new(),
            panics: 0,
            progress: HashMap::new(),
            is_woken: false,
        }
    }

    pub fn log(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace_opt {
            trace.push(format!("{:>9.4} {}", now.as_secs_f64(), line()));
        }
    }

    pub fn at(&mut self, when: Duration, happening: Happening) {
        self.sequence += 1;
        let scheduled = Scheduled(when, self.sequence, happening);
        self.queue.push(Reverse(scheduled));
    }

    /// Lets a rank's engine look at its rooms soon.
    pub fn wake(&mut self, site: Site) {
        if !std::mem::replace(&mut self.places[site].is_woken, true) {
            let when = self.now + self.random.between(0, 20);
            self.at(when, Happening::Engine(site, self.places[site].life));
        }
    }

    pub fn is_loaded(&self) -> bool {
        self.events < LEAST_EVENTS || self.requests.len() < 4
    }

    pub fn is_cut(&self, one: Site, other: Site) -> bool {
        let pair = (one.min(other), one.max(other));
        self.cuts.get(&pair).is_some_and(|until| *until > self.now)
    }

    /// Runs until everything is over; what was violated first.
    pub fn run(&mut self) -> Result<(), String> {
        let mut end_opt = None;
        while let Some(Reverse(Scheduled(when, sequence, happening))) = self.queue.pop() {
            self.now = when;
            if !self.is_loaded() {
                let end = *end_opt.get_or_insert(when + SETTLING);
                if when > end {
                    return self.finish();
                }
            }
            if when > Duration::from_secs(3600) {
                return Err("nothing happens any more, and it is not over".to_owned());
            }
            self.happen(happening, sequence)?;
        }
        Err("the clock stands still".to_owned())
    }

    fn finish(&self) -> Result<(), String> {
        for (site, place) in self.places.iter().enumerate() {
            if !place.is_alive {
                continue;
            }
            if let Some((room, script)) = place.scripts.iter().next() {
                return Err(format!(
                    "room {room} of site {site} never ended: {:?}, {script:?}",
                    place.core.view(super::super::room(*room))
                ));
            }
            let census = place.core.census();
            if (census.by_status, place.core.pending_work()) != ([0; 5], 0) {
                return Err(format!("site {site} still holds {census:?}"));
            }
            if (census.early, census.tombstones) != (0, 0) {
                return Err(format!("site {site} still remembers {census:?}"));
            }
        }
        Ok(())
    }

    fn is_gone(&self, site: Site, life: u32) -> bool {
        !self.places[site].is_alive || self.places[site].life != life
    }

    fn happen(&mut self, mut happening: Happening, sequence: u64) -> Result<(), String> {
        if let Happening::Deliver(site, life, ..) = &mut happening {
            let place = &self.places[*site];
            // A sender that had not connected yet finds the process that has come in its place.
            let is_at_address = place.is_alive && *life >= place.moved;
            let is_at_address = is_at_address && !self.taken.contains(&sequence);
            if is_at_address && *life != place.life && self.random.percent(50) {
                *life = place.life;
            }
        }
        let (site, life) = match &happening {
            Happening::Engine(site, life)
            | Happening::Tick(site, life)
            | Happening::Deliver(site, life, ..)
            | Happening::Event(site, life, _)
            | Happening::Exit(site, life, _)
            | Happening::Leave(site, life)
            | Happening::Retired(site, life, _)
            | Happening::Compare(site, life, ..)
            | Happening::Answer(site, life, ..) => (*site, *life),
            Happening::Sent(number) => {
                self.sent(*number);
                return Ok(());
            }
            Happening::Land(number) | Happening::Report(number, _) => {
                let Some(work) = self.works.get(number) else {
                    return Ok(());
                };
                // Bytes that are on their way do not ask whether the writer still lives.
                match happening {
                    Happening::Land(number) => return self.land(number),
                    _ => (work.site, work.life),
                }
            }
            Happening::Router => return self.route(),
            Happening::Outage => return self.outage(),
            Happening::Restart(site) => return self.restart(*site),
        };
        if self.is_gone(site, life) {
            return Ok(());
        }
        let stopped_until = self.places[site].stopped_until;
        if stopped_until > self.now {
            if matches!(happening, Happening::Deliver(..)) {
                self.taken.insert(sequence);
            }
            // Under its old number, so that what waits keeps its order.
            let later = Scheduled(stopped_until, sequence, happening);
            self.queue.push(Reverse(later));
            return Ok(());
        }
        match happening {
            Happening::Engine(..) => {
                self.places[site].is_woken = false;
                self.drive(site)
            }
            Happening::Tick(..) => {
                self.at(self.now + TICK, Happening::Tick(site, life));
                self.event(site, Event::Tick)?;
                self.look_for_peers(site)?;
                self.check_transfers(site)?;
                self.check_lost_works(site)?;
                self.wake(site);
                Ok(())
            }
            Happening::Deliver(_, _, message, generation_opt) => {
                let is_fatal = self.weather.has_outages
                    && crate::control::announcer_of(&message).is_some()
                    && self.random.percent(3);
                if is_fatal {
                    return self.panic_with(site, &message, generation_opt);
                }
                self.event(site, Event::Message(message, generation_opt))
            }
            Happening::Event(_, _, event) => self.event(site, event),
            Happening::Answer(_, _, room, generation, engine) => {
                self.answer(site, room, generation, engine)
            }
            // The actor that waited for it is gone.
            Happening::Compare(_, _, panics, ..) if panics != self.places[site].panics => Ok(()),
            Happening::Compare(.., generation, checks) => self.compare(site, generation, &checks),
            Happening::Report(number, outcome) => self.report(number, outcome),
            Happening::Leave(..) => {
                let reason = "the engine ends".to_owned();
                self.event(site, Event::Shutdown { reason })?;
                self.kill(site)
            }
            Happening::Retired(_, _, report) => self.event(site, Event::Component(report)),
            Happening::Exit(_, _, (key, endpoint, life)) => self.exited(site, &key, endpoint, life),
            _ => Ok(()),
        }
    }

    /// Applies an event, does what follows, and looks at every promise.
    pub fn event(&mut self, site: Site, event: Event) -> Result<(), String> {
        self.command(site, event).map(|_| ())
    }

    /// The same; whether it was accepted.
    pub fn command(&mut self, site: Site, event: Event) -> Result<bool, String> {
        let is_tick = matches!(event, Event::Tick);
        self.events += usize::from(!is_tick);
        let place = &self.places[site];
        for number in 0..ROOMS {
            let room = room(number);
            if super::coverage::is_about(&event, room) {
                let pair = (
                    place.is_prefill,
                    state_of(&place.core, room),
                    kind_of(&event),
                );
                self.covered.insert(pair);
            }
        }
        if !is_tick {
            self.log(|| format!("site {site}: {event:?}"));
        }
        let got_on_opt = match &event {
            Event::Chunk { room, .. } => Some(*room),
            Event::Component(report) => Some(report.key.room),
            _ => None,
        };
        if let Some(room) = got_on_opt {
            self.places[site].progress.insert(room, self.now);
        }
        let now = self.start + self.now;
        let reaction = self.places[site].core.handle(event, now);
        if let Some(error) = &reaction.error_opt {
            self.log(|| format!("site {site}: refused, {error}"));
        }
        let is_accepted = reaction.error_opt.is_none();
        for effect in reaction.effects {
            self.perform(site, effect)?;
        }
        self.watch(site)?;
        self.check_flight(site)?;
        Ok(is_accepted)
    }

    fn perform(&mut self, site: Site, effect: Effect) -> Result<(), String> {
        let life = self.places[site].life;
        match effect {
            Effect::Send {
                to,
                message,
                generation_opt,
                about_opt,
            } => self.send(site, &to, message, generation_opt, about_opt),
            Effect::Start {
                key,
                link,
                grant_opt,
            } => {
                let is_granted = grant_opt.is_some_and(|grant| grant.key.is_some());
                let link = (link, is_granted);
                self.places[site].links.insert(key, link);
            }
            Effect::Work { key, work } => return self.begin(site, key, &work),
            Effect::Cancel { key } => self.cancel(site, &key),
            Effect::Retire { key } => self.retire(site, &key),
            Effect::Stop { key } => {
                self.places[site].links.remove(&key);
            }
            Effect::Resolve {
                room,
                generation,
                bootstrap,
                ..
            } => {
                let engine = usize::from(bootstrap.ends_with('1'));
                let when = self.now + self.random.between(1, 30);
                self.at(
                    when,
                    Happening::Answer(site, life, room, generation, engine),
                );
            }
            Effect::Compare {
                generation, checks, ..
            } => {
                if self.random.percent(self.weather.engine_faults) {
                    // One that does not wait for the answer, whatever it is.
                    let hasty =
                        status_message(checks.room.get(), checks.prefill_rank, KvPoll::Success);
                    let hasty = Happening::Deliver(site, life, hasty, Some(generation));
                    self.at(self.now, hasty);
                }
                let when = self.now + self.random.between(1, 60);
                let panics = self.places[site].panics;
                let compare = Happening::Compare(site, life, panics, generation, checks);
                self.at(when, compare);
            }
            Effect::Met {
                endpoint,
                life,
                engine,
            } => self.met(site, endpoint, life, &engine.key),
            Effect::TakeBack {
                room,
                generation,
                endpoint,
                ..
            } => self.take_back(site, room, generation, endpoint),
            Effect::Changed { .. } => self.wake(site),
            Effect::WriteAux { .. } | Effect::Count(_) => {}
        }
        Ok(())
    }

    fn answer(
        &mut self,
        site: Site,
        room: Room,
        generation: Generation,
        engine: usize,
    ) -> Result<(), String> {
        let result = self.resolve(site, engine);
        if result.is_err() && self.random.percent(70) {
            // The rank's own client tries again for a while.
            let (when, life) = (
                self.now + Duration::from_millis(400),
                self.places[site].life,
            );
            self.at(
                when,
                Happening::Answer(site, life, room, generation, engine),
            );
            return Ok(());
        }
        if self.random.percent(self.weather.engine_faults) {
            let (when, life) = (
                self.now + self.random.between(1, 3000),
                self.places[site].life,
            );
            let again = Event::Resolved {
                room,
                generation,
                result: result.clone(),
            };
            self.at(when, Happening::Event(site, life, again));
        }
        self.event(
            site,
            Event::Resolved {
                room,
                generation,
                result,
            },
        )
    }

    fn resolve(&self, site: Site, engine: usize) -> Result<ResolvedPrefill, String> {
        let mut resolved = self.engines.resolved(self.places[site].rank);
        resolved.bootstrap = format!("bootstrap:{engine}");
        for target in &mut resolved.targets {
            let is_it = |place: &&Place| {
                place.is_prefill
                    && place.engine == engine
                    && i64::from(place.rank) == target.unique_rank
            };
            let place = self.places.iter().find(is_it).ok_or("no such engine")?;
            let forgotten = place.died + STALE_ANSWERS;
            if !place.is_alive && self.now > forgotten {
                return Err("not every rank of the prefill has registered".to_owned());
            }
            target.endpoint = place.endpoint.clone();
            target.is_ferry = self.weather.is_ferry;
        }
        Ok(resolved)
    }

    fn outage(&mut self) -> Result<(), String> {
        if !self.is_loaded() {
            return Ok(());
        }
        let next = self.now + self.random.between(500, 6000);
        self.at(next, Happening::Outage);
        let site = self.random.below(self.places.len());
        match self.random.below(6) {
            0 | 1 if self.places[site].is_alive => self.kill(site)?,
            2 => {
                let until = self.now + self.random.between(100, 9000);
                self.log(|| format!("site {site} is stopped until {until:?}"));
                // Never sooner than before: what waits would be overtaken.
                let place = &mut self.places[site];
                place.stopped_until = place.stopped_until.max(until);
            }
            3 if self.places[site].is_alive => self.panic(site)?,
            4 if self.places[site].is_alive && !self.places[site].core.is_draining() => {
                let when = self.now + self.random.between(500, 6000);
                self.at(when, Happening::Leave(site, self.places[site].life));
                let reason = "the engine drains".to_owned();
                self.event(site, Event::Drain { reason })?;
            }
            _ => {
                let other = self.random.below(self.places.len());
                let until = self.now + self.random.between(100, 9000);
                self.log(|| format!("sites {site} and {other} are cut off until {until:?}"));
                let pair = (site.min(other), site.max(other));
                self.cuts.insert(pair, until);
            }
        }
        Ok(())
    }

    /// The rank's actor panics, and its successor goes on.
    fn panic(&mut self, site: Site) -> Result<(), String> {
        self.lose_works(site);
        self.places[site].panics += 1;
        let reason = "the rank's actor panicked".to_owned();
        self.event(site, Event::Restarted { reason }).map(|_| ())
    }

    /// A message that the actor does not survive; whoever read it hands on that it was lost, if its
    /// sender would wait for an answer.
    fn panic_with(
        &mut self,
        site: Site,
        message: &ControlMessage,
        generation_opt: Option<Generation>,
    ) -> Result<(), String> {
        self.panic(site)?;
        let Some((room, endpoint)) = crate::control::announcer_of(message) else {
            return Ok(());
        };
        let lost = Event::Lost {
            room,
            endpoint,
            generation_opt,
        };
        self.event(site, lost).map(|_| ())
    }

    pub fn kill(&mut self, site: Site) -> Result<(), String> {
        if self.random.percent(25) {
            let reason = "the engine ends".to_owned();
            self.event(site, Event::Shutdown { reason })?;
        }
        self.log(|| format!("site {site} is killed"));
        let place = &mut self.places[site];
        place.is_alive = false;
        place.died = self.now;
        let (engine, is_prefill) = (place.engine, place.is_prefill);
        for script in std::mem::take(&mut place.scripts).into_values() {
            // Not every client learns of it.
            if self.random.percent(50) {
                self.requests[script.request].is_cancelled = true;
            }
        }
        self.log(|| format!("engine {engine}, prefill {is_prefill}, has lost a rank"));
        self.let_go_of_works(site);
        self.spread_exit(site);
        let when = self.now + self.random.between(200, 3000);
        self.at(when, Happening::Restart(site));
        Ok(())
    }

    fn restart(&mut self, site: Site) -> Result<(), String> {
        let place = &self.places[site];
        let (life, old) = (place.life + 1, place.endpoint.port - 1);
        // Where messages name no use of a room, a rank must not come back to a port whose messages
        // may still be on their way.
        let port = match self.weather.is_ferry && self.random.percent(50) {
            true => old,
            false => old + 1,
        };
        let (is_prefill, engine, rank) = (place.is_prefill, place.engine, place.rank);
        let died = place.died;
        let moved = if port == old { place.moved } else { life };
        self.places[site] = self.place(is_prefill, engine, rank, site, life, port);
        self.places[site].died = died;
        self.places[site].moved = moved;
        self.log(|| format!("site {site} lives again, life {life}, port {}", port + 1));
        self.at(self.now + TICK, Happening::Tick(site, life));
        Ok(())
    }
}

/// Who gave it, in which life, for which use of a room, to whom.
pub type Permission = (Site, u32, Room, Generation, Endpoint);

/// Whether what a prefill's engine writes passes the decode's hands; of a rank's lives some do.
pub fn is_only_way_in(key: &str) -> bool {
    key.bytes().map(u32::from).sum::<u32>().is_multiple_of(2)
}

fn engine_desc(site: Site, life: u32) -> EngineDesc {
    EngineDesc {
        key: engine_key(site, life),
        ..EngineDesc::default()
    }
}

pub fn engine_key(site: Site, life: u32) -> String {
    format!("engine-{site}-{life}")
}
