// The last changes of state, newest first.

import { count } from "./words.js";
import { element, keepingPlace, moment, replaceChildren } from "./elements.js";

/** Events that are kept. */
export const MAX_EVENTS = 200;
/** Changes that are shown before a button asks for more. */
const FIRST_CHANGES = 15;
/** Registrations of one engine in so many seconds are one change. */
const RUN_SECONDS = 60;

/** What kind of thing happened, and how it is marked beside its word. */
const KINDS = {
  registration: { word: "registration", tone: "" },
  generation: { word: "generation", tone: "warn" },
  reachability: { word: "reachability", tone: "warn" },
  operator: { word: "operator", tone: "warn" },
  store: { word: "store", tone: "bad" },
  failure: { word: "failure", tone: "bad" },
};

let showsAll = false;

/** Shows the events, which come newest first. */
export function showEvents(place, events) {
  if (events.length === 0) {
    replaceChildren(place, element("p", { class: "quiet" }, "Nothing has changed since the server started."));
    return;
  }
  const changes = runs(events);
  const shown = showsAll ? changes : changes.slice(0, FIRST_CHANGES);
  const more = changes.length > shown.length && element("button", { type: "button", id: "more:events", class: "more", onclick: () => {
    showsAll = true;
    showEvents(place, events);
  } }, `Show ${changes.length - shown.length} older ones`);
  keepingPlace(() => replaceChildren(place, element("ol", { class: "events", role: "list" }, shown.map(item)), more));
}

/** An engine that starts registers each of its ranks: that is one change, and its last event stands for it. */
function runs(events) {
  const found = [];
  for (const event of events) {
    const run = found.at(-1);
    const continues = run?.kind === "registration" && event.kind === run.kind && event.engine === run.engine && run.at - event.at < RUN_SECONDS;
    if (continues) run.more += 1;
    else found.push({ ...event, more: 0 });
  }
  return found;
}

function item(event) {
  const { word, tone } = KINDS[event.kind] ?? { word: event.kind, tone: "" };
  return element("li", { class: `event ${tone}` },
    element("p", { class: "when" }, moment(event.at), element("span", { class: "kind" }, word)),
    element("p", { class: "what" }, event.engine && element("strong", {}, event.engine), event.engine && " ", event.text,
      event.more > 0 && element("span", { class: "quiet" }, `, and ${count(event.more, "registration")} just before`)));
}
