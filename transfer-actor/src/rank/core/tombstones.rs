//! What is remembered of rooms that are gone, bounded in number and time.

use std::collections::{HashMap, VecDeque};
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
}

/// Rooms that were cleared, or aborted before they were known.
#[derive(Debug)]
pub struct Tombstones {
    capacity: usize,
    lifetime: Duration,
    rooms: HashMap<Room, Tombstone>,
    order: VecDeque<(Instant, Room)>,
}

#[derive(Clone, Copy, Debug)]
struct Tombstone {
    laid: Instant,
    epitaph: Epitaph,
}

impl Tombstones {
    /// Keeps at most `capacity` for `lifetime`.
    pub fn new(capacity: usize, lifetime: Duration) -> Self {
        Self {
            capacity,
            lifetime,
            rooms: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    /// Remembers a room. The oldest is forgotten when there is no space.
    pub fn lay(&mut self, room: Room, epitaph: Epitaph, now: Instant) {
        self.rooms.insert(room, Tombstone { laid: now, epitaph });
        self.order.push_back((now, room));
        if self.order.len() > self.capacity.saturating_mul(2) {
            // Rooms that were lifted leave their place in the order behind.
            let rooms = &self.rooms;
            self.order.retain(|(laid, room)| {
                let known = rooms.get(room);
                known.is_some_and(|tombstone| tombstone.laid == *laid)
            });
        }
        while self.rooms.len() > self.capacity {
            self.forget_oldest();
        }
    }

    /// What is remembered of a room.
    pub fn get(&self, room: Room) -> Option<Epitaph> {
        self.rooms.get(&room).map(|tombstone| tombstone.epitaph)
    }

    /// Forgets a room that is opened again; what was remembered of it.
    pub fn lift(&mut self, room: Room) -> Option<Epitaph> {
        self.rooms.remove(&room).map(|tombstone| tombstone.epitaph)
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
        self.rooms.len()
    }

    /// Whether no room is remembered.
    pub fn is_empty(&self) -> bool {
        self.rooms.is_empty()
    }

    fn forget_oldest(&mut self) {
        let Some((laid, room)) = self.order.pop_front() else {
            return;
        };
        // A room that was laid again since has a younger entry in the order.
        if self
            .rooms
            .get(&room)
            .is_some_and(|tombstone| tombstone.laid == laid)
        {
            self.rooms.remove(&room);
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
        assert!(tombstones.get(room(1)).is_none() && tombstones.get(room(2)).is_some());
        tombstones.lay(room(2), Epitaph::GivenUp, begin + Duration::from_secs(9));
        tombstones.expire(begin + Duration::from_secs(14));
        assert_eq!(
            tombstones.len(),
            1,
            "only the one that was laid again is young enough"
        );
        assert_eq!(tombstones.lift(room(2)), Some(Epitaph::GivenUp));
        assert!(tombstones.is_empty());
    }

    #[test]
    fn rooms_that_are_opened_again_leave_nothing_behind() {
        let begin = Instant::now();
        let room = Room::new(1).expect("a room");
        let mut tombstones = Tombstones::new(3, Duration::from_secs(10));
        for count in 0..100 {
            tombstones.lay(room, Epitaph::Cleared, begin + Duration::from_millis(count));
            tombstones.lift(room);
            assert!(tombstones.order.len() <= 6);
        }
    }
}
