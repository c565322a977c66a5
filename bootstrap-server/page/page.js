// The page: asks the server, keeps what it said, and shows it. Everything that is shown comes from
// `state`; answers change `state`, and `show` draws it.

import { ApiError, getJson, keepToken, serverNow } from "./api.js";
import { element, moment, replaceChildren, setText, tick } from "./elements.js";
import { isOpen, showEngines } from "./engines.js";
import { showEvents } from "./events.js";
import { tryNow } from "./live.js";
import { judged, sentence } from "./model.js";
import { readEngine, readEngines } from "./read.js";
import { count, grouped } from "./words.js";

/** Probes and reports change without an event, so the server is also asked now and then. */
const REFRESH_MS = 3_000;
/** Opened engines that are asked for in one round; more wait for the next. */
const DETAILS_AT_ONCE = 16;

const state = {
  engines: [],
  details: new Map(),
  events: [],
  filter: "",
  /** When the server last answered, by its clock; `null` before the first answer. */
  answeredAt: null,
  /** What is wrong with the connection, an `ApiError`; `null` while it works. */
  trouble: null,
  /** When that began. */
  troubleSince: null,
};

const at = (id) => document.getElementById(id);

let asking = false;
let askAgain = false;
let timer;

/** Asks for everything that is shown. One round at a time; what is asked meanwhile follows it. */
async function refresh() {
  if (asking) {
    askAgain = true;
    return;
  }
  asking = true;
  clearTimeout(timer);
  try {
    const path = "/v1/engines";
    state.engines = readEngines(await getJson(path), path).sort((one, other) => one.name.localeCompare(other.name));
    await refreshDetails();
    state.engines = state.engines.map((engine) => judged(engine, state.details.get(engine.name)));
    answered();
  } catch (error) {
    failed(error);
  }
  asking = false;
  show();
  timer = setTimeout(refresh, askAgain ? 0 : REFRESH_MS);
  askAgain = false;
}

async function refreshDetails() {
  const open = state.engines.filter((engine) => state.engines.length <= 64 || engine.state === "failing" || isOpen(engine.name, state.engines)).slice(0, 64);
  const names = new Set(open.map((engine) => engine.name));
  for (const name of state.details.keys()) if (!names.has(name)) state.details.delete(name);
  await Promise.all(open.map(async (engine) => {
    const path = `/v1/engines/${encodeURIComponent(engine.name)}`;
    state.details.set(engine.name, readEngine(await getJson(path), path));
  }));
}

function answered() {
  state.answeredAt = serverNow();
  state.trouble = null;
  state.troubleSince = null;
}

function failed(error) {
  if (!(error instanceof ApiError)) throw error;
  if (state.trouble === null) state.troubleSince = serverNow();
  state.trouble = error;
}

function show() {
  showConnection();
  showSentence();
  const meant = showEngines(at("engine-groups"), {
    engines: state.engines, details: state.details, filter: state.filter, changed: (opened) => {
      show();
      if (opened !== undefined) refresh();
    },
  });
  const all = state.engines.length;
  setText(at("filter-result"), state.filter === "" ? "" : `${grouped(meant)} of ${count(all, "engine")} ${meant === 1 ? "is" : "are"} meant by “${state.filter}”.`);
  showEvents(at("event-list"), state.events);
  tick(serverNow());
}

let shownSentence = "";

function showSentence() {
  if (state.answeredAt === null) return;
  const { calm, parts } = sentence(state.engines);
  const dated = state.trouble === null ? [] : ["As of ", { since: state.answeredAt }, ": "];
  const all = [...dated, ...parts];
  const key = JSON.stringify(all);
  if (key !== shownSentence) {
    shownSentence = key;
    const head = element("h1", { class: calm ? "calm" : "failing" },
      all.map((part) => (typeof part === "string" ? part : moment(part.since, { ago: false }))));
    replaceChildren(at("sentence"), head);
  }
  showTab(calm);
}

function showTab(calm) {
  const failing = state.engines.filter((engine) => engine.state === "failing").length;
  const all = grouped(state.engines.length);
  document.title = state.trouble !== null ? "? no answer · Ferry" : failing > 0 ? `✕ ${failing} of ${all} fail · Ferry` : `✓ ${all} serve · Ferry`;
  const icon = calm ? "/page/icon.svg" : "/page/icon-failing.svg";
  if (at("icon").getAttribute("href") !== icon) at("icon").setAttribute("href", icon);
}

function showConnection() {
  const { trouble } = state;
  const word = trouble === null ? "live" : trouble.kind === "token" ? "token needed" : "not connected";
  document.body.dataset.connection = trouble === null ? "live" : trouble.kind;
  setText(at("connection-text"), word);
  at("token").hidden = trouble?.kind !== "token";
  if (trouble?.kind === "token") setText(at("token-text"), `${trouble.message}.`);
  showNotice(trouble === null || trouble.kind === "token" ? null : trouble);
}

let shownNotice = "";

function showNotice(trouble) {
  const key = trouble === null ? "" : `${trouble.message} ${state.troubleSince}`;
  if (key === shownNotice) return;
  shownNotice = key;
  if (trouble === null) {
    replaceChildren(at("notices"));
    return;
  }
  const dated = state.answeredAt === null ? "Nothing is known yet. " : ["What stands below is from ", moment(state.answeredAt, { ago: false }), ". "];
  replaceChildren(at("notices"), element("p", { class: "notice" },
    element("strong", {}, trouble.message), ", since ", moment(state.troubleSince, { ago: false }), ". ", dated,
    "This page tries again by itself."));
}

at("filter").addEventListener("input", (event) => {
  state.filter = event.target.value.trim();
  show();
});

document.addEventListener("keydown", (event) => {
  const inField = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey && !event.altKey) {
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
  refresh();
  tryNow();
});

setInterval(() => tick(serverNow()), 1_000);
refresh();
