//! What peers say of their transfers: 16 bytes over each queue pair of a session, once the data of
//! it is in place (`spec/mori-io.md`, section 3.5).

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Transfers that are remembered; the oldest is forgotten for a new one.
const MOST: usize = 1 << 16;

/// One message: `u64 uid | i32 place of the queue pair | i32 number of queue pairs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notification {
    pub(crate) uid: u64,
    pub(crate) place: i32,
    pub(crate) total: i32,
}

impl Notification {
    pub(crate) fn pack(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let fields = self.uid.to_le_bytes().into_iter();
        let fields = fields.chain(self.place.to_le_bytes());
        let fields = fields.chain(self.total.to_le_bytes());
        bytes
            .iter_mut()
            .zip(fields)
            .for_each(|(to, from)| *to = from);
        bytes
    }

    pub(crate) fn unpack(bytes: [u8; 16]) -> Self {
        let number = u128::from_le_bytes(bytes);
        Self {
            uid: number as u64,
            place: (number >> 64) as i32,
            total: (number >> 96) as i32,
        }
    }
}

type Key = (String, u64);

#[derive(Default)]
struct Heard {
    /// How many of how many have come.
    counts: HashMap<Key, (i32, i32)>,
    order: VecDeque<Key>,
}

/// Notifications that have come and were not taken.
#[derive(Default)]
pub(crate) struct Notifications(Mutex<Heard>);

impl Notifications {
    pub(crate) fn note(&self, engine_key: &str, notification: Notification) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (engine_key.to_owned(), notification.uid);
        if let Some((come, _)) = heard.counts.get_mut(&key) {
            *come = come.saturating_add(1);
            return;
        }
        if heard.counts.len() >= MOST
            && let Some(oldest) = heard.order.pop_front()
        {
            heard.counts.remove(&oldest);
        }
        heard.counts.insert(key.clone(), (1, notification.total));
        heard.order.push_back(key);
    }

    /// Whether all of a transfer's have come; then they are forgotten.
    pub(crate) fn take(&self, engine_key: &str, uid: u64) -> bool {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (engine_key.to_owned(), uid);
        let is_whole = heard
            .counts
            .get(&key)
            .is_some_and(|(come, total)| come >= total);
        if is_whole {
            heard.counts.remove(&key);
            heard.order.retain(|other| *other != key);
        }
        is_whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notification_has_moris_bytes() {
        let notification = Notification {
            uid: 0x11_2233_4455,
            place: 1,
            total: 2,
        };
        let bytes = [
            0x55, 0x44, 0x33, 0x22, 0x11, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0,
        ];
        assert_eq!(notification.pack(), bytes);
        assert_eq!(Notification::unpack(notification.pack()), notification);
    }

    #[test]
    fn a_transfer_is_whole_when_every_queue_pair_has_said_so() {
        let heard = Notifications::default();
        let note = |uid, place| {
            heard.note(
                "prefill",
                Notification {
                    uid,
                    place,
                    total: 2,
                },
            );
        };
        note(7, 0);
        assert!(!heard.take("prefill", 7), "one of two");
        note(8, 0);
        note(7, 1);
        assert!(!heard.take("decode", 7), "of another engine");
        assert!(heard.take("prefill", 7));
        assert!(!heard.take("prefill", 7), "taken");
        assert!(!heard.take("prefill", 8));
    }

    #[test]
    fn what_nobody_takes_is_bounded() {
        let heard = Notifications::default();
        for uid in 0..MOST as u64 + 10 {
            let notification = Notification {
                uid,
                place: 0,
                total: 1,
            };
            heard.note("e", notification);
        }
        assert!(!heard.take("e", 9) && heard.take("e", 10));
    }
}
