// Makes and replaces parts of the document.
//
// Whatever came from the server becomes a text node or the value of an attribute, never markup:
// there is no place here that parses HTML, and the content security policy forbids one.

import { absolute, clock, duration, iso } from "./words.js";

/** An element with attributes and children. `null` and `false` leave an attribute or child out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** A time of day, and beside it how long ago that was, which `tick` keeps up to date. */
export function moment(seconds, { ago = true } = {}) {
  const time = element("time", { datetime: iso(seconds), title: absolute(seconds) }, clock(seconds));
  return ago ? [time, " ", element("span", { class: "ago", "data-ago": seconds })] : [time];
}

/** How long something has lasted, kept up to date by `tick`. */
export function lasting(seconds) {
  return element("time", { datetime: iso(seconds), title: absolute(seconds), "data-lasting": seconds });
}

/** Writes every shown duration anew. */
export function tick(now, root = document) {
  for (const shown of root.querySelectorAll("[data-ago]")) {
    setText(shown, `${duration(now - Number(shown.dataset.ago))} ago`);
  }
  for (const shown of root.querySelectorAll("[data-lasting]")) {
    setText(shown, duration(now - Number(shown.dataset.lasting)));
  }
}

/** Writes only what differs, so that a screen reader announces only what changed. */
export function setText(shown, text) {
  if (shown.textContent !== text) shown.textContent = text;
}

/** Changes the document, and leaves the keyboard's focus and the scrolled boxes where they were. */
export function keepingPlace(change) {
  const focused = document.activeElement?.id ?? "";
  const scrolled = [...document.querySelectorAll(".scroll[id]")].filter((box) => box.scrollLeft > 0);
  const positions = scrolled.map((box) => [box.id, box.scrollLeft]);
  const result = change();
  for (const [id, left] of positions) {
    const box = document.getElementById(id);
    if (box !== null) box.scrollLeft = left;
  }
  if (focused !== "" && document.activeElement?.id !== focused) {
    document.getElementById(focused)?.focus({ preventScroll: true });
  }
  return result;
}

/** Replaces the children of a place. */
export function replaceChildren(place, ...children) {
  place.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== false));
}

/** Text that only a screen reader says. */
export function spoken(text) {
  return element("span", { class: "spoken" }, text);
}

/** A box that scrolls by itself when the window is narrow, by keyboard too. `name` is unique. */
export function scrolling(name, ...children) {
  return element("div", { class: "scroll", id: `box:${encodeURIComponent(name)}`, tabindex: "0", role: "region", "aria-label": name }, children);
}

/** A table in such a box; the first cell of each row is its head. */
export function table(caption, heads, rows) {
  const head = heads.map((text) => element("th", { scope: "col" }, text));
  const body = rows.map((cells) => element("tr", {}, cells.map((cell, at) =>
    at === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell))));
  return scrolling(caption, element("table", {},
    element("caption", { class: "spoken" }, caption),
    element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, body)));
}
