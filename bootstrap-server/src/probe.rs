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

use crate::registry::{Rank, RankId};
use crate::writer::Registrations;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses that are dialled at once.
const CONCURRENCY: usize = 64;

type Place = (String, RankId);

/// What probes have found, shared by its clones.
#[derive(Clone, Debug, Default)]
pub struct Probes(Arc<RwLock<HashMap<Place, Misses>>>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Misses {
    instance: String,
    in_a_row: u32,
}

/// Whether an address may be dialled for a registration that came from `peer_opt`.
pub fn may_probe(ip: &str, peer_opt: Option<IpAddr>) -> bool {
    let Ok(address) = ip
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>()
    else {
        return false;
    };
    if Some(address) == peer_opt {
        return true;
    }
    match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_private(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unique_local(),
    }
}

impl Probes {
    /// Whether a rank has missed so many probes in a row. A rank that was never probed has not.
    pub fn is_unreachable(&self, namespace: &str, id: RankId, rank: &Rank, misses: u32) -> bool {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let place = (namespace.to_owned(), id);
        found
            .get(&place)
            .is_some_and(|known| known.instance == rank.instance() && known.in_a_row >= misses)
    }

    /// Probes all ranks once.
    pub async fn round(&self, registrations: &Registrations) {
        let state = registrations.state();
        let mut due: Vec<(Place, String)> = Vec::new();
        for (namespace, space) in &state.namespaces {
            let ranks = space.ranks.iter().filter(|(_, rank)| rank.may_probe);
            due.extend(ranks.map(|(id, rank)| ((namespace.clone(), *id), rank.instance())));
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
        let before = known.map_or(0, |known| known.in_a_row);
        let in_a_row = if answered {
            0
        } else {
            before.saturating_add(1)
        };
        if in_a_row == 1 {
            tracing::info!(namespace = place.0, rank = %place.1, instance, "a rank does not answer");
        } else if answered && before > 0 {
            tracing::info!(namespace = place.0, rank = %place.1, instance, "a rank answers again");
        }
        found.insert(place, Misses { instance, in_a_row });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("fd00::1", true),
            ("2001:db8::1", false),
            ("metadata.internal", false),
        ] {
            assert_eq!(may_probe(ip, peer), allowed, "{ip}");
        }
    }
}
