//! Which data-parallel rank serves a room: bounded in number and time, kept in memory only.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;

/// Entries of the order beyond those of the rooms: a room that is bound again leaves one behind.
const MAX_SURPLUS: usize = 1024;

/// The table of one namespace.
#[derive(Debug)]
pub struct Rooms {
    capacity: usize,
    lifetime: Duration,
    /// Rooms of all namespaces.
    total: Arc<AtomicUsize>,
    ranks: HashMap<u64, (Instant, u32), RandomState>,
    order: VecDeque<(Instant, u64)>,
    evicted: u64,
}

impl Rooms {
    /// Keeps at most `capacity` rooms, each for `lifetime`; counts them in `total`, too.
    pub fn new(capacity: usize, lifetime: Duration, total: Arc<AtomicUsize>) -> Self {
        Self {
            capacity,
            lifetime,
            total,
            ranks: HashMap::default(),
            order: VecDeque::new(),
            evicted: 0,
        }
    }

    /// Binds a room, and returns what it was bound to. The oldest leaves when there is no space.
    pub fn put(&mut self, room: u64, dp_rank: u32, now: Instant) -> Option<u32> {
        self.expire(now);
        let before = self.ranks.insert(room, (now, dp_rank));
        if before.is_none() {
            self.total.fetch_add(1, Ordering::Relaxed);
        }
        self.order.push_back((now, room));
        while self.ranks.len() > self.capacity {
            self.evict_oldest();
        }
        if self.order.len() > 2 * self.ranks.len() + MAX_SURPLUS {
            let ranks = &self.ranks;
            self.order
                .retain(|(bound, room)| ranks.get(room).is_some_and(|(at, _)| at == bound));
        }
        before.map(|(_, dp_rank)| dp_rank)
    }

    /// When the oldest room was bound, or one that was bound again since.
    pub fn oldest(&self) -> Option<Instant> {
        self.order.front().map(|(bound, _)| *bound)
    }

    /// Drops the oldest room before its time.
    pub fn evict_oldest(&mut self) {
        self.evicted += u64::from(self.drop_oldest());
    }

    /// The rank that a room is bound to.
    pub fn get(&self, room: u64, now: Instant) -> Option<u32> {
        self.bound_after(now.checked_sub(self.lifetime), room)
    }

    /// The ranks that rooms are bound to, in their order; for many rooms, faster than one by one.
    pub fn get_all(&self, rooms: &[u64], now: Instant) -> Vec<Option<u32>> {
        let oldest_opt = now.checked_sub(self.lifetime);
        let ranks = rooms.iter().map(|room| self.bound_after(oldest_opt, *room));
        ranks.collect()
    }

    /// The rank of a room that was bound after some time; before the machine has run for a lifetime
    /// there is no such time, and nothing can be too old.
    fn bound_after(&self, oldest_opt: Option<Instant>, room: u64) -> Option<u32> {
        let (bound, dp_rank) = self.ranks.get(&room)?;
        oldest_opt
            .is_none_or(|oldest| *bound > oldest)
            .then_some(*dp_rank)
    }

    /// The rooms behind one, by number, at most `limit` of them: room, rank, age.
    pub fn after(
        &self,
        after_opt: Option<u64>,
        limit: usize,
        now: Instant,
    ) -> Vec<(u64, u32, Duration)> {
        let live = self.ranks.iter().filter_map(|(room, (bound, dp_rank))| {
            let age = now.duration_since(*bound);
            let is_wanted = age < self.lifetime && after_opt.is_none_or(|after| *room > after);
            is_wanted.then_some((*room, *dp_rank, age))
        });
        let mut rooms: Vec<_> = live.collect();
        if rooms.len() > limit {
            rooms.select_nth_unstable(limit);
            rooms.truncate(limit);
        }
        rooms.sort_unstable();
        rooms
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
        if self.order.is_empty() {
            // The memory of a busy time is given back.
            (self.ranks, self.order) = Default::default();
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
            self.total.fetch_sub(1, Ordering::Relaxed);
        }
        is_current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn bounded_in_number_and_time() {
        let begin = Instant::now();
        let total = Arc::new(AtomicUsize::new(0));
        let mut rooms = Rooms::new(2, after(600), Arc::clone(&total));
        for room in 0..3 {
            assert_eq!(rooms.put(room, 5, begin + after(room)), None);
        }
        assert_eq!((rooms.len(), rooms.evicted()), (2, 1));
        assert_eq!(total.load(Ordering::Relaxed), 2);
        assert_eq!(rooms.get(0, begin), None);
        assert_eq!(rooms.get(2, begin + after(601)), Some(5));
        assert_eq!(rooms.get(1, begin + after(601)), None);
        assert_eq!(
            rooms.get_all(&[2, 1, 0], begin + after(601)),
            [Some(5), None, None]
        );
        rooms.expire(begin + after(700));
        assert_eq!((rooms.len(), total.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn a_room_that_is_bound_again_and_again_takes_no_more_memory() {
        let begin = Instant::now();
        let mut rooms = Rooms::new(10, after(600), Arc::default());
        rooms.put(1, 0, begin);
        for again in 0..100_000 {
            let bound = begin + Duration::from_micros(again);
            assert!(rooms.put(7, again as u32, bound).is_some() || again == 0);
        }
        assert!(rooms.order.len() <= 2 * 2 + MAX_SURPLUS + 1);
        assert_eq!((rooms.len(), rooms.evicted()), (2, 0));
        assert_eq!(rooms.get(1, begin + after(1)), Some(0));
        assert_eq!(rooms.get(7, begin + after(1)), Some(99_999));
    }
}
