//! Registrations outlive their owners, so each rank's address is dialled now and then.
//!
//! A probe opens a TCP connection and closes it; a rank's ZeroMQ socket does not mind. Only the
//! address that a rank registered from, and private and loopback addresses, are ever dialled, so
//! that a forged registration cannot make this server probe others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::registry::RankId;
use crate::writer::Registrations;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses that are dialled at once.
const CONCURRENCY: usize = 64;

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

/// What probes have found, shared by its clones.
#[derive(Clone, Debug, Default)]
pub struct Probes(Arc<RwLock<HashMap<Place, Found>>>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Found {
    instance: String,
    misses_in_a_row: u32,
}

/// Whether an address may be dialled for a registration that came from `peer_opt`.
pub fn may_probe(ip: &str, peer_opt: Option<IpAddr>) -> bool {
    let bare = ip
        .strip_prefix('[')
        .and_then(|ip| ip.strip_suffix(']'))
        .unwrap_or(ip);
    let Ok(address) = bare.parse::<IpAddr>() else {
        return false;
    };
    // A dual-stack socket shows IPv4 peers as mapped addresses.
    let address = address.to_canonical();
    if Some(address) == peer_opt.map(|peer| peer.to_canonical()) {
        return true;
    }
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local(),
    }
}

impl Probes {
    /// Whether a place answers: not when it has missed so many probes in a row. `None` when it was
    /// not probed yet, or may not be.
    pub fn is_reachable(&self, place: &Place, instance: &str, misses: u32) -> Option<bool> {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner);
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
            let ranks = space.ranks.iter().filter(|(_, rank)| rank.may_probe);
            due.extend(ranks.map(|(id, rank)| (Place::rank(namespace, *id), rank.instance())));
            let engines = space
                .registrations
                .iter()
                .filter(|(_, known)| known.may_probe);
            due.extend(engines.map(|(key, known)| {
                (
                    Place::registration(namespace, key),
                    known.body.instance.clone(),
                )
            }));
        }
        self.forget_others(&due);
        for group in due.chunks(CONCURRENCY) {
            let mut probes = tokio::task::JoinSet::new();
            for (place, instance) in group.iter().cloned() {
                probes.spawn(async move {
                    let answered = timeout(CONNECT_TIMEOUT, TcpStream::connect(&instance)).await;
                    (place, instance, matches!(answered, Ok(Ok(_))))
                });
            }
            while let Some(probed) = probes.join_next().await {
                let Ok((place, instance, answered)) = probed else {
                    continue;
                };
                self.record(place, instance, answered);
            }
        }
    }

    fn forget_others(&self, due: &[(Place, String)]) {
        let kept: std::collections::HashSet<&Place> = due.iter().map(|(place, _)| place).collect();
        self.0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|place, _| kept.contains(place));
    }

    fn record(&self, place: Place, instance: String, answered: bool) {
        let mut found = self.0.write().unwrap_or_else(PoisonError::into_inner);
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
}
