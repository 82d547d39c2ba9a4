// Findings: what wastes money, in words, with the cure.

import { html } from "./html.js";
import { address, useData } from "./api.js";
import { NONE, ago, count, dollars, dollarsOf, iso, percent, words } from "./format.js";
import { DAY_MS, HOUR_MS, href } from "./route.js";
import { Chip, Empty, TenantLink, instead } from "./pieces.js";

const EVERY_MS = 30_000;

// The findings of one tenant, or of all; `path`: a tenant's own are elsewhere.
// `days`: of the last days; the server's default without it. Those of other days are not shown.
export function useFindings(tenant = null, path = "/admin/v1/findings", days = null) {
  const since = days && iso(Math.floor(Date.now() / HOUR_MS) * HOUR_MS - days * DAY_MS);
  const found = useData(address(path, { tenant, since }), EVERY_MS);
  return found.isOld ? { ...found, data: undefined } : found;
}
// Of the findings that waste money.
export const costly = (data) => (data?.findings ?? []).filter((one) => !one.legitimate);
export const savingOf = (data) =>
  costly(data).reduce((sum, one) => sum + Number(one.saving_usd_month ?? 0), 0);

// The sentence without the tenant's name, which stands above it. A field's name at its beginning
// stays as it is written.
function said({ tenant, sentence }) {
  const text = sentence.startsWith(`${tenant}: `) ? sentence.slice(tenant.length + 2) : sentence;
  return text.replace(/^[a-z]+(?= )/, (word) => word[0].toUpperCase() + word.slice(1));
}

function Evidence({ one, isOwn }) {
  const write = dollarsOf([one.of_cost_usd]);
  const examples = isOwn ? [] : (one.example_request_ids ?? []).slice(0, 3);
  return html`<p class="note">${percent(one.confidence)} sure ·
    ${" "}${count(one.requests)} of ${count(one.of_requests)} requests ·
    ${" "}${one.wasted_tokens > 0 && html`${count(one.wasted_tokens)} tokens,
      ${" "}${write(one.cost_usd)} of ${write(one.of_cost_usd)} · `}
    ${" "}${one.model} · last seen ${ago(one.last_seen_ms)}${examples.length > 0
      && html` · for example ${examples.map((id) => html` <a class="mono"
        href=${href(["requests", id])}>${id.slice(0, 14)}…</a>`)}`}</p>`;
}

function Finding({ one, hasTenant, isOwn, isBrief, chosen }) {
  const isChosen = chosen === one.finding_id;
  return html`<li id=${one.finding_id} ref=${isChosen ? (item) => item?.scrollIntoView() : null}
    class=${`finding ${one.legitimate ? "legitimate" : ""} ${isChosen ? "chosen" : ""}`}>
    <div class="worth">${one.legitimate ? html`<b>${NONE}</b><span>no waste</span>`
      : html`<b>${dollars(one.saving_usd_month)}</b><span>a month</span>`}</div>
    <div class="says">
      <h3>${hasTenant && html`<${TenantLink} name=${one.tenant} />: `}${one.title}
        <${Chip} tone=${one.legitimate ? "plain" : "warn"}>${words(one.cause)}<//></h3>
      ${!(isBrief && one.advice) && html`<p>${said(one)}</p>`}
      ${one.advice && html`<p class="advice"><b>To do:</b> ${one.advice}</p>`}
      ${!isBrief && html`<${Evidence} one=${one} isOwn=${isOwn} />`}
    </div></li>`;
}

const List = ({ list, ...more }) => html`<ol class="findings">${list.map((one) =>
  html`<${Finding} key=${one.finding_id} one=${one} ...${more} />`)}</ol>`;

// `most`: of them, if not all. `hasTenant`: with the tenant's name. `isOwn`: for the tenant itself.
// `isBrief`: title and cure alone.
// `chosen`: the id of one that is shown first to the eye.
export function FindingList({ found, most, hasTenant = true, isOwn, isBrief, chosen }) {
  const missing = instead(found, "findings"), list = costly(found.data).slice(0, most);
  if (missing) return missing;
  if (!list.length) return html`<${Empty}>Nothing is wasted: no finding in the traffic seen.<//>`;
  return html`<${List} list=${list} hasTenant=${hasTenant} isOwn=${isOwn} isBrief=${isBrief}
    chosen=${chosen} />`;
}

export function Legitimate({ found, chosen }) {
  const list = (found.data?.findings ?? []).filter((one) => one.legitimate);
  if (!list.length) return null;
  return html`<details open=${list.some((one) => one.finding_id === chosen)}>
    <summary>${count(list.length)} causes of misses that waste nothing</summary>
    <${List} list=${list} hasTenant chosen=${chosen} /></details>`;
}
