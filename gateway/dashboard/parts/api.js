// Requests to this host with the key of the tab, polling, and the state of the connection.

import { useEffect, useReducer, useRef, useState } from "./html.js";

const KEY = "key";
const EVERY_MS = 5000;

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
  get isMissing() { return this.status === 404 && ["not_found", "not_served"].includes(this.code); }
}

// --- the connection ------------------------------------------------------------------------------

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

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { "X-Trunkline-Request": "dashboard" };
  if (storedKey()) headers.Authorization = `Bearer ${storedKey()}`;
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
  const told = parsed(text);
  if (answer.ok) return told;
  const refused = new Refused(answer.status, told?.error);
  if (refused.isSignedOut) connection.signedOut(refused);
  throw refused;
}

function parsed(text) {
  try { return text ? JSON.parse(text) : null; } catch { return null; }
}

// --- polling -------------------------------------------------------------------------------------

// {data, error, isOld, again}: the answer of a path, asked for again every `every` milliseconds
// while the page is seen. The last answer stays while a new one is on its way. `path` null: none.
export function useData(path, every = EVERY_MS) {
  const [state, set] = useState({ path: null, data: undefined, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    let timer = 0, isOver = false;
    const stop = new AbortController();
    const round = async () => {
      clearTimeout(timer);
      try {
        const data = await ask(path, { signal: stop.signal });
        if (!isOver) set({ path, data, error: null });
      } catch (error) {
        if (isOver) return;
        set((old) => ({ path, error,
          data: error instanceof Refused || !isSame(old.path, path) ? undefined : old.data }));
        if (error instanceof Refused && (error.isMissing || error.isForbidden)) return;
      }
      if (!isOver && every > 0 && !document.hidden) timer = setTimeout(round, every);
    };
    const seen = () => { if (!document.hidden) round(); };
    again.current = round;
    document.addEventListener("visibilitychange", seen);
    round();
    return () => {
      isOver = true;
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path, every]);
  const isMine = path !== null && isSame(state.path, path);
  return { data: isMine ? state.data : undefined, error: isMine ? state.error : null,
    isOld: isMine && state.path !== path, again: () => again.current() };
}

// The same thing at another time: the path before its parameters, and the parameters but the times.
function isSame(a, b) {
  return a !== null && b !== null && timeless(a) === timeless(b);
}
const timeless = (path) => path.replace(/(since|until|range|limit)=[^&]*&?/g, "").replace(/[?&]$/,
  "");
