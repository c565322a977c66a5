//! What a change is told to: the audit log, the events and the metrics.

use super::{Job, Writer};
use crate::api::EventKind;
use crate::registry::{Applied, Command, NOTHING};

impl Writer {
    /// What was done goes into the audit log, the events and the metrics.
    pub(super) fn tell(&self, job: &Job, applied: &[Applied]) {
        for ((namespace, command), applied) in job.commands.iter().zip(applied) {
            let subject = command.subject();
            let Applied {
                what,
                before,
                after,
                ..
            } = applied;
            tracing::info!(target: "audit", who = job.who, namespace, subject, what, before, after);
            if !applied.changed.is_empty() {
                let message = told(&subject, what, before, after);
                let kind = match command {
                    _ if applied.began_generation => EventKind::Generation,
                    Command::PutRank(_) | Command::PutRegistration(..) => EventKind::Registration,
                    _ => EventKind::Operator,
                };
                self.events.record(kind, Some(namespace), message);
            }
            self.count(namespace, command, applied);
        }
    }

    fn count(&self, namespace: &str, command: &Command, applied: &Applied) {
        if applied.began_generation {
            self.metrics
                .generations
                .with_label_values(&[namespace])
                .inc();
        }
        if applied.evicted > 0 {
            tracing::warn!(
                namespace,
                evicted = applied.evicted,
                "the oldest registrations left to make room"
            );
        }
        if let Command::PutRank(registration) = command {
            let unknown = registration.rank.unknown_fields.len() as u64;
            self.metrics
                .unknown_fields
                .with_label_values(&[namespace])
                .inc_by(unknown);
        }
    }
}

/// What changed, for people.
fn told(subject: &str, what: &str, before: &str, after: &str) -> String {
    match (before, after) {
        (NOTHING, _) => format!("{subject}: {what}, {after}"),
        (_, NOTHING) => format!("{subject}: {what}, it was {before}"),
        _ => format!("{subject}: {what}, from {before} to {after}"),
    }
}
