// One tenant: its state, budgets, limits, keys and refusals; its history, findings and prefixes.

import { html, useState } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { Budgets, Limits } from "../parts/budgets.js";
import { FindingList, useFindings } from "../parts/findings.js";
import { about, ago, bytes, count, dollars, dollarsOf, fromPico, instant, share,
  words } from "../parts/format.js";
import { HistoryCharts, useHistory } from "../parts/history.js";
import { Chip, Empty, Panel, Status, instead } from "../parts/pieces.js";
import { href, windowQuery } from "../parts/route.js";
import { NewSecret } from "../parts/secret.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";
import { Promises } from "./cache.js";
import { Counted, FirstToken, HistoryTiles } from "./overview.js";
import { Declared, DeleteTenant, EditTenant, EraseCache, NewKey, RevokeKey, RotateKey, SetBudget,
  SetStatus, endOf, pathOf }
  from "./tenant_acts.js";

const total = (counts) => Object.values(counts ?? {}).reduce((sum, n) => sum + n, 0);

export function Tenant({ thing: name }) {
  const { range, can, me } = useSession(), [act, setAct] = useState(null);
  const one = useData(pathOf(name), 15_000), state = useData(`${pathOf(name)}/state`);
  const keys = useData(`${pathOf(name)}/keys?limit=1000`, 15_000);
  const budgets = useData(`/admin/v1/budgets?tenant=${encodeURIComponent(name)}`);
  const found = useHistory(range, { tenant: name }), findings = useFindings(name);
  const missing = instead(one, "this tenant");
  if (missing) return html`<${Panel} title=${name} wide>${missing}<//>`;
  const tenant = one.data, close = () => setAct(null);
  const done = () => { close(); one.again(); state.again(); keys.again(); budgets.again(); };
  const made = (key) => { keys.again(); setAct({ of: NewSecret, made: key, server: me.server }); };
  const open = (of, more = {}) => () => setAct({ of, tenant, close, done, made, ...more });
  const tools = html`${can("tenants") && !tenant.declared && html`
      <button type="button" onClick=${open(EditTenant,
        { classes: me.server.classes })}>Settings</button>
      <button type="button" onClick=${open(SetStatus)}>${tenant.status === "active" ? "Suspend"
        : "Resume"}</button>`}
    ${can("erase") && html`<button type="button" onClick=${open(EraseCache)}>Erase cache</button>`}
    ${can("tenants") && !tenant.declared && html`<button type="button" class="danger"
      onClick=${open(DeleteTenant)}>Delete</button>`}`;
  return html`<${StateHead} tenant=${tenant} state=${state} tools=${tools} /><${Declared}
    tenant=${tenant} />
    <${HistoryTiles} found=${found} refusedHour=${state.data ? total(state.data.refusals_last_hour)
      : null} />
    <div class="grid three">
      <${Panel} title="Budgets" tools=${can("money") && html`<button type="button" class="small"
        onClick=${open(SetBudget,
        { tenant: name, keys: keys.data?.keys })}>Set a budget</button>`}>${instead(budgets,
          "budgets") ?? html`<${Budgets}
        budgets=${budgets.data.budgets} tools=${can("money") ? (budget) => html`<button
          type="button" class="link"
        onClick=${open(SetBudget, { tenant: name, budget, keys: keys.data?.keys })}>Change</button>`
          : null} />`}<//>
      <${Panel} title="Limits" note="Use of the last minute.">${instead(state, "the use of limits")
        ?? html`<${Limits} limits=${state.data.limits} />`}<//>
      <${Refusals} state=${state} name=${name} />
    </div>
    <${Keys} keys=${keys} open=${open} can=${can} />
    <${Panel} title="Findings" wide><${FindingList} found=${findings} hasTenant=${false} /><//>
    <${HistoryCharts} found=${found} />
    <${Details} name=${name} range=${range} />
    ${act && html`<${act.of} ...${act} close=${close} />`}`;
}

function StateHead({ tenant, state, tools }) {
  const told = state.data, status = told?.status ?? tenant.status;
  return html`<section class="panel wide state" aria-label="State">
    <div class="head"><div><${Status} status=${status} /> ${told?.since_ms && html`<span
      class="soft">since
      ${" "}${instant(told.since_ms)}</span>`} <span class="soft">tier ${tenant.tier}${told
      ? ` · last request ${told.last_request_ms ? ago(told.last_request_ms) : "never"}`
        : ""}</span></div>
      <div class="tools">${tools}</div></div>
    ${(told?.reasons ?? []).map((reason) => html`<p class="reason">${reason}</p>`)}</section>`;
}

function Refusals({ state, name }) {
  const rows = Object.keys({ ...state.data?.refusals_today,
    ...state.data?.refusals_last_hour }).map((code) => ({ code,
    hour: state.data.refusals_last_hour[code] ?? 0, today: state.data.refusals_today?.[code]
      ?? 0 }));
  return html`<${Panel} title="Refusals by code" tools=${html`<a href=${href(["requests"],
    { tenant: name, code: "refused" })}>Requests</a>`}>
    ${instead(state, "refusals") ?? html`<${Table} caption="Refused requests" isHidden isPlain
      none="No request was refused today."
      rows=${rows.sort((a, b) => b.today - a.today)} id=${(row) => row.code} columns=${[
        { head: "code", get: (row) => row.code, kind: "text mono" },
        { head: "last hour", get: (row) => row.hour, show: (row) => count(row.hour) },
        { head: "today", get: (row) => row.today, show: (row) => count(row.today) }]} />`}<//>`;
}

function Keys({ keys, open, can }) {
  const acts = (row) => (row.revoked || row.declared || row.replaced_by ? "" : html`
    <button type="button" class="small" onClick=${open(RotateKey, { row })}>Rotate</button>
    ${" "}<button type="button" class="small danger" onClick=${open(RevokeKey,
      { row })}>Revoke</button>`);
  const note = (row) => (row.revoked ? "revoked" : row.replaced_by
    ? `replaced by key ${row.replaced_by}` : row.declared ? "declared" : "");
  return html`<${Panel} title="Keys" wide tools=${can("tenants") && html`<button type="button"
    class="main small"
    onClick=${open(NewKey)}>New key</button>`}>${instead(keys, "keys") ?? html`<${Table}
      caption="Keys" isHidden rows=${keys.data.keys}
    id=${(row) => row.key_id} file="keys" none="No key: the tenant cannot ask." columns=${[
      { head: "key", get: (row) => row.shown, kind: "text mono" }, { head: "label",
        get: (row) => row.label || null, kind: "text" },
      { head: "workspace", get: (row) => row.workspace, kind: "text" }, { head: "scopes",
        get: (row) => row.scopes.join(", "), kind: "text" },
      { head: "created", get: (row) => row.created, show: (row) => instant(row.created),
        kind: "text" },
      { head: "ends", get: (row) => endOf(row), kind: "text" },
      { head: "note", get: (row) => note(row), show: (row) => note(row)
        && html`<${Chip}>${note(row)}<//>`, kind: "text" },
      ...(can("tenants") ? [{ head: "change", get: () => null, show: acts, kind: "text" }] : [])]}
        />`}<//>`;
}

function Details({ name, range }) {
  const seen = useData(`/admin/v1/analytics/${encodeURIComponent(name)}`, 15_000);
  const wanted = `tenant=${encodeURIComponent(name)}&group_by=model&${windowQuery(range)}`;
  const used = useData(`/admin/v1/usage?${wanted}`, 15_000);
  const bill = used.data && html`<${Bill} used=${used.data} />`;
  const one = seen.data;
  if (!one) return html`<div class="grid">${bill}<${Panel}
    title="Prefixes and misses"><${Empty}>${seen.error?.message
    ?? "Loading…"}<//><//></div>`;
  const usd = (x) => dollars(fromPico(x));
  return html`<h2 class="divider">Since the gateway's start</h2><div class="grid">
    ${bill}
    <${Panel} title="Time to first token"><${FirstToken} times=${one.first_token_ms} /><//>
    <${Panel} title="Misses by cause"><${Counted} caption="By cause" label="cause"
      counts=${one.misses} none="No misses." /><//>
    <${Panel} title="Cost of misses"><${Table} caption="Recomputed tokens of written prefixes"
      isPlain rows=${one.recomputed}
      id=${(row) => row.cause} none="No written prefix was recomputed." columns=${[{ head: "cause",
        get: (row) => words(row.cause), kind: "text" },
      { head: "tokens", get: (row) => count(row.tokens) }, { head: "cost",
        get: (row) => usd(row.cost_pico) }]} /><//>
    <${Panel} title="Where prompts diverge" wide><${Table}
      caption="Positions at which prompts diverge, and the tokens after them" rows=${one.breaks}
      id=${(row) => row.place} none="No prompts diverge." order=${-3} file="divergence"
        columns=${[{ head: "position", get: (row) => row.place, kind: "text mono" },
      { head: "prompts", get: (row) => row.count, show: (row) => count(row.count) },
        { head: "tokens", get: (row) => row.tokens, show: (row) => about(row.tokens) },
      { head: "cost", get: (row) => row.cost_pico, show: (row) => usd(row.cost_pico) }]} /><//>
    <${Panel} title="Promises" wide><${Promises} rows=${one.leases} /><//>
    <${Advice} one=${one} />
    <${Panel} title="Top prefixes" wide tools=${html`<a href=${href(["cache"],
      { tenant: name })}>Prefix tree</a>`}><${Table}
      caption="By saved tokens; a prefix is shown by its digest and the position of its end"
        rows=${one.top_prefixes} id=${(row) => row.id}
      file="prefixes" none="No prefix was read twice." columns=${[{ head: "ends at",
        get: (row) => row.path, kind: "text mono" },
      { head: "tokens", get: (row) => row.tokens, show: (row) => count(row.tokens) },
        { head: "uses", get: (row) => row.uses, show: (row) => count(row.uses) },
      { head: "hits", get: (row) => row.hits, show: (row) => count(row.hits) }, { head: "digest",
        get: (row) => row.id, kind: "text mono" }]} /><//>
    <${Panel} title="Ignored fields"><${Counted} caption="Requests with a field that had no effect"
      label="field" counts=${one.ignored_fields}
      none="No ignored fields." /><//></div>`;
}

function Advice({ one }) {
  const ratio = (a) => `${a.is_early ? "at least "
    : ""}${share(a.hit_ratio)} ± ${(100 * a.error).toFixed(1)}`;
  const writeClass = dollarsOf(one.retention_advice.map((a) => fromPico(a.saving_pico)));
  const writeSize = dollarsOf(one.size_advice.map((a) => fromPico(a.saving_pico)));
  const gain = (write, x, error) => `${write(fromPico(x))} ± ${write(fromPico(error)).replace("$",
    "")}`;
  const verdict = (a) => html`<${Chip} tone=${a.verdict === "pays" ? "good" : a.verdict === "loses"
    ? "bad" : "plain"}>${
    a.verdict === "too_few" ? "not enough data" : a.verdict}<//>`;
  return html`<${Panel} title="Value of each retention class" wide
    note=${`Dollars per million prompt tokens, at ${one.rate_card}; from ${
      count(one.sampled_prompts)} prompts and ${count(one.sampled_blocks)} sampled blocks.`}
      ><${Table}
      caption="By retention class" isHidden isPlain
      rows=${one.retention_advice} id=${(a) => a.retention} columns=${[{ head: "class",
        get: (a) => a.retention, kind: "text" },
      { head: "hit ratio", get: ratio }, { head: "saving", get: (a) => gain(writeClass,
        a.saving_pico, a.error_pico) },
      { head: "verdict", get: (a) => a.verdict, show: verdict, kind: "text" }]} /><//>
    <${Panel} title="Value of more KV memory" wide
      note="Dollars per million prompt tokens, against no cache and the present memory."><${Table}
      caption="By KV memory" isHidden isPlain rows=${one.size_advice} id=${(a) => a.bytes}
        none="The engine is not running." columns=${[
      { head: "KV memory", get: (a) => bytes(a.bytes), kind: "text" }, { head: "tokens",
        get: (a) => about(a.tokens) }, { head: "hit ratio", get: ratio },
      { head: "saving", get: (a) => gain(writeSize, a.saving_pico, a.error_pico) },
      { head: "against now", get: (a) => (a.more_error_pico ? gain(writeSize, a.more_pico,
        a.more_error_pico) : "present") }]} /><//>`;
}

function Bill({ used }) {
  const rows = [...used.rows.map((row) => [`requests, ${row.model}`, row.charge_usd]),
    ...used.storage.map((row) => [`storage, ${words(row.class)}`, row.charge_usd]), ["adjustments",
      used.totals.adjusted_usd]];
  const sum = rows.reduce((all, [, amount]) => all + Number(amount), 0), write = dollarsOf([sum]);
  return html`<${Panel} title="Bill" note=${`${used.window.since.slice(0, 16).replace("T",
    " ")} to ${used.window.until.slice(0, 16).replace("T", " ")} UTC`}>
    <${Table} caption="Charges in the range" isHidden isPlain rows=${[...rows, ["total", sum]]}
      id=${([name]) => name} columns=${[
      { head: "for", get: ([name]) => name, kind: "text" }, { head: "amount", get: ([,
        amount]) => write(amount) }]} /><//>`;
}
