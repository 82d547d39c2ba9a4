// Findings: what wastes money, in words, with the cure.

import { html } from "./html.js";
import { useData } from "./api.js";
import { ago, count, dollars, dollarsOf, words } from "./format.js";
import { href } from "./route.js";
import { Chip, Empty, TenantLink, instead } from "./pieces.js";

const EVERY_MS = 30_000;

export function useFindings(tenant = null, base = "/admin/v1/findings") {
  return useData(tenant === null ? base : `${base}?tenant=${encodeURIComponent(tenant)}`, EVERY_MS);
}
export const costly = (data) => (data?.findings ?? []).filter((one) => !one.legitimate);
export const savingOf = (list) => list.reduce((sum, one) => sum + Number(one.saving_usd_month ?? 0),
  0);

// The sentence without the tenant's name, which stands above it.
function said({ tenant, sentence }) {
  const text = sentence.startsWith(`${tenant}: `) ? sentence.slice(tenant.length + 2) : sentence;
  return text[0].toUpperCase() + text.slice(1);
}

function Finding({ one, hasTenant, isOwn, isBrief }) {
  const examples = one.example_request_ids ?? [], write = dollarsOf([one.of_cost_usd]);
  return html`<li class=${`finding ${one.legitimate ? "legitimate" : ""}`}>
    <div class="worth">${one.legitimate ? html`<b>–</b><span>no waste</span>`
      : html`<b>${dollars(one.saving_usd_month)}</b><span>a month</span>`}</div>
    <div class="says">
      <h3>${hasTenant && html`<${TenantLink} name=${one.tenant} />: `}${one.title}
        <${Chip} tone=${one.legitimate ? "plain" : "warn"}>${words(one.cause)}<//></h3>
      ${!(isBrief && one.advice) && html`<p>${said(one)}</p>`}
      ${one.advice && html`<p class="advice"><b>To do:</b> ${one.advice}</p>`}
      ${!isBrief && html`<p class="note">${count(100 * one.confidence)} % sure ·
        ${" "}${count(one.requests)} of ${count(one.of_requests)} requests ·
        ${" "}${count(one.wasted_tokens)} tokens,
        ${" "}${write(one.cost_usd)} of ${write(one.of_cost_usd)} · ${one.model} · last seen
        ${" "}${ago(one.last_seen_ms)}${!isOwn && examples.length > 0 && html` · for example
        ${examples.slice(0, 3).map((id) => html` <a class="mono" href=${href(["requests", id])}
          >${id.slice(0, 14)}…</a>`)}`}</p>`}
    </div></li>`;
}

// `isBrief`: title and cure alone.
export function FindingList({ found, most, hasTenant = true, isOwn = false, isBrief = false,
  none = "Nothing is wasted: no finding in the traffic seen." }) {
  const missing = instead(found, "findings");
  if (missing) return missing;
  const list = costly(found.data), shown = list.slice(0, most ?? list.length);
  if (!shown.length) return html`<${Empty}>${none}<//>`;
  return html`<ol class="findings">${shown.map((one) =>
    html`<${Finding} key=${one.finding_id} one=${one} hasTenant=${hasTenant} isOwn=${isOwn}
      isBrief=${isBrief} />`)}</ol>`;
}

export function Legitimate({ found }) {
  const list = (found.data?.findings ?? []).filter((one) => one.legitimate);
  if (!list.length) return null;
  return html`<details><summary>${count(list.length)} causes of misses that waste nothing</summary>
    <ol class="findings">${list.map((one) => html`<${Finding} key=${one.finding_id} one=${one}
      hasTenant />`)}
    </ol></details>`;
}
