// Reads the answers of the admin API into facts, and refuses what is not what the API promises.

import { malformed } from "./api.js";

const DIMENSIONS = ["dp", "cp", "tp", "pp"];

function check(condition, path, what) {
  if (!condition) throw malformed(path, what);
}

/** The list of engines: `GET /v1/engines`. */
export function readEngines(document, path) {
  check(Array.isArray(document?.engines), path, "it has no list of engines");
  return document.engines.map((engine) => {
    check(typeof engine?.namespace === "string", path, "an engine has no namespace");
    check(Number.isInteger(engine.ranks_expected), path, `engine ${engine.namespace} has no number of ranks`);
    return {
      name: engine.namespace,
      generation: engine.generation,
      present: engine.ranks_present,
      expected: engine.ranks_expected,
      registrations: engine.registrations,
      state: engine.generation === null ? "waiting" : engine.complete ? "serving" : "failing",
      since: null,
      reason: null,
    };
  });
}

/** One engine: `GET /v1/engines/{namespace}`. */
export function readEngine(engine, path) {
  check(Array.isArray(engine?.ranks_present), path, "it has no list of ranks");
  check(Array.isArray(engine.registrations), path, "it has no list of registrations");
  const sizes = sizesOf(engine.topology);
  return {
    name: engine.namespace,
    generation: engine.generation,
    beganAt: engine.generation_began_at,
    retired: engine.retired_generations,
    release: engine.release,
    topology: engine.topology,
    sizes,
    ranks: engine.ranks_present.map((rank) => readRank(rank, path)),
    missing: engine.ranks_missing.map((name) => readRankName(name, path)),
    missingCount: engine.ranks_missing_count,
    registrations: engine.registrations.map((registration) => readRegistration(registration, path)),
  };
}

function sizesOf(topology) {
  return Object.fromEntries(DIMENSIONS.map((name) => [name, topology?.[`${name}_size`] ?? 0]));
}

function readRank(rank, path) {
  check(DIMENSIONS.every((name) => Number.isInteger(rank?.[name])), path, "a rank has no place");
  const state = rank.reachable === null ? "unprobed" : rank.reachable ? "present" : "unreachable";
  return {
    dp: rank.dp, cp: rank.cp, tp: rank.tp, pp: rank.pp, state,
    name: rank.rank,
    instance: rank.instance,
    registeredAt: rank.registered_at,
    release: rank.release,
  };
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
