// An engine's ranks as a grid: one cell a rank, dp, cp, tp and pp on its edges.

import { element, scrolling, spoken } from "./elements.js";
import { RANK_STATES, grid } from "./model.js";

/** A table with a cell for each rank, and what the marks in it mean. */
export function rankGrid(detail) {
  const { heads, rows } = grid(detail);
  const used = new Set(rows.flatMap((row) => row.cells.map((cell) => cell.state)));
  const hasNames = rows.some((row) => row.name !== "");
  const head = element("tr", {}, hasNames && element("td"), heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((row) => element("tr", {}, hasNames && element("th", { scope: "row" }, row.name), row.cells.map(cell)));
  return element("figure", { class: "grid" },
    scrolling(`Grid of ${detail.name}`, element("table", {},
      element("caption", { class: "spoken" }, `Ranks of ${detail.name} by their place in the engine`),
      element("thead", {}, head), element("tbody", {}, body))),
    legend(used));
}

function cell(rank) {
  const { word, mark } = RANK_STATES[rank.state];
  const place = `dp${rank.dp} cp${rank.cp} tp${rank.tp} pp${rank.pp}`;
  const address = rank.instance ? `, ${rank.instance}` : "";
  return element("td", { title: `${place}: ${word}${address}` },
    element("span", { class: `cell ${rank.state}`, "aria-hidden": "true" }, mark), spoken(word));
}

function legend(used) {
  const states = Object.entries(RANK_STATES).filter(([state]) => used.has(state));
  return element("figcaption", {}, states.map(([state, { word, mark, means }]) =>
    element("span", { class: "legend" },
      element("span", { class: `cell ${state}`, "aria-hidden": "true" }, mark), state === "present" ? word : `${word}: ${means}`)));
}
