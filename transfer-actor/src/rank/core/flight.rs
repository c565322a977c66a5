//! What a prefill rank has on its way, and what waits for it: bounded in bytes and in number, for
//! each decode rank and in all.

use std::collections::{HashMap, VecDeque};

use common::ids::{Endpoint, Generation, Room};

use crate::error::ApiError;
use crate::rank::core::event::{ComponentKey, Work};
use crate::rank::core::rules::{Rule, holds};
use crate::rank::core::{Limits, WhenFull};

/// What of one chunk goes to one decode rank: it begins as one.
#[derive(Debug)]
pub(super) struct Portion {
    pub room: Room,
    pub generation: Generation,
    pub endpoint: Endpoint,
    /// The pieces of work, and about how many bytes each moves.
    pub works: Vec<(ComponentKey, Work, u64)>,
}

impl Portion {
    pub fn bytes(&self) -> u64 {
        let bytes = self.works.iter().map(|(.., bytes)| *bytes);
        bytes.fold(0, u64::saturating_add)
    }
}

/// Whether there is space for some more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Enough,
    /// Not for this decode rank.
    PeerFull,
    /// For none.
    Full,
}

/// Bytes on their way, and what waits for them to arrive.
#[derive(Debug, Default)]
pub(super) struct Flight {
    bytes: u64,
    by_peer: HashMap<Endpoint, u64>,
    waiting: HashMap<Endpoint, VecDeque<Portion>>,
    /// Decode ranks for which something waits, in turn.
    turns: VecDeque<Endpoint>,
    waiting_count: usize,
}

impl Flight {
    /// Bytes on their way.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Portions that wait.
    pub fn waiting(&self) -> usize {
        self.waiting_count
    }

    /// Pieces of work that wait.
    #[cfg(test)]
    pub fn waiting_work(&self) -> usize {
        let portions = self.waiting.values().flatten();
        portions.map(|portion| portion.works.len()).sum()
    }

    /// Which portions of a chunk must wait: for space, or behind what their decode rank waits for
    /// already. A chunk is taken whole or refused whole.
    pub fn admit(&self, portions: &[Portion], limits: &Limits) -> Result<Vec<bool>, ApiError> {
        let is_held_up = self.is_held_up(limits);
        // Where nothing waits a chunk for several decode ranks goes whole or not at all, and when
        // nothing else is on its way it would never go if not now.
        let goes_alone = limits.when_full == WhenFull::Refuse && self.bytes == 0;
        let mut total = self.bytes;
        let mut waits = Vec::with_capacity(portions.len());
        for portion in portions {
            let bytes = portion.bytes();
            let used = self.used_by(&portion.endpoint);
            let has_space = space(total, used, bytes, limits) == Space::Enough;
            let is_behind = is_held_up || self.waiting.contains_key(&portion.endpoint);
            let must_wait = !goes_alone && (is_behind || !has_space);
            if !must_wait {
                total = total.saturating_add(bytes);
            }
            waits.push(must_wait);
        }
        let count = waits.iter().filter(|must_wait| **must_wait).count();
        if count == 0 {
            return Ok(waits);
        }
        if limits.when_full == WhenFull::Refuse {
            return Err(ApiError::new(
                429,
                "in_flight_limit",
                format!(
                    "{} bytes are on their way, at most {} in all and {} to one decode rank may be; hand the chunk over again when some have arrived",
                    self.bytes, limits.in_flight_bytes, limits.in_flight_bytes_per_peer
                ),
            ));
        }
        let waiting_of = |endpoint: &Endpoint| self.waiting.get(endpoint).map_or(0, VecDeque::len);
        let mut held_back = portions.iter().zip(&waits).filter(|(_, waits)| **waits);
        let is_peer_over = held_back
            .any(|(portion, _)| waiting_of(&portion.endpoint) >= limits.queued_chunks_per_peer);
        if is_peer_over || self.waiting_count + count > limits.queued_chunks {
            return Err(ApiError::new(
                429,
                "too_many_chunks",
                format!(
                    "{} chunks wait for bytes on their way to arrive, at most {} in all and {} for one decode rank may; hand the chunk over again later",
                    self.waiting_count, limits.queued_chunks, limits.queued_chunks_per_peer
                ),
            ));
        }
        Ok(waits)
    }

    /// A portion is on its way from now on.
    pub fn begin(&mut self, portion: &Portion) {
        let bytes = portion.bytes();
        self.bytes = self.bytes.saturating_add(bytes);
        let used = self.by_peer.entry(portion.endpoint.clone()).or_default();
        *used = used.saturating_add(bytes);
    }

    /// A portion waits, behind what its decode rank waits for already.
    pub fn wait(&mut self, portion: Portion) {
        self.waiting_count += 1;
        let endpoint = portion.endpoint.clone();
        let queue = self.waiting.entry(endpoint.clone()).or_default();
        if queue.is_empty() {
            self.turns.push_back(endpoint);
        }
        queue.push_back(portion);
    }

    /// What waited longest and has space now; it begins with this. Decode ranks take turns, and
    /// nobody passes one that waits for all others.
    pub fn next(&mut self, limits: &Limits) -> Option<Portion> {
        for _ in 0..self.turns.len() {
            let endpoint = self.turns.front()?.clone();
            match self.space_for_head(&endpoint, limits) {
                Space::Full => return None,
                Space::PeerFull => self.turns.rotate_left(1),
                Space::Enough => {
                    let queue = self.waiting.get_mut(&endpoint)?;
                    let portion_opt = queue.pop_front();
                    self.turns.pop_front();
                    if queue.is_empty() {
                        self.waiting.remove(&endpoint);
                    } else {
                        self.turns.push_back(endpoint);
                    }
                    let portion = portion_opt?;
                    self.waiting_count -= 1;
                    self.begin(&portion);
                    return Some(portion);
                }
            }
        }
        None
    }

    /// Bytes have arrived, or never will.
    pub fn ended(&mut self, endpoint: &Endpoint, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        if let Some(used) = self.by_peer.get_mut(endpoint) {
            *used = used.saturating_sub(bytes);
            if *used == 0 {
                self.by_peer.remove(endpoint);
            }
        }
    }

    /// Takes out what waits for a use of a room that has failed.
    pub fn give_up(
        &mut self,
        room: Room,
        generation: Generation,
        endpoints: impl Iterator<Item = Endpoint>,
    ) -> Vec<Portion> {
        let mut given_up = Vec::new();
        for endpoint in endpoints {
            let Some(queue) = self.waiting.get_mut(&endpoint) else {
                continue;
            };
            let is_its =
                |portion: &Portion| (portion.room, portion.generation) == (room, generation);
            let (its, others): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(queue).into_iter().partition(is_its);
            given_up.extend(its);
            if others.is_empty() {
                self.waiting.remove(&endpoint);
                self.turns.retain(|turn| *turn != endpoint);
            } else {
                *queue = others;
            }
        }
        self.waiting_count -= given_up.len();
        given_up
    }

    /// Whether somebody waits for bytes of all others to arrive; then nobody may pass.
    fn is_held_up(&self, limits: &Limits) -> bool {
        let mut heads = self.turns.iter();
        heads.any(|endpoint| self.space_for_head(endpoint, limits) == Space::Full)
    }

    fn space_for_head(&self, endpoint: &Endpoint, limits: &Limits) -> Space {
        let queue = self.waiting.get(endpoint);
        let bytes = queue.and_then(VecDeque::front).map_or(0, Portion::bytes);
        space(self.bytes, self.used_by(endpoint), bytes, limits)
    }

    fn used_by(&self, endpoint: &Endpoint) -> u64 {
        self.by_peer.get(endpoint).copied().unwrap_or_default()
    }
}

/// What is larger than a limit goes alone, or it would never go.
fn space(total: u64, used: u64, bytes: u64, limits: &Limits) -> Space {
    if !holds(Rule::InFlightIsBounded) {
        return Space::Enough;
    }
    let fits = |used: u64, limit: u64| used == 0 || used.saturating_add(bytes) <= limit;
    if !fits(used, limits.in_flight_bytes_per_peer) {
        Space::PeerFull
    } else if !fits(total, limits.in_flight_bytes) {
        Space::Full
    } else {
        Space::Enough
    }
}
