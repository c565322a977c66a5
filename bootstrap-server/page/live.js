// Follows the server's stream of events, and begins again where it broke off.
//
// The browser's own EventSource cannot send a token, so the stream is read with fetch.

import { send } from "./api.js";

const SHORTEST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5_000;
/** The server sends at least a comment every 10 s; a longer silence means that it is gone. */
const SILENCE_MS = 25_000;

let endPause = () => {};

/**
 * Follows the stream at `path` for as long as the page is open. `onOpen` is called each time that
 * it begins, `onData` with the data of each event, `onLost` when it broke off or never began.
 */
export async function follow(path, { onOpen, onData, onLost }) {
  let pause = SHORTEST_PAUSE_MS;
  for (;;) {
    try {
      await readOnce(path, () => {
        pause = SHORTEST_PAUSE_MS;
        onOpen();
      }, onData);
    } catch {
      // Whoever asks the server next sees why; there is nothing to add here.
    }
    onLost();
    await paused(pause);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

/** Tries again at once, for example because a token was given. */
export function tryNow() {
  endPause();
}

function paused(milliseconds) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    endPause = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

async function readOnce(path, onOpen, onData) {
  const control = new AbortController();
  let watch;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => control.abort(), SILENCE_MS);
  };
  heard();
  try {
    const response = await send(path, { signal: control.signal, headers: { accept: "text/event-stream" } });
    onOpen();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let unread = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const blocks = (unread + value).split("\n\n");
      unread = blocks.pop();
      blocks.map(dataOf).filter((data) => data !== "").forEach(onData);
    }
  } finally {
    clearTimeout(watch);
    control.abort();
  }
}

/** The data of one block of the stream; a comment has none. */
function dataOf(block) {
  return block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
}
