// The last changes of state, newest first.

import { element, moment, replaceChildren } from "./elements.js";

/** Events that are kept and shown. */
export const MAX_EVENTS = 100;

/** Shows the events; `newest first` is the caller's order. */
export function showEvents(place, events) {
  if (events.length === 0) {
    replaceChildren(place, element("p", { class: "quiet" }, "Nothing has changed since the server started."));
    return;
  }
  replaceChildren(place, element("ol", { class: "events", role: "list" }, events.map(item)));
}

function item(event) {
  return element("li", { class: `event ${event.tone}` },
    element("p", { class: "when" }, moment(event.at)),
    element("p", { class: "what" }, event.engine ? [element("strong", {}, event.engine), " "] : null, event.text));
}
