// What an opened engine shows: its grid of ranks, its facts, its components, its io engines.

import { bytes, grouped } from "./words.js";
import { element, moment, table } from "./elements.js";
import { RANK_STATES, UNWELL, components } from "./model.js";
import { rankGrid } from "./ranks.js";

/** Ranks in need of a look that are listed; the grid shows all of them. */
const LISTED_RANKS = 24;
/** Io engines that are listed without being asked for. */
const LISTED_IO_ENGINES = 8;

/** Folded lists that the reader has opened; they stay open when the engine is drawn anew. */
const unfolded = new Set();

/** The parts of an opened engine. */
export function engineDetail(detail) {
  const ranks = detail.generation === null
    ? [element("p", { class: "quiet" }, "No rank has registered. Ranks register with PUT /route at this engine's port.")]
    : [rankGrid(detail), unwellRanks(detail), facts(detail)];
  return [ranks, componentTable(detail), ioEngines(detail), allRanks(detail)];
}

function unwellRanks(detail) {
  const unwell = [...detail.missing, ...detail.ranks.filter((rank) => UNWELL.includes(rank.state))];
  if (unwell.length === 0) return null;
  const rows = unwell.slice(0, LISTED_RANKS).map((rank) => [
    rank.name,
    stateOf(rank.state),
    rank.instance ?? "—",
    rank.since ? moment(rank.since) : "—",
  ]);
  const rest = detail.missingCount - detail.missing.length + unwell.length - rows.length;
  return part("Ranks that need a look",
    table(`Ranks of ${detail.name} that need a look`, ["Rank", "State", "Address", "Since"], rows),
    rest > 0 && element("p", { class: "quiet" }, `And ${grouped(rest)} more.`));
}

function stateOf(state) {
  const { word, mark } = RANK_STATES[state];
  return element("span", { class: "rank-state" }, element("span", { class: `cell ${state}`, "aria-hidden": "true" }, mark), word);
}

function facts(detail) {
  const { topology, sizes } = detail;
  const pages = [`${topology.page_size} tokens`, topology.kv_cache_dtype, topology.kv_layout].filter(Boolean).join(", ");
  const pairs = [
    ["Generation", [`${detail.generation}, began `, moment(detail.beganAt)]],
    ["Sizes", ["dp", "cp", "tp", "pp"].map((name) => `${name} ${sizes[name]}`).join(" × ")],
    ["SGLang", detail.release],
    ["Pages", pages],
    ["Decode allocates", topology.decode_allocation_policy.replaceAll("_", " ")],
  ];
  if (detail.drainingSince !== null) pairs.unshift(["Draining", ["since ", moment(detail.drainingSince)]]);
  return element("dl", { class: "facts" }, pairs.map(([term, text]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, text))));
}

function componentTable(detail) {
  const found = components(detail.registrations);
  if (found.length === 0) return null;
  const rows = found.map((component) => [
    component.type,
    component.role,
    grouped(component.ranks),
    span([...component.tensors]),
    component.itemLengths.size === 0 ? "—" : span([...component.itemLengths], bytes),
    component.layers.size === 0 ? "—" : grouped(component.layers.size),
    bytes(component.bytes),
  ]);
  return part("Components",
    table(`Components of ${detail.name}`, ["Component", "Role", "Ranks", "Tensors", "Item", "Layers", "Size in all"], rows));
}

/** One value, or the smallest and the largest. */
function span(numbers, shown = grouped) {
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  return least === most ? shown(least) : `${shown(least)} to ${shown(most)}`;
}

function ioEngines(detail) {
  const reported = new Map(detail.reports.map((report) => [report.key, report]));
  const registered = new Set(detail.registrations.map(({ key }) => key));
  const unregistered = detail.reports.filter(({ key }) => !registered.has(key));
  const rows = [...detail.registrations, ...unregistered].map(({ key, role, rank, instance, reachable = null, release }) => {
    const report = reported.get(key);
    return [
      element("span", { class: "key" }, key),
      role,
      String(rank),
      instance,
      stateOf(reachable === false ? "unreachable" : report?.stale ? "stale" : reachable ? "present" : "unprobed"),
      release ?? "—",
      report?.version ?? "—",
    ];
  });
  if (rows.length === 0) return null;
  const heads = ["Key", "Role", "Rank", "Address", "State", "SGLang", "Ferry"];
  const list = table(`IO engines of ${detail.name}`, heads, rows);
  if (rows.length <= LISTED_IO_ENGINES) return part("IO engines", list);
  return folded(`io:${detail.name}`, `IO engines (${grouped(rows.length)})`, list);
}

function allRanks(detail) {
  if (detail.ranks.length === 0) return null;
  const rows = detail.ranks.map((rank) => [rank.name, stateOf(rank.state), rank.instance, rank.release, moment(rank.registeredAt)]);
  return folded(`ranks:${detail.name}`, `Registered ranks (${grouped(rows.length)})`,
    table(`Registered ranks of ${detail.name}`, ["Rank", "State", "Address", "SGLang", "Registered"], rows));
}

function folded(name, head, content) {
  const ontoggle = ({ target }) => (target.open ? unfolded.add(name) : unfolded.delete(name));
  return element("details", { open: unfolded.has(name), ontoggle },
    element("summary", { id: `fold:${encodeURIComponent(name)}` }, head), content);
}

function part(head, ...children) {
  return element("section", { class: "part" }, element("h5", {}, head), children);
}
