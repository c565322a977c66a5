//! The engines of the ranks and the router before them, and what they are promised.

use std::collections::BTreeMap;

use super::coverage::state_of;
use super::memory::{Holding, Request};
use super::world::{Happening, ROOMS, RequestState, Site, TICK, World};
use crate::rank::core::tests::*;

const PAGES: usize = 4;
/// What the bootstrap server said when it was asked for an older room.
const OLD_ANSWER: &str = "an old answer";
/// How long an engine waits for proof before it gives a room's items up for lost.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a decode's room may outlive a prefill rank that is gone and can be seen to be.
const LOSS_BOUND: Duration = Duration::from_millis(3500);
/// How long a bootstrap server may name a rank that is gone.
pub const STALE_ANSWERS: Duration = Duration::from_secs(2);

/// Where a rank's engine stands with one room.
#[derive(Clone, Debug)]
pub struct Script {
    pub request: Request,
    begun: Duration,
    is_open: bool,
    holding: Holding,
    is_announced: bool,
    is_completed: bool,
    pages_sent: usize,
    is_last_sent: bool,
    /// Never clears its room.
    is_forgetful: bool,
    ended_opt: Option<Duration>,
    seen_opt: Option<(RoomStatus, Option<String>)>,
}

impl World {
    /// Sends the next request to a prefill and a decode engine.
    pub fn route(&mut self) -> Result<(), String> {
        if !self.is_loaded() {
            return Ok(());
        }
        let next = self.now + self.random.between(20, 600);
        self.at(next, Happening::Router);
        let engines = |is_prefill| {
            let places = self.places.iter();
            let theirs = places.filter(move |place| place.is_prefill == is_prefill);
            theirs.map(|place| place.engine + 1).max().unwrap_or(1)
        };
        let (prefills, decodes) = (engines(true), engines(false));
        let request = RequestState {
            room: self.random.below(ROOMS as usize) as u64,
            prefill: self.random.below(prefills),
            decode: self.random.below(decodes),
            is_cancelled: false,
        };
        // A number is used again only when no engine knows it any more.
        if self
            .places
            .iter()
            .any(|place| place.scripts.contains_key(&request.room))
        {
            return Ok(());
        }
        let number = self.requests.len();
        // The other half of a request may never be sent.
        let is_half = self.random.percent(self.weather.engine_faults);
        let is_left = self.random.percent(50);
        self.log(|| format!("request {number}: {request:?}, half: {is_half}"));
        for site in 0..self.places.len() {
            let place = &self.places[site];
            let engine = if place.is_prefill {
                request.prefill
            } else {
                request.decode
            };
            let is_asked = !is_half || place.is_prefill == is_left;
            if !place.is_alive || place.engine != engine || !is_asked {
                continue;
            }
            let offset = self.random.below(16);
            let place = &mut self.places[site];
            let Some(holding) = place.memory.take(number, PAGES, offset) else {
                // Too much is held for good: somebody starts the engine anew.
                self.kill(site)?;
                continue;
            };
            let script = Script {
                request: number,
                begun: self.now,
                is_open: false,
                holding,
                is_announced: false,
                is_completed: false,
                pages_sent: 0,
                is_last_sent: false,
                is_forgetful: self.random.percent(self.weather.engine_faults),
                ended_opt: None,
                seen_opt: None,
            };
            self.places[site].scripts.insert(request.room, script);
            self.wake(site);
        }
        self.requests.push(request);
        Ok(())
    }

    /// Lets a rank's engine do its next step with each of its rooms.
    pub fn drive(&mut self, site: Site) -> Result<(), String> {
        let rooms: Vec<u64> = self.places[site].scripts.keys().copied().collect();
        for room in rooms {
            self.drive_room(site, room)?;
        }
        for _ in 0..2 {
            if self.is_loaded() && self.random.percent(self.weather.engine_faults) {
                self.make_a_mistake(site)?;
            }
        }
        Ok(())
    }

    fn drive_room(&mut self, site: Site, number: u64) -> Result<(), String> {
        let Some(mut script) = self.places[site].scripts.get(&number).cloned() else {
            return Ok(());
        };
        let is_prefill = self.places[site].is_prefill;
        let before = script.clone();
        let room = room(number);
        let view_opt = self.places[site].core.view(room);
        let Some(view) = view_opt else {
            return self.without_view(site, number, script);
        };
        if matches!(view.status, RoomStatus::Failed | RoomStatus::Success) {
            let ended = *script.ended_opt.get_or_insert(self.now);
            let is_patient = self.now < ended + PATIENCE;
            self.places[site].scripts.insert(number, script.clone());
            if is_prefill && self.random.percent(self.weather.engine_faults) {
                // It had been handed over before the engine heard of the end.
                let chunk = ChunkCommand {
                    kv_indices: script.holding.pages[script.pages_sent..].to_vec(),
                    state_indices: vec![vec![script.holding.row]],
                    num_kv_tokens_opt: None,
                    aux_index_opt: None,
                    is_last: true,
                };
                self.command(site, Event::Chunk { room, chunk })?;
            }
            if script.is_forgetful || (!view.release_safe && is_patient) {
                return Ok(());
            }
            if view.release_safe {
                self.log(|| format!("site {site} frees the items of request {}", script.request));
                self.places[site].memory.free(&script.holding);
                self.freed.insert((site, script.request));
            }
            self.places[site].scripts.remove(&number);
            return self.event(site, Event::Clear { room });
        }
        let is_given_up = self.requests[script.request].is_cancelled && self.random.percent(40);
        if is_given_up || self.random.percent(self.weather.engine_faults / 2) {
            let reason = "the engine gave up".to_owned();
            return match self.random.below(4) {
                // Without looking whether it may.
                0 => {
                    self.places[site].scripts.remove(&number);
                    self.event(site, Event::Clear { room })
                }
                _ => self.event(site, Event::Abort { room, reason }),
            };
        }
        let event = match view.status {
            _ if !is_prefill && !script.is_announced => {
                script.is_announced = true;
                Event::Announce {
                    room,
                    announcement: Announcement {
                        kv_indices: script.holding.pages.clone(),
                        aux_index_opt: u32::try_from(script.holding.aux).ok(),
                        state_indices: vec![vec![script.holding.row]],
                        decode_prefix_len_opt: None,
                    },
                }
            }
            RoomStatus::Bootstrapping if is_prefill && !script.is_completed => {
                script.is_completed = true;
                Event::PrefillComplete { room }
            }
            RoomStatus::WaitingForInput | RoomStatus::Transferring
                if is_prefill && !script.is_last_sent =>
            {
                if self.random.percent(30) {
                    // The model is still at work.
                    self.wake(site);
                    return Ok(());
                }
                let begin = script.pages_sent;
                script.pages_sent = (begin + self.random.below(4)).min(PAGES);
                let is_early = self.random.percent(self.weather.engine_faults / 2);
                script.is_last_sent = script.pages_sent == PAGES || is_early;
                let mut kv_indices = script.holding.pages[begin..script.pages_sent].to_vec();
                if self.random.percent(self.weather.engine_faults / 2) {
                    kv_indices.push(-1);
                }
                let last = vec![vec![script.holding.row]];
                let chunk = ChunkCommand {
                    kv_indices,
                    state_indices: if script.is_last_sent {
                        last
                    } else {
                        Vec::new()
                    },
                    num_kv_tokens_opt: None,
                    aux_index_opt: None,
                    is_last: script.is_last_sent,
                };
                Event::Chunk { room, chunk }
            }
            _ => return Ok(()),
        };
        let is_chunk = matches!(event, Event::Chunk { .. });
        self.places[site].scripts.insert(number, script);
        let is_accepted = self.command(site, event)?;
        let status_opt = self.places[site].core.view(room).map(|view| view.status);
        let is_open = status_opt.is_some_and(|status| status != RoomStatus::Failed);
        if is_chunk && !is_accepted && is_open {
            // For want of space: it is handed over again.
            self.places[site].scripts.insert(number, before);
        }
        self.wake(site);
        Ok(())
    }

    /// The rank does not know the room: it is to be opened, or was forgotten.
    fn without_view(&mut self, site: Site, number: u64, mut script: Script) -> Result<(), String> {
        if script.is_open {
            // What nobody vouched for stays held.
            self.places[site].scripts.remove(&number);
            return Ok(());
        }
        if self.now > script.begun + PATIENCE {
            self.places[site].memory.free(&script.holding);
            self.places[site].scripts.remove(&number);
            return Ok(());
        }
        let room = room(number);
        let prefill = self.requests[script.request].prefill;
        let open = Event::Open(OpenCommand {
            room,
            bootstrap_opt: Some(format!("bootstrap:{prefill}")),
            prefill_dp_rank_opt: None,
            aux_index_opt: u32::try_from(script.holding.aux).ok(),
        });
        // What it is bound to must be known before the effects of opening are done.
        script.is_open = true;
        self.places[site].scripts.insert(number, script.clone());
        let next = self.places[site].core.next_generation();
        let is_draining = self.places[site].core.is_draining();
        let binding = (site, self.places[site].life, room, next);
        self.bound.insert(binding, script.request);
        if !self.command(site, open)? {
            // The last writes of an older use are still on their way, or the rank drains.
            script.is_open = false;
            self.places[site].scripts.insert(number, script);
        } else if is_draining {
            return Err(format!("room {number} is opened at {site}, which drains"));
        }
        self.wake(site);
        Ok(())
    }

    /// Commands and messages that make no sense; all they may do is to fail a room.
    fn make_a_mistake(&mut self, site: Site) -> Result<(), String> {
        let known: Vec<u64> = self.places[site].scripts.keys().copied().collect();
        let number = match self.random.percent(50) && !known.is_empty() {
            true => self.random.pick(&known),
            false => self.random.below(ROOMS as usize) as u64,
        };
        let is_held = known.contains(&number);
        let room = room(number);
        let stranger = Endpoint::new("stranger", 1);
        let rank = self.random.below(3) as i64;
        let message = |message| Event::Message(message, None);
        let is_prefill = self.places[site].is_prefill;
        let mistakes = if self.weather.verifies { 40 } else { 33 };
        // Rooms that wait for space are few.
        let scarce = self.held_up(site).unwrap_or(room);
        let event = match self.random.below(mistakes) {
            // 0.5.23 takes a dummy for real, and says so before any byte has moved.
            23 if !is_prefill && !self.weather.is_ferry => {
                let resolved = self.engines.resolved(self.places[site].rank);
                let mut targets = resolved.targets.iter();
                match targets.find(|target| target.is_dummy) {
                    Some(target) => {
                        message(status_message(number, target.unique_rank, KvPoll::Success))
                    }
                    None => Event::Tick,
                }
            }
            24 => self.older_report(site, number),
            33 => message(ControlMessage::Checks(Box::new(Checks {
                room: scarce,
                prefill_rank: 77,
                token: 1,
                mode: CheckMode::Full,
                groups: Vec::new(),
            }))),
            34 => message(ControlMessage::Checked(Checked {
                room: scarce,
                endpoint: stranger,
                token: self.random.below(4) as u64,
                mismatch: self.random.percent(50).then(|| "nonsense".to_owned()),
            })),
            35.. => Event::Compared {
                room: scarce,
                generation: Generation(0),
                prefill_rank: rank,
                result: self
                    .random
                    .pick(&[true, false])
                    .then_some(())
                    .ok_or(Mismatch {
                        component: "kv",
                        reason: "nonsense".to_owned(),
                    }),
            },
            18 => Event::Chunk {
                room,
                chunk: ChunkCommand::default(),
            },
            19 => Event::Abort {
                room,
                reason: "nobody wants it".to_owned(),
            },
            20 => Event::Clear { room }.only_if(!is_held),
            21 => Event::Resolved {
                room,
                generation: Generation(0),
                result: Ok(self.engines.resolved(0)),
            },
            22 => message(status_message(
                number,
                77,
                KvPoll::ALL[self.random.below(5)],
            )),
            0 => Event::Announce {
                room,
                announcement: Announcement {
                    kv_indices: vec![99],
                    ..Announcement::default()
                },
            },
            1 => Event::PrefillComplete { room },
            2 => Event::Chunk {
                room,
                chunk: ChunkCommand {
                    kv_indices: vec![99],
                    is_last: true,
                    ..ChunkCommand::default()
                },
            },
            3 => Event::Open(OpenCommand {
                room,
                bootstrap_opt: None,
                prefill_dp_rank_opt: None,
                aux_index_opt: None,
            })
            .only_if(!is_prefill || is_held),
            4 => message(ControlMessage::Abort(Abort {
                room,
                reply_to: Some(stranger),
                generation: Some(1),
            })),
            5 => message(ControlMessage::Abort(Abort {
                room,
                reply_to: None,
                generation: None,
            })),
            6 => message(ack_message(number, rank, 1 << 60)),
            7 => message(status_message(
                number,
                77,
                KvPoll::ALL[self.random.below(5)],
            )),
            8 | 25..30 if is_prefill => message(status_message(
                number,
                rank,
                KvPoll::ALL[self.random.below(5)],
            )),
            9 => Event::Unreadable {
                sender: UnreadableSender {
                    endpoint: stranger,
                    room_opt: self.random.percent(70).then_some(room),
                },
                reason: "it has two frames".to_owned(),
            },
            10 => {
                let mut info = self.engines.info(number, 0);
                info.endpoint = stranger;
                message(ControlMessage::TransferInfo(info))
            }
            11 => message(ControlMessage::Bootstrap(Bootstrap {
                room,
                reply_to: stranger,
            })),
            12 => message(ControlMessage::AuxData(common::wire::AuxData {
                room,
                buffer_index: 0,
                aux_index: rank as u32,
                data: vec![1; 16],
            })),
            13 => Event::SendFailed {
                to: stranger,
                about_opt: Some((room, Generation(1))),
                kind: "status",
                register_opt: None,
                reason: "no route".to_owned(),
            },
            14 if is_prefill => message(ControlMessage::Hello(Box::new(Hello {
                endpoint: stranger,
                engine: EngineDesc::default(),
                register: 1,
                checks: None,
            }))),
            14 => Event::PeerLost {
                endpoint: stranger,
                reason: "no route".to_owned(),
            },
            30 => {
                let (endpoint, generation_opt) =
                    self.said_twice(site, room).unwrap_or((stranger, None));
                Event::Lost {
                    room,
                    endpoint,
                    generation_opt,
                }
            }
            31 => Event::PeerLost {
                endpoint: self.places[self.random.below(self.places.len())]
                    .endpoint
                    .clone(),
                reason: "no route".to_owned(),
            },
            15 => Event::Resolved {
                room,
                generation: Generation(0),
                result: Err(OLD_ANSWER.to_owned()),
            },
            32 => Event::TakenBack {
                room,
                generation: Generation(0),
                endpoint: stranger,
            },
            16 => {
                let register = self.engines.register(0);
                message(ControlMessage::Register(Box::new(register)))
            }
            _ => Event::Component(ComponentReport {
                key: ComponentKey {
                    room: scarce,
                    generation: Generation(0),
                    endpoint: stranger,
                    component: ComponentId::Kv,
                },
                outcome: match self.random.below(5) {
                    0 => ComponentOutcome::Died { panicked: false },
                    3 => ComponentOutcome::Retired { is_quiesced: false },
                    1 => failed(false),
                    2 => failed(true),
                    _ => moved(),
                },
            }),
        };
        self.command(site, event).map(|_| ())
    }

    /// A room whose chunks wait for space.
    fn held_up(&self, site: Site) -> Option<Room> {
        let core = &self.places[site].core;
        let mut rooms = (0..ROOMS).map(room);
        rooms.find(|room| state_of(core, *room) == "held_up")
    }

    /// Who may have announced the room once more, where messages come twice.
    fn said_twice(&self, site: Site, room: Room) -> Option<(Endpoint, Option<Generation>)> {
        match &self.places[site].core {
            RankCore::Prefill(core) if self.weather.is_chaotic => core.fed_by(room).pop(),
            _ => None,
        }
    }

    /// The report of a write of an older use of a room.
    fn older_report(&self, site: Site, number: u64) -> Event {
        let life = self.places[site].life;
        let newest_opt = self.places[site].core.view(room(number));
        let newest = newest_opt.map_or(0, |view| view.generation);
        let mut works = self.works.values().rev();
        let older = works.find(|work| {
            (work.site, work.life, work.key.room) == (site, life, room(number))
                && work.key.generation.get() < newest
        });
        older.map_or(Event::Tick, |work| {
            Event::Component(ComponentReport {
                key: work.key.clone(),
                outcome: moved(),
            })
        })
    }

    /// Looks at what a rank tells its engine.
    pub fn watch(&mut self, site: Site) -> Result<(), String> {
        let numbers: Vec<u64> = self.places[site].scripts.keys().copied().collect();
        for number in numbers {
            let place = &self.places[site];
            let Some(view) = place.core.view(room(number)) else {
                continue;
            };
            let script = &place.scripts[&number];
            if !script.is_open {
                continue;
            }
            let request = script.request;
            let now_seen = (view.status, view.reason.clone());
            let is_open = !matches!(view.status, RoomStatus::Failed | RoomStatus::Success);
            if is_open && view.release_safe {
                return Err(format!(
                    "request {request} is open at {site} and safe to release"
                ));
            }
            if is_open {
                self.check_loss(site, number)?;
                self.check_peers(site)?;
            }
            let script = &self.places[site].scripts[&number];
            if script.seen_opt.as_ref() == Some(&now_seen) {
                continue;
            }
            if let Some((before, reason_opt)) = &script.seen_opt {
                let is_forward = match (before, view.status) {
                    (RoomStatus::Failed | RoomStatus::Success, after) => *before == after,
                    (_, RoomStatus::Failed) => true,
                    (before, after) => after >= *before,
                };
                if !is_forward {
                    return Err(format!(
                        "request {request} at {site} went from {before:?} to {:?}",
                        view.status
                    ));
                }
                if reason_opt.is_some() && *reason_opt != view.reason {
                    return Err(format!(
                        "the first cause of request {request} at {site} changed from {reason_opt:?} to {:?}",
                        view.reason
                    ));
                }
            }
            let place = &mut self.places[site];
            if let Some(script) = place.scripts.get_mut(&number) {
                script.seen_opt = Some(now_seen);
            }
            self.outcomes
                .insert((site, request), (view.status, self.now));
            match view.status {
                RoomStatus::Success => self.successes += 1,
                RoomStatus::Failed => self.failures += 1,
                _ => {}
            }
            match &self.places[site].core {
                RankCore::Prefill(core) => {
                    self.fed.insert((site, request), core.fed_by(room(number)));
                }
                RankCore::Decode(_) => self.check_end(site, number, &view)?,
            }
        }
        Ok(())
    }

    /// A decode's Success means that every byte is there and every writer says the same; its
    /// failure is blamed on a prefill rank only if that has failed.
    fn check_end(&self, site: Site, number: u64, view: &RoomView) -> Result<(), String> {
        let place = &self.places[site];
        let script = &place.scripts[&number];
        let (request, resolved) = (script.request, self.engines.resolved(place.rank));
        let writers = resolved.targets.iter().filter(|target| !target.is_dummy);
        let site_of = |unique_rank: i64| {
            let mut places = self.places.iter();
            let engine = self.requests[request].prefill;
            places.position(|place| {
                place.is_prefill && place.engine == engine && i64::from(place.rank) == unique_rank
            })
        };
        let outcome_of = |unique_rank: i64| {
            let outcome = self.outcomes.get(&(site_of(unique_rank)?, request));
            outcome.map(|(status, _)| *status)
        };
        // An announcement that nobody waited for any more may have been taken in place of this
        // one.
        let has_fed_this_use = |unique_rank: i64| {
            let fed_opt = site_of(unique_rank).and_then(|writer| self.fed.get(&(writer, request)));
            let mut fed = fed_opt.into_iter().flatten();
            fed.any(|(endpoint, generation_opt)| {
                let is_this_use = |it: &Generation| it.get() == view.generation;
                *endpoint == place.endpoint && generation_opt.as_ref().is_none_or(is_this_use)
            })
        };
        if view.status == RoomStatus::Success {
            place.memory.verify(&script.holding, request)?;
            for writer in writers {
                let outcome_opt = outcome_of(writer.unique_rank);
                if outcome_opt != Some(RoomStatus::Success) {
                    return Err(format!(
                        "request {request} succeeds at decode {site}, and is {outcome_opt:?} at prefill rank {}",
                        writer.unique_rank
                    ));
                }
            }
        }
        let differs = |rank: i64| super::io::difference(rank).reason;
        let reason = view.reason.as_deref().unwrap_or_default();
        for target in &resolved.targets {
            if reason.contains(&differs(target.unique_rank))
                && outcome_of(target.unique_rank) == Some(RoomStatus::Success)
            {
                return Err(format!(
                    "request {request} fails at decode {site} with {reason:?}, and that rank succeeded"
                ));
            }
        }
        if view.reason.as_deref() == Some(OLD_ANSWER) {
            return Err(format!(
                "an answer to an older question fails request {request}"
            ));
        }
        if view.status == RoomStatus::Failed && self.weather.is_ferry {
            let reason = view.reason.as_deref().unwrap_or_default();
            for target in &resolved.targets {
                let blames = format!("prefill rank {}: ", target.unique_rank);
                if reason.starts_with(&blames)
                    && outcome_of(target.unique_rank) == Some(RoomStatus::Success)
                    && has_fed_this_use(target.unique_rank)
                {
                    return Err(format!(
                        "request {request} fails at decode {site} with {reason:?}, and that rank succeeded"
                    ));
                }
            }
        }
        Ok(())
    }

    /// A write that does not end does not hold its room for ever.
    pub fn check_transfers(&self, site: Site) -> Result<(), String> {
        let place = &self.places[site];
        let limit = self.times.transfer + 2 * TICK;
        if place.stopped_until + limit > self.now {
            return Ok(());
        }
        for work in self.works.values() {
            let is_ours = (work.site, work.life) == (site, place.life) && !work.is_reported;
            let view_opt = place.core.view(work.key.room).filter(|_| is_ours);
            let is_moving = view_opt.is_some_and(|view| {
                view.status == RoomStatus::Transferring
                    && view.generation == work.key.generation.get()
            });
            let since = place.progress.get(&work.key.room).max(Some(&work.begun));
            if is_moving && since.is_some_and(|since| self.now > *since + limit) {
                return Err(format!("the write of {:?} does not end", work.key));
            }
        }
        Ok(())
    }

    /// No more rooms are open with one peer than may be.
    fn check_peers(&self, site: Site) -> Result<(), String> {
        let (place, limit) = (&self.places[site], self.engines.limits.rooms_per_peer);
        let mut with_peer: BTreeMap<String, usize> = BTreeMap::new();
        for (number, script) in &place.scripts {
            let view_opt = place.core.view(room(*number));
            let is_open = view_opt.is_some_and(|view| {
                !matches!(view.status, RoomStatus::Failed | RoomStatus::Success)
            });
            if !is_open || !script.is_open {
                continue;
            }
            match &place.core {
                RankCore::Prefill(core) => {
                    for (endpoint, _) in core.fed_by(room(*number)) {
                        *with_peer.entry(endpoint.to_string()).or_default() += 1;
                    }
                }
                RankCore::Decode(_) => {
                    let prefill = self.requests[script.request].prefill;
                    *with_peer.entry(prefill.to_string()).or_default() += 1;
                }
            }
        }
        match with_peer.iter().find(|(_, count)| **count > limit) {
            Some((peer, count)) => Err(format!("{count} rooms are open with {peer} at {site}")),
            None => Ok(()),
        }
    }

    /// The rooms of a prefill rank that is gone do not wait for their timeouts.
    fn check_loss(&self, site: Site, number: u64) -> Result<(), String> {
        let place = &self.places[site];
        if place.is_prefill || place.stopped_until + LOSS_BOUND > self.now {
            return Ok(());
        }
        let watched = place.core.watched_of(room(number));
        let begun = place.scripts[&number].begun;
        for endpoint in watched {
            let mut places = self.places.iter();
            let host = places.find(|other| endpoint.host == other.endpoint.host);
            let Some(host) = host.filter(|_| self.listener(&endpoint).is_none()) else {
                continue;
            };
            // A room that began later may have been told of it for a while.
            let from = match begun < host.died {
                true => host.died,
                false => begun.max(host.died + STALE_ANSWERS),
            };
            if self.now > from + LOSS_BOUND {
                return Err(format!(
                    "room {number} at {site} waits for {endpoint}, which is gone"
                ));
            }
        }
        Ok(())
    }
}

trait OnlyIf {
    fn only_if(self, is_wanted: bool) -> Self;
}

impl OnlyIf for Event {
    /// A mistake that would be none is replaced by the passing of time.
    fn only_if(self, is_wanted: bool) -> Self {
        if is_wanted { self } else { Self::Tick }
    }
}
