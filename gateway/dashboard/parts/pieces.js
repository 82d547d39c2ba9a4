// The pieces of every page: panels, tiles, bars, chips, and the states of data that is not there.

import { html, useState } from "./html.js";
import { Refused, useConnection } from "./api.js";
import { NONE, clockSeconds, count, share } from "./format.js";
import { href } from "./route.js";
import { Sparkline } from "./charts/sparkline.js";

export const Brand = ({ children }) => html`<div class="brand">
  <img src="/dashboard/favicon.svg" width="24" height="24" alt="" /><span>Trunkline</span>
  ${children}</div>`;

export function Panel({ title, note, tools, wide, children }) {
  return html`<section class=${wide ? "panel wide" : "panel"}>
    <div class="head"><h2>${title}</h2><div class="tools">${tools}</div></div>
    ${note && html`<p class="note">${note}</p>`}
    ${children}
  </section>`;
}

export const Tiles = ({ children }) => html`<div class="tiles">${children}</div>`;

// `change`: {text, isGood} against the period before. `values`: a trend.
export function Tile({ label, value, unit, note, change, values, colour = "read", tone = "" }) {
  return html`<div class=${`tile ${tone}`}>
    <span class="label">${label}</span>
    <div class="value"><b>${value}</b>${unit && html`<span>${unit}</span>`}</div>
    <p class="note">${change
      && html`<span class=${change.isGood ? "good" : "bad"}>${change.text}</span> `}${note}</p>
    ${values && html`<${Sparkline} values=${values} colour=${colour} label=${label} />`}
  </div>`;
}

export const Chip = ({ tone = "plain", children }) =>
  html`<span class=${`chip ${tone}`}>${children}</span>`;

const STATES = { ok: ["good", "ok"], active: ["good", "ok"], limited: ["warn", "limited"],
  over_budget: ["bad", "over budget"], suspended: ["bad", "suspended"] };
export function Status({ status }) {
  const [tone, text] = STATES[status] ?? ["plain", String(status ?? NONE)];
  return html`<${Chip} tone=${tone}>${text}<//>`;
}

export const TenantLink = ({ name }) => (name
  ? html`<a href=${href(["tenants", name])}>${name}</a>` : html`<span class="soft">${NONE}</span>`);

// --- choices -------------------------------------------------------------------------------------

// options: names, or [name, text].
export function Select({ id, value, options, set, ...more }) {
  return html`<select id=${id} value=${value} onChange=${(event) => set(event.target.value)}
    ...${more}>${options.map((one) => {
      const [name, text] = Array.isArray(one) ? one : [one, one];
      return html`<option value=${name}>${text}</option>`;
    })}</select>`;
}
export const Filter = ({ label, ...choice }) =>
  html`<label class="filter">${label} <${Select} ...${choice} /></label>`;

// `isLive`: set at each character, not at the end; until then the text is a draft, as the page
// around it is drawn anew at each poll.
export function Search({ label, value, set, isLive, list }) {
  const [draft, setDraft] = useState(null);
  const changed = (event) => set(event.target.value.trim());
  const events = isLive ? { onInput: changed } : { onChange: changed,
    onInput: (event) => setDraft(event.target.value), onBlur: () => setDraft(null) };
  return html`<input type="search" aria-label=${label} placeholder=${label} value=${draft ?? value}
    list=${list} ...${events} />`;
}

// --- bars ----------------------------------------------------------------------------------------

// A share of a whole; `mark`: a share that is marked within it, if any.
export function Bar({ part, tone = "read", mark = null }) {
  const percent = (x) => `${100 * Math.max(0, Math.min(1, x ?? 0))}%`;
  return html`<span class="meter"><span class="track" aria-hidden="true">
      <i class=${`fill ${tone}`} style=${{ width: percent(part) }}></i>
      ${mark !== null && html`<i class="mark" style=${{ left: percent(mark) }}></i>`}
    </span><span>${share(part)}</span></span>`;
}

// Parts of a whole side by side, with a legend. parts: [text, number, colour]; `write`: a number as
// text; `whole`: at least the sum of the parts.
export function Stack({ parts, whole, write = count }) {
  return html`<div class="stack" role="img"
      aria-label=${parts.map(([text, n]) => `${text} ${write(n)}`).join(", ")}>
      ${parts.map(([, n, colour]) => n > 0
        && html`<i class=${colour} style=${{ width: `${(100 * n) / whole}%` }}></i>`)}</div>
    <ul class="legend">${parts.map(([text, n, colour]) =>
      html`<li><i class=${colour}></i>${text} <b>${write(n)}</b></li>`)}</ul>`;
}

// --- data that is not there ----------------------------------------------------------------------

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;
export const Loading = ({ what }) => html`<p class="empty" role="status">
  <span class="pulse" aria-hidden="true"></span>${what}…</p>`;
export const Notice = ({ tone = "warn", children }) =>
  html`<p class=${`notice ${tone}`} role="status">${children}</p>`;

// Return what stands in place of data: loading, refused, not offered, or an error; null if it is
// there.
export function instead({ data, error }, what) {
  if (data !== undefined) return null;
  if (!error) return html`<${Loading} what=${`Loading ${what}`} />`;
  if (!(error instanceof Refused)) {
    return html`<${Empty}>Not connected: ${what} will be shown again when the server answers.<//>`;
  }
  return html`<${Empty}>${error.isMissing ? `This server does not offer ${what}.`
    : error.message}<//>`;
}

export function Disconnected() {
  const since = useConnection();
  return html`<div role="alert">${since !== null && html`<p class="notice bad lost">Disconnected
    since ${clockSeconds(since)}; trying again. Figures are the last known ones.</p>`}</div>`;
}
