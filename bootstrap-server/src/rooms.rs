//! Which data-parallel rank serves a room: bounded in number and time, kept in memory only.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// The table of one namespace.
#[derive(Debug)]
pub struct Rooms {
    capacity: usize,
    lifetime: Duration,
    ranks: HashMap<u64, (Instant, u32)>,
    order: VecDeque<(Instant, u64)>,
    evicted: u64,
}

impl Rooms {
    /// Keeps at most `capacity` rooms, each for `lifetime`.
    pub fn new(capacity: usize, lifetime: Duration) -> Self {
        Self {
            capacity,
            lifetime,
            ranks: HashMap::new(),
            order: VecDeque::new(),
            evicted: 0,
        }
    }

    /// Binds a room, and returns what it was bound to. The oldest leaves when there is no space.
    pub fn put(&mut self, room: u64, dp_rank: u32, now: Instant) -> Option<u32> {
        self.expire(now);
        let before = self.ranks.insert(room, (now, dp_rank));
        self.order.push_back((now, room));
        while self.ranks.len() > self.capacity {
            self.evicted += u64::from(self.drop_oldest());
        }
        before.map(|(_, dp_rank)| dp_rank)
    }

    /// The rank that a room is bound to.
    pub fn get(&self, room: u64, now: Instant) -> Option<u32> {
        let (bound, dp_rank) = self.ranks.get(&room)?;
        (now.duration_since(*bound) < self.lifetime).then_some(*dp_rank)
    }

    /// Drops what is too old.
    pub fn expire(&mut self, now: Instant) {
        while self
            .order
            .front()
            .is_some_and(|(bound, _)| now.duration_since(*bound) >= self.lifetime)
        {
            self.drop_oldest();
        }
    }

    /// How many rooms are bound.
    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    /// Whether no room is bound.
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Rooms that left before their time.
    pub const fn evicted(&self) -> u64 {
        self.evicted
    }

    fn drop_oldest(&mut self) -> bool {
        let Some((bound, room)) = self.order.pop_front() else {
            return false;
        };
        // A room that was bound again has a younger entry in the order.
        let is_current = self
            .ranks
            .get(&room)
            .is_some_and(|(current, _)| *current == bound);
        if is_current {
            self.ranks.remove(&room);
        }
        is_current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_in_number_and_time() {
        let begin = Instant::now();
        let mut rooms = Rooms::new(2, Duration::from_secs(600));
        for room in 0..3 {
            rooms.put(room, 5, begin + Duration::from_secs(room));
        }
        assert_eq!((rooms.len(), rooms.evicted()), (2, 1));
        assert_eq!(rooms.get(0, begin), None);
        assert_eq!(rooms.get(2, begin + Duration::from_secs(601)), Some(5));
        assert_eq!(rooms.get(1, begin + Duration::from_secs(601)), None);
    }
}
