// The address of a view: `#/tenants/acme?range=24h`. The range stays when the page changes.

import { useEffect, useState } from "./html.js";

export const RANGES = { "1h": 3600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000 };
const LASTING = ["range", "since", "until"];
const YOUNG_MS = 3 * 3_600_000;
let usual = "24h";

// Show the last hour, unless another range is chosen, of a server that has begun lately: in a day
// all of it would be at the chart's edge.
export function setUsualRange(beganMs, nowMs) {
  usual = beganMs !== null && nowMs - beganMs < YOUNG_MS ? "1h" : "24h";
}

export function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { steps: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(query) };
}

function decoded(step) {
  try { return decodeURIComponent(step); } catch { return step; }
}

export function href(steps, extra = {}) {
  const query = new URLSearchParams();
  const now = route().query;
  for (const name of LASTING) if (now.has(name)) query.set(name, now.get(name));
  for (const [name, value] of Object.entries(extra)) query.set(name, value);
  const text = query.toString();
  return `#/${steps.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

// Change parameters of this view; an empty value removes one.
export function setQuery(changes, isNew = false) {
  const { steps, query } = route();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  const text = query.toString();
  const hash = `#/${steps.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
  if (isNew) { location.hash = hash; return; }
  history.replaceState(null, "", hash);
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

// The chosen time range. `query`: for the history; `window(now)`: [since, until] in milliseconds.
export function rangeOf(query) {
  const since = Number(query.get("since")), until = Number(query.get("until"));
  if (since > 0 && until > since) {
    const text = `since=${iso(since)}&until=${iso(until)}&step_ms=${stepOf(until - since)}`;
    return { name: "custom", seconds: (until - since) / 1000, query: text, isLive: false,
      window: () => [since, until] };
  }
  const name = query.get("range") in RANGES ? query.get("range") : usual;
  const length = RANGES[name];
  return { name, seconds: length, query: `range=${name}&step_ms=${stepOf(length * 1000)}`,
    isLive: true,
    window: () => {
      const now = Math.ceil(Date.now() / 60_000) * 60_000;
      return [now - length * 1000, now];
    } };
}
// The bucket of a chart: about a hundred in the range, each of a length that people count in.
const MINUTE_MS = 60_000, BUCKETS = 125;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 7200, 14_400];
function stepOf(length) {
  const minutes = STEPS.find((one) => length / (one * MINUTE_MS) <= BUCKETS)
    ?? STEPS[STEPS.length - 1];
  return minutes * MINUTE_MS;
}
export const iso = (at) => new Date(at).toISOString();

export function windowQuery(range) {
  const [since, until] = range.window();
  return `since=${iso(since)}&until=${iso(until)}`;
}
