// Requests to this host with the key of the tab, polling, and the state of the connection.

import { useEffect, useReducer, useRef, useState } from "./html.js";
import { isKnown } from "./format.js";

const KEY = "key";
export const POLL_MS = 5000, SLOW_POLL_MS = 15_000;
const ANSWER_MS = 60_000, PAGE_MAX = 1000, PAGES_MAX = 20;

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export function keepKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

// An answer that is an error: its status, stable code and message.
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? "";
    this.param = error?.param ?? null;
  }
  get isSignedOut() { return this.status === 401; }
  get isForbidden() { return this.status === 403; }
  // The server has no answer now: the same request may get one later.
  get isPassing() { return this.status === 429 || this.status >= 500; }
  get isMissing() { return this.status === 404 && ["not_found", "not_served"].includes(this.code); }
}

// --- the connection ------------------------------------------------------------------------------

// `since`: when the server was lost, in milliseconds, or null. `signedOut(error)`: called at a 401.
export const connection = { since: null, listeners: new Set(), signedOut: () => {} };

function setLost(isLost) {
  if (isLost === (connection.since !== null)) return;
  connection.since = isLost ? Date.now() : null;
  for (const tell of connection.listeners) tell();
}

export function useConnection() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    connection.listeners.add(again);
    return () => connection.listeners.delete(again);
  }, []);
  return connection.since;
}

// --- requests ------------------------------------------------------------------------------------

// Return a path with its parameters; those that are empty or unknown are left out.
export function address(path, parameters) {
  const given = Object.entries(parameters).filter(([, v]) => isKnown(v) && v !== "");
  return `${path}${path.includes("?") ? "&" : "?"}${new URLSearchParams(given)}`;
}

// Return the answer's JSON. Throws Refused for an error, and fetch's own errors without an answer;
// a question has none after a minute.
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { "X-Trunkline-Request": "dashboard" }, key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (method === "GET") {
    const ends = [signal, AbortSignal.timeout(ANSWER_MS)].filter(Boolean);
    signal = AbortSignal.any(ends);
  }
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer, text;
  try {
    answer = await fetch(path, { method, headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body) });
    text = await answer.text();
  } catch (error) {
    if (error.name !== "AbortError") setLost(true);
    throw error;
  }
  setLost(false);
  const found = parsed(text);
  if (answer.ok && found !== undefined) return found;
  const refused = answer.ok
    ? new Refused(502, { message: "The answer is no JSON: it is not this server's." })
    : new Refused(answer.status, found?.error);
  // An answer to an earlier key says nothing of the present one.
  if (refused.isSignedOut && key === storedKey()) connection.signedOut(refused);
  throw refused;
}

// Return a text's value; undefined if it is no JSON.
function parsed(text) {
  try { return JSON.parse(text); } catch { return undefined; }
}

// Return the whole of a list that the server gives in pages, as one page: `name` of its rows, each
// after the `id` of the one before. `has_more`: it is longer than PAGES_MAX pages.
const askRows = (name, id) => async (path, options) => {
  const rows = [];
  for (let pages = 1, after = null; ; pages += 1) {
    const page = await ask(address(path, { limit: PAGE_MAX, after }), options);
    rows.push(...page[name]);
    if (!page.has_more || pages === PAGES_MAX) return { ...page, [name]: rows };
    after = rows.at(-1)[id];
  }
};
const KEYS = askRows("keys", "key_id"), TENANTS = askRows("tenants", "name");
// As `useData`, of all keys of a path, and of all tenants.
export const useKeys = (path) => useData(path, SLOW_POLL_MS, KEYS);
export const useTenants = () => useData("/admin/v1/tenants", SLOW_POLL_MS, TENANTS);

// Return {data, error, isOld, again}: the answer of a path, asked for again every `every`
// milliseconds while the page is seen; 0 asks once, a `path` of null never. The last answer stays
// while a new one is on its way. `again()` asks now. `read`: how the path is asked.
export function useData(path, every = POLL_MS, read = ask) {
  const [state, set] = useState({ path: null, data: undefined, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    let timer = 0, stop = new AbortController();
    const round = async () => {
      // One request and one timer at a time: an older answer that comes later must not win.
      clearTimeout(timer);
      stop.abort();
      stop = new AbortController();
      const { signal } = stop;
      try {
        const data = await read(path, { signal });
        if (signal.aborted) return;
        set({ path, data, error: null });
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error instanceof Refused;
        set((old) => ({ path, error,
          data: isRefused || !isSame(old.path, path) ? undefined : old.data }));
        if (isRefused && (error.isMissing || error.isForbidden)) return;
      }
      if (every > 0 && !document.hidden) timer = setTimeout(round, every);
    };
    const seen = () => { if (!document.hidden) round(); };
    again.current = round;
    document.addEventListener("visibilitychange", seen);
    round();
    return () => {
      again.current = () => {};
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, every]);
  const isMine = isSame(state.path, path);
  return { data: isMine ? state.data : undefined, error: isMine ? state.error : null,
    isOld: isMine && state.path !== path, again: () => again.current() };
}

// Whether two paths ask for the same thing at another time, or for more or less of it.
const OF_TIME = ["since", "until", "range", "step_ms", "limit"];
function isSame(a, b) {
  const [one, other] = [a, b].map((path) => {
    const url = new URL(path ?? "", location.origin);
    for (const name of OF_TIME) url.searchParams.delete(name);
    return url.href;
  });
  return a !== null && b !== null && one === other;
}
