// Makes and replaces parts of the document.
//
// Whatever came from the server becomes a text node or the value of an attribute, never markup:
// there is no place here that parses HTML, and the content security policy forbids one.

import { absolute, clock, duration, iso } from "./words.js";

/** An element with attributes and children. `null` and `false` leave an attribute or child out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return fill(made, attributes, children);
}

/** As `element`, for SVG. */
export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(made, attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") made.addEventListener("click", value);
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

/** Changes the document, and then puts the keyboard's focus back on the element of the same id. */
export function keepingFocus(change) {
  const focused = document.activeElement?.id ?? "";
  const result = change();
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

/** A table in a box that scrolls by itself when the window is narrow. */
export function table(caption, heads, rows, attributes = {}) {
  const head = heads.map((text) => element("th", { scope: "col" }, text));
  const body = rows.map((cells) =>
    element("tr", {}, cells.map((cell, at) =>
      at === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell))));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, ...attributes },
    element("table", {},
      element("caption", { class: "spoken" }, caption),
      element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, body)));
}
