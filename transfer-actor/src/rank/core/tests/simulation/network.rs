//! Messages between ranks: they take time, get lost, come twice and overtake each other; and the
//! looks of decode ranks for prefill ranks that are gone.

use super::world::{Happening, Site, World};
use crate::rank::core::tests::*;

impl World {
    pub fn listener(&self, endpoint: &Endpoint) -> Option<Site> {
        let mut places = self.places.iter();
        places.position(|place| place.is_alive && place.endpoint == *endpoint)
    }

    pub fn send(
        &mut self,
        site: Site,
        to: &Endpoint,
        message: ControlMessage,
        generation_opt: Option<Generation>,
        about_opt: Option<(Room, Generation)>,
    ) {
        let life = self.places[site].life;
        let failed = Event::SendFailed {
            to: to.clone(),
            about_opt,
            kind: message.kind(),
            register_opt: message.register_number(),
            reason: "the connection broke".to_owned(),
        };
        self.log(|| format!("site {site} to {to}: {message:?}, of {generation_opt:?}"));
        let Some(receiver) = self.listener(to) else {
            let when = self.now + self.random.between(1, 1000);
            return self.at(when, Happening::Event(site, life, failed));
        };
        let pair = (site.min(receiver), site.max(receiver));
        let cut_until_opt = self.cuts.get(&pair).filter(|until| **until > self.now);
        let earliest = match cut_until_opt.copied() {
            // Either the kernel delivers it once the link is back, or the sender gives it up.
            Some(until) if self.random.percent(50) => until,
            Some(_) => {
                let when = self.now + Duration::from_secs(1);
                return self.at(when, Happening::Event(site, life, failed));
            }
            None => self.now,
        };
        if self.random.percent(self.weather.loss) {
            self.log(|| "it is lost".to_owned());
            if self.random.percent(50) {
                let when = self.now + self.random.between(1, 1000);
                self.at(when, Happening::Event(site, life, failed));
            }
            return;
        }
        let mut when = earliest + self.random.between(0, 4);
        if self.random.percent(self.weather.delays) {
            when += self.random.between(50, 2500);
        }
        let receiver_life = self.places[receiver].life;
        let lane = (site, life, to.clone());
        let is_overtaken = self.weather.is_chaotic && self.random.percent(10);
        if is_overtaken {
            when += self.random.between(0, 3000);
        } else {
            // One connection keeps its order.
            let last = self.lanes.entry(lane).or_default();
            when = when.max(*last);
            *last = when;
        }
        if self.weather.is_chaotic && self.random.percent(8) {
            let again = when + self.random.between(0, 3000);
            self.at(
                again,
                Happening::Deliver(receiver, receiver_life, message.clone(), generation_opt),
            );
        }
        self.at(
            when,
            Happening::Deliver(receiver, receiver_life, message, generation_opt),
        );
    }

    /// What the shell's heartbeats do, once a tick.
    pub fn look_for_peers(&mut self, site: Site) -> Result<(), String> {
        let watched = self.places[site].core.watched();
        self.places[site]
            .misses
            .retain(|endpoint, _| watched.contains(endpoint));
        let mut watched: Vec<Endpoint> = watched.into_iter().collect();
        watched.sort();
        for endpoint in watched {
            let is_there = self
                .listener(&endpoint)
                .is_some_and(|other| !self.is_cut(site, other));
            let misses = self.places[site]
                .misses
                .entry(endpoint.clone())
                .or_default();
            *misses = if is_there { 0 } else { *misses + 1 };
            if *misses >= self.times.heartbeat_misses {
                *misses = 0;
                let reason = "nobody answers".to_owned();
                self.event(site, Event::PeerLost { endpoint, reason })?;
            }
        }
        Ok(())
    }

    /// A rank has met another's process; whether it can watch it is chance.
    pub fn met(&mut self, site: Site, endpoint: Endpoint, life: Life, key: &str) {
        let mut places = self.places.iter().enumerate();
        let lives = places.any(|(other, place)| {
            place.is_alive && super::world::engine_key(other, place.life) == key
        });
        if lives && self.random.percent(70) {
            let met = (key.to_owned(), endpoint, life);
            self.places[site].met.push(met);
        }
    }

    /// Whoever watches a process that has ended learns of it, most of them at once.
    pub fn spread_exit(&mut self, site: Site) {
        let key = super::world::engine_key(site, self.places[site].life);
        for other in 0..self.places.len() {
            let life = self.places[other].life;
            let met = self.places[other].met.iter();
            let met = met.filter(|(known, ..)| *known == key).cloned();
            for met in met.collect::<Vec<_>>() {
                let most = self.random.pick(&[20, 50, 5000]);
                let when = self.now + self.random.between(1, most);
                self.at(when, Happening::Exit(other, life, met));
            }
        }
    }

    /// The kernel says that a process has exited, and what it had sent has been thrown away.
    pub fn exited(
        &mut self,
        site: Site,
        key: &str,
        endpoint: Endpoint,
        life: Life,
    ) -> Result<(), String> {
        self.throw_away(key, site);
        let reason = "its process has exited".to_owned();
        self.event(
            site,
            Event::PeerExited {
                endpoint,
                life,
                reason,
            },
        )
    }
}
