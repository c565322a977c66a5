//! What a rank counts: its rooms, its transfers, its sessions.

use std::time::Instant;

use common::wire::KvPoll;
use io_engine::{RailReport, TransportKind};

use crate::metrics::TransferLabels;
use crate::rank::actor::RankActor;
use crate::rank::core::{ComponentOutcome, ComponentReport, Counted};

impl RankActor {
    pub(super) fn count(&mut self, counted: &Counted) {
        let role = self.role();
        match counted {
            Counted::RoomFinished {
                room,
                poll,
                reason_opt,
                elapsed,
            } => {
                if *poll == KvPoll::Failed {
                    let reason = reason_opt.as_deref().unwrap_or("no reason given");
                    self.tally.room_failed(*room, reason);
                }
                self.metrics
                    .rooms_finished
                    .with_label_values(&[role, poll.name()])
                    .inc();
                let seconds = self
                    .metrics
                    .room_seconds
                    .with_label_values(&[role, poll.name()]);
                seconds.observe(elapsed.as_secs_f64());
            }
            Counted::RoomBegan { elapsed } => {
                let seconds = self
                    .metrics
                    .room_bootstrap_seconds
                    .with_label_values(&[role]);
                seconds.observe(elapsed.as_secs_f64());
            }
            Counted::Orphaned { rooms } => {
                self.metrics
                    .orphaned
                    .with_label_values(&[role])
                    .inc_by(*rooms as u64);
            }
            Counted::Waiting { portions } => {
                let waits = self.metrics.chunk_waits.with_label_values(&[role]);
                waits.inc_by(*portions as u64);
            }
            Counted::Mismatched { component } => {
                self.metrics
                    .verify_mismatches
                    .with_label_values(&[component])
                    .inc();
            }
            Counted::Uncompared { peer } => self.note_uncompared(peer),
            Counted::Late { kind } => {
                self.metrics
                    .late_messages
                    .with_label_values(&[role, kind])
                    .inc();
            }
        }
    }

    /// One event for each piece of work: bytes, time, transport, outcome.
    pub(super) fn count_component(&mut self, report: &ComponentReport) {
        let component = self.buffers.layout.component_label(report.key.component);
        let role = self.role();
        match &report.outcome {
            ComponentOutcome::Moved {
                bytes,
                ranges,
                truncated_items,
                elapsed,
                transport,
                ..
            } => {
                self.tally.moved(component, *bytes);
                let labels = TransferLabels {
                    component,
                    transport,
                    role,
                };
                self.metrics.moved(labels, (*bytes, *ranges), *elapsed);
                if *truncated_items > 0 {
                    let counter = self.metrics.truncated_items.with_label_values(&[component]);
                    counter.inc_by(*truncated_items);
                    tracing::warn!(
                        room = %report.key.room, component, truncated_items,
                        "the two sides' index lists differ in length; their common prefix was moved"
                    );
                }
            }
            ComponentOutcome::Failed {
                kind,
                reason,
                transport,
                ..
            } => {
                let labels = TransferLabels {
                    component,
                    transport,
                    role,
                };
                if self.metrics.not_moved(labels, kind) {
                    self.tally.failed(component);
                    let (room, endpoint) = (report.key.room, &report.key.endpoint);
                    tracing::warn!(%room, %endpoint, component, transport, reason, "a transfer failed");
                }
            }
            ComponentOutcome::Retired { .. } | ComponentOutcome::Died { .. } => {}
        }
    }

    /// Gauges are sums over the ranks of a process, so each rank adds its differences.
    pub(super) fn update_gauges(&mut self) {
        let role = self.role();
        let census = self.core.census().by_status;
        for ((poll, now), before) in KvPoll::ALL.into_iter().zip(census).zip(self.last_census) {
            let gauge = self.metrics.rooms.with_label_values(&[role, poll.name()]);
            gauge.add(now as i64 - before as i64);
        }
        self.last_census = census;
        let (bytes, waiting) = self.core.in_flight();
        self.publish_in_flight(i64::try_from(bytes).unwrap_or(i64::MAX), waiting as i64);
        self.sessions.tidy(Instant::now());
        self.publish_sessions(self.sessions.count());
        self.publish_rails(false);
    }

    pub(super) fn publish_in_flight(&mut self, bytes: i64, waiting: i64) {
        let role = [self.role()];
        let (bytes_before, waiting_before) = self.last_in_flight;
        let metrics = &self.metrics;
        let in_flight = metrics.in_flight_bytes.with_label_values(&role);
        in_flight.add(bytes - bytes_before);
        let chunks = metrics.chunks_waiting.with_label_values(&role);
        chunks.add(waiting - waiting_before);
        self.last_in_flight = (bytes, waiting);
    }

    /// What the engine's network devices have done since the last time.
    pub(super) fn publish_rails(&mut self, is_last: bool) {
        let rails = self.engine.rails();
        for (at, rail) in rails.iter().enumerate() {
            let before = self.last_rails.get(at);
            let was = |count: fn(&RailReport) -> u64| before.map_or(0, count);
            let device = [rail.device.as_str()];
            let metrics = &self.metrics;
            let counts = [
                (&metrics.device_bytes, rail.bytes - was(|it| it.bytes)),
                (
                    &metrics.device_failures,
                    rail.failures - was(|it| it.failures),
                ),
                (&metrics.device_left, rail.left - was(|it| it.left)),
            ];
            for (counter, more) in counts {
                counter.with_label_values(&device).inc_by(more);
            }
            let is_up = i64::from(rail.is_up && !is_last);
            let was_up = i64::from(before.is_some_and(|it| it.is_up));
            let gauge = metrics.device_up.with_label_values(&device);
            gauge.add(is_up - was_up);
        }
        self.last_rails = if is_last { Vec::new() } else { rails };
    }

    pub(super) fn publish_sessions(&mut self, sessions: [i64; TransportKind::ALL.len()]) {
        let role = self.role();
        for ((kind, now), before) in TransportKind::ALL
            .into_iter()
            .zip(sessions)
            .zip(self.last_sessions)
        {
            self.metrics
                .peers
                .with_label_values(&[role, kind.name()])
                .add(now - before);
        }
        self.last_sessions = sessions;
    }
}
