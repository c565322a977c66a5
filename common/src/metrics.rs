//! The one home for names of metrics, their labels and the values of labels.
//!
//! `ferry_<subsystem>_<what>_<unit>[_total]` in base units; never a room, request or pointer as a
//! label. A test compares every query of the dashboards with what the processes serve.

/// Bytes that a writer has moved; labels component, transport, role.
pub const TRANSFER_BYTES: &str = "ferry_transfer_bytes_total";
/// Contiguous ranges that a writer has moved; labels component, transport, role.
pub const TRANSFER_RANGES: &str = "ferry_transfer_ranges_total";
/// Component transfers that ended; labels component, transport, role, outcome.
pub const TRANSFER_OPERATIONS: &str = "ferry_transfer_operations_total";
/// Seconds from submission to completion of one component transfer; labels component, transport,
/// role, outcome.
pub const TRANSFER_SECONDS: &str = "ferry_transfer_seconds";
/// Failed component transfers; labels component, transport, role, reason.
pub const TRANSFER_FAILURES: &str = "ferry_transfer_failures_total";
/// Items beyond the common prefix of a paged component whose index lists differ in length;
/// label component.
pub const TRANSFER_TRUNCATED_ITEMS: &str = "ferry_transfer_truncated_items_total";
/// Rooms now held, by status; labels role, status.
pub const ROOMS: &str = "ferry_room_current_count";
/// Rooms that reached an end; labels role, outcome.
pub const ROOMS_FINISHED: &str = "ferry_room_finished_total";
/// Seconds from a room's first event to its end; labels role, outcome.
pub const ROOM_SECONDS: &str = "ferry_room_seconds";
/// Seconds from a room's opening to the first byte; labels role.
pub const ROOM_BOOTSTRAP_SECONDS: &str = "ferry_room_bootstrap_seconds";
/// Messages for rooms that are gone; labels role, kind.
pub const ROOM_LATE_MESSAGES: &str = "ferry_room_late_messages_total";
/// Rooms that a peer announced and that were dropped before the engine opened them; label role.
pub const ROOM_ORPHANS: &str = "ferry_room_orphans_total";
/// Chunks that had to wait for bytes on their way to arrive, counted for each decode rank that they
/// go to; label role.
pub const CHUNK_WAITS: &str = "ferry_chunk_waits_total";
/// Those that wait now; label role.
pub const CHUNKS_WAITING: &str = "ferry_chunk_waiting_current_count";
/// Bytes on their way, as far as pages, slots and rows tell; label role.
pub const IN_FLIGHT_BYTES: &str = "ferry_chunk_in_flight_bytes";
/// Commands of engines that were refused for a limit; labels role, reason.
pub const LIMIT_REFUSALS: &str = "ferry_limit_refusals_total";
/// Control messages; labels role, kind, direction.
pub const CONTROL_MESSAGES: &str = "ferry_control_messages_total";
/// Control messages that were dropped as malformed; labels role, kind.
pub const CONTROL_MALFORMED: &str = "ferry_control_malformed_total";
/// Unknown trailing frames that were ignored; label role.
pub const CONTROL_IGNORED_FRAMES: &str = "ferry_control_ignored_frames_total";
/// Messages that could not be sent; labels role, reason.
pub const CONTROL_SEND_FAILURES: &str = "ferry_control_send_failures_total";
/// Peers that are known now; labels role, transport.
pub const PEERS: &str = "ferry_peer_current_count";
/// Ranks that run in this process; label role.
pub const RANKS: &str = "ferry_rank_current_count";
/// Bytes that this process has moved from or to device memory; label path: `staged` through pinned
/// host buffers, `shared` from device memory to device memory.
pub const DEVICE_BYTES: &str = "ferry_device_bytes_total";
/// Pieces that went through pinned host buffers; label path: `gathered` (and scattered) on the
/// device, where a piece of a batch has at least 64 of less than 4 KiB on average, or `direct`.
pub const DEVICE_PIECES: &str = "ferry_device_pieces_total";
/// Component actors that died without an answer; label component.
pub const COMPONENT_PANICS: &str = "ferry_component_panics_total";
/// Rank actors that panicked, and were restarted unless that came too often; label role.
pub const RANK_PANICS: &str = "ferry_rank_panics_total";

/// Bytes that a decode compared with checksums of a prefill and found equal; label component.
pub const VERIFY_BYTES: &str = "ferry_verify_bytes_total";
/// Rooms that failed because a checksum differs; label component.
pub const VERIFY_MISMATCHES: &str = "ferry_verify_mismatches_total";
/// Successes (decode) and peers (prefill) without the comparison that was asked for; label role.
pub const VERIFY_UNAVAILABLE: &str = "ferry_verify_unavailable_total";

/// Bytes that a network device has written or read for this process; label device.
pub const RDMA_DEVICE_BYTES: &str = "ferry_rdma_device_bytes_total";
/// Queue pairs of a network device that failed; label device.
pub const RDMA_DEVICE_FAILURES: &str = "ferry_rdma_device_failures_total";
/// Queue pairs that failed on a network device and were made again on another; label device.
pub const RDMA_DEVICE_LEFT: &str = "ferry_rdma_device_left_total";
/// Ranks that can use a network device now; label device.
pub const RDMA_DEVICE_UP: &str = "ferry_rdma_device_up_count";

/// HTTP requests at the bootstrap server; labels route, code.
pub const BOOTSTRAP_REQUESTS: &str = "ferry_bootstrap_requests_total";
/// Seconds to answer a request; label route.
pub const BOOTSTRAP_REQUEST_SECONDS: &str = "ferry_bootstrap_request_seconds";
/// Open connections of engines' ports at the bootstrap server.
pub const BOOTSTRAP_CONNECTIONS: &str = "ferry_bootstrap_connections_current_count";
/// Connections that were closed before any request; label reason.
pub const BOOTSTRAP_CONNECTIONS_REFUSED: &str = "ferry_bootstrap_connections_refused_total";
/// Registered prefill ranks; label namespace.
pub const BOOTSTRAP_RANKS: &str = "ferry_bootstrap_ranks_current_count";
/// Ranks that a complete engine has; label namespace.
pub const BOOTSTRAP_RANKS_EXPECTED: &str = "ferry_bootstrap_ranks_expected_count";
/// Generation of the engine; label namespace.
pub const BOOTSTRAP_GENERATION: &str = "ferry_bootstrap_generation_number";
/// Generations that began; label namespace.
pub const BOOTSTRAP_GENERATIONS: &str = "ferry_bootstrap_generations_total";
/// Stored registrations of io engines; label namespace.
pub const BOOTSTRAP_REGISTRATIONS: &str = "ferry_bootstrap_registrations_current_count";
/// Rooms with a dp rank; label namespace.
pub const BOOTSTRAP_ROOMS: &str = "ferry_bootstrap_rooms_current_count";
/// Rooms dropped before their time because the table was full; label namespace.
pub const BOOTSTRAP_ROOMS_EVICTED: &str = "ferry_bootstrap_rooms_evicted_total";
/// Ranks whose address answered the last probe; labels namespace, state.
pub const BOOTSTRAP_RANKS_PROBED: &str = "ferry_bootstrap_ranks_probed_count";
/// Rank actors whose last report is fresh or stale; labels namespace, state.
pub const BOOTSTRAP_REPORTS: &str = "ferry_bootstrap_reports_current_count";
/// 1 while an engine takes no new rooms, else 0; label namespace.
pub const BOOTSTRAP_DRAINING: &str = "ferry_bootstrap_draining_state";
/// What happened, by its kind in the history of events; label kind.
pub const BOOTSTRAP_EVENTS: &str = "ferry_bootstrap_events_total";
/// Fields of registrations that no known release sends; label namespace.
pub const BOOTSTRAP_UNKNOWN_FIELDS: &str = "ferry_bootstrap_unknown_fields_total";
/// Seconds to make one change durable.
pub const BOOTSTRAP_STORE_SECONDS: &str = "ferry_bootstrap_store_commit_seconds";
/// 1 while changes are refused because the store fails, else 0.
pub const BOOTSTRAP_STORE_READ_ONLY: &str = "ferry_bootstrap_store_read_only_state";
/// Failed attempts to make something durable.
pub const BOOTSTRAP_STORE_FAILURES: &str = "ferry_bootstrap_store_failures_total";

/// Label: which part of a request's state.
pub const LABEL_COMPONENT: &str = "component";
/// Label: how bytes moved.
pub const LABEL_TRANSPORT: &str = "transport";
/// Label: prefill or decode.
pub const LABEL_ROLE: &str = "role";
/// Label: success, failed or aborted.
pub const LABEL_OUTCOME: &str = "outcome";
/// Label: a short fixed word for why.
pub const LABEL_REASON: &str = "reason";
/// Label: a room's status.
pub const LABEL_STATUS: &str = "status";
/// Label: a message's kind.
pub const LABEL_KIND: &str = "kind";
/// Label: sent or received.
pub const LABEL_DIRECTION: &str = "direction";
/// A network device.
pub const LABEL_DEVICE: &str = "device";
/// Label: an engine's namespace at the bootstrap server.
pub const LABEL_NAMESPACE: &str = "namespace";
/// Label: an HTTP route's pattern.
pub const LABEL_ROUTE: &str = "route";
/// Label: an HTTP status code.
pub const LABEL_CODE: &str = "code";
/// Label: what a probe found of a rank, or how old its report is.
pub const LABEL_STATE: &str = "state";
/// How bytes of device memory go.
pub const LABEL_PATH: &str = "path";

/// Value of [`LABEL_COMPONENT`]: the paged KV cache.
pub const COMPONENT_KV: &str = "kv";
/// Value of [`LABEL_COMPONENT`]: auxiliary rows.
pub const COMPONENT_AUX: &str = "aux";
/// Value of [`LABEL_COMPONENT`]: a position that the layout does not have.
pub const COMPONENT_UNKNOWN: &str = "unknown";

/// Bounds, in seconds, of every histogram of durations: from 50 us to 300 s.
pub const DURATION_BUCKETS: [f64; 20] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 100.0, 300.0,
];

/// Every metric, for the checks of dashboards.
pub const ALL: &[&str] = &[
    TRANSFER_BYTES,
    TRANSFER_RANGES,
    TRANSFER_OPERATIONS,
    TRANSFER_SECONDS,
    TRANSFER_FAILURES,
    TRANSFER_TRUNCATED_ITEMS,
    ROOMS,
    ROOMS_FINISHED,
    ROOM_SECONDS,
    ROOM_BOOTSTRAP_SECONDS,
    ROOM_LATE_MESSAGES,
    ROOM_ORPHANS,
    CHUNK_WAITS,
    CHUNKS_WAITING,
    IN_FLIGHT_BYTES,
    LIMIT_REFUSALS,
    CONTROL_MESSAGES,
    CONTROL_MALFORMED,
    CONTROL_IGNORED_FRAMES,
    CONTROL_SEND_FAILURES,
    PEERS,
    RANKS,
    DEVICE_BYTES,
    DEVICE_PIECES,
    COMPONENT_PANICS,
    VERIFY_BYTES,
    VERIFY_MISMATCHES,
    VERIFY_UNAVAILABLE,
    RDMA_DEVICE_BYTES,
    RDMA_DEVICE_FAILURES,
    RDMA_DEVICE_LEFT,
    RDMA_DEVICE_UP,
    RANK_PANICS,
    BOOTSTRAP_REQUESTS,
    BOOTSTRAP_REQUEST_SECONDS,
    BOOTSTRAP_CONNECTIONS,
    BOOTSTRAP_CONNECTIONS_REFUSED,
    BOOTSTRAP_RANKS,
    BOOTSTRAP_RANKS_EXPECTED,
    BOOTSTRAP_GENERATION,
    BOOTSTRAP_GENERATIONS,
    BOOTSTRAP_REGISTRATIONS,
    BOOTSTRAP_ROOMS,
    BOOTSTRAP_ROOMS_EVICTED,
    BOOTSTRAP_RANKS_PROBED,
    BOOTSTRAP_REPORTS,
    BOOTSTRAP_DRAINING,
    BOOTSTRAP_EVENTS,
    BOOTSTRAP_UNKNOWN_FIELDS,
    BOOTSTRAP_STORE_SECONDS,
    BOOTSTRAP_STORE_READ_ONLY,
    BOOTSTRAP_STORE_FAILURES,
];
