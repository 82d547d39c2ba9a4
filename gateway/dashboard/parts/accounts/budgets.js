// Budgets and limits as bars.

import { html, useState } from "../html.js";
import { count, dollarsOf, isKnown, time, words } from "../format.js";
import { Bar, Empty, TenantLink } from "../pieces.js";

const BUDGETS_FIRST = 100;
const limitOf = (one) => Number(one.hard_usd ?? one.soft_usd);
const usedOf = (one) => Number(one.spent_usd) + Number(one.reserved_usd);
const partOf = (one) => (limitOf(one) ? usedOf(one) / limitOf(one) : 0);
const toneOf = (part) => (part >= 1 ? "bad" : part >= 0.8 ? "warn" : "read");

// tools(budget): what may be done to one.
function Budget({ one, hasTenant, tools }) {
  const limit = limitOf(one), write = dollarsOf([limit]), part = partOf(one);
  const reserved = Number(one.reserved_usd), used = usedOf(one);
  const hasBoth = isKnown(one.hard_usd) && isKnown(one.soft_usd);
  const notes = [reserved > 0 && `${write(reserved)} reserved`,
    hasBoth && `soft limit ${write(one.soft_usd)}`, `starts anew ${time(one.resets)}`];
  return html`<li>
    <div><b>${hasTenant && html`<${TenantLink} name=${one.tenant} /> · `}${one.window}${
      one.key_id ? `, key ${one.key_id}` : ""}</b>
      <span>${write(used)} of ${write(limit)}${isKnown(one.hard_usd) ? "" : " (soft)"}</span></div>
    <${Bar} part=${part} tone=${toneOf(part)}
      mark=${hasBoth && limit ? Number(one.soft_usd) / limit : null} />
    <p class="note">${notes.filter(Boolean).join(" · ")}${tools && html` · ${tools(one)}`}</p>
  </li>`;
}

// Budgets of `/admin/v1/budgets` or of `/v1/usage`; of many the most used ones first.
export function Budgets({ budgets, hasTenant, tools, none = "No budget is set." }) {
  const [most, setMost] = useState(BUDGETS_FIRST);
  if (!budgets.length) return html`<${Empty}>${none}<//>`;
  const isLong = budgets.length > most, byUse = (a, b) => partOf(b) - partOf(a);
  const shown = isLong ? [...budgets].sort(byUse).slice(0, most) : budgets;
  return html`<ul class="budgets">${shown.map((one) => html`<${Budget} one=${one}
    key=${`${one.tenant} ${one.window} ${one.key_id}`} hasTenant=${hasTenant} tools=${tools} />`)}
  </ul>${isLong && html`<button type="button" class="quiet small"
    onClick=${() => setMost(Infinity)}>Show all ${count(budgets.length)} budgets</button>`}`;
}

// Limits of a tenant's state.
export function Limits({ limits }) {
  const rows = Object.entries(limits ?? {}).filter(([, one]) => one.limit !== null);
  if (!rows.length) return html`<${Empty}>No limit is set.<//>`;
  return html`<ul class="budgets">${rows.map(([name, one]) => {
    const part = one.limit ? one.used_last_minute / one.limit : 0;
    return html`<li key=${name}><div><b>${words(name)}</b>
      <span>${count(one.used_last_minute)} of ${count(one.limit)}</span></div>
      <${Bar} part=${part} tone=${toneOf(part)} /></li>`;
  })}</ul>`;
}
