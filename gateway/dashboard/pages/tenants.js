// Tenants: the table with search, filter and order, and the making of a tenant.

import { html, useState } from "../parts/html.js";
import { ask, useData } from "../parts/api.js";
import { Dialog, Form } from "../parts/dialog.js";
import { about, count, dollarsOf, share } from "../parts/format.js";
import { Bar, Panel, Status, TenantLink, instead } from "../parts/pieces.js";
import { href, setQuery, windowQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";
import { SETTINGS, settingsOf } from "./tenant_acts.js";
import { overBudget, refusedBy } from "./overview.js";

const FILTERS = { all: "all", attention: "to look after", suspended: "suspended" };

export function Tenants() {
  const { range, query, can, me } = useSession(), [isMaking, setMaking] = useState(false);
  const tenants = useData("/admin/v1/tenants?limit=1000", 15_000),
    now = useData("/admin/v1/analytics");
  const used = useData(`/admin/v1/usage?group_by=tenant&${windowQuery(range)}`, range.isLive
    ? 15_000 : 0);
  const budgets = useData("/admin/v1/budgets", 15_000);
  const missing = instead(tenants, "tenants");
  const q = query.get("q") ?? "", filter = query.get("show") ?? "all";
  const rows = missing ? [] : joined(tenants.data.tenants, used.data, now.data,
    budgets.data?.budgets ?? [])
    .filter((one) => one.name.includes(q.trim().toLowerCase()))
    .filter((one) => filter === "all" || (filter === "suspended" ? one.status === "suspended"
      : one.status !== "ok"));
  return html`<${Panel} title="Tenants" wide
    note="Sums of the ledger for the whole hours of the range."
    tools=${html`<input type="search" aria-label="Find a tenant" placeholder="Find a tenant"
      value=${q}
        onInput=${(event) => setQuery({ q: event.target.value })} />
      <label class="filter">Show <select value=${filter}
        onChange=${(event) => setQuery({ show: event.target.value === "all" ? null
          : event.target.value })}>
        ${Object.entries(FILTERS).map(([name, text]) => html`<option value=${name}
          selected=${name === filter}>${text}</option>`)}</select></label>
      ${can("tenants") && html`<button type="button" class="main"
        onClick=${() => setMaking(true)}>New tenant</button>`}`}>
    ${missing ?? html`<${TenantTable} rows=${rows} q=${q} />`}<//>
    ${isMaking && html`<${NewTenant} close=${() => setMaking(false)} classes=${me.server.classes}
      />`}`;
}

function joined(tenants, used, now, budgets) {
  const sums = Object.fromEntries((used?.rows ?? []).map((row) => [row.tenant, row]));
  const held = Object.fromEntries((now?.holdings ?? []).map((row) => [row.tenant, row.blocks]));
  const refused = refusedBy(now?.refused_last_hour);
  return tenants.map((one) => {
    const many = refused[one.name] ?? (now?.refused_last_hour ? 0 : null);
    const status = one.status === "suspended" ? "suspended" : overBudget(budgets, one.name)
      ? "over_budget"
      : many ? "limited" : "ok";
    return { ...one, status, refused: many, blocks: held[one.name] ?? 0, used: sums[one.name] };
  });
}

function TenantTable({ rows, q }) {
  const charged = dollarsOf(rows.map((row) => row.used?.charge_usd));
  const saving = dollarsOf(rows.map((row) => row.used?.saved_usd));
  const number = (head, get, show = count) => ({ head, get, show: (row) => show(get(row)) });
  const usd = (head, name, write) => number(head, (row) => (row.used ? Number(row.used[name])
    : null), write);
  return html`<${Table} caption="Tenants in the range" isHidden rows=${rows} id=${(row) => row.name}
    file="tenants" order=${-3}
    none=${q ? `No tenant has “${q}” in its name.` : "No tenant."} columns=${[
      { head: "tenant", get: (row) => row.name, show: (row) => html`<${TenantLink} name=${row.name}
        />`, kind: "text" },
      { head: "status", get: (row) => row.status, show: (row) => html`<${Status}
        status=${row.status} />`, kind: "text" },
      number("requests", (row) => row.used?.requests ?? 0),
      number("prompt tokens", (row) => row.used?.prompt_tokens ?? 0, about),
      { head: "hit ratio", get: (row) => row.used?.hit_ratio ?? null,
        show: (row) => (row.used?.hit_ratio === undefined
        || row.used.hit_ratio === null ? "–" : html`<${Bar} part=${row.used.hit_ratio}
          text=${share(row.used.hit_ratio)} />`) },
      usd("charged", "charge_usd", charged), usd("saved", "saved_usd", saving),
      { ...number("refused, 1 h", (row) => row.refused), show: (row) => (row.refused ? html`<a
        class="bad"
        href=${href(["requests"], { tenant: row.name, code: "refused" })}>${count(row.refused)}</a>`
          : count(row.refused)) },
      number("blocks now", (row) => row.blocks), { head: "tier", get: (row) => row.tier,
        kind: "text" }]} />`;
}

function NewTenant({ close, classes }) {
  const make = async (values) => {
    await ask("/admin/v1/tenants", { method: "POST", body: { name: values.name,
      ...settingsOf(values) } });
    location.hash = href(["tenants", values.name]);
  };
  return html`<${Dialog} title="New tenant" close=${close}><${Form} submit="Create tenant"
    close=${close} act=${make}
    fields=${[{ name: "name", label: "Name", isRequired: true,
      hint: "1 to 64 of a–z, 0–9, “-”, “_”, “.”" },
    ...SETTINGS(null, classes)]} /><//>`;
}
