// An engine's ranks as a grid: one cell a rank, dp, cp, tp and pp on its edges.

import { element, spoken } from "./elements.js";
import { RANK_STATES, grid } from "./model.js";

/** A table with a cell for each rank, and what the marks in it mean. */
export function rankGrid(detail) {
  const { heads, rows } = grid(detail);
  const used = new Set(rows.flatMap((row) => row.cells.map((cell) => cell.state)));
  const named = rows.some((row) => row.name !== "");
  return element("figure", { class: "grid" },
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Ranks of ${detail.name}` },
      element("table", {},
        element("caption", { class: "spoken" }, `Ranks of ${detail.name} by place in the engine`),
        element("thead", {}, element("tr", {},
          named ? element("td", {}) : null,
          heads.map((head) => element("th", { scope: "col" }, head)))),
        element("tbody", {}, rows.map((row) => element("tr", {},
          named ? element("th", { scope: "row" }, row.name) : null,
          row.cells.map(cell)))))),
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
    element("span", { class: "legend", title: means },
      element("span", { class: `cell ${state}`, "aria-hidden": "true" }, mark), word)));
}
