// The address of a view: `#/tenants/acme?range=24h`. The range stays when the page changes.

import { useEffect, useState } from "./html.js";
import { iso } from "./format.js";

const MINUTE_MS = 60_000;
export const HOUR_MS = 60 * MINUTE_MS, DAY_MS = 24 * HOUR_MS;
export const RANGES_MS = { "1h": HOUR_MS, "24h": DAY_MS, "7d": 7 * DAY_MS, "30d": 30 * DAY_MS };
const LAST_MS = Date.UTC(9999, 0);
const LASTING = ["range", "since", "until"];

// --- the address ---------------------------------------------------------------------------------

export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { steps: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

function decoded(step) {
  try { return decodeURIComponent(step); } catch { return step; }
}

function hashOf(steps, query) {
  const text = query.toString();
  return `#/${steps.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function href(steps, extra = {}) {
  const lasting = [...route().query].filter(([name]) => LASTING.includes(name));
  return hashOf(steps, new URLSearchParams([...lasting, ...Object.entries(extra)]));
}

// Change parameters of this view; an empty value removes one. `isNew`: a step of the history.
export function setQuery(changes, isNew = false) {
  const { steps, query } = route();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  if (isNew) { location.hash = hashOf(steps, query); return; }
  history.replaceState(null, "", hashOf(steps, query));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [now, set] = useState(route);
  useEffect(() => {
    const changed = () => set(route());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return now;
}

// --- the time range ------------------------------------------------------------------------------

// Return the range of a server that has no other chosen: of a young one the last hour, as in a day
// all of it would be at the charts' edge.
export function usualRange({ began_ms: began, at_ms: now }) {
  return began !== null && now - began < 3 * HOUR_MS ? "1h" : "24h";
}

// Return the chosen range. `window()`: its [since, until] now, in milliseconds; `history`: the
// parameters of a history of it.
export function rangeOf(query, usual = "24h") {
  const since = Number(query.get("since")), until = Number(query.get("until"));
  if (since > 0 && until > since && until <= LAST_MS) {
    return { name: "custom", length_ms: until - since, isLive: false,
      window: () => [since, until],
      history: { since: iso(since), until: iso(until), step_ms: stepOf(until - since, since) } };
  }
  const name = Object.hasOwn(RANGES_MS, query.get("range")) ? query.get("range") : usual;
  const length = RANGES_MS[name];
  return { name, length_ms: length, isLive: true,
    window: () => {
      const now = Math.ceil(Date.now() / MINUTE_MS) * MINUTE_MS;
      return [now - length, now];
    },
    history: { range: name, step_ms: stepOf(length, Date.now() - length) } };
}

// Return the parameters of a list or sum over a range.
export function windowOf(range) {
  const [since, until] = range.window();
  return { since: iso(since), until: iso(until) };
}

// Return the bucket of a chart: about a hundred in the range, each of a length that people count
// in. Of what is older than two days the server has whole hours; an hour is to spare.
const BUCKETS_MAX = 125, FINE_MS = 2 * DAY_MS;
const STEPS_MIN = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14_400];
function stepOf(length, since) {
  const isFine = since > Date.now() - FINE_MS + HOUR_MS;
  const steps = STEPS_MIN.map((n) => n * MINUTE_MS).filter((step) => isFine || step >= HOUR_MS);
  return steps.find((step) => length / step <= BUCKETS_MAX) ?? steps[steps.length - 1];
}
