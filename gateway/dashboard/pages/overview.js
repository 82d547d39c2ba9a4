// Overview: four figures that matter, the history, the costliest findings, tenants to look after.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { enginesOf } from "../parts/engines.js";
import { FindingList, costly, savingOf, useFindings } from "../parts/findings.js";
import { count, dollars, ms, share, words } from "../parts/format.js";
import { HistoryCharts, numbers, ratios, saved, useHistory } from "../parts/history.js";
import { ChangeOf, Empty, Notice, Panel, Status, TenantLink, Tile, Tiles,
  instead } from "../parts/pieces.js";
import { href } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";

export function warnings(engines) {
  return engines.map((engine) => {
    const asked = engine.floor_blocks_asked, most = engine.floor_blocks_max;
    const which = engine.name ? ` of ${engine.name}` : "";
    return html`${!engine.ready && html`<${Notice} tone="bad">The engine${which} takes no requests
      now: it is starting,
        has died, or the gateway is draining. Figures of blocks are the last known ones.<//>`}
      ${asked > most && html`<${Notice}>Floors request ${count(asked)} blocks; ${which
        ? `the engine${which}` : "this engine"} can guarantee
        ${" "}${count(most)}. Each floor is reduced in that proportion.<//>`}`;
  });
}

const pair = (p50, p99) => `${ms(p50)} / ${ms(p99)}`;

// The four figures of a history; `refusedHour`: refusals of the last hour, if they are known.
export function HistoryTiles({ found, refusedHour }) {
  const { sums, before, data } = found;
  if (!data) return null;
  const { series } = data, { hit, miss } = data.first_token_ms ?? {};
  const part = sums.uncached ? sums.saved / sums.uncached : null;
  const asked = (sums.requests ?? 0) + (sums.refused ?? 0);
  return html`<${Tiles}>
    <${Tile} label="Hit ratio" value=${share(sums.hitRatio)}
      change=${ChangeOf(sums.hitRatio, before?.hitRatio, { isShare: true })}
      note=${`of ${count(sums.prompt)} prompt tokens read from the cache`}
      values=${ratios(numbers(series.read_tokens), numbers(series.prompt_tokens))} />
    <${Tile} label="Saved by caching" value=${dollars(sums.saved)} change=${ChangeOf(sums.saved,
      before?.saved)}
      note=${part === null ? "no prices: nothing is charged"
        : `${share(part)} of ${dollars(sums.uncached)} without caching`}
      values=${saved(series)} />
    <${Tile} label="First token, p50 / p99" value=${pair(hit?.p50, hit?.p99)} unit="hit"
      note=${`${pair(miss?.p50, miss?.p99)} on a miss; over the whole range`}
      values=${numbers(series.first_token_ms_hit?.p50)} colour="out" />
    <${Tile} label="Refused, last hour" value=${count(refusedHour)} unit="requests"
      tone=${refusedHour > 0 ? "alarm" : ""} colour="bad" values=${numbers(series.refused)}
      note=${`${count(sums.refused)} of ${count(asked)} requests in the range`} />
  <//>`;
}

export function Overview() {
  const { range } = useSession();
  const now = useData("/admin/v1/analytics"), found = useHistory(range), findings = useFindings();
  const tenants = useData("/admin/v1/tenants?limit=1000", 15_000),
    budgets = useData("/admin/v1/budgets", 15_000);
  const refused = now.data?.refused_last_hour;
  const waste = savingOf(costly(findings.data));
  return html`${warnings(enginesOf(now.data))}
    <${HistoryTiles} found=${found} refusedHour=${refused?.total} />
    <div class="grid two">
      <${Panel} title="Findings" note=${waste > 0 ? `${dollars(waste)} a month could be saved.`
        : null}
        tools=${html`<a href=${href(["findings"])}>All findings</a>`}>
        <${FindingList} found=${findings} most=${3} isBrief /><//>
      <${Panel} title="Tenants to look after" tools=${html`<a href=${href(["tenants"])}>All
        tenants</a>`}>
        ${instead(tenants, "tenants") ?? html`<${LookAfter} tenants=${tenants.data.tenants}
          budgets=${budgets.data?.budgets ?? []} refused=${refusedBy(refused)} />`}<//>
    </div>
    <${HistoryCharts} found=${found} />
    ${now.data && html`<${SinceTheStart} all=${now.data} />`}`;
}

// Refusals of the last hour by tenant's name.
export function refusedBy(refused) {
  return refused?.tenants ?? {};
}

export function overBudget(budgets, name) {
  return budgets.find((one) => one.tenant === name && one.hard_usd !== null
    && Number(one.spent_usd) + Number(one.reserved_usd) >= Number(one.hard_usd));
}

function LookAfter({ tenants, budgets, refused }) {
  const rows = tenants.map((one) => {
    const spent = overBudget(budgets, one.name), soft = budgets.find((b) => b.tenant === one.name
      && b.is_over_soft);
    const many = refused[one.name] ?? 0;
    const status = one.status === "suspended" ? "suspended" : spent ? "over_budget" : many
      ? "limited" : "ok";
    const why = [many ? `${count(many)} refused in the last hour` : "",
      spent ? `the ${spent.window}'s budget of ${dollars(spent.hard_usd)} is spent` : "",
      !spent && soft ? `over the soft limit of ${dollars(soft.soft_usd)} a ${soft.window}` : "",
      one.status === "suspended" ? "suspended by an administrator" : ""].filter(Boolean).join("; ");
    return { name: one.name, status, many, why };
  }).filter((one) => one.why);
  if (!rows.length) return html`<${Empty}>All tenants are well: no refusal in the last hour, no
    budget spent.<//>`;
  return html`<${Table} caption="Tenants with refusals, spent budgets or a suspension" isHidden
    rows=${rows.sort((a, b) => b.many - a.many).slice(0, 8)} id=${(row) => row.name} isPlain
      columns=${[
      { head: "tenant", get: (row) => row.name, show: (row) => html`<${TenantLink} name=${row.name}
        />`, kind: "text" },
      { head: "status", get: (row) => row.status, show: (row) => html`<${Status}
        status=${row.status} />`, kind: "text" },
      { head: "why", get: (row) => row.why, kind: "text wrap" }]} />`;
}

export function Counted({ caption, label, counts, none }) {
  const rows = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
  return html`<${Table} caption=${caption} isPlain rows=${rows} id=${([name]) => name} none=${none}
    columns=${[
    { head: label, get: ([name]) => words(name), kind: "text" }, { head: "number", get: ([,
      n]) => n, show: ([, n]) => count(n) }]} />`;
}

const CACHED = { hit: "half or more", partial: "less than half", miss: "none" };
export function FirstToken({ times }) {
  const rows = Object.entries(CACHED).map(([kind, text]) => ({ text, ...times[kind] }));
  const cell = (name) => ({ head: name, get: (row) => row[name], show: (row) => ms(row[name]) });
  return html`<${Table} caption="Time to first token by cached share of the prompt" isPlain
    rows=${rows}
    id=${(row) => row.text} columns=${[{ head: "cached", get: (row) => row.text, kind: "text" },
    { head: "requests", get: (row) => row.count, show: (row) => count(row.count) }, cell("p50"),
      cell("p95"), cell("p99")]} />`;
}

function SinceTheStart({ all }) {
  return html`<h2 class="divider">Since the gateway's start</h2><div class="grid">
    <${Panel} title="Time to first token"><${FirstToken} times=${all.first_token_ms} /><//>
    <${Panel} title="Misses by cause"><${Counted}
      caption="Prompts with a breakpoint that were not read in full"
      label="cause" counts=${all.misses} none="No misses." /><//>
    <${Panel} title="Requests by ending"><${Counted} caption="All requests" label="ending"
      counts=${all.endings}
      none="No requests since the start." /><//>
    <${Panel} title="Ignored fields"><${Counted} caption="Requests with a field that had no effect"
      label="field"
      counts=${all.ignored_fields} none="No ignored fields." /><//></div>`;
}
