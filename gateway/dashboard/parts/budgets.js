// Budgets and limits as bars.

import { html } from "./html.js";
import { count, day, dollarsOf, share, time, words } from "./format.js";
import { Bar, Empty, TenantLink } from "./pieces.js";

const toned = (part) => (part >= 1 ? "bad" : part >= 0.8 ? "warn" : "read");

// Budgets of `/admin/v1/budgets`, of a tenant's state or of `/v1/usage`.
export function Budgets({ budgets, hasTenant, tools, none = "No budget is set." }) {
  if (!budgets.length) return html`<${Empty}>${none}<//>`;
  return html`<ul class="budgets">${budgets.map((one) => {
    const limit = Number(one.hard_usd ?? one.soft_usd ?? 0);
    const used = Number(one.spent_usd) + Number(one.reserved_usd ?? 0);
    const part = limit ? used / limit : 0, write = dollarsOf([limit]);
    const mark = one.hard_usd && one.soft_usd ? Number(one.soft_usd) / limit : null;
    const ends = one.ends_at_ms ?? one.resets;
    return html`<li key=${`${one.tenant}${one.window}${one.key_id}`}>
      <div><b>${hasTenant && html`<${TenantLink} name=${one.tenant} /> · `}${one.window}${
        one.key_id ? `, key ${one.key_id}` : ""}</b>
        <span>${write(used)} of ${write(limit)} ${one.hard_usd ? "" : "(soft)"}</span></div>
      <${Bar} part=${part} tone=${toned(part)} mark=${mark} />
      <p class="note">${Number(one.reserved_usd) > 0 ? `${write(one.reserved_usd)} reserved · `
        : ""}${
        one.soft_usd && one.hard_usd ? `soft limit ${write(one.soft_usd)} · ` : ""}starts anew
        ${" "}${one.window === "day" ? time(ends) : day(ends)}${tools ? html` · ${tools(one)}`
          : ""}</p>
    </li>`; })}</ul>`;
}

export function Limits({ limits }) {
  const rows = Object.entries(limits ?? {}).filter(([, one]) => one.limit !== null);
  if (!rows.length) return html`<${Empty}>No limit is set.<//>`;
  return html`<ul class="budgets">${rows.map(([name, one]) => {
    const part = one.limit ? one.used_last_minute / one.limit : 0;
    return html`<li key=${name}><div><b>${words(name)}</b>
      <span>${count(one.used_last_minute)} of ${count(one.limit)}</span></div>
      <${Bar} part=${part} tone=${toned(part)} text=${share(part)} /></li>`; })}</ul>`;
}
