// The pieces of every page: panels, tiles, bars, chips, and the states of data that is not there.

import { html } from "./html.js";
import { Refused, useConnection } from "./api.js";
import { NONE, clockSeconds, share } from "./format.js";
import { href } from "./route.js";
import { Sparkline } from "./sparkline.js";

export function Panel({ title, note, tools, wide, children }) {
  return html`<section class=${wide ? "panel wide" : "panel"}>
    <div class="head"><h2>${title}</h2><div class="tools">${tools}</div></div>
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

// `change`: {text, isGood} against the period before.
export function Tile({ label, value, unit, note, change, values, colour = "read", tone }) {
  return html`<div class=${`tile ${tone ?? ""}`}>
    <span class="label">${label}</span>
    <div class="value"><b>${value}</b>${unit && html`<span>${unit}</span>`}</div>
    <p class="note">${change && html`<span class=${change.isGood ? "good"
      : "bad"}>${change.text}</span> `}
      ${note}</p>
    ${values && html`<${Sparkline} values=${values} colour=${colour} label=${label} />`}
  </div>`;
}

export const Tiles = ({ children }) => html`<div class="tiles">${children}</div>`;
export const Chip = ({ tone = "plain", children }) => html`<span
  class=${`chip ${tone}`}>${children}</span>`;

const STATES = {
  ok: ["good", "ok"], active: ["good", "ok"], limited: ["warn", "limited"],
  over_budget: ["bad", "over budget"], suspended: ["bad", "suspended"],
};
export function Status({ status }) {
  const [tone, text] = STATES[status] ?? ["plain", String(status ?? NONE)];
  return html`<${Chip} tone=${tone}>${text}<//>`;
}

export const TenantLink = ({ name }) => (name
  ? html`<a href=${href(["tenants", name])}>${name}</a>` : html`<span class="soft">${NONE}</span>`);

// A share of a whole as words and a bar; `limit` marks a soft limit within it.
export function Bar({ part, text, tone = "read", mark }) {
  const width = Math.max(0, Math.min(1, part ?? 0));
  return html`<span class="meter"><span class="track" aria-hidden="true">
      <i class=${`fill ${tone}`} style=${{ width: `${100 * width}%` }}></i>
      ${mark !== undefined && mark !== null
        && html`<i class="mark" style=${{ left: `${100 * Math.min(1, mark)}%` }}></i>`}
    </span><span>${text ?? share(part)}</span></span>`;
}

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Loading = ({ what = "Loading" }) => html`<p class="empty" role="status">
  <span class="pulse" aria-hidden="true"></span>${what}…</p>`;
export const Notice = ({ tone = "warn", children }) =>
  html`<p class=${`notice ${tone}`} role="status">${children}</p>`;

// What stands in place of data: loading, refused, not offered, or an error. Null if it is there.
export function instead({ data, error }, what) {
  if (data !== undefined) return null;
  if (!error) return html`<${Loading} what=${`Loading ${what}`} />`;
  if (!(error instanceof Refused)) return html`<${Empty}>Not connected: ${what} will be shown again
    when the server answers.<//>`;
  if (error.isMissing) return html`<${Empty}>This server does not offer ${what}.<//>`;
  return html`<${Empty}>${error.message}<//>`;
}

export function Disconnected() {
  const since = useConnection();
  return html`<div role="alert">${since !== null && html`<p class="notice bad lost">
    Disconnected since ${clockSeconds(since)}; trying again every 5 s. Figures are the last known
      ones.
  </p>`}</div>`;
}

export function ChangeOf(now, before, { isMoreGood = true, write = share, isShare = false } = {}) {
  if (now === null || before === null || now === undefined || before === undefined) return null;
  const step = isShare ? now - before : before > 0 ? now / before - 1 : null;
  if (step === null || !Number.isFinite(step)) return null;
  const sign = step > 0 ? "+" : step < 0 ? "−" : "±";
  if (!isShare && step > 10) return null; // almost nothing before: no trend
  const size = isShare ? `${(100 * Math.abs(step)).toFixed(1)} points` : write(Math.abs(step));
  return { text: `${sign}${size}`, isGood: step === 0 || step > 0 === isMoreGood };
}
