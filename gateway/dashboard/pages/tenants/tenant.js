// One tenant: its state, budgets, limits, keys and refusals; its history, findings and prefixes.

import { html } from "../../parts/html.js";
import { useDialog } from "../../parts/dialogs/open_dialog.js";
import { SLOW_POLL_MS, address, useData, useKeys } from "../../parts/api.js";
import { Budgets, Limits } from "../../parts/accounts/budgets.js";
import * as column from "../../parts/tables/columns.js";
import { FindingList, useFindings } from "../../parts/findings.js";
import { about, ago, bytes, count, dollars, dollarsOf, fromPico, instant, number, share, words }
  from "../../parts/format.js";
import { HistoryCharts, HistoryTiles, useHistory } from "../../parts/charts/history.js";
import { KeyTable } from "../../parts/accounts/keys.js";
import { FirstRows } from "../../parts/tables/more_rows.js";
import { Chip, Notice, Panel, Status, instead } from "../../parts/pieces.js";
import { href, windowOf } from "../../parts/route.js";
import { useSession } from "../../parts/session.js";
import { FirstToken, IgnoredFields, Misses, Promises, ReadsPerWrite }
  from "../../parts/tables/since_start.js";
import { Table } from "../../parts/tables/table.js";
import { windowText } from "../../parts/accounts/usage.js";
import { DeleteTenant, EditTenant, EraseCache, NewKey, SetBudget, SetStatus, pathOf }
  from "./tenant_dialogs.js";

const sum = (numbers) => Object.values(numbers).reduce((all, n) => all + n, 0);

export function Tenant({ thing: name }) {
  const { range, can } = useSession();
  const one = useData(pathOf(name), SLOW_POLL_MS), state = useData(`${pathOf(name)}/state`);
  const keys = useKeys(`${pathOf(name)}/keys`);
  const budgets = useData(address("/admin/v1/budgets", { tenant: name }));
  const found = useHistory(range, name), findings = useFindings(name);
  const acts = useDialog(() => [one, state, keys, budgets].forEach((shown) => shown.again()));
  const missing = instead(one, "this tenant");
  if (missing) return html`<${Panel} title=${name} wide>${missing}<//>${acts.dialog}`;
  const tenant = one.data;
  const open = (of, props) => acts.open(of, { tenant, ...props });
  return html`<${StateHead} tenant=${tenant} state=${state.data}
      tools=${html`<${Acts} tenant=${tenant} open=${open} />`} />
    ${tenant.declared && html`<${Notice} tone="plain">The configuration file declares this tenant:
      its settings are changed there.<//>`}
    <${HistoryTiles} found=${found}
      refusedHour=${state.data && sum(state.data.refusals_last_hour)} />
    <div class="grid three">
      <${OwnBudgets} budgets=${budgets} keys=${keys.data?.keys}
        open=${can("money") ? open : null} />
      <${Panel} title="Limits" note="Use of the last minute.">${instead(state, "the use of limits")
        ?? html`<${Limits} limits=${state.data.limits} />`}<//>
      <${Refusals} state=${state} name=${name} />
    </div>
    <${Keys} keys=${keys} open=${can("tenants") ? open : null} />
    <${Panel} title="Findings" wide><${FindingList} found=${findings} hasTenant=${false} /><//>
    <${HistoryCharts} found=${found} />
    <${Details} name=${name} range=${range} />
    ${acts.dialog}`;
}

function Acts({ tenant, open }) {
  const { can } = useSession(), canChange = can("tenants") && !tenant.declared;
  const button = (text, of, kind = "") => html`<button type="button" class=${kind}
    onClick=${() => open(of)}>${text}</button>`;
  return html`${canChange && button("Settings", EditTenant)}
    ${canChange && button(tenant.status === "active" ? "Suspend" : "Resume", SetStatus)}
    ${can("erase") && button("Erase cache", EraseCache)}
    ${canChange && button("Delete", DeleteTenant, "danger")}`;
}

// state: undefined until it is known.
function StateHead({ tenant, state, tools }) {
  const last = state?.last_request_ms;
  return html`<section class="panel wide state" aria-label="State">
    <div class="head"><div><${Status} status=${state?.status ?? tenant.status} />
      ${" "}<span class="soft">${state?.since_ms ? `since ${instant(state.since_ms)} ` : ""}tier
      ${" "}${tenant.tier}${state && ` · last request ${last ? ago(last) : "never"}`}</span></div>
      <div class="tools">${tools}</div></div>
    ${state?.reasons.map((reason) => html`<p class="reason">${reason}</p>`)}</section>`;
}

function OwnBudgets({ budgets, keys, open }) {
  const change = (budget) => html`<button type="button" class="link"
    onClick=${() => open(SetBudget, { budget })}>Change</button>`;
  return html`<${Panel} title="Budgets" tools=${open && html`<button type="button" class="small"
    onClick=${() => open(SetBudget, { keys })}>Set a budget</button>`}>
    ${instead(budgets, "budgets") ?? html`<${Budgets} budgets=${budgets.data.budgets}
      tools=${open ? change : null} />`}<//>`;
}

function Refusals({ state, name }) {
  const { refusals_last_hour: hour = {}, refusals_today: today = {} } = state.data ?? {};
  const rows = Object.keys({ ...today, ...hour })
    .map((code) => ({ code, hour: hour[code] ?? 0, today: today[code] ?? 0 }))
    .sort((a, b) => b.today - a.today);
  return html`<${Panel} title="Refusals by code"
    tools=${html`<a href=${href(["requests"], { tenant: name, code: "refused" })}>Requests</a>`}>
    ${instead(state, "refusals") ?? html`<${Table} caption="Refused requests" isHidden isPlain
      rows=${rows} none="No request was refused today." id=${(row) => row.code} columns=${[
        column.text("code", "code", { kind: "text mono" }), column.figure("last hour", "hour"),
        column.figure("today, UTC", "today")]} />`}<//>`;
}

function Keys({ keys, open }) {
  return html`<${Panel} title="Keys" wide tools=${open && html`<button type="button"
    class="main small" onClick=${() => open(NewKey)}>New key</button>`}>
    ${instead(keys, "keys") ?? html`<${FirstRows} rows=${keys.data.keys} what="keys"
      hasMore=${keys.data.has_more} /><${KeyTable} caption="Keys" rows=${keys.data.keys} file="keys"
      none="No key: the tenant cannot ask." open=${open} canChange=${() => true}
      extra=${[column.text("workspace")]} />`}<//>`;
}

function Details({ name, range }) {
  const seen = useData(`/admin/v1/analytics/${encodeURIComponent(name)}`, SLOW_POLL_MS);
  const used = useData(address("/admin/v1/usage",
    { tenant: name, group_by: "model", ...windowOf(range) }), SLOW_POLL_MS);
  const one = seen.data, missing = instead(seen, "what was counted since the start");
  return html`<div class="grid">
    <${Panel} title="Bill" note=${used.data && windowText(used.data.window)}>${
      instead(used, "the bill") ?? html`<${Bill} used=${used.data} />`}<//></div>
    <h2 class="divider">Since the gateway's start</h2><div class="grid">
    ${missing ? html`<${Panel} title="Prefixes and misses">${missing}<//>` : html`
      <${FirstToken} times=${one.first_token_ms} /><${Misses} counts=${one.misses} />
      <${Recomputed} rows=${one.recomputed} /><${Divergence} rows=${one.breaks}
        of=${one.advice.length > 1 ? [column.text("model")] : []} />
      <${ReadsPerWrite} rows=${[one]} /><${Promises} rows=${one.leases} />
      ${one.advice.map((each) => html`<${Advice} key=${each.model} one=${each}
        of=${one.advice.length > 1 ? ` of ${each.model}` : ""} />`)}
      <${TopPrefixes} rows=${one.top_prefixes} name=${name}
        of=${one.advice.length > 1 ? [column.text("model")] : []} />
      <${IgnoredFields} counts=${one.ignored_fields} />`}</div>`;
}

function Bill({ used }) {
  const rows = [...used.rows.map((row) => [`requests, ${row.model}`, Number(row.charge_usd)]),
    ...used.storage.map((row) => [`storage, ${words(row.class)}`, Number(row.charge_usd)]),
    ["adjustments", Number(used.totals.adjusted_usd)]];
  const total = rows.reduce((all, [, amount]) => all + amount, 0);
  return html`<${Table} caption="Charges in the range" isHidden isPlain
    rows=${[...rows, ["total", total]]} id=${([text]) => text} columns=${[
      column.text("for", ([text]) => text),
      column.figure("amount", ([, amount]) => amount, dollarsOf([total]))]} />`;
}

const cost = column.figure("cost", (row) => fromPico(row.cost_pico), dollars);

function Recomputed({ rows }) {
  return html`<${Panel} title="Cost of misses"><${Table} isPlain rows=${rows}
    caption="Tokens that were computed again, by cause" id=${(row) => row.cause}
    none="Nothing was computed again." columns=${[
      column.text("cause", (row) => words(row.cause)), column.figure("tokens"), cost]} /><//>`;
}

function Divergence({ rows, of }) {
  return html`<${Panel} title="Where prompts diverge" wide><${Table} rows=${rows}
    caption="Positions at which prompts diverge, and the tokens after them"
    id=${(row) => `${row.model} ${row.place}`} none="No prompts diverge." down="tokens"
    file="divergence" columns=${[...of,
      column.text("position", "place", { kind: "text mono wrap" }),
      column.figure("prompts", "count"), column.figure("tokens", "tokens", about), cost]} /><//>`;
}

function TopPrefixes({ rows, name, of }) {
  return html`<${Panel} title="Top prefixes" wide
    tools=${html`<a href=${href(["cache"], { tenant: name })}>Prefix tree</a>`}>
    <${Table} caption="By saved tokens; a prefix is shown by its digest and the position of its end"
      rows=${rows} id=${(row) => row.id} file="prefixes" none="No prefix was read twice."
      columns=${[...of, column.text("ends at", "path", { kind: "text mono wrap" }),
        column.figure("tokens"), column.figure("uses"), column.figure("hits"),
        column.digest("digest", "id")]} /><//>`;
}

const VERDICTS = { pays: ["good", "pays"], loses: ["bad", "loses"],
  too_few: ["plain", "not enough data"] };

// `of`: " of " and the model's name, where the tenant uses several.
function Advice({ one, of }) {
  const ratio = { head: "hit ratio", get: (a) => `${a.is_early ? "at least " : ""}${
    share(a.hit_ratio)} ± ${number(1)(100 * a.error)}` };
  const write = (rows) => dollarsOf(rows.map((a) => fromPico(a.saving_pico)));
  const [writeClass, writeSize] = [one.retention_advice, one.size_advice].map(write);
  const gain = (usd, pico, error) =>
    `${usd(fromPico(pico))} ± ${usd(fromPico(error)).replace("$", "")}`;
  const verdict = (a) => {
    const [tone, text] = VERDICTS[a.verdict] ?? ["plain", a.verdict];
    return html`<${Chip} tone=${tone}>${text}<//>`;
  };
  return html`<${Panel} title=${`Value of each retention class${of}`} wide
      note=${`Dollars per million prompt tokens, at ${one.rate_card}; from ${
        count(one.sampled_prompts)} prompts and ${count(one.sampled_blocks)} sampled blocks.`}>
      <${Table} caption="By retention class" isHidden isPlain rows=${one.retention_advice}
        id=${(a) => a.retention} columns=${[column.text("class", "retention"), ratio,
          { head: "saving", get: (a) => gain(writeClass, a.saving_pico, a.error_pico) },
          column.text("verdict", "verdict", { show: verdict })]} /><//>
    <${Panel} title=${`Value of more KV memory${of}`} wide
      note="Dollars per million prompt tokens, against no cache and the present memory.">
      <${Table} caption="By KV memory" isHidden isPlain rows=${one.size_advice}
        id=${(a) => a.bytes} none="The engine is not running." columns=${[
          column.text("KV memory", (a) => bytes(a.bytes)), column.figure("tokens", "tokens", about),
          ratio, { head: "saving", get: (a) => gain(writeSize, a.saving_pico, a.error_pico) },
          { head: "against now", get: (a) => (a.more_error_pico
            ? gain(writeSize, a.more_pico, a.more_error_pico) : "present") }]} /><//>`;
}
