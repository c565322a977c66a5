//! Rooms that decode ranks have announced and the engine has not opened, bounded in number, in
//! bytes and in time: any number from the network may begin one.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use common::ids::{Endpoint, Generation, Room};
use common::wire::{Abort, Bootstrap, TransferInfo};

use crate::rank::core::Limits;

/// Far more decode ranks than ever share a room.
const MOST_ANNOUNCERS: usize = 1024;

/// Messages for a room that the engine has not opened.
#[derive(Debug)]
pub(super) struct Early {
    since: Instant,
    bytes: usize,
    pub infos: Vec<(TransferInfo, Option<Generation>)>,
    pub bootstrap_opt: Option<(Bootstrap, Option<Generation>)>,
    /// Decode ranks that gave the room up and did not announce it again since; `None` is one that
    /// did not say who it is. They may have been promised that nothing is written.
    pub given_up: Vec<Option<Endpoint>>,
    /// The decode rank that was told that the room cannot be served, and why.
    pub refused_opt: Option<(Endpoint, String)>,
}

impl Early {
    fn new(since: Instant) -> Self {
        Self {
            since,
            bytes: 0,
            infos: Vec::new(),
            bootstrap_opt: None,
            given_up: Vec::new(),
            refused_opt: None,
        }
    }

    /// A decode rank gives the room up. What it had announced is forgotten with it, so that its
    /// next announcement cannot bring old places back.
    pub fn give_up(&mut self, who_opt: Option<Endpoint>) {
        if let Some(who) = &who_opt {
            self.infos.retain(|(info, _)| info.endpoint != *who);
            self.bootstrap_opt
                .take_if(|(bootstrap, _)| bootstrap.reply_to == *who);
        }
        if !self.given_up.contains(&who_opt) && self.given_up.len() < MOST_ANNOUNCERS {
            self.given_up.push(who_opt);
        }
    }

    /// Whether the decode rank has announced a newer use than the one that it gives up.
    pub fn is_newer(&self, abort: &Abort) -> bool {
        let Some(generation) = abort.generation.and_then(|it| u64::try_from(it).ok()) else {
            return false;
        };
        let is_theirs = |endpoint: &Endpoint| Some(endpoint) == abort.reply_to.as_ref();
        let infos = self.infos.iter();
        let infos = infos.filter(|(info, _)| is_theirs(&info.endpoint));
        let bootstraps = self.bootstrap_opt.iter();
        let bootstraps = bootstraps.filter(|(bootstrap, _)| is_theirs(&bootstrap.reply_to));
        let announced = infos
            .map(|(_, it)| *it)
            .chain(bootstraps.map(|(_, it)| *it));
        announced
            .flatten()
            .any(|announced| announced.get() > generation)
    }

    /// Takes an announcement in place of the same rank's older one; whether it was taken.
    pub fn announce(&mut self, info: TransferInfo, generation_opt: Option<Generation>) -> bool {
        self.is_back(&info.endpoint);
        let is_full = self.infos.len() >= MOST_ANNOUNCERS;
        let mut infos = self.infos.iter_mut();
        match infos.find(|(known, _)| known.endpoint == info.endpoint) {
            Some((_, known_opt)) if generation_opt.is_some() && *known_opt > generation_opt => {
                return false;
            }
            Some(known) => *known = (info, generation_opt),
            None if is_full => return false,
            None => self.infos.push((info, generation_opt)),
        }
        true
    }

    /// Takes a BOOTSTRAP in place of an older one; whether it was taken.
    pub fn bootstrap(&mut self, bootstrap: Bootstrap, generation_opt: Option<Generation>) -> bool {
        let known_opt = self.bootstrap_opt.as_ref();
        if known_opt.is_some_and(|(known, known_opt)| {
            known.reply_to == bootstrap.reply_to
                && generation_opt.is_some()
                && *known_opt > generation_opt
        }) {
            return false;
        }
        self.is_back(&bootstrap.reply_to);
        self.bootstrap_opt = Some((bootstrap, generation_opt));
        true
    }

    fn is_back(&mut self, who: &Endpoint) {
        self.given_up
            .retain(|other| other.as_ref().is_some_and(|other| other != who));
        self.refused_opt.take_if(|(other, _)| other == who);
    }

    /// About what it takes, in bytes.
    fn weight(&self) -> usize {
        let of_info = |info: &TransferInfo| {
            let states: usize = info.state_indices.iter().map(Vec::len).sum();
            size_of::<TransferInfo>()
                + 4 * (info.kv_indices.len() + states)
                + size_of::<Vec<i32>>() * info.state_indices.len()
                + info.engine_key.len()
                + info.endpoint.host.len()
        };
        let infos: usize = self.infos.iter().map(|(info, _)| of_info(info)).sum();
        let reason = self.refused_opt.as_ref();
        let reason = reason.map_or(0, |(_, reason)| reason.len());
        size_of::<Self>() + infos + reason + self.given_up.len() * size_of::<Endpoint>()
    }
}

/// All of them, and their order.
#[derive(Debug, Default)]
pub(super) struct EarlyRooms {
    rooms: BTreeMap<Room, Early>,
    /// By age; those that were opened since leave their place behind for a while.
    order: VecDeque<(Instant, Room)>,
    bytes: usize,
}

impl EarlyRooms {
    pub fn contains(&self, room: Room) -> bool {
        self.rooms.contains_key(&room)
    }

    pub fn len(&self) -> usize {
        self.rooms.len()
    }

    /// Changes what is known of a room; how many of the oldest were dropped to have space for it.
    pub fn change(
        &mut self,
        room: Room,
        now: Instant,
        limits: &Limits,
        change: impl FnOnce(&mut Early),
    ) -> usize {
        let early = self.rooms.entry(room).or_insert_with(|| {
            self.order.push_back((now, room));
            Early::new(now)
        });
        change(early);
        self.weigh(room);
        let mut dropped = 0;
        while (self.rooms.len() > limits.early_rooms || self.bytes > limits.early_bytes)
            && self.drop_oldest()
        {
            dropped += 1;
        }
        if self.order.len() > limits.early_rooms.saturating_mul(2) {
            let rooms = &self.rooms;
            let is_there = |since: &Instant, room: &Room| {
                rooms.get(room).is_some_and(|early| early.since == *since)
            };
            self.order.retain(|(since, room)| is_there(since, room));
        }
        dropped
    }

    /// Changes a room that is known already.
    pub fn change_known(&mut self, room: Room, change: impl FnOnce(&mut Early)) {
        if let Some(early) = self.rooms.get_mut(&room) {
            change(early);
            self.weigh(room);
        }
    }

    /// Changes all rooms.
    pub fn change_all(&mut self, mut change: impl FnMut(&mut Early)) {
        for early in self.rooms.values_mut() {
            change(early);
            self.bytes -= early.bytes;
            early.bytes = early.weight();
            self.bytes += early.bytes;
        }
    }

    /// The engine opens the room.
    pub fn take(&mut self, room: Room) -> Option<Early> {
        let early = self.rooms.remove(&room)?;
        self.bytes -= early.bytes;
        Some(early)
    }

    /// Forgets all rooms; who had announced them.
    pub fn take_all(&mut self) -> Vec<(Room, Endpoint, Option<Generation>)> {
        let mut announcers = Vec::new();
        for (room, early) in std::mem::take(self).rooms {
            let infos = early.infos.into_iter();
            let infos = infos.map(|(info, generation_opt)| (info.endpoint, generation_opt));
            let bootstraps = early.bootstrap_opt.into_iter();
            let bootstraps =
                bootstraps.map(|(bootstrap, generation_opt)| (bootstrap.reply_to, generation_opt));
            announcers.extend(
                infos
                    .chain(bootstraps)
                    .map(|(endpoint, generation_opt)| (room, endpoint, generation_opt)),
            );
        }
        announcers
    }

    /// Forgets what is too old; how many rooms.
    pub fn expire(&mut self, now: Instant, lifetime: Duration) -> usize {
        let mut dropped = 0;
        let is_old = |(since, _): &(Instant, Room)| now.duration_since(*since) >= lifetime;
        while self.order.front().is_some_and(is_old) {
            dropped += usize::from(self.drop_oldest());
        }
        dropped
    }

    fn weigh(&mut self, room: Room) {
        if let Some(early) = self.rooms.get_mut(&room) {
            self.bytes -= early.bytes;
            early.bytes = early.weight();
            self.bytes += early.bytes;
        }
    }

    /// Takes places off the order until a room goes with one; whether there was one.
    fn drop_oldest(&mut self) -> bool {
        while let Some((since, room)) = self.order.pop_front() {
            let early_opt = self.rooms.get(&room);
            if early_opt.is_some_and(|early| early.since == since) {
                self.take(room);
                return true;
            }
        }
        false
    }
}
