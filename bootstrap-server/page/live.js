// Follows the server's stream of events, and begins again where it broke off.
//
// The browser's own EventSource cannot send a token, so the stream is read with fetch.

import { ApiError, send } from "./api.js";

const SHORTEST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5_000;
/** The server sends at least a comment more often than this; silence means that it is gone. */
const SILENCE_MS = 20_000;

/**
 * Follows `path` for as long as the page is open. `onOpen` is called when the stream is there,
 * `onEvent` with each event's type and data, `onLost` with an `ApiError` and the pause in
 * milliseconds before the next try.
 */
export async function follow(path, { onOpen, onEvent, onLost }) {
  let pause = SHORTEST_PAUSE_MS;
  let lastId = null;
  for (;;) {
    try {
      await readOnce(path, lastId, {
        onOpen: () => {
          pause = SHORTEST_PAUSE_MS;
          onOpen();
        },
        onEvent: (event) => {
          lastId = event.id ?? lastId;
          onEvent(event);
        },
      });
      onLost(new ApiError("unreachable", "The server ended the connection"), pause);
    } catch (error) {
      onLost(error instanceof ApiError ? error : new ApiError("unreachable", "The connection broke off"), pause);
    }
    await new Promise((resolve) => retry(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

let wake = () => {};

function retry(resolve, pause) {
  const timer = setTimeout(resolve, pause);
  wake = () => {
    clearTimeout(timer);
    resolve();
  };
}

/** Ends the pause between two tries, for example when a token was given. */
export function tryNow() {
  wake();
}

async function readOnce(path, lastId, { onOpen, onEvent }) {
  const aborted = new AbortController();
  let watchdog = setTimeout(() => aborted.abort(), SILENCE_MS);
  const heard = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => aborted.abort(), SILENCE_MS);
  };
  try {
    const headers = lastId === null ? {} : { "last-event-id": lastId };
    const response = await send(path, { signal: aborted.signal, headers: { accept: "text/event-stream", ...headers } });
    const type = response.headers.get("content-type") ?? "";
    if (!type.startsWith("text/event-stream")) {
      await response.body?.cancel();
      throw new ApiError("malformed", `The server's answer to GET ${path} cannot be read: it is no stream of events`);
    }
    heard();
    onOpen();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let unread = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      unread += value;
      const blocks = unread.split("\n\n");
      unread = blocks.pop();
      blocks.map(parseBlock).filter((event) => event.data !== null).forEach(onEvent);
    }
  } finally {
    clearTimeout(watchdog);
    aborted.abort();
  }
}

/** One block of a stream: its id, type and data. Comments have no data. */
export function parseBlock(block) {
  const event = { id: null, type: "message", data: null };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon === 0) continue;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") event.data = event.data === null ? value : `${event.data}\n${value}`;
    else if (field === "event") event.type = value;
    else if (field === "id") event.id = value;
  }
  return event;
}
