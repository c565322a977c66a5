// Asks the admin API, and says plainly why an answer did not come.

const TOKEN_KEY = "ferry-admin-token";
const TIMEOUT_MS = 10_000;

/** Why there is no answer. `kind` is `token`, `unreachable`, `refused` or `malformed`. */
export class ApiError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** Keeps the reader's token until the browser's tab is closed. */
export function keepToken(token) {
  sessionStorage.setItem(TOKEN_KEY, token);
}

/** Seconds by which the server's clock is ahead of the browser's: durations are told by the server's. */
let clockAhead = 0;

/** The server's time, in seconds since 1970. */
export function serverNow() {
  return Date.now() / 1000 + clockAhead;
}

function noteClock(response) {
  const said = Date.parse(response.headers.get("date") ?? "") / 1000;
  if (Number.isNaN(said)) return;
  const ahead = said - Date.now() / 1000;
  // The header has whole seconds, and the answer was under way for a while.
  clockAhead = Math.abs(ahead) < 2 ? 0 : ahead;
}

/** Sends a request with the token. The answer is a response that is no error. */
export async function send(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const authorization = token === null ? {} : { authorization: `Bearer ${token}` };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers: { ...options.headers, ...authorization } });
  } catch (error) {
    if (options.signal?.aborted && error.name === "AbortError") throw error;
    throw new ApiError("unreachable", "The server does not answer");
  }
  noteClock(response);
  if (response.ok || response.status === options.expected) return response;
  if (response.status === 401 || response.status === 403) {
    throw new ApiError("token", token === null ? "The server asks for its admin token" : "The server refused this token");
  }
  throw new ApiError("refused", `GET ${path} was answered with status ${response.status}${await reason(response)}`);
}

async function reason(response) {
  try {
    const { message } = await response.json();
    return typeof message === "string" ? `: ${message}` : "";
  } catch {
    return "";
  }
}

/** A JSON document. One status beside 200 may be `expected`. */
export async function getJson(path, expected) {
  const response = await send(path, { signal: AbortSignal.timeout(TIMEOUT_MS), expected });
  let text;
  try {
    text = await response.text();
  } catch {
    throw new ApiError("unreachable", "The server's answer broke off");
  }
  return parsed(text, path);
}

/** What a text of JSON says. */
export function parsed(text, path) {
  try {
    return JSON.parse(text);
  } catch {
    throw malformed(path, "it is no JSON");
  }
}

/** For an answer that is not what the API promises. */
export function malformed(path, what) {
  return new ApiError("malformed", `The server's answer to GET ${path} cannot be read: ${what}`);
}
