//! What is remembered of rooms that are gone, bounded in number and time.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

use common::ids::Room;

/// What is known of a room that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epitaph {
    /// It was cleared, and nothing is written for it any more.
    Cleared,
    /// Its peer gave it up before it was known here.
    GivenUp,
    /// It was cleared, and nobody has proved that its last writes have stopped.
    Poisoned,
    /// It was cleared, and not every prefill rank has said its last word about it (decode).
    Unsettled,
}

/// Rooms that were cleared, or aborted before they were known; or whatever else is worth
/// remembering for a while.
#[derive(Debug)]
pub struct Tombstones<K = Room, V = Epitaph> {
    capacity: usize,
    lifetime: Duration,
    graves: HashMap<K, (Instant, V)>,
    order: VecDeque<(Instant, K)>,
}

impl<K: Clone + Eq + Hash, V: Copy> Tombstones<K, V> {
    /// Keeps at most `capacity` for `lifetime`.
    pub fn new(capacity: usize, lifetime: Duration) -> Self {
        Self {
            capacity,
            lifetime,
            graves: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Remembers a room. The oldest is forgotten when there is no space.
    pub fn lay(&mut self, room: K, epitaph: V, now: Instant) {
        self.graves.insert(room.clone(), (now, epitaph));
        self.order.push_back((now, room));
        if self.order.len() > self.capacity.saturating_mul(2) {
            // Rooms that were lifted leave their place in the order behind.
            let graves = &self.graves;
            self.order.retain(|(laid, room)| {
                let known = graves.get(room);
                known.is_some_and(|(since, _)| since == laid)
            });
        }
        while self.graves.len() > self.capacity {
            self.forget_oldest();
        }
    }

    /// What is remembered of a room.
    pub fn get(&self, room: &K) -> Option<V> {
        self.graves.get(room).map(|(_, epitaph)| *epitaph)
    }

    /// Forgets a room that is opened again; what was remembered of it.
    pub fn lift(&mut self, room: &K) -> Option<V> {
        self.graves.remove(room).map(|(_, epitaph)| epitaph)
    }

    /// Forgets what is too old.
    pub fn expire(&mut self, now: Instant) {
        while let Some((laid, _)) = self.order.front() {
            if now.duration_since(*laid) < self.lifetime {
                break;
            }
            self.forget_oldest();
        }
    }

    /// How many rooms are remembered.
    pub fn len(&self) -> usize {
        self.graves.len()
    }

    /// Whether no room is remembered.
    pub fn is_empty(&self) -> bool {
        self.graves.is_empty()
    }

    fn forget_oldest(&mut self) {
        let Some((laid, room)) = self.order.pop_front() else {
            return;
        };
        // A room that was laid again since has a younger entry in the order.
        if self
            .graves
            .get(&room)
            .is_some_and(|(since, _)| *since == laid)
        {
            self.graves.remove(&room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_in_number_and_time() {
        let begin = Instant::now();
        let room = |number| Room::new(number).expect("a room");
        let mut tombstones = Tombstones::new(3, Duration::from_secs(10));
        for number in 0..5 {
            tombstones.lay(
                room(number),
                Epitaph::Cleared,
                begin + Duration::from_secs(number),
            );
        }
        assert_eq!(tombstones.len(), 3);
        assert!(tombstones.get(&room(1)).is_none() && tombstones.get(&room(2)).is_some());
        tombstones.lay(room(2), Epitaph::GivenUp, begin + Duration::from_secs(9));
        tombstones.expire(begin + Duration::from_secs(14));
        assert_eq!(
            tombstones.len(),
            1,
            "only the one that was laid again is young enough"
        );
        assert_eq!(tombstones.lift(&room(2)), Some(Epitaph::GivenUp));
        assert!(tombstones.is_empty());
    }

    #[test]
    fn rooms_that_are_opened_again_leave_nothing_behind() {
        let begin = Instant::now();
        let room = Room::new(1).expect("a room");
        let mut tombstones = Tombstones::new(3, Duration::from_secs(10));
        for count in 0..100 {
            tombstones.lay(room, Epitaph::Cleared, begin + Duration::from_millis(count));
            tombstones.lift(&room);
            assert!(tombstones.order.len() <= 6);
        }
    }
}
