// What an opened engine shows: its grid of ranks, its peers, its components, its facts.

import { bytes, grouped } from "./words.js";
import { element, moment, table } from "./elements.js";
import { RANK_STATES, components } from "./model.js";
import { rankGrid } from "./ranks.js";

/** Ranks in need of a look that are listed; the grid shows all of them. */
const LISTED_RANKS = 24;

/** The parts of an opened engine. */
export function engineDetail(detail) {
  const shown = [facts(detail)];
  if (detail.generation === null) {
    shown.unshift(element("p", { class: "quiet" }, "No rank has registered yet. Ranks register with PUT /route at this engine's port."));
  } else {
    shown.unshift(rankGrid(detail), troubled(detail));
  }
  shown.push(peers(detail), componentTable(detail), allRanks(detail));
  return shown;
}

function troubled(detail) {
  const unwell = [...detail.missing, ...detail.ranks.filter((rank) => !["present", "unprobed"].includes(rank.state))];
  if (unwell.length === 0) return null;
  const rows = unwell.slice(0, LISTED_RANKS).map((rank) => [
    rank.name,
    stateOf(rank.state),
    rank.instance ?? "—",
    rank.since ? moment(rank.since) : "—",
  ]);
  const rest = Math.max(detail.missingCount - detail.missing.length, 0) + unwell.length - rows.length;
  return part("Ranks that need a look",
    table(`Ranks of ${detail.name} that need a look`, ["Rank", "State", "Address", "Since"], rows),
    rest > 0 ? element("p", { class: "quiet" }, `And ${grouped(rest)} more.`) : null);
}

function stateOf(state) {
  const { word, mark } = RANK_STATES[state];
  return element("span", { class: `rank-state ${state}` }, element("span", { class: `cell ${state}`, "aria-hidden": "true" }, mark), word);
}

function facts(detail) {
  const { topology } = detail;
  const pairs = [];
  if (detail.generation !== null) {
    pairs.push(["Generation", [`${detail.generation}, began `, ...moment(detail.beganAt)]]);
    pairs.push(["Sizes", ["dp", "cp", "tp", "pp"].map((name) => `${name} ${detail.sizes[name]}`).join(" × ")]);
    pairs.push(["SGLang", detail.release]);
    pairs.push(["Pages", `${topology.page_size} tokens, ${topology.kv_cache_dtype}${topology.kv_layout ? `, ${topology.kv_layout}` : ""}`]);
    pairs.push(["Decode allocates", topology.decode_allocation_policy.replaceAll("_", " ")]);
  }
  return element("dl", { class: "facts" }, pairs.map(([term, text]) =>
    element("div", {}, element("dt", {}, term), element("dd", {}, text))));
}

function peers(detail) {
  if (detail.registrations.length === 0) return null;
  const rows = detail.registrations.map((registration) => [
    element("span", { class: "key" }, registration.key),
    registration.role,
    String(registration.rank),
    registration.instance,
    registration.reachable === false ? stateOf("unreachable") : registration.reachable ? stateOf("present") : stateOf("unprobed"),
    registration.release ?? "—",
    moment(registration.registeredAt),
  ]);
  return part("Registered io engines",
    table(`Io engines registered with ${detail.name}`, ["Engine key", "Role", "Rank", "Address", "State", "SGLang", "Since"], rows));
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
    table(`Components of ${detail.name}`, ["Component", "Role", "Ranks", "Tensors each", "Item", "Layers", "Size in all"], rows));
}

/** One value, or the smallest and the largest. */
function span(numbers, shown = grouped) {
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  return least === most ? shown(least) : `${shown(least)} to ${shown(most)}`;
}

function allRanks(detail) {
  if (detail.ranks.length === 0) return null;
  const rows = detail.ranks.map((rank) => [rank.name, stateOf(rank.state), rank.instance, rank.release, moment(rank.registeredAt)]);
  return element("details", {},
    element("summary", { id: `ranks:${encodeURIComponent(detail.name)}` }, `Every registered rank (${grouped(rows.length)})`),
    table(`Registered ranks of ${detail.name}`, ["Rank", "State", "Address", "SGLang", "Registered"], rows));
}

function part(head, ...children) {
  return element("section", { class: "part" }, element("h5", {}, head), children);
}
