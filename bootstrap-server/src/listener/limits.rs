//! How many connections and requests one peer may have, in memory of a fixed size.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A peer: an IPv4 address, or the /64 that one IPv6 host usually has to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Peer(IpAddr);

impl Peer {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & (u128::MAX << 64);
                Self(IpAddr::V6(Ipv6Addr::from(network)))
            }
            address @ IpAddr::V4(_) => Self(address),
        }
    }
}

/// The connections that are open. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    most: usize,
    most_of_peer: usize,
    open: Arc<Mutex<Open>>,
}

#[derive(Debug, Default)]
struct Open {
    number: usize,
    by_peer: HashMap<Peer, usize>,
}

/// One open connection; dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Permit {
    peer: Peer,
    open: Arc<Mutex<Open>>,
}

/// Why a connection is refused; the words are values of the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    All,
    OfPeer,
}

impl Full {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::All => "too_many",
            Self::OfPeer => "too_many_of_peer",
        }
    }
}

impl Connections {
    pub(crate) fn new(most: usize, most_of_peer: usize) -> Self {
        Self {
            most,
            most_of_peer,
            open: Arc::default(),
        }
    }

    pub(crate) fn admit(&self, address: IpAddr) -> Result<Permit, Full> {
        let peer = Peer::of(address);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.number >= self.most {
            return Err(Full::All);
        }
        let of_peer = open.by_peer.entry(peer).or_default();
        if *of_peer >= self.most_of_peer {
            return Err(Full::OfPeer);
        }
        *of_peer += 1;
        open.number += 1;
        Ok(Permit {
            peer,
            open: Arc::clone(&self.open),
        })
    }

    pub(crate) fn number(&self) -> usize {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.number
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.number = open.number.saturating_sub(1);
        if let Some(of_peer) = open.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                open.by_peer.remove(&self.peer);
            }
        }
    }
}

/// Peers are spread over this many counters. Two that share one share its rate; the hash is keyed
/// at random, so that nobody can choose with whom.
const SLOTS: usize = 1 << 16;
/// A peer that was quiet may send this much at once.
const BURST: Duration = Duration::from_secs(1);

/// Requests a second of each peer: a leaky bucket (GCRA), whose whole state is one time.
#[derive(Debug)]
pub(crate) struct RequestRate {
    began: Instant,
    nanoseconds_each: u64,
    hasher: RandomState,
    /// When the slot's bucket will be empty, in nanoseconds since `began`.
    empty_at: Box<[AtomicU64]>,
}

impl RequestRate {
    /// `None` where there is no limit.
    pub(crate) fn new(per_second: u32) -> Option<Self> {
        let nanoseconds_each = 1_000_000_000u64.checked_div(u64::from(per_second))?;
        Some(Self {
            began: Instant::now(),
            nanoseconds_each,
            hasher: RandomState::new(),
            empty_at: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Admits a request, or says after which time the next will be.
    pub(crate) fn admit(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let nanoseconds = |duration: Duration| duration.as_nanos() as u64;
        let now = nanoseconds(now.duration_since(self.began));
        let at = self.hasher.hash_one(Peer::of(address)) as usize % SLOTS;
        let Some(slot) = self.empty_at.get(at) else {
            return Ok(());
        };
        let admitted = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |empty_at| {
            let next = empty_at.max(now) + self.nanoseconds_each;
            (next - now <= nanoseconds(BURST)).then_some(next)
        });
        admitted.map(drop).map_err(|empty_at| {
            let excess = empty_at + self.nanoseconds_each - now;
            Duration::from_nanos(excess.saturating_sub(nanoseconds(BURST)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connections_are_counted_for_all_and_for_each_peer() {
        let connections = Connections::new(3, 2);
        let [one, other] = [address("10.0.0.1"), address("10.0.0.2")];
        let first = connections.admit(one).unwrap();
        let _second = connections.admit(address("::ffff:10.0.0.1")).unwrap();
        assert_eq!(connections.admit(one).unwrap_err(), Full::OfPeer);
        let _third = connections.admit(other).unwrap();
        assert_eq!(connections.admit(other).unwrap_err(), Full::All);
        drop(first);
        assert!(connections.admit(one).is_ok());
        assert_eq!(connections.number(), 2, "the last was dropped at once");
    }

    #[test]
    fn no_peer_leaves_a_trace_once_it_is_gone() {
        let connections = Connections::new(10, 1);
        for last in 0..=255 {
            drop(connections.admit(IpAddr::from([10, 0, 0, last])).unwrap());
        }
        assert_eq!(connections.open.lock().unwrap().by_peer.len(), 0);
    }

    #[test]
    fn a_peer_may_burst_and_then_keeps_to_its_rate() {
        let rate = RequestRate::new(10).unwrap();
        let [one, other] = [address("10.0.0.1"), address("2001:db8::1")];
        let begin = rate.began;
        for _ in 0..10 {
            assert_eq!(rate.admit(one, begin), Ok(()));
        }
        assert_eq!(rate.admit(one, begin), Err(Duration::from_millis(100)));
        assert_eq!(rate.admit(other, begin), Ok(()), "another peer");
        let later = begin + Duration::from_millis(100);
        assert_eq!(rate.admit(one, later), Ok(()));
        assert_eq!(rate.admit(one, later), Err(Duration::from_millis(100)));
        assert_eq!(rate.admit(one, begin + Duration::from_secs(5)), Ok(()));
        assert!(RequestRate::new(0).is_none());
    }

    #[test]
    fn the_addresses_of_one_ipv6_host_are_one_peer() {
        assert_eq!(
            Peer::of(address("2001:db8::1")),
            Peer::of(address("2001:db8::ffff:1"))
        );
        assert_ne!(
            Peer::of(address("2001:db8::1")),
            Peer::of(address("2001:db8:0:1::1"))
        );
    }
}
