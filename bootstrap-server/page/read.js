// Reads the answers of the admin API into facts, and refuses what is not what the API promises.

import { malformed } from "./api.js";

const DIMENSIONS = ["dp", "cp", "tp", "pp"];

function check(condition, path, what) {
  if (!condition) throw malformed(path, what);
}

/** One page of the list of engines, and what the next one begins behind: `GET /v1/engines`. */
export function readEngines(document, path) {
  check(Array.isArray(document?.engines), path, "it has no list of engines");
  return { engines: document.engines.map((engine) => readSummary(engine, path)), next: document.next };
}

function readSummary(engine, path) {
  check(typeof engine?.namespace === "string", path, "an engine has no namespace");
  for (const number of ["ranks_present", "ranks_expected", "ranks_unreachable", "registrations", "rooms"]) {
    check(Number.isInteger(engine[number]), path, `engine ${engine.namespace} has no ${number}`);
  }
  return {
    name: engine.namespace,
    listening: engine.listening,
    generation: engine.generation,
    beganAt: engine.generation_began_at,
    present: engine.ranks_present,
    expected: engine.ranks_expected,
    unreachable: engine.ranks_unreachable,
    drainingSince: engine.draining_since,
    problem: engine.problem,
    failingSince: engine.failing_since,
    registrations: engine.registrations,
    rooms: engine.rooms,
  };
}

/** One engine: `GET /v1/engines/{namespace}`. */
export function readEngine(engine, path) {
  for (const list of ["ranks_present", "ranks_missing", "registrations", "reports"]) {
    check(Array.isArray(engine?.[list]), path, `it has no list of ${list}`);
  }
  const reports = engine.reports.map((report) => readReport(report, path));
  return {
    name: engine.namespace,
    generation: engine.generation,
    beganAt: engine.generation_began_at,
    drainingSince: engine.draining_since,
    release: engine.release,
    topology: engine.topology,
    sizes: Object.fromEntries(DIMENSIONS.map((name) => [name, engine.topology?.[`${name}_size`] ?? 0])),
    ranks: engine.ranks_present.map((rank) => readRank(rank, engine, reports, path)),
    missing: engine.ranks_missing.map((name) => readRankName(name, path)),
    missingCount: engine.ranks_missing_count,
    registrations: engine.registrations.map((registration) => readRegistration(registration, path)),
    reports,
  };
}

function readRank(rank, engine, reports, path) {
  check(DIMENSIONS.every((name) => Number.isInteger(rank?.[name])), path, "a rank has no place");
  const report = reports.find((known) => known.role === "prefill" && known.rank === rank.rank);
  return {
    dp: rank.dp, cp: rank.cp, tp: rank.tp, pp: rank.pp,
    state: rankState(rank, engine, report),
    name: rank.rank,
    instance: rank.instance,
    registeredAt: rank.registered_at,
    since: rank.unreachable_since,
    release: rank.release,
  };
}

function rankState(rank, engine, report) {
  if (rank.reachable === false) return "unreachable";
  if (report?.stale) return "stale";
  if (engine.draining_since !== null) return "draining";
  return rank.reachable === null ? "unprobed" : "present";
}

function readRankName(name, path) {
  const found = /^dp(\d+) cp(\d+) tp(\d+) pp(\d+)$/.exec(name);
  check(found !== null, path, `${JSON.stringify(name)} names no rank`);
  const [dp, cp, tp, pp] = found.slice(1).map(Number);
  return { dp, cp, tp, pp, state: "missing", name };
}

function readRegistration(registration, path) {
  check(typeof registration?.engine_key === "string", path, "a registration has no engine key");
  return {
    key: registration.engine_key,
    role: registration.role,
    rank: registration.rank,
    instance: registration.instance,
    reachable: registration.reachable,
    registeredAt: registration.registered_at,
    release: registration.sglang_release,
    components: registration.components ?? [],
  };
}

function readReport(entry, path) {
  const { report } = entry;
  check(Array.isArray(report?.peers) && Array.isArray(report.components), path, "a report has no peers or components");
  return {
    key: entry.engine_key,
    age: entry.age_seconds,
    stale: entry.stale,
    version: report.version,
    role: report.role,
    rank: report.rank,
    instance: report.instance,
    peers: report.peers.map((peer) => ({ key: peer.engine_key, transport: peer.transport })),
    bytes: report.components.reduce((sum, component) => sum + component.bytes, 0),
    failures: report.components.reduce((sum, component) => sum + component.failures, 0),
    causes: report.failures ?? [],
  };
}

/** An event of the history or of the stream. */
export function readEvent(event, path) {
  check(Number.isInteger(event?.id) && Number.isInteger(event.at_ms), path, "an event has no number or time");
  check(typeof event.message === "string", path, "an event has no message");
  return { id: event.id, at: event.at_ms / 1000, kind: event.kind, engine: event.namespace, text: event.message };
}

/** Whether the server can make changes, and why not: `GET /v1/health/ready`. */
export function readReadiness(document, path) {
  check(Array.isArray(document?.problems), path, "it has no list of problems");
  return document.problems.map((problem) => problem.message);
}
