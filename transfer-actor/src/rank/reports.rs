//! What a rank tells the bootstrap servers of itself from time to time, and to which of them.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::ids::Room;
use common::topology::ParallelConfig;
use common::wire::route::{
    MAX_REPORT_ITEMS, RankReport, ReportedComponent, ReportedFailure, ReportedPeer,
};

use crate::bootstrap_client::{BootstrapClient, BootstrapError};
use crate::rank::core::Census;
use crate::rank::{RankConfig, SessionSummary};

/// The longest time from a rank's start to its first report.
pub(super) const FIRST_REPORT: Duration = Duration::from_secs(1);
/// Failures that are told.
const MAX_FAILURES: usize = 8;
/// Characters of a cause that are told.
const MAX_REASON: usize = 500;
/// So many reports in a row must be lost before that is worth a line in the log.
const NOTABLE_MISSES: u32 = 3;
/// After so many a server is given up, until a room names it again.
const MOST_MISSES: u32 = 60;

/// What a rank has done since it started.
#[derive(Debug, Default)]
pub(super) struct Tally {
    components: BTreeMap<&'static str, Counts>,
    failures: VecDeque<ReportedFailure>,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: u64,
    failures: u64,
}

impl Tally {
    pub(super) fn moved(&mut self, component: &'static str, bytes: u64) {
        let counts = self.components.entry(component).or_default();
        counts.bytes = counts.bytes.saturating_add(bytes);
    }

    pub(super) fn failed(&mut self, component: &'static str) {
        self.components.entry(component).or_default().failures += 1;
    }

    /// Keeps the first cause of a room that failed now.
    pub(super) fn room_failed(&mut self, room: Room, reason: &str) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        if self.failures.len() >= MAX_FAILURES {
            self.failures.pop_front();
        }
        self.failures.push_back(ReportedFailure {
            at: since.map_or(0, |since| since.as_secs()),
            room: room.get(),
            reason: reason.chars().take(MAX_REASON).collect(),
        });
    }

    /// The report that is due now.
    pub(super) fn report(
        &self,
        config: &RankConfig,
        instance: String,
        census: Census,
        sessions: Vec<SessionSummary>,
    ) -> RankReport {
        let [_failed, bootstrapping, waiting, transferring, _success] = census.by_status;
        let peers = sessions.into_iter().map(|session| ReportedPeer {
            engine_key: session.peer,
            transport: session.transport,
        });
        let components = self.components.iter();
        RankReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            role: config.role.name().to_owned(),
            rank: rank_name(&config.parallel),
            instance,
            interval_seconds: config.timeouts.report.as_secs().max(1),
            rooms_open: (bootstrapping + waiting + transferring) as u64,
            peers: peers.take(MAX_REPORT_ITEMS).collect(),
            components: components
                .map(|(component, counts)| ReportedComponent {
                    component: (*component).to_owned(),
                    bytes: counts.bytes,
                    failures: counts.failures,
                })
                .collect(),
            failures: self.failures.iter().cloned().collect(),
        }
    }
}

/// As the bootstrap server names it.
fn rank_name(parallel: &ParallelConfig) -> String {
    format!(
        "dp{} cp{} tp{} pp{}",
        parallel.dp_rank, parallel.cp_rank, parallel.tp_rank, parallel.pp_rank
    )
}

/// The bootstrap servers that a rank reports to, by `host:port`.
#[derive(Debug, Default)]
pub(super) struct Targets(BTreeMap<String, Target>);

#[derive(Debug)]
struct Target {
    client: BootstrapClient,
    is_busy: bool,
    misses: u32,
    /// A server of SGLang's own has no use for reports.
    is_deaf: bool,
}

impl Targets {
    /// Reports to this server from now on.
    pub(super) fn add(&mut self, bootstrap: &str) {
        if self.0.contains_key(bootstrap) {
            return;
        }
        // A text that names no server has failed the room or the rank that came with it.
        let Ok(client) = BootstrapClient::new(bootstrap) else {
            return;
        };
        let target = Target {
            client,
            is_busy: false,
            misses: 0,
            is_deaf: false,
        };
        self.0.insert(bootstrap.to_owned(), target);
    }

    /// The servers that get a report now: all but those that still have one to answer.
    pub(super) fn due(&mut self) -> Vec<(String, BootstrapClient)> {
        let due = self.0.iter_mut();
        let due = due.filter(|(_, target)| !target.is_deaf && !target.is_busy);
        due.map(|(bootstrap, target)| {
            target.is_busy = true;
            (bootstrap.clone(), target.client.clone())
        })
        .collect()
    }

    /// Takes in how a report ended.
    pub(super) fn sent(&mut self, bootstrap: &str, sent: Result<(), BootstrapError>) {
        let Some(target) = self.0.get_mut(bootstrap) else {
            return;
        };
        target.is_busy = false;
        match sent {
            Ok(()) => target.misses = 0,
            Err(BootstrapError::Refused { status, .. }) if [404, 405].contains(&status) => {
                target.is_deaf = true;
                tracing::info!(bootstrap, "the bootstrap server takes no reports");
            }
            Err(error) => {
                target.misses += 1;
                if target.misses == NOTABLE_MISSES {
                    tracing::info!(bootstrap, %error, "reports do not reach the bootstrap server");
                }
                if target.misses >= MOST_MISSES {
                    self.0.remove(bootstrap);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(status: u16) -> Result<(), BootstrapError> {
        let text = "no".to_owned();
        Err(BootstrapError::Refused { status, text })
    }

    #[test]
    fn a_slow_server_misses_reports_and_a_deaf_one_gets_no_more() {
        let mut targets = Targets::default();
        for bootstrap in ["ferry:1", "sglang:1", "ferry:1", "nonsense"] {
            targets.add(bootstrap);
        }
        assert_eq!(targets.due().len(), 2);
        assert!(targets.due().is_empty(), "both have one to answer");
        targets.sent("sglang:1", refused(404));
        targets.sent("ferry:1", refused(503));
        targets.add("sglang:1");
        let due = targets.due();
        assert_eq!(due.len(), 1, "{due:?}");
        assert_eq!(due[0].0, "ferry:1");
    }

    #[test]
    fn a_server_that_is_gone_is_given_up_until_it_is_named_again() {
        let mut targets = Targets::default();
        targets.add("ferry:1");
        for _ in 0..MOST_MISSES {
            assert_eq!(targets.due().len(), 1);
            targets.sent("ferry:1", refused(503));
        }
        assert!(targets.due().is_empty());
        targets.add("ferry:1");
        assert_eq!(targets.due().len(), 1);
    }

    #[test]
    fn the_last_failures_are_kept_and_their_causes_bounded() {
        let mut tally = Tally::default();
        for room in 0..20 {
            let room = Room::new(room).expect("a room");
            tally.room_failed(room, &"é".repeat(2 * MAX_REASON));
        }
        assert_eq!(tally.failures.len(), MAX_FAILURES);
        assert_eq!(tally.failures[0].room, 20 - MAX_FAILURES as u64);
        assert_eq!(tally.failures[0].reason.chars().count(), MAX_REASON);
    }
}
