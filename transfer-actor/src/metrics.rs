//! What the rank actors of a process count. Names and labels are `common::metrics`'.

use common::metrics as names;
use common::schema::StateKind;
use io_engine::TransferResult;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry};

use crate::api::Role;

/// The counters, registered once for a process and shared by its ranks.
#[derive(Debug)]
pub struct TransferMetrics {
    pub(crate) bytes: IntCounterVec,
    pub(crate) ranges: IntCounterVec,
    pub(crate) operations: IntCounterVec,
    pub(crate) seconds: HistogramVec,
    pub(crate) failures: IntCounterVec,
    pub(crate) truncated_items: IntCounterVec,
    pub(crate) rooms: IntGaugeVec,
    pub(crate) rooms_finished: IntCounterVec,
    pub(crate) room_seconds: HistogramVec,
    pub(crate) room_bootstrap_seconds: HistogramVec,
    pub(crate) late_messages: IntCounterVec,
    pub(crate) orphaned: IntCounterVec,
    pub(crate) control_messages: IntCounterVec,
    pub(crate) malformed: IntCounterVec,
    pub(crate) ignored_frames: IntCounterVec,
    pub(crate) send_failures: IntCounterVec,
    pub(crate) peers: IntGaugeVec,
    pub(crate) ranks: IntGaugeVec,
    pub(crate) component_panics: IntCounterVec,
    pub(crate) verified_bytes: IntCounterVec,
    pub(crate) verify_mismatches: IntCounterVec,
    pub(crate) verify_unavailable: IntCounterVec,
    pub(crate) device_bytes: IntCounterVec,
    pub(crate) device_failures: IntCounterVec,
    pub(crate) device_left: IntCounterVec,
    pub(crate) device_up: IntGaugeVec,
    pub(crate) rank_panics: IntCounterVec,
    pub(crate) chunk_waits: IntCounterVec,
    pub(crate) chunks_waiting: IntGaugeVec,
    pub(crate) in_flight_bytes: IntGaugeVec,
    pub(crate) limit_refusals: IntCounterVec,
}

/// The limits that a command of an engine can meet.
const REFUSALS: [(Role, &str); 5] = [
    (Role::Prefill, "too_many_rooms"),
    (Role::Prefill, "in_flight_limit"),
    (Role::Prefill, "too_many_chunks"),
    (Role::Decode, "too_many_rooms"),
    (Role::Decode, "too_many_rooms_with_peer"),
];

/// What the io engine counts for the whole process, read when somebody asks.
struct DeviceMetrics {
    bytes: IntCounterVec,
    pieces: IntCounterVec,
}

/// Shows counts from the start: an increase from nothing is none to Prometheus, and the first one is
/// to be seen, too.
fn from_zero<const N: usize>(
    counter: IntCounterVec,
    labels: impl IntoIterator<Item = [&'static str; N]>,
) -> IntCounterVec {
    for values in labels {
        counter.with_label_values(&values);
    }
    counter
}

/// The label values of every component.
fn components() -> impl Iterator<Item = [&'static str; 1]> {
    let states = StateKind::ALL.map(StateKind::name);
    let others = [names::COMPONENT_KV, names::COMPONENT_AUX];
    others.into_iter().chain(states).map(|name| [name])
}

fn device_counters() -> prometheus::Result<[IntCounterVec; 2]> {
    let labels = [names::LABEL_PATH];
    Ok([
        IntCounterVec::new(
            Opts::new(names::DEVICE_BYTES, "bytes moved from or to device memory"),
            &labels,
        )?,
        IntCounterVec::new(
            Opts::new(
                names::DEVICE_PIECES,
                "pieces of device memory that went through pinned buffers",
            ),
            &labels,
        )?,
    ])
}

impl DeviceMetrics {
    fn new() -> prometheus::Result<Self> {
        let [bytes, pieces] = device_counters()?;
        Ok(Self { bytes, pieces })
    }
}

impl Collector for DeviceMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let mut all = self.bytes.desc();
        all.extend(self.pieces.desc());
        all
    }

    fn collect(&self) -> Vec<MetricFamily> {
        // Made anew each time: two that ask at once must not add to one counter.
        let Ok([bytes, pieces]) = device_counters() else {
            return Vec::new();
        };
        let report = io_engine::device_report();
        for (counter, path, count) in [
            (&bytes, "staged", report.staged_bytes),
            (&bytes, "shared", report.shared_bytes),
            (&pieces, "gathered", report.gathered_pieces),
            (&pieces, "direct", report.direct_pieces),
        ] {
            counter.with_label_values(&[path]).inc_by(count);
        }
        let mut families = bytes.collect();
        families.extend(pieces.collect());
        families
    }
}

impl Role {
    /// The metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// The labels of a component's transfers.
#[derive(Clone, Copy, Debug)]
pub struct TransferLabels<'a> {
    /// The component, for example `kv`.
    pub component: &'a str,
    /// How its bytes move.
    pub transport: &'a str,
    /// Whose transfers they are: `prefill` or `decode`.
    pub role: &'a str,
}

impl TransferMetrics {
    /// Counts a transfer that succeeded.
    pub fn moved(
        &self,
        of: TransferLabels<'_>,
        (bytes, ranges): (u64, u64),
        elapsed: std::time::Duration,
    ) {
        let labels = [of.component, of.transport, of.role];
        self.bytes.with_label_values(&labels).inc_by(bytes);
        self.ranges.with_label_values(&labels).inc_by(ranges);
        let labels = [of.component, of.transport, of.role, "success"];
        self.operations.with_label_values(&labels).inc();
        let seconds = self.seconds.with_label_values(&labels);
        seconds.observe(elapsed.as_secs_f64());
    }

    /// Counts a transfer that did not; one that was cancelled is no failure. Whether it is one.
    pub fn not_moved(&self, of: TransferLabels<'_>, kind: &str) -> bool {
        let is_failure = kind != "cancelled";
        let outcome = if is_failure { "failed" } else { "aborted" };
        let labels = [of.component, of.transport, of.role, outcome];
        self.operations.with_label_values(&labels).inc();
        if is_failure {
            let labels = [of.component, of.transport, of.role, kind];
            self.failures.with_label_values(&labels).inc();
        }
        is_failure
    }

    /// Counts a batch that ended.
    pub fn ended(&self, of: TransferLabels<'_>, sizes: (u64, u64), result: &TransferResult) {
        match result {
            Ok(moved) => self.moved(of, sizes, moved.elapsed),
            Err(error) => {
                self.not_moved(of, error.kind().name());
            }
        }
    }

    /// Makes and registers everything.
    ///
    /// # Errors
    /// When a name is registered already.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let gauge = |name: &str, help: &str, labels: &[&str]| {
            let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let histogram = |name: &str, help: &str, labels: &[&str]| {
            let options = HistogramOpts::new(name, help).buckets(names::DURATION_BUCKETS.to_vec());
            let metric = HistogramVec::new(options, labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let (component, transport, role) = (
            names::LABEL_COMPONENT,
            names::LABEL_TRANSPORT,
            names::LABEL_ROLE,
        );
        registry.register(Box::new(DeviceMetrics::new()?))?;
        let (outcome, reason, kind) =
            (names::LABEL_OUTCOME, names::LABEL_REASON, names::LABEL_KIND);
        let roles = [Role::Prefill, Role::Decode].map(|role| [role.name()]);
        Ok(Self {
            bytes: counter(
                names::TRANSFER_BYTES,
                "bytes that reached the decode's memory",
                &[component, transport, role],
            )?,
            ranges: counter(
                names::TRANSFER_RANGES,
                "contiguous ranges written",
                &[component, transport, role],
            )?,
            operations: counter(
                names::TRANSFER_OPERATIONS,
                "component transfers that ended",
                &[component, transport, role, outcome],
            )?,
            seconds: histogram(
                names::TRANSFER_SECONDS,
                "from submission to completion of a component transfer",
                &[component, transport, role, outcome],
            )?,
            failures: counter(
                names::TRANSFER_FAILURES,
                "component transfers that failed",
                &[component, transport, role, reason],
            )?,
            truncated_items: counter(
                names::TRANSFER_TRUNCATED_ITEMS,
                "items beyond the common prefix of two index lists",
                &[component],
            )?,
            rooms: gauge(names::ROOMS, "rooms held now", &[role, names::LABEL_STATUS])?,
            rooms_finished: counter(
                names::ROOMS_FINISHED,
                "rooms that came to their end",
                &[role, outcome],
            )?,
            room_seconds: histogram(
                names::ROOM_SECONDS,
                "from a room's opening to its end",
                &[role, outcome],
            )?,
            room_bootstrap_seconds: histogram(
                names::ROOM_BOOTSTRAP_SECONDS,
                "from a room's opening to its first byte",
                &[role],
            )?,
            late_messages: counter(
                names::ROOM_LATE_MESSAGES,
                "messages and results for rooms that are gone",
                &[role, kind],
            )?,
            orphaned: {
                let orphaned = counter(
                    names::ROOM_ORPHANS,
                    "rooms that a peer announced and that were dropped before the engine opened them",
                    &[role],
                )?;
                // Decode ranks have none; what never happens is to be seen as zero.
                orphaned.with_label_values(&[Role::Prefill.name()]);
                orphaned
            },
            control_messages: counter(
                names::CONTROL_MESSAGES,
                "control messages",
                &[role, kind, names::LABEL_DIRECTION],
            )?,
            malformed: counter(
                names::CONTROL_MALFORMED,
                "control messages dropped as malformed",
                &[role, kind],
            )?,
            ignored_frames: counter(
                names::CONTROL_IGNORED_FRAMES,
                "unknown trailing frames",
                &[role],
            )?,
            send_failures: counter(
                names::CONTROL_SEND_FAILURES,
                "control messages that could not be sent",
                &[role, reason],
            )?,
            peers: gauge(names::PEERS, "sessions to peers", &[role, transport])?,
            ranks: gauge(names::RANKS, "ranks in this process", &[role])?,
            component_panics: from_zero(
                counter(
                    names::COMPONENT_PANICS,
                    "component actors that died without an answer",
                    &[component],
                )?,
                components(),
            ),
            verified_bytes: counter(
                names::VERIFY_BYTES,
                "bytes that a decode compared with a prefill's checksums and found equal",
                &[component],
            )?,
            verify_mismatches: from_zero(
                counter(
                    names::VERIFY_MISMATCHES,
                    "rooms that failed because a checksum differs",
                    &[component],
                )?,
                components(),
            ),
            verify_unavailable: from_zero(
                counter(
                    names::VERIFY_UNAVAILABLE,
                    "successes and peers that were to be compared and cannot be",
                    &[role],
                )?,
                roles,
            ),
            device_bytes: counter(
                names::RDMA_DEVICE_BYTES,
                "bytes written or read over a network device",
                &[names::LABEL_DEVICE],
            )?,
            device_failures: counter(
                names::RDMA_DEVICE_FAILURES,
                "queue pairs of a network device that failed",
                &[names::LABEL_DEVICE],
            )?,
            device_left: counter(
                names::RDMA_DEVICE_LEFT,
                "queue pairs that failed on a network device and were made again on another",
                &[names::LABEL_DEVICE],
            )?,
            device_up: gauge(
                names::RDMA_DEVICE_UP,
                "ranks that can use a network device",
                &[names::LABEL_DEVICE],
            )?,
            rank_panics: from_zero(
                counter(names::RANK_PANICS, "rank actors that panicked", &[role])?,
                roles,
            ),
            chunk_waits: from_zero(
                counter(
                    names::CHUNK_WAITS,
                    "chunks that had to wait for bytes on their way to arrive",
                    &[role],
                )?,
                [[Role::Prefill.name()]],
            ),
            chunks_waiting: gauge(
                names::CHUNKS_WAITING,
                "chunks that wait for bytes on their way to arrive",
                &[role],
            )?,
            in_flight_bytes: gauge(names::IN_FLIGHT_BYTES, "bytes on their way", &[role])?,
            limit_refusals: from_zero(
                counter(
                    names::LIMIT_REFUSALS,
                    "commands of engines that were refused for a limit",
                    &[role, reason],
                )?,
                REFUSALS.map(|(role, reason)| [role.name(), reason]),
            ),
        })
    }
}
