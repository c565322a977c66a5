// The list of engines: problems first, each a row that opens.
//
// Rows are kept and only rebuilt when what they show has changed, so that a thousand engines cost
// little, focus stays where it is and nothing flickers.

import { count, grouped } from "./words.js";
import { element, keepingPlace, moment, replaceChildren, spoken } from "./elements.js";
import { ENGINE_STATES, matches } from "./model.js";
import { engineDetail } from "./detail.js";

/** Rows of one state that are shown before a button asks for more. */
const FIRST_ROWS = 50;
/** A fleet of so few engines is shown opened. */
const OPEN_FLEET = 3;

const rows = new Map();
const groups = new Map();
/** What the reader opened or closed; an engine that is not here follows the rule of `isOpen`. */
const chosen = new Map();
const shownRows = new Map();

/** Whether an engine's row is open: as the reader chose, else in a small fleet, and the first that fails. */
export function isOpen(name, engines) {
  if (chosen.has(name)) return chosen.get(name);
  if (engines.length <= OPEN_FLEET) return true;
  return engines.find((engine) => engine.state === "failing")?.name === name;
}

/**
 * Shows the engines that the filter means. `details` has what is known of opened ones; `opened` is
 * called when the reader opens or closes one, `changed` when more rows are wanted.
 */
export function showEngines(place, { engines, details, filter, opened, changed }) {
  const meant = filter === "" ? engines : engines.filter((engine) => matches(engine, filter));
  // A row that changes its state moves to another group, and the focus in it goes along.
  keepingPlace(() => showGroups(place, meant, { engines, details, opened, changed }));
  forgetOthers(engines);
  return meant.length;
}

function showGroups(place, meant, { engines, details, opened, changed }) {
  const shown = [];
  for (const state of Object.keys(ENGINE_STATES)) {
    const members = meant.filter((engine) => engine.state === state);
    if (members.length > 0) shown.push(group(state, members, { engines, details, opened, changed }));
  }
  if (!sameNodes(place, shown)) replaceChildren(place, ...shown);
}

function group(state, members, { engines, details, opened, changed }) {
  const known = groups.get(state) ?? newGroup(state);
  groups.set(state, known);
  const limit = shownRows.get(state) ?? FIRST_ROWS;
  const number = grouped(members.length);
  if (known.number.textContent !== number) known.number.textContent = number;
  const items = members.slice(0, limit).map((engine) => {
    const open = isOpen(engine.name, engines);
    return row(engine, open, open ? details.get(engine.name) : undefined, opened);
  });
  if (!sameNodes(known.list, items)) replaceChildren(known.list, ...items);
  const rest = members.length - items.length;
  known.more.hidden = rest === 0;
  if (rest > 0) {
    const next = Math.min(rest, 4 * FIRST_ROWS);
    replaceChildren(known.more, element("button", { type: "button", id: `more:${state}`, class: "more", onclick: () => {
      shownRows.set(state, limit + next);
      changed();
    } }, `Show ${next === rest ? `the other ${grouped(rest)}` : `${grouped(next)} of the other ${grouped(rest)}`}`));
  }
  return known.section;
}

function newGroup(state) {
  const number = element("span", { class: "number" });
  const list = element("ul", { class: "engine-list", role: "list" });
  const more = element("div", { hidden: true });
  const { word, mark } = ENGINE_STATES[state];
  const head = element("h3", { id: `group:${state}` }, element("span", { class: `mark ${state}`, "aria-hidden": "true" }, mark),
    `${word[0].toUpperCase()}${word.slice(1)} `, number);
  const section = element("section", { class: "group", "aria-labelledby": `group:${state}` }, head, list, more);
  return { section, number, list, more };
}

function row(engine, open, detail, opened) {
  const known = rows.get(engine.name) ?? { item: element("li", { class: "engine" }), head: "", body: "" };
  rows.set(engine.name, known);
  const head = JSON.stringify([engine, open]);
  const body = open ? JSON.stringify(detail ?? null) : "";
  if (head !== known.head || body !== known.body) {
    const parts = [rowHead(engine, open, opened)];
    if (open) parts.push(rowBody(engine, detail));
    replaceChildren(known.item, ...parts);
    known.item.className = `engine ${engine.state}`;
    Object.assign(known, { head, body });
  }
  return known.item;
}

function rowHead(engine, open, opened) {
  const id = encodeURIComponent(engine.name);
  const { word, mark } = ENGINE_STATES[engine.state];
  const button = element("button", {
    type: "button", class: "engine-head", id: `engine:${id}`, "aria-expanded": String(open), "aria-controls": open ? `detail:${id}` : null,
    onclick: () => {
      chosen.set(engine.name, !open);
      opened();
    },
  },
  element("span", { class: `mark ${engine.state}`, "aria-hidden": "true" }, mark),
  element("span", { class: "name" }, engine.name),
  spoken(`, ${word}, `),
  element("span", { class: "ranks" }, ranksOf(engine)),
  element("span", { class: "fact generation" }, engine.generation === null ? "" : `generation ${engine.generation}`),
  element("span", { class: "fact release" }, engine.release ? `SGLang ${engine.release}` : ""),
  element("span", { class: "fact rooms" }, engine.rooms > 0 ? count(engine.rooms, "room") : ""));
  const parts = [element("h4", {}, button)];
  if (engine.reason) {
    parts.push(element("p", { class: "reason" }, `${engine.reason[0].toUpperCase()}${engine.reason.slice(1)}`,
      engine.since === null ? "" : [", since ", moment(engine.since)]));
  }
  return parts;
}

function ranksOf(engine) {
  if (engine.expected === 0) return "no ranks yet";
  const well = engine.present - engine.unreachable;
  if (well === engine.expected) return count(engine.expected, "rank");
  return `${grouped(well)} of ${count(engine.expected, "rank")}`;
}

function rowBody(engine, detail) {
  const id = `detail:${encodeURIComponent(engine.name)}`;
  if (detail === undefined) return element("p", { class: "quiet detail", id }, "Asking the server …");
  return element("div", { class: "detail", id }, engineDetail(detail));
}

function sameNodes(place, nodes) {
  return place.children.length === nodes.length && nodes.every((node, at) => place.children[at] === node);
}

function forgetOthers(engines) {
  if (rows.size <= engines.length) return;
  const names = new Set(engines.map((engine) => engine.name));
  for (const kept of [rows, chosen]) {
    for (const name of kept.keys()) if (!names.has(name)) kept.delete(name);
  }
}
