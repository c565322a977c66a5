// The top of the page: the sentence, what is wrong with the server or the connection, the tab.

import { element, keepingPlace, moment, replaceChildren, setText } from "./elements.js";
import { recentFailure, sentence, tally } from "./model.js";
import { count, grouped } from "./words.js";

const at = (id) => document.getElementById(id);
const shown = new Map();

/** Draws a place anew only when what it says has changed, so that a screen reader is not repeated to. */
function showOnce(place, facts, children) {
  const key = JSON.stringify(facts);
  if (shown.get(place) === key) return;
  shown.set(place, key);
  keepingPlace(() => replaceChildren(at(place), ...children()));
}

/** The sentence, the figures below it, and the tab's title and icon. */
export function showSummary({ engines, details, problems, answeredAt, trouble }, now) {
  if (answeredAt === null) {
    document.title = trouble?.kind === "token" ? "Token needed · Ferry" : trouble === null ? "Ferry" : "? no answer · Ferry";
    return;
  }
  const { calm, parts } = sentence(engines);
  const failure = recentFailure(details.values(), now);
  if (failure !== null) parts.push(...failed(failure));
  const isCalm = calm && failure === null && problems.length === 0;
  const dated = trouble === null ? [] : ["As of ", { since: answeredAt }, ": "];
  const all = [...dated, ...parts];
  showOnce("sentence", [all, isCalm], () => [element("h1", { class: isCalm ? "calm" : "failing" },
    all.map((part) => (typeof part === "string" ? part : moment(part.since, { ago: false }))))]);
  showFigures(engines, details);
  showTab(engines, trouble, isCalm);
}

function failed({ number, newest }) {
  const which = number === 1 ? `Room ${newest.room} failed at ` : `${grouped(number)} rooms failed lately, the last at `;
  return [` ${which}`, { since: newest.at }, ` (${newest.engine}, ${newest.role} ${newest.rank}): ${newest.reason}.`];
}

function showFigures(engines, details) {
  const sum = (field) => engines.reduce((total, engine) => total + engine[field], 0);
  const reports = [...details.values()].flatMap((detail) => detail.reports);
  const [expected, well] = [sum("expected"), sum("present") - sum("unreachable")];
  const figures = [
    [expected, well === expected ? count(expected, "rank") : `${grouped(well)} of ${count(expected, "rank")} are there and answer`],
    [sum("registrations"), count(sum("registrations"), "IO engine")],
    [sum("rooms"), `${count(sum("rooms"), "room")} bound to a rank`],
    [reports.length, `${count(reports.length, "rank actor")} reporting`],
  ].filter(([number]) => number > 0).map(([, text]) => text);
  showOnce("figures", figures, () => figures.map((text) => element("li", {}, text)));
}

function showTab(engines, trouble, isCalm) {
  const { failing, serving, draining } = tally(engines);
  document.title = trouble !== null ? "? no answer · Ferry"
    : failing > 0 ? `✕ ${grouped(failing)} of ${grouped(engines.length)} fail · Ferry`
    : `${isCalm ? "✓" : "✕"} ${grouped(serving + draining)} serve · Ferry`;
  const icon = isCalm && trouble === null ? "/page/icon.svg" : "/page/icon-failing.svg";
  if (at("icon").getAttribute("href") !== icon) at("icon").setAttribute("href", icon);
}

/** What is wrong with the connection, and with the server itself. */
export function showTrouble({ trouble, troubleSince, answeredAt, problems, isFollowing, unreadEvent }) {
  document.body.dataset.connection = trouble === null ? "live" : trouble.kind;
  const words = { token: "token needed", malformed: "answers not understood", refused: "refused" };
  const whileWell = isFollowing ? "live" : "asking now and then";
  setText(at("connection-text"), trouble === null ? whileWell : words[trouble.kind] ?? "not connected");
  at("token").hidden = trouble?.kind !== "token";
  if (trouble?.kind === "token") setText(at("token-text"), `${trouble.message}.`);
  const notices = problems.map((problem) => [element("strong", {}, "The server cannot make changes"), `: ${problem}. It goes on answering from memory.`]);
  if (unreadEvent !== null) notices.push([element("strong", {}, unreadEvent.message), ". The last changes are not complete."]);
  if (trouble !== null && trouble.kind !== "token") notices.unshift(connection(trouble, troubleSince, answeredAt));
  showOnce("notices", [trouble?.message, troubleSince, answeredAt === null, problems, unreadEvent?.message],
    () => notices.map((parts) => element("p", { class: "notice" }, parts)));
}

function connection(trouble, troubleSince, answeredAt) {
  const dated = answeredAt === null ? [" Nothing is known yet."] : [" What stands below is from ", moment(answeredAt, { ago: false }), "."];
  return [element("strong", {}, trouble.message), ", since ", moment(troubleSince, { ago: false }), ".", dated, " This page tries again by itself."];
}
