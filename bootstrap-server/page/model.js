// What the facts mean: pure functions, from what the server knows to what is shown.

import { count, grouped, listed, rankName } from "./words.js";

/** The states of an engine, the ones that need a person first. */
export const ENGINE_STATES = {
  failing: { word: "not serving", mark: "✕" },
  settling: { word: "settling", mark: "◷" },
  draining: { word: "draining", mark: "↓" },
  waiting: { word: "waiting for ranks", mark: "…" },
  serving: { word: "serving", mark: "✓" },
  stored: { word: "not listened for", mark: "○" },
};

/** The states of a rank. Each has a mark of its own, because colour alone does not reach everyone. */
export const RANK_STATES = {
  missing: { word: "missing", mark: "?", means: "has not registered" },
  unreachable: { word: "unreachable", mark: "✕", means: "registered, but its address does not answer" },
  stale: { word: "stale", mark: "~", means: "its rank actor has stopped reporting" },
  draining: { word: "draining", mark: "↓", means: "takes no new rooms" },
  unprobed: { word: "not probed", mark: "·", means: "registered; its address has not been probed" },
  present: { word: "present", mark: "", means: "registered, and its address answers" },
};

/** States of a rank that somebody should look at. */
export const UNWELL = ["missing", "unreachable", "stale"];

/** Ranks that stand beside each other before a row of the grid is folded. */
const FOLD = 16;
/** A failure of a room is told in the summary for so many seconds. */
const RECENT_SECONDS = 600;

/** An engine of the list with its state, since when, and why; `detail` adds names when it is known. */
export function judged(engine, detail) {
  const state = stateOf(engine);
  const reason = state === "settling" ? engine.problem : ["waiting", "stored"].includes(state) ? null : reasonOf(engine, detail);
  const since = state === "draining" ? engine.drainingSince : state === "settling" ? engine.beganAt : engine.failingSince;
  return { ...engine, state, since, reason, release: detail?.release, addresses: detail?.ranks.map((rank) => rank.instance) };
}

function stateOf(engine) {
  if (!engine.listening) return "stored";
  if (engine.generation === null) return "waiting";
  if (engine.present < engine.expected) return "failing";
  // Where operators have said that probes do not count, an unreachable rank is no problem.
  if (engine.problem !== null) return engine.unreachable > 0 ? "failing" : "settling";
  return engine.drainingSince === null ? "serving" : "draining";
}

function reasonOf(engine, detail) {
  const missing = engine.expected - engine.present;
  const unreachable = detail?.ranks.filter((rank) => rank.state === "unreachable") ?? [];
  const parts = [];
  if (missing > 0) parts.push(whichAre(detail?.missing ?? [], missing, engine.expected, detail?.sizes, ["is missing", "are missing"]));
  if (engine.unreachable > 0) {
    const verbs = unreachable.length === 1 ? [`does not answer at ${unreachable[0].instance}`] : ["does not answer", "do not answer"];
    parts.push(whichAre(unreachable, engine.unreachable, engine.present, detail?.sizes, verbs));
  }
  return parts.length === 0 ? null : parts.join("; ");
}

/** `rank tp3 is missing`, `ranks tp1, tp2, tp3 and 5 more are missing`, `all 8 ranks are missing`. */
function whichAre(ranks, number, all, sizes, [one, many]) {
  if (number > 1 && number === all) return `all ${grouped(all)} ranks ${many}`;
  if (ranks.length === 0) return `${count(number, "rank")} ${number === 1 ? one : many}`;
  const names = ranks.slice(0, 4).map((rank) => rankName(rank, sizes));
  const rest = number - names.length;
  if (rest > 0) names.splice(3, names.length, `${grouped(number - 3)} more`);
  if (number === 1) return sizes && Object.values(sizes).every((size) => size === 1) ? `${names[0]} ${one}` : `rank ${names[0]} ${one}`;
  return `ranks ${listed(names, names.length)} ${many}`;
}

/** How many engines are in each state. */
export function tally(engines) {
  const numbers = Object.fromEntries(Object.keys(ENGINE_STATES).map((state) => [state, 0]));
  engines.forEach((engine) => { numbers[engine.state] += 1; });
  return numbers;
}

/**
 * The one sentence: how many engines serve; what fails, since when and why. Parts are text or
 * `{ since }`, a moment. `calm` says that nobody has to act.
 */
export function sentence(engines) {
  const heard = engines.filter((engine) => engine.state !== "stored");
  const numbers = tally(heard);
  const total = heard.length;
  const serving = numbers.serving + numbers.draining;
  if (total === 0) return { calm: true, parts: [engines.length === 0 ? "No engine has registered yet." : "This server listens for none of the registered engines."] };
  if (numbers.waiting === total) {
    return { calm: true, parts: [total === 1 ? `${heard[0].name} waits for its first rank.` : `All ${grouped(total)} engines wait for their first rank.`] };
  }
  const parts = [howMany(serving, total)];
  const failing = inOrder(heard.filter((engine) => engine.state === "failing"));
  if (failing.length > 0) parts.push(...failure(failing));
  for (const [state, one, many] of [["settling", "settles", "settle"], ["draining", "drains", "drain"], ["waiting", "waits for its first rank", "wait for their first rank"]]) {
    const names = heard.filter((engine) => engine.state === state).map((engine) => engine.name);
    if (names.length > 0) parts.push(` ${listed(names)} ${names.length === 1 ? one : many}.`);
  }
  return { calm: failing.length === 0, parts };
}

function howMany(serving, total) {
  if (total === 1) return serving === 1 ? "The only engine serves." : "No engine serves.";
  if (serving === total) return `All ${grouped(total)} engines serve.`;
  return `${serving === 0 ? "None" : grouped(serving)} of ${grouped(total)} engines ${serving === 1 ? "serves" : "serve"}.`;
}

/** Of one engine: what, since when, why. Of several: the first, which may be the cause of the others. */
function failure(failing) {
  const [first, ...others] = failing;
  const when = first.since === null ? [` ${first.name} does not serve`] : [` ${first.name} has not served since `, { since: first.since }];
  if (others.length === 0) return [...when, `: ${first.reason}.`];
  const names = listed(others.map((engine) => engine.name));
  return [...when, `: ${first.reason}. Then ${names} failed too.`];
}

/** Engines as they are shown: those that failed first stand first, the others by name. */
export function inOrder(engines) {
  return [...engines].sort(byAge);
}

function byAge(one, other) {
  const age = (engine) => (engine.state === "failing" ? engine.since ?? Number.MAX_SAFE_INTEGER : Number.MAX_SAFE_INTEGER);
  return age(one) - age(other) || one.name.localeCompare(other.name);
}

/** The newest room that failed not long ago, of the engines whose details are known. */
export function recentFailure(details, now) {
  const rooms = new Set();
  let newest = null;
  for (const detail of details) {
    for (const report of detail.reports) {
      for (const cause of report.causes.filter(({ at }) => now - at < RECENT_SECONDS)) {
        // Both sides tell of a room, and so do all ranks.
        rooms.add(`${detail.name} ${cause.room}`);
        if (newest === null || cause.at > newest.at) newest = { ...cause, engine: detail.name, role: report.role, rank: report.rank };
      }
    }
  }
  return newest === null ? null : { number: rooms.size, newest };
}

/** Whether an engine is meant by the filter: each of its words stands in its name, state or facts. */
export function matches(engine, filter) {
  const facts = [engine.name, ENGINE_STATES[engine.state].word, engine.release, engine.reason, ...(engine.addresses ?? [])];
  const text = facts.filter(Boolean).join(" ").toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/**
 * The ranks of an engine as rows of cells. Columns are the largest dimension, preferably tp; the
 * others make rows, and a long row is folded.
 */
export function grid(detail) {
  const { sizes } = detail;
  const across = ["tp", "dp", "cp", "pp"].reduce((best, name) => (sizes[name] > sizes[best] ? name : best));
  const down = ["dp", "pp", "cp", "tp"].filter((name) => name !== across);
  const known = new Map([...detail.ranks, ...detail.missing].map((rank) => [placeOf(rank), rank]));
  const width = Math.min(sizes[across], FOLD);
  const isFolded = sizes[across] > FOLD;
  const rows = [];
  for (const fixed of combinations(down, sizes)) {
    for (let begin = 0; begin < sizes[across]; begin += width) {
      const end = Math.min(begin + width, sizes[across]);
      const cells = [];
      for (let at = begin; at < end; at += 1) cells.push(cellOf(known, { ...fixed, [across]: at }));
      const names = down.filter((name) => sizes[name] > 1).map((name) => `${name}${fixed[name]}`);
      if (isFolded) names.push(`${across}${begin}–${end - 1}`);
      rows.push({ name: names.join(" "), cells });
    }
  }
  const heads = Array.from({ length: width }, (_, at) => (isFolded ? `+${at}` : `${across}${at}`));
  return { heads, rows };
}

function cellOf(known, place) {
  // A list of very many missing ranks is cut by the server: what is not known is missing.
  return known.get(placeOf(place)) ?? { ...place, state: "missing" };
}

function placeOf(rank) {
  return `${rank.dp}/${rank.cp}/${rank.tp}/${rank.pp}`;
}

function combinations(names, sizes) {
  return names.reduce(
    (found, name) => found.flatMap((fixed) => Array.from({ length: sizes[name] }, (_, at) => ({ ...fixed, [name]: at }))),
    [{}],
  );
}

/** The components of an engine's registrations, equal ones together. */
export function components(registrations) {
  const found = new Map();
  for (const { role, components: own } of registrations) {
    for (const component of own) {
      const key = `${role} ${component.type}`;
      const sum = found.get(key) ?? { role, type: component.type, ranks: 0, bytes: 0, tensors: new Set(), itemLengths: new Set(), layers: new Set() };
      sum.ranks += 1;
      sum.bytes += component.bytes;
      sum.tensors.add(component.tensors);
      (component.item_lengths ?? []).flat().forEach((length) => sum.itemLengths.add(length));
      (component.layer_ids ?? []).forEach((layer) => sum.layers.add(layer));
      found.set(key, sum);
    }
  }
  return [...found.values()];
}
