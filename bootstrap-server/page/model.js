// What the facts mean: pure functions, from what the server knows to what is shown.

import { count, grouped, listed, rankName } from "./words.js";

/** The states of an engine, the ones that need a person first. */
export const ENGINE_STATES = {
  failing: { word: "not serving", mark: "✕" },
  settling: { word: "settling", mark: "◷" },
  draining: { word: "draining", mark: "↓" },
  waiting: { word: "waiting for ranks", mark: "…" },
  serving: { word: "serving", mark: "✓" },
};

/** The states of a rank. Each has a mark of its own, because colour alone does not reach everyone. */
export const RANK_STATES = {
  missing: { word: "missing", mark: "?", means: "has not registered" },
  unreachable: { word: "unreachable", mark: "✕", means: "registered, but its address does not answer" },
  stale: { word: "stale", mark: "~", means: "reported before and has fallen silent" },
  draining: { word: "draining", mark: "↓", means: "takes no new rooms" },
  unprobed: { word: "not probed", mark: "·", means: "registered; its address has not been probed" },
  present: { word: "present", mark: "", means: "registered, and its address answers" },
};

/** Ranks that stand beside each other before a row of the grid is folded. */
const FOLD = 16;

/** What is wrong with an engine, in words; `null` when nothing is. */
export function reasonOf(detail) {
  const unreachable = detail.ranks.filter((rank) => rank.state === "unreachable");
  const parts = [];
  if (detail.missingCount > 0) parts.push(ranksAre(detail.missing, detail.missingCount, detail.sizes, "missing"));
  if (unreachable.length > 0) parts.push(ranksDo(unreachable, detail.sizes));
  return parts.length === 0 ? null : parts.join("; ");
}

function ranksAre(ranks, number, sizes, what) {
  const names = ranks.map((rank) => rankName(rank, sizes));
  const rest = number - names.length;
  const all = rest > 0 ? `${names.slice(0, 3).join(", ")} and ${grouped(number - 3)} more` : listed(names);
  return number === 1 ? `rank ${all} is ${what}` : `ranks ${all} are ${what}`;
}

function ranksDo(ranks, sizes) {
  const names = ranks.map((rank) => rankName(rank, sizes));
  if (ranks.length === 1) return `rank ${names[0]} does not answer at ${ranks[0].instance}`;
  return `ranks ${listed(names)} do not answer`;
}

/** An engine of the list with what its details add: its state, since when, and why. */
export function judged(engine, detail) {
  if (detail === undefined || detail.generation === null) return engine;
  const reason = reasonOf(detail);
  const since = detail.missingCount > 0 ? detail.beganAt : null;
  return { ...engine, release: detail.release, reason, since, state: reason === null ? "serving" : "failing" };
}

/** How many engines are in each state. */
export function tally(engines) {
  const numbers = Object.fromEntries(Object.keys(ENGINE_STATES).map((state) => [state, 0]));
  engines.forEach((engine) => { numbers[engine.state] += 1; });
  return numbers;
}

/**
 * The one sentence: how many engines serve; what fails, since when and why. Parts are text or
 * `{ since }`, a moment; `calm` says that nobody has to act.
 */
export function sentence(engines) {
  const numbers = tally(engines);
  if (engines.length === 0) return { calm: true, parts: ["No engine has registered yet."] };
  const serving = numbers.serving + numbers.draining;
  const total = engines.length;
  const parts = [];
  if (serving === total) parts.push(total === 1 ? "The only engine serves." : `All ${grouped(total)} engines serve.`);
  else if (total === 1) parts.push("No engine serves.");
  else parts.push(`${serving === 0 ? "None" : grouped(serving)} of ${grouped(total)} engines ${serving === 1 ? "serves" : "serve"}.`);
  const failing = engines.filter((engine) => engine.state === "failing").sort(byAge);
  if (failing.length > 0) parts.push(...failure(failing));
  for (const [state, verb] of [["settling", "settle"], ["draining", "drain"], ["waiting", "wait"]]) {
    const names = engines.filter((engine) => engine.state === state).map((engine) => engine.name);
    if (names.length > 0) parts.push(` ${listed(names)} ${names.length === 1 ? `${verb}s` : verb}${state === "waiting" ? " for ranks" : ""}.`);
  }
  return { calm: failing.length === 0, parts };
}

/** Of one engine: what, since when, why. Of several: the first, which may be the cause of the others. */
function failure(failing) {
  const [first, ...others] = failing;
  const reason = first.reason ?? "not all of its ranks are there";
  const since = first.since === null ? [] : [" since ", { since: first.since }];
  if (others.length === 0) return [` ${first.name} does not`, ...since, `: ${reason}.`];
  return [` First to fail was ${first.name}, `, ...(first.since === null ? [] : ["at ", { since: first.since }, ", "]),
    `because ${reason}. Then ${listed(others.map((engine) => engine.name))}.`];
}

function byAge(one, other) {
  return (one.since ?? Infinity) - (other.since ?? Infinity) || one.name.localeCompare(other.name);
}

/** Whether an engine is meant by the words of the filter: each stands in its name, state or facts. */
export function matches(engine, filter) {
  const text = [engine.name, ENGINE_STATES[engine.state].word, engine.release, engine.reason, ...(engine.addresses ?? [])]
    .filter(Boolean).join(" ").toLowerCase();
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
  const folded = sizes[across] > FOLD;
  const rows = [];
  for (const fixed of combinations(down, sizes)) {
    for (let begin = 0; begin < sizes[across]; begin += width) {
      const end = Math.min(begin + width, sizes[across]);
      const cells = [];
      for (let at = begin; at < end; at += 1) cells.push(cellOf(known, { ...fixed, [across]: at }));
      const names = down.filter((name) => sizes[name] > 1).map((name) => `${name}${fixed[name]}`);
      if (folded) names.push(`${across}${begin}–${end - 1}`);
      rows.push({ name: names.join(" "), cells });
    }
  }
  const heads = Array.from({ length: width }, (_, at) => (folded ? `+${at}` : `${across}${at}`));
  return { across, heads, rows };
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
