//! What rank actors reported last: kept in memory, bounded, and dropped when it is old.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::wire::route::{RankReport, ReportedFailure};

use crate::api::Report;

/// Reports that are kept at most.
const MAX_REPORTS: usize = 16_384;
/// A report that is older is dropped.
const LIFETIME: Duration = Duration::from_secs(600);
/// Reports that may be missed before one is stale.
const MISSES: u64 = 3;

/// There is no space for another key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyReports;

/// By engine and key.
#[derive(Debug, Default)]
pub struct Reports(Mutex<BTreeMap<(String, String), Kept>>);

#[derive(Debug)]
struct Kept {
    came_at: Instant,
    report: RankReport,
}

impl Kept {
    fn age_seconds(&self, now: Instant) -> u64 {
        now.duration_since(self.came_at).as_secs()
    }

    fn is_stale(&self, now: Instant) -> bool {
        self.age_seconds(now) > MISSES * self.report.interval_seconds.max(1)
    }
}

/// How many reports there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ages {
    /// Those that came when they were due.
    pub fresh: usize,
    /// Those whose successors are missing.
    pub stale: usize,
}

impl Reports {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, String), Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a report in place of the last one of its key. Says which failures are new.
    ///
    /// # Errors
    /// When there are too many keys.
    pub fn put(
        &self,
        namespace: &str,
        engine_key: &str,
        report: RankReport,
        now: Instant,
    ) -> Result<Option<String>, TooManyReports> {
        let mut kept = self.lock();
        let place = (namespace.to_owned(), engine_key.to_owned());
        if kept.len() >= MAX_REPORTS && !kept.contains_key(&place) {
            kept.retain(|_, known| now.duration_since(known.came_at) < LIFETIME);
            if kept.len() >= MAX_REPORTS {
                return Err(TooManyReports);
            }
        }
        let known = kept.get(&place).map(|known| &known.report.failures);
        let is_new =
            |failure: &&ReportedFailure| known.is_none_or(|known| !known.contains(failure));
        let mut failures = report.failures.iter().filter(is_new);
        // One line for each report, however many rooms failed: the history is for other things too.
        let news = failures.next().map(|first| {
            let others = match failures.count() {
                0 => String::new(),
                others => format!(", and {others} more"),
            };
            format!(
                "{} {} of {engine_key}: room {} failed: {}{others}",
                report.role, report.rank, first.room, first.reason
            )
        });
        kept.insert(
            place,
            Kept {
                came_at: now,
                report,
            },
        );
        Ok(news)
    }

    /// How many reports of an engine are fresh, and how many are not.
    pub fn ages(&self, namespace: &str, now: Instant) -> Ages {
        let kept = self.lock();
        let first = (namespace.to_owned(), String::new());
        let of_engine = kept
            .range(first..)
            .take_while(|((owner, _), _)| owner == namespace)
            .filter(|(_, known)| now.duration_since(known.came_at) < LIFETIME);
        let mut ages = Ages::default();
        for (_, known) in of_engine {
            if known.is_stale(now) {
                ages.stale += 1;
            } else {
                ages.fresh += 1;
            }
        }
        ages
    }

    /// The reports behind a place that are wanted, at most `limit` of them.
    pub fn after(
        &self,
        after_opt: Option<(String, String)>,
        limit: usize,
        namespace_opt: Option<&str>,
        now: Instant,
    ) -> Vec<Report> {
        use std::ops::Bound;
        let mut kept = self.lock();
        kept.retain(|_, known| now.duration_since(known.came_at) < LIFETIME);
        let from = after_opt.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = kept.range((from, Bound::Unbounded));
        let wanted =
            behind.filter(|((namespace, _), _)| namespace_opt.is_none_or(|only| only == namespace));
        let shown = wanted.map(|((namespace, engine_key), known)| Report {
            namespace: namespace.clone(),
            engine_key: engine_key.clone(),
            age_seconds: known.age_seconds(now),
            stale: known.is_stale(now),
            report: known.report.clone(),
        });
        shown.take(limit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_grow_stale_and_leave() {
        let reports = Reports::default();
        let begin = Instant::now();
        let failure = |room| ReportedFailure {
            at: 1,
            room,
            reason: "a peer died".to_owned(),
        };
        let report = |rooms: &[u64]| RankReport {
            interval_seconds: 5,
            failures: rooms.iter().copied().map(failure).collect(),
            ..RankReport::default()
        };
        let put = |rooms| reports.put("a", "key", report(rooms), begin).unwrap();
        let news = |text: &str| Some(text.to_owned());
        assert_eq!(put(&[1]), news("  of key: room 1 failed: a peer died"));
        assert_eq!(
            put(&[1, 2, 3]),
            news("  of key: room 2 failed: a peer died, and 1 more")
        );
        assert_eq!(put(&[2]), None);
        let shown =
            |seconds| reports.after(None, 9, Some("a"), begin + Duration::from_secs(seconds));
        assert!(!shown(15)[0].stale && shown(16)[0].stale);
        let ages = |seconds| reports.ages("a", begin + Duration::from_secs(seconds));
        assert_eq!(ages(15), Ages { fresh: 1, stale: 0 });
        assert_eq!(ages(16), Ages { fresh: 0, stale: 1 });
        assert_eq!(ages(600), Ages::default());
        assert_eq!(reports.ages("", begin), Ages::default());
        assert!(shown(600).is_empty());
        assert!(reports.after(None, 9, Some("b"), begin).is_empty());
    }
}
