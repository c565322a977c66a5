// Who moves state to whom, how, and with which versions.

import { bytes, count, grouped, listed } from "./words.js";
import { element, replaceChildren, table } from "./elements.js";

/** Pairs that are shown before a button asks for more. */
const FIRST_PAIRS = 6;

let showsAll = false;

/**
 * The pairs of an engine: its prefill ranks, and the decode ranks of one host. What they report is
 * joined with what they registered, because a stock SGLang peer registers and never reports.
 */
export function pairsOf(detail) {
  const reported = new Map(detail.reports.map((report) => [report.key, report]));
  const prefills = detail.reports.filter((report) => report.role === "prefill");
  const decodes = new Map();
  for (const { key, role, instance, release, reachable } of detail.registrations) {
    if (role === "decode") decodes.set(key, { key, instance, release, reachable, report: reported.get(key) });
  }
  for (const report of detail.reports) {
    if (report.role === "decode" && !decodes.has(report.key)) decodes.set(report.key, { key: report.key, instance: report.instance, reachable: null, report });
  }
  const hosts = Map.groupBy(decodes.values(), ({ instance }) => hostOf(instance));
  return [...hosts].map(([host, members]) => pair(detail, prefills, host, members)).sort((one, other) => other.troubles.length - one.troubles.length);
}

function hostOf(instance) {
  return instance.slice(0, Math.max(instance.lastIndexOf(":"), 0));
}

function pair(detail, prefills, host, members) {
  const keys = new Set(members.map((member) => member.key));
  const reports = members.map((member) => member.report).filter((report) => report !== undefined);
  const versions = { prefill: distinct(prefills, "version"), decode: distinct(reports, "version") };
  const releases = { prefill: [detail.release].filter(Boolean), decode: distinct(members, "release") };
  // The sender counts, and does not tell its peers apart.
  const senders = prefills.filter(({ peers }) => peers.some(({ key }) => keys.has(key)));
  const failures = sum(senders, "failures");
  const troubles = [];
  const gone = members.filter((member) => member.reachable === false).length;
  if (gone > 0) troubles.push(`${count(gone, "decode rank")} ${gone === 1 ? "does" : "do"} not answer`);
  const stale = reports.filter((report) => report.stale).length;
  if (stale > 0) troubles.push(`${count(stale, "decode rank")} stopped reporting`);
  if (differ(versions) || !compatible(releases)) troubles.push("versions differ");
  if (failures > 0) troubles.push(count(failures, "failed transfer"));
  return {
    engine: detail.name, host, ranks: members.length, versions, releases, troubles,
    transports: transports(keys, prefills, reports),
    bytes: sum(senders, "bytes"),
    sendsElsewhere: senders.some(({ peers }) => peers.some(({ key }) => !keys.has(key))),
    reporting: reports.length + senders.length,
  };
}

/** How many sessions use each transport. Both ends may report one; it counts once. */
function transports(keys, prefills, decodes) {
  const sessions = new Map();
  const note = (one, other, transport) => sessions.set([one, other].sort().join("\n"), transport);
  prefills.forEach(({ key, peers }) => peers.filter((peer) => keys.has(peer.key)).forEach((peer) => note(key, peer.key, peer.transport)));
  decodes.forEach(({ key, peers }) => peers.forEach((peer) => note(key, peer.key, peer.transport)));
  return new Map([...Map.groupBy(sessions.values(), (transport) => transport)].map(([transport, all]) => [transport, all.length]));
}

/** Whether one release can be meant by all: they are told by what they send, `0.5.22 or later`. */
function compatible({ prefill, decode }) {
  const spans = [...prefill, ...decode].map(spanOf);
  const first = Math.max(0, ...spans.map(([from]) => from));
  return spans.every(([, to]) => to >= first);
}

/** The first and the last release of `0.5.21`, `0.5.17 to 0.5.20` or `0.5.22 or later`, as numbers. */
function spanOf(text) {
  const found = [...text.matchAll(/(\d+)\.(\d+)\.(\d+)/g)].map(([, major, minor, patch]) => (Number(major) * 1000 + Number(minor)) * 1000 + Number(patch));
  if (found.length === 0) return [0, Infinity];
  return [found[0], text.endsWith("or later") ? Infinity : found.at(-1)];
}

function distinct(members, field) {
  return [...new Set(members.map((member) => member[field]).filter(Boolean))].sort();
}

function sum(members, field) {
  return members.reduce((total, member) => total + member[field], 0);
}

function differ({ prefill, decode }) {
  return new Set([...prefill, ...decode]).size > 1;
}

/** Shows the pairs of all engines whose details are known. */
export function showPairs(place, details, changed) {
  const pairs = details.flatMap(pairsOf).sort((one, other) => other.troubles.length - one.troubles.length);
  if (pairs.length === 0) {
    replaceChildren(place, element("p", { class: "quiet" }, "No decode engine has registered with a prefill engine."));
    return;
  }
  const shown = showsAll ? pairs : pairs.slice(0, FIRST_PAIRS);
  const more = pairs.length > shown.length && element("button", { type: "button", id: "more:pairs", class: "more", onclick: () => {
    showsAll = true;
    changed();
  } }, `Show all ${grouped(pairs.length)} pairs`);
  replaceChildren(place, table("Pairs of prefill and decode engines",
    ["Prefill engine", "Transport", "Decode engine", "Sent", "Trouble"], shown.map(row)), more);
}

function row(pair) {
  const { engine, host, ranks, versions, releases, troubles } = pair;
  return [
    side(engine, "", versions.prefill, releases.prefill),
    transportOf(pair),
    side(host, count(ranks, "rank"), versions.decode, releases.decode),
    pair.reporting === 0 ? "—" : [bytes(pair.bytes), pair.sendsElsewhere && element("span", { class: "below" }, "to all its pairs")],
    troubles.length === 0 ? element("span", { class: "quiet" }, "none")
      : element("span", { class: "trouble" }, element("span", { "aria-hidden": "true" }, "✕ "), troubles.join(", ")),
  ];
}

/** One side: its name, and below it what it runs. */
function side(name, size, own, releases) {
  const versions = [];
  if (releases.length > 0) versions.push(`SGLang ${listed(releases)}`);
  if (own.length > 0) versions.push(`Ferry ${listed(own)}`);
  return [element("span", { class: "name" }, name), ` ${size}`,
    element("span", { class: "below" }, versions.length === 0 ? "version not reported" : versions.join(", "))];
}

function transportOf({ transports: used, reporting }) {
  if (used.size === 0) return element("span", { class: "quiet" }, reporting === 0 ? "not reported" : "no session yet");
  return [...used].map(([transport, sessions]) =>
    element("span", { class: "transport" }, element("b", {}, transport), element("span", { class: "below" }, count(sessions, "session"))));
}
