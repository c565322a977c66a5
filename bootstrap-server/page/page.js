// The page: asks the server, keeps what it said in `state`, and shows that. Data flows one way:
// answers (api.js, live.js), facts (read.js), meaning (model.js), then what draws them.

import { ApiError, getJson, keepToken, parsed, serverNow } from "./api.js";
import { isOpen, showEngines } from "./engines.js";
import { MAX_EVENTS, showEvents } from "./events.js";
import { setText, tick } from "./elements.js";
import { follow, tryNow } from "./live.js";
import { inOrder, judged } from "./model.js";
import { showPairs } from "./pairs.js";
import { readEngine, readEngines, readEvent, readReadiness } from "./read.js";
import { showSummary, showTrouble } from "./summary.js";
import { count, grouped } from "./words.js";

/** Reports and probes change without an event, so the server is also asked now and then. */
const REFRESH_MS = 4_000;
/** While it does not answer it is asked more often. */
const RETRY_MS = 1_500;
/** Events come in crowds, for example when an engine starts; one round serves them all. */
const CROWD_MS = 200;
/** Of so many engines everything is asked for; of more, only what is opened or fails. */
const SMALL_FLEET = 48;
/** Engines of one page of the list. */
const LIST_LIMIT = 1_000;
const STREAM = "/v1/events/stream?since=0";

const state = {
  engines: [],
  details: new Map(),
  /** Newest first. */
  events: [],
  /** Why the server cannot make changes, in its words. */
  problems: [],
  filter: "",
  /** When the server last answered, by its clock; `null` before the first answer. */
  answeredAt: null,
  /** What is wrong with the connection, an `ApiError`; `null` while it works. */
  trouble: null,
  /** When that began. */
  troubleSince: null,
  /** Whether changes are told as they happen; otherwise they are seen when the server is asked. */
  isFollowing: false,
  /** An event that could not be read, an `ApiError`. */
  unreadEvent: null,
};

const at = (id) => document.getElementById(id);
let asking = false;
let timer;

/** Asks for everything that is shown, and then again after a while. */
async function refresh() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    await askAll();
    state.answeredAt = serverNow();
    state.trouble = null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (state.trouble === null) state.troubleSince = serverNow();
    state.trouble = error;
  } finally {
    asking = false;
    refreshIn(state.trouble === null ? REFRESH_MS : RETRY_MS);
  }
  show();
}

function refreshIn(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(refresh, milliseconds);
}

async function askAll() {
  const ready = "/v1/health/ready";
  const problems = readReadiness(await getJson(ready, 503), ready);
  const engines = await askEngines();
  const details = await askDetails(engines);
  Object.assign(state, { problems, details, engines: inOrder(engines.map((engine) => judged(engine, details.get(engine.name)))) });
}

async function askEngines() {
  const engines = [];
  let after = "";
  do {
    const path = `/v1/engines?limit=${LIST_LIMIT}${after}`;
    const page = readEngines(await getJson(path), path);
    engines.push(...page.engines);
    after = page.next === null ? "" : `&after=${encodeURIComponent(page.next)}`;
  } while (after !== "");
  return engines;
}

async function askDetails(engines) {
  const known = inOrder(engines.map((engine) => judged(engine)));
  const isWanted = (engine) => known.length <= SMALL_FLEET || isOpen(engine.name, known);
  const wanted = known.filter(isWanted).slice(0, SMALL_FLEET);
  const asked = await Promise.all(wanted.map(async ({ name }) => {
    const path = `/v1/engines/${encodeURIComponent(name)}`;
    return [name, readEngine(await getJson(path), path)];
  }));
  return new Map(asked);
}

function show() {
  showTrouble(state);
  showSummary(state, serverNow());
  const details = [...state.details.values()];
  showPairs(at("pair-list"), details, show);
  setText(at("pair-scope"), state.engines.length > SMALL_FLEET ? "Of the opened engines, because this fleet is large." : "");
  const opened = () => {
    show();
    refreshIn(0);
  };
  const meant = showEngines(at("engine-groups"), { ...state, opened, changed: show });
  setText(at("filter-result"), state.filter === "" ? ""
    : `${grouped(meant)} of ${count(state.engines.length, "engine")} ${meant === 1 ? "matches" : "match"} “${state.filter}”.`);
  tick(serverNow());
}

let eventsDue;

function showEventsSoon() {
  clearTimeout(eventsDue);
  eventsDue = setTimeout(() => {
    showEvents(at("event-list"), state.events);
    tick(serverNow(), at("event-list"));
  }, CROWD_MS / 2);
}

follow(STREAM, {
  // The whole history comes first: the server may be another process than before.
  onOpen: () => {
    Object.assign(state, { events: [], isFollowing: true, unreadEvent: null });
    showEventsSoon();
    refreshIn(CROWD_MS);
  },
  onData: (data) => {
    try {
      state.events.unshift(readEvent(parsed(data, STREAM), STREAM));
      state.events.length = Math.min(state.events.length, MAX_EVENTS);
    } catch (error) {
      state.unreadEvent = error;
    }
    showEventsSoon();
    refreshIn(CROWD_MS);
  },
  onLost: () => {
    state.isFollowing = false;
    refreshIn(0);
  },
});

at("filter").addEventListener("input", (event) => {
  state.filter = event.target.value.trim();
  show();
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    at("filter").focus();
  } else if (event.key === "Escape" && event.target === at("filter")) {
    at("filter").value = "";
    state.filter = "";
    show();
  }
});

at("token").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(at("token-field").value);
  at("token-field").value = "";
  refreshIn(0);
  tryNow();
});

setInterval(() => tick(serverNow()), 1_000);
refresh();
