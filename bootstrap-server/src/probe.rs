//! Registrations outlive their owners, so each rank's address is dialled now and then.
//!
//! A probe opens a TCP connection and closes it; a rank's ZeroMQ socket does not mind. Only
//! addresses of the allowed networks are ever dialled (without any: the address that a rank
//! registered from, private and loopback ones), so that a forged registration cannot make this
//! server probe others.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures::{StreamExt, stream};
use ipnet::IpNet;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};

use crate::api::EventKind;
use crate::events::Events;
use crate::registry::RankId;
use crate::writer::{Registrations, now};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses that are dialled at once: those that time out must not hold up a large fleet's round.
const CONCURRENCY: usize = 1024;
/// A fleet that is too large for its interval is probed more slowly, not more expensively.
const SHORTEST_PAUSE: Duration = Duration::from_micros(500);

/// Who is dialled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// A rank of a namespace.
    Rank(String, RankId),
    /// A registered io engine of a namespace.
    Registration(String, String),
}

impl Place {
    /// A rank's place.
    pub fn rank(namespace: &str, id: RankId) -> Self {
        Self::Rank(namespace.to_owned(), id)
    }

    /// A registration's place.
    pub fn registration(namespace: &str, key: &str) -> Self {
        Self::Registration(namespace.to_owned(), key.to_owned())
    }
}

impl Place {
    fn namespace(&self) -> &str {
        match self {
            Self::Rank(namespace, _) | Self::Registration(namespace, _) => namespace,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rank(_, id) => write!(formatter, "rank {id}"),
            Self::Registration(_, key) => write!(formatter, "io engine {key}"),
        }
    }
}

/// What probes have found.
#[derive(Debug)]
pub struct Probes {
    allowed: Vec<IpNet>,
    /// Misses in a row after which a place is unreachable.
    misses: u32,
    events: Arc<Events>,
    found: RwLock<HashMap<Place, Found>>,
}

/// One address that is to be dialled.
struct Probe {
    place: Place,
    instance: String,
    address: SocketAddr,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    instance: String,
    misses_in_a_row: u32,
    /// When the first of them was, in seconds since 1970.
    missed_since: u64,
}

/// An address as a rank writes it; names are never looked up. A dual-stack socket shows IPv4 peers
/// as mapped addresses.
fn address_of(ip: &str) -> Option<IpAddr> {
    let bare = ip
        .strip_prefix('[')
        .and_then(|ip| ip.strip_suffix(']'))
        .unwrap_or(ip);
    Some(bare.parse::<IpAddr>().ok()?.to_canonical())
}

/// As [`address_of`], with the port behind it.
fn instance_address(instance: &str) -> Option<SocketAddr> {
    let (ip, port) = instance.rsplit_once(':')?;
    Some(SocketAddr::new(address_of(ip)?, port.parse().ok()?))
}

/// Whether an address may be dialled for a registration that came from `peer_opt`, where no
/// networks are named: the peer's own one, and private ones. Loopback is private to each host, so
/// it is only for peers on this one.
pub fn may_probe(ip: &str, peer_opt: Option<IpAddr>) -> bool {
    let Some(address) = address_of(ip) else {
        return false;
    };
    let peer_opt = peer_opt.map(|peer| peer.to_canonical());
    if Some(address) == peer_opt {
        return true;
    }
    let is_local_peer = peer_opt.is_some_and(|peer| peer.is_loopback());
    match address {
        address if address.is_loopback() => is_local_peer,
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.is_unique_local(),
    }
}

impl Probes {
    /// Nothing is found yet. Without networks each registration's own rule counts.
    pub fn new(allowed: Vec<IpNet>, misses: u32, events: Arc<Events>) -> Self {
        Self {
            allowed,
            misses,
            events,
            found: RwLock::default(),
        }
    }

    /// Where an instance, `ip:port`, is dialled; `None` when it may not be. Without networks
    /// `by_default` counts.
    fn target(&self, instance: &str, by_default: bool) -> Option<SocketAddr> {
        let address = instance_address(instance)?;
        let is_inside = |network: &IpNet| network.contains(&address.ip());
        let may_dial = match self.allowed.is_empty() {
            true => by_default,
            false => self.allowed.iter().any(is_inside),
        };
        may_dial.then_some(address)
    }

    /// Whether a place answers: not when it has missed so many probes in a row. `None` when it was
    /// not probed yet, or may not be.
    pub fn is_reachable(&self, place: &Place, instance: &str) -> Option<bool> {
        self.look(place, instance, |known| known.misses_in_a_row < self.misses)
    }

    /// Since when a place does not answer, if it is unreachable, in seconds since 1970.
    pub fn unreachable_since(&self, place: &Place, instance: &str) -> Option<u64> {
        let since_opt = self.look(place, instance, |known| {
            (known.misses_in_a_row >= self.misses).then_some(known.missed_since)
        });
        since_opt.flatten()
    }

    fn look<T>(&self, place: &Place, instance: &str, see: impl Fn(&Found) -> T) -> Option<T> {
        let found = self.found.read().unwrap_or_else(PoisonError::into_inner);
        let known = found.get(place);
        known.filter(|known| known.instance == instance).map(see)
    }

    /// Probes all ranks and registrations once, spread over `interval`, so that neither they nor
    /// this process notice. Returns at its end, or later where there are too many.
    pub async fn round(&self, registrations: &Registrations, interval: Duration) {
        let begun = Instant::now();
        let due = self.due(registrations);
        self.forget_others(&due);
        let number = u32::try_from(due.len().max(1)).unwrap_or(u32::MAX);
        let pause = (interval / number).max(SHORTEST_PAUSE);
        let in_time = stream::iter((0..).zip(due)).then(|(at, probe)| async move {
            sleep_until(begun + pause * at).await;
            probe
        });
        let probes = in_time.for_each_concurrent(CONCURRENCY, |probe| async move {
            let answered = timeout(CONNECT_TIMEOUT, TcpStream::connect(probe.address)).await;
            let answered = matches!(answered, Ok(Ok(_)));
            self.record(probe.place, probe.instance, answered);
        });
        probes.await;
        sleep_until(begun + interval).await;
    }

    fn due(&self, registrations: &Registrations) -> Vec<Probe> {
        let mut due = Vec::new();
        let mut add = |place: &dyn Fn() -> Place, instance: String, by_default: bool| {
            if let Some(address) = self.target(&instance, by_default) {
                due.push(Probe {
                    place: place(),
                    instance,
                    address,
                });
            }
        };
        for (namespace, space) in &registrations.state().namespaces {
            for (id, rank) in &space.ranks {
                let place = || Place::rank(namespace, *id);
                add(&place, rank.instance(), rank.may_probe);
            }
            for (key, known) in &space.registrations {
                let place = || Place::registration(namespace, key);
                add(&place, known.body.instance.clone(), known.may_probe);
            }
        }
        due
    }

    fn forget_others(&self, due: &[Probe]) {
        let kept: std::collections::HashSet<&Place> =
            due.iter().map(|probe| &probe.place).collect();
        self.found
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|place, _| kept.contains(place));
    }

    fn record(&self, place: Place, instance: String, answered: bool) {
        let mut found = self.found.write().unwrap_or_else(PoisonError::into_inner);
        let known = found
            .remove(&place)
            .filter(|known| known.instance == instance);
        let (before, since_opt) = known.map_or((0, None), |known| {
            (known.misses_in_a_row, Some(known.missed_since))
        });
        let misses_in_a_row = if answered {
            0
        } else {
            before.saturating_add(1)
        };
        let change_opt = if !answered && misses_in_a_row == self.misses {
            Some("does not answer")
        } else if answered && before >= self.misses {
            Some("answers again")
        } else {
            None
        };
        if let Some(change) = change_opt {
            tracing::info!(%place, instance, change, "probed");
            let message = format!("{place} at {instance} {change}");
            let namespace = Some(place.namespace());
            self.events
                .record(EventKind::Reachability, namespace, message);
        }
        let missed_since = since_opt.filter(|_| before > 0).unwrap_or_else(now);
        found.insert(
            place,
            Found {
                instance,
                misses_in_a_row,
                missed_since,
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_in_a_row_make_a_place_unreachable_and_one_hit_reachable() {
        let events = Arc::new(Events::for_tests());
        let probes = Probes::new(Vec::new(), 2, Arc::clone(&events));
        let place = Place::registration("default", "engine");
        let record = |answered| probes.record(place.clone(), "10.0.0.1:5".to_owned(), answered);
        let reachable = || probes.is_reachable(&place, "10.0.0.1:5");
        assert_eq!(reachable(), None, "not probed yet");
        record(false);
        assert_eq!(reachable(), Some(true), "one miss may be chance");
        record(false);
        assert_eq!(reachable(), Some(false));
        assert_eq!(
            probes.is_reachable(&place, "10.0.0.1:6"),
            None,
            "another instance"
        );
        record(false);
        record(true);
        assert_eq!(reachable(), Some(true));
        record(true);
        let told = events.after(0, 9, |_| true).events;
        let told: Vec<&str> = told.iter().map(|event| event.message.as_str()).collect();
        assert_eq!(
            told,
            [
                "io engine engine at 10.0.0.1:5 does not answer",
                "io engine engine at 10.0.0.1:5 answers again"
            ]
        );
    }

    #[test]
    fn only_own_and_private_addresses_are_dialled() {
        let peer = Some("203.0.113.7".parse().unwrap());
        for (ip, allowed) in [
            ("127.0.0.1", false),
            ("10.1.2.3", true),
            ("203.0.113.7", true),
            ("203.0.113.8", false),
            ("::1", false),
            ("[fd00::1]", true),
            ("::ffff:203.0.113.7", true),
            ("fd00::1", true),
            ("2001:db8::1", false),
            ("metadata.internal", false),
        ] {
            assert_eq!(may_probe(ip, peer), allowed, "{ip}");
        }
        let here = Some("127.0.0.1".parse().unwrap());
        assert!(may_probe("127.0.0.1", here) && may_probe("[::1]", here));
    }

    #[test]
    fn named_networks_are_the_only_ones_that_are_dialled() {
        let networks = vec![
            "203.0.113.0/24".parse().unwrap(),
            "fd00::/8".parse().unwrap(),
        ];
        let probes = Probes::new(networks, 1, Arc::new(Events::for_tests()));
        for (instance, allowed) in [
            ("203.0.113.7:5", true),
            ("[::ffff:203.0.113.7]:5", true),
            ("[fd00::1]:5", true),
            ("127.0.0.1:5", false),
            ("10.0.0.1:5", false),
            ("host:5", false),
        ] {
            let target = probes.target(instance, true);
            assert_eq!(target.is_some(), allowed, "{instance}");
        }
        let default = Probes::new(Vec::new(), 2, Arc::new(Events::for_tests()));
        let here = "10.0.0.1:5";
        assert_eq!(default.target(here, true), Some(here.parse().unwrap()));
        assert_eq!(default.target(here, false), None);
        for unclear in [
            "host:5",
            "10.0.0.1",
            "10.0.0.1:",
            "10.0.0.1:70000",
            "10.1:5",
        ] {
            assert_eq!(default.target(unclear, true), None, "{unclear}");
        }
    }
}
