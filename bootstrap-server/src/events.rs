//! What happened: a bounded history that can be read, and followed.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::IntCounterVec;
use tokio::sync::broadcast;

use crate::api::{Event, EventKind, EventList};

/// Events that are remembered.
const MAX_EVENTS: usize = 4096;
/// Events that a follower may lag behind; one who lags more begins anew from the history.
const MAX_LAG: usize = 256;

/// The history, and who follows it.
#[derive(Debug)]
pub struct Events {
    history: Mutex<History>,
    counted: IntCounterVec,
    followers: broadcast::Sender<Event>,
}

#[derive(Debug)]
struct History {
    last_id: u64,
    events: VecDeque<Event>,
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

impl Events {
    /// An empty history. What happens is counted, by kind.
    pub fn new(counted: IntCounterVec) -> Self {
        for kind in EventKind::ALL {
            counted.with_label_values(&[kind.name()]).inc_by(0);
        }
        // Numbers go on where those of the process before this one cannot have come to, so that
        // whoever followed that one misses nothing of this one.
        let history = History {
            last_id: now_ms(),
            events: VecDeque::new(),
        };
        Self {
            history: Mutex::new(history),
            counted,
            followers: broadcast::Sender::new(MAX_LAG),
        }
    }

    /// An empty history with counters of its own.
    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        let metrics = crate::metrics::Metrics::new();
        Self::new(metrics.expect("names are registered once").events)
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records something, of one engine or of all.
    pub fn record(&self, kind: EventKind, namespace_opt: Option<&str>, message: String) {
        self.counted.with_label_values(&[kind.name()]).inc();
        let at_ms = now_ms();
        let mut history = self.lock();
        history.last_id += 1;
        let event = Event {
            id: history.last_id,
            at_ms,
            kind,
            namespace: namespace_opt.map(str::to_owned),
            message,
        };
        if history.events.len() >= MAX_EVENTS {
            history.events.pop_front();
        }
        history.events.push_back(event.clone());
        // Under the lock, so that followers see the order of the history. Nobody may follow.
        let _ = self.followers.send(event);
    }

    /// The first events after number `since` that are wanted, at most `limit` of them.
    pub fn after(&self, since: u64, limit: usize, is_wanted: impl Fn(&Event) -> bool) -> EventList {
        let history = self.lock();
        let later = history.events.iter().filter(|event| event.id > since);
        let events: Vec<Event> = later
            .filter(|event| is_wanted(event))
            .take(limit)
            .cloned()
            .collect();
        let next = match events.last() {
            Some(last) if events.len() == limit => last.id,
            _ => history.last_id.max(since),
        };
        let oldest = history.events.front();
        EventList {
            forgotten: oldest.map_or(history.last_id, |oldest| oldest.id - 1),
            events,
            next,
        }
    }

    /// What happens from now on. Subscribe before reading the history, so that nothing is missed.
    pub fn follow(&self) -> broadcast::Receiver<Event> {
        self.followers.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_is_bounded_and_pages_do_not_skip() {
        let events = Events::for_tests();
        for number in 0..MAX_EVENTS + 10 {
            let namespace = if number % 2 == 0 { "even" } else { "odd" };
            events.record(EventKind::Operator, Some(namespace), number.to_string());
        }
        let all = events.after(0, usize::MAX, |_| true);
        assert_eq!(all.events.len(), MAX_EVENTS);
        assert_eq!(all.forgotten, all.events[0].id - 1);
        assert_eq!(all.events[0].message, "10");
        let is_even = |event: &Event| event.namespace.as_deref() == Some("even");
        let mut since = 0;
        let mut seen = 0;
        loop {
            let page = events.after(since, 100, is_even);
            seen += page.events.len();
            if page.events.is_empty() {
                break;
            }
            since = page.next;
        }
        assert_eq!(seen, MAX_EVENTS / 2);
        assert_eq!(events.after(since, 100, |_| true).next, since, "the end");
    }

    #[test]
    fn followers_see_what_happens_in_order() {
        let events = Events::for_tests();
        let mut follower = events.follow();
        events.record(EventKind::Store, None, "first".to_owned());
        events.record(EventKind::Store, None, "second".to_owned());
        assert_eq!(events.counted.with_label_values(&["store"]).get(), 2);
        assert_eq!(follower.try_recv().unwrap().message, "first");
        assert_eq!(follower.try_recv().unwrap().message, "second");
    }
}
