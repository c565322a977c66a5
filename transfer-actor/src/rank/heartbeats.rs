//! Whether the other side's ranks of open rooms are still there. A message that is already
//! sent fails no more when its receiver dies, so each of them is looked for from time to time.

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::ids::Endpoint;
use tokio::net::TcpStream;

/// How long a rank may take to accept a connection.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// Looks that are under way, and how many found nobody, one after the other.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    last_opt: Option<Instant>,
    misses: HashMap<Endpoint, u32>,
    pending: HashSet<Endpoint>,
}

impl Heartbeats {
    /// Which of the watched ranks are to be looked for now.
    pub(super) fn due(
        &mut self,
        interval: Duration,
        now: Instant,
        watched: impl FnOnce() -> HashSet<Endpoint>,
    ) -> Vec<Endpoint> {
        if self
            .last_opt
            .is_some_and(|last| now.duration_since(last) < interval)
        {
            return Vec::new();
        }
        self.last_opt = Some(now);
        let watched = watched();
        self.misses.retain(|endpoint, _| watched.contains(endpoint));
        let due = watched.into_iter();
        due.filter(|endpoint| self.pending.insert(endpoint.clone()))
            .collect()
    }

    /// Takes in what a look found. Why the rank counts as gone, if it does now.
    pub(super) fn seen(
        &mut self,
        endpoint: &Endpoint,
        found: Result<(), Absence>,
        most_misses: u32,
    ) -> Option<String> {
        self.pending.remove(endpoint);
        let Err(Absence { reason, .. }) = found else {
            self.misses.remove(endpoint);
            return None;
        };
        let misses = self.misses.entry(endpoint.clone()).or_default();
        *misses += 1;
        if *misses < most_misses {
            return None;
        }
        self.misses.remove(endpoint);
        Some(reason)
    }
}

/// What a look at a rank found, if not the rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Absence {
    /// What the operating system said.
    pub reason: String,
    /// Whether its host answered that nobody listens there: a rank that lives does.
    pub is_certain: bool,
}

/// Connects to a rank's control socket and hangs up.
pub(super) async fn probe(endpoint: Endpoint) -> Result<(), Absence> {
    let host = endpoint.host.as_str();
    // A scoped or bracketed address is for the resolver to refuse.
    let connected = match host.parse::<IpAddr>() {
        Ok(address) => {
            tokio::time::timeout(PROBE_TIMEOUT, TcpStream::connect((address, endpoint.port))).await
        }
        Err(_) => {
            tokio::time::timeout(PROBE_TIMEOUT, TcpStream::connect((host, endpoint.port))).await
        }
    };
    match connected {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Absence {
            is_certain: error.kind() == ErrorKind::ConnectionRefused,
            reason: error.to_string(),
        }),
        Err(_) => Err(Absence {
            reason: format!("no answer within {} s", PROBE_TIMEOUT.as_secs()),
            is_certain: false,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(port: u16) -> Endpoint {
        Endpoint::new("127.0.0.1", port)
    }

    fn refused() -> Absence {
        Absence {
            reason: "refused".to_owned(),
            is_certain: true,
        }
    }

    #[test]
    fn a_rank_is_gone_after_misses_in_a_row_only() {
        let mut beats = Heartbeats::default();
        let (interval, start) = (Duration::from_secs(5), Instant::now());
        let watched = || HashSet::from([endpoint(1)]);
        let missed = || Err(refused());
        assert_eq!(beats.due(interval, start, watched), [endpoint(1)]);
        let early = start + Duration::from_secs(4);
        assert!(beats.due(interval, early, watched).is_empty());
        let next = start + interval;
        assert!(
            beats.due(interval, next, watched).is_empty(),
            "it is being looked for already"
        );
        assert_eq!(beats.seen(&endpoint(1), missed(), 2), None);
        assert_eq!(beats.seen(&endpoint(1), Ok(()), 2), None);
        assert_eq!(
            beats.seen(&endpoint(1), missed(), 2),
            None,
            "the row was broken"
        );
        assert_eq!(
            beats.seen(&endpoint(1), missed(), 2),
            Some("refused".to_owned())
        );
        assert_eq!(
            beats.seen(&endpoint(1), missed(), 2),
            None,
            "it is told once, then counted anew"
        );
    }

    #[test]
    fn a_rank_that_nobody_waits_for_is_forgotten() {
        let mut beats = Heartbeats::default();
        let (interval, start) = (Duration::from_secs(5), Instant::now());
        assert_eq!(beats.seen(&endpoint(1), Err(refused()), 2), None);
        assert!(beats.due(interval, start, HashSet::new).is_empty());
        assert_eq!(beats.seen(&endpoint(1), Err(refused()), 2), None);
    }

    #[actix_rt::test]
    async fn whoever_listens_is_there() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        assert_eq!(probe(endpoint(address.port())).await, Ok(()));
        drop(listener);
        let absence = probe(endpoint(address.port())).await.expect_err("nobody");
        assert!(absence.is_certain, "{absence:?}");
    }
}
