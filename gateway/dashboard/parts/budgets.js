// Budgets and limits as bars.

import { html } from "./html.js";
import { count, dollarsOf, isKnown, time, words } from "./format.js";
import { Bar, Empty, TenantLink } from "./pieces.js";

const toneOf = (part) => (part >= 1 ? "bad" : part >= 0.8 ? "warn" : "read");

// tools(budget): what may be done to one.
function Budget({ one, hasTenant, tools }) {
  const limit = Number(one.hard_usd ?? one.soft_usd), write = dollarsOf([limit]);
  const reserved = Number(one.reserved_usd), used = Number(one.spent_usd) + reserved;
  const hasBoth = isKnown(one.hard_usd) && isKnown(one.soft_usd);
  const part = limit ? used / limit : 0;
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

// Budgets of `/admin/v1/budgets` or of `/v1/usage`.
export function Budgets({ budgets, hasTenant, tools, none = "No budget is set." }) {
  if (!budgets.length) return html`<${Empty}>${none}<//>`;
  return html`<ul class="budgets">${budgets.map((one) => html`<${Budget} one=${one}
    key=${`${one.tenant} ${one.window} ${one.key_id}`} hasTenant=${hasTenant} tools=${tools} />`)}
  </ul>`;
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
