//! Registrations outlive their owners, so each rank's address is dialled now and then.
//!
//! A probe opens a TCP connection and closes it; a rank's ZeroMQ socket does not mind. Only
//! addresses of the allowed networks are ever dialled (without any: the address that a rank
//! registered from, private and loopback ones), so that a forged registration cannot make this
//! server probe others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use futures::{StreamExt, stream};
use ipnet::IpNet;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::registry::RankId;
use crate::writer::Registrations;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses that are dialled at once: those that time out must not hold up a large fleet's round.
const CONCURRENCY: usize = 256;

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

impl std::fmt::Display for Place {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rank(namespace, id) => write!(formatter, "{namespace} {id}"),
            Self::Registration(namespace, key) => write!(formatter, "{namespace} {key}"),
        }
    }
}

/// What probes have found.
#[derive(Debug, Default)]
pub struct Probes {
    allowed: Vec<IpNet>,
    found: RwLock<HashMap<Place, Found>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    instance: String,
    misses_in_a_row: u32,
}

/// An address as a rank writes it. A dual-stack socket shows IPv4 peers as mapped addresses.
fn address_of(ip: &str) -> Option<IpAddr> {
    let bare = ip
        .strip_prefix('[')
        .and_then(|ip| ip.strip_suffix(']'))
        .unwrap_or(ip);
    Some(bare.parse::<IpAddr>().ok()?.to_canonical())
}

/// Whether an address may be dialled for a registration that came from `peer_opt`, where no
/// networks are named.
pub fn may_probe(ip: &str, peer_opt: Option<IpAddr>) -> bool {
    let Some(address) = address_of(ip) else {
        return false;
    };
    if Some(address) == peer_opt.map(|peer| peer.to_canonical()) {
        return true;
    }
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local(),
    }
}

impl Probes {
    /// Nothing is found yet. Without networks each registration's own rule counts.
    pub fn new(allowed: Vec<IpNet>) -> Self {
        Self {
            allowed,
            found: RwLock::default(),
        }
    }

    /// Whether an instance, `ip:port`, may be dialled; `by_default` without networks.
    fn may_dial(&self, instance: &str, by_default: bool) -> bool {
        if self.allowed.is_empty() {
            return by_default;
        }
        let ip_opt = instance.rsplit_once(':').and_then(|(ip, _)| address_of(ip));
        let is_inside = |ip: IpAddr| self.allowed.iter().any(|network| network.contains(&ip));
        ip_opt.is_some_and(is_inside)
    }

    /// Whether a place answers: not when it has missed so many probes in a row. `None` when it was
    /// not probed yet, or may not be.
    pub fn is_reachable(&self, place: &Place, instance: &str, misses: u32) -> Option<bool> {
        let found = self.found.read().unwrap_or_else(PoisonError::into_inner);
        let known = found
            .get(place)
            .filter(|known| known.instance == instance)?;
        Some(known.misses_in_a_row < misses)
    }

    /// Probes all ranks and registrations once.
    pub async fn round(&self, registrations: &Registrations) {
        let state = registrations.state();
        let mut due: Vec<(Place, String)> = Vec::new();
        for (namespace, space) in &state.namespaces {
            let ranks = space.ranks.iter();
            let ranks = ranks.filter(|(_, rank)| self.may_dial(&rank.instance(), rank.may_probe));
            due.extend(ranks.map(|(id, rank)| (Place::rank(namespace, *id), rank.instance())));
            let engines = space.registrations.iter();
            let engines =
                engines.filter(|(_, known)| self.may_dial(&known.body.instance, known.may_probe));
            due.extend(engines.map(|(key, known)| {
                (
                    Place::registration(namespace, key),
                    known.body.instance.clone(),
                )
            }));
        }
        self.forget_others(&due);
        let probes =
            stream::iter(due).for_each_concurrent(CONCURRENCY, |(place, instance)| async {
                let answered = timeout(CONNECT_TIMEOUT, TcpStream::connect(&instance)).await;
                self.record(place, instance, matches!(answered, Ok(Ok(_))));
            });
        probes.await;
    }

    fn forget_others(&self, due: &[(Place, String)]) {
        let kept: std::collections::HashSet<&Place> = due.iter().map(|(place, _)| place).collect();
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
        let before = known.map_or(0, |known| known.misses_in_a_row);
        let misses_in_a_row = if answered {
            0
        } else {
            before.saturating_add(1)
        };
        if misses_in_a_row == 1 {
            tracing::info!(%place, instance, "an address does not answer");
        } else if answered && before > 0 {
            tracing::info!(%place, instance, "an address answers again");
        }
        found.insert(
            place,
            Found {
                instance,
                misses_in_a_row,
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_in_a_row_make_a_place_unreachable_and_one_hit_reachable() {
        let probes = Probes::default();
        let place = Place::registration("default", "engine");
        let record = |answered| probes.record(place.clone(), "10.0.0.1:5".to_owned(), answered);
        let reachable = || probes.is_reachable(&place, "10.0.0.1:5", 2);
        assert_eq!(reachable(), None, "not probed yet");
        record(false);
        assert_eq!(reachable(), Some(true), "one miss may be chance");
        record(false);
        assert_eq!(reachable(), Some(false));
        assert_eq!(
            probes.is_reachable(&place, "10.0.0.1:6", 2),
            None,
            "another instance"
        );
        record(true);
        assert_eq!(reachable(), Some(true));
    }

    #[test]
    fn only_own_and_private_addresses_are_dialled() {
        let peer = Some("203.0.113.7".parse().unwrap());
        for (ip, allowed) in [
            ("127.0.0.1", true),
            ("10.1.2.3", true),
            ("203.0.113.7", true),
            ("203.0.113.8", false),
            ("::1", true),
            ("[::1]", true),
            ("::ffff:203.0.113.7", true),
            ("fd00::1", true),
            ("2001:db8::1", false),
            ("metadata.internal", false),
        ] {
            assert_eq!(may_probe(ip, peer), allowed, "{ip}");
        }
    }

    #[test]
    fn named_networks_are_the_only_ones_that_are_dialled() {
        let probes = Probes::new(vec![
            "203.0.113.0/24".parse().unwrap(),
            "fd00::/8".parse().unwrap(),
        ]);
        for (instance, allowed) in [
            ("203.0.113.7:5", true),
            ("[::ffff:203.0.113.7]:5", true),
            ("[fd00::1]:5", true),
            ("127.0.0.1:5", false),
            ("10.0.0.1:5", false),
            ("host:5", false),
        ] {
            assert_eq!(probes.may_dial(instance, true), allowed, "{instance}");
        }
        let default = Probes::default();
        assert!(default.may_dial("10.0.0.1:5", true) && !default.may_dial("10.0.0.1:5", false));
    }
}
