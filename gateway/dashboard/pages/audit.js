// Audit: every change that administrators, commands and the file made, newest first.

import { html, useState } from "../parts/html.js";
import { ask, useData } from "../parts/api.js";
import { instant, words } from "../parts/format.js";
import { Panel, TenantLink, instead } from "../parts/pieces.js";
import { setQuery, windowQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";

const KINDS = ["tenant", "key", "shared_scope", "rate_card", "budget", "ledger", "cache"];
const isNothing = (v) => v === null || v === undefined || v === ""
  || (typeof v === "object" && !Object.keys(v).length);
const shown = (name, v) => (isNothing(v) ? "nothing"
  : name.endsWith("_ms") && typeof v === "number" ? instant(v)
    : Array.isArray(v) ? v.join(", ") : typeof v === "object" ? JSON.stringify(v) : String(v));

function Difference({ before, after }) {
  const names = Object.keys({ ...before, ...after })
    .filter((name) => !isNothing(before?.[name]) || !isNothing(after?.[name]));
  const word = (name) => words(name.replace(/_ms$/, ""));
  return html`<ul class="diff">${names.map((name) => html`<li><b>${word(name)}</b>
    ${before && name in before && html` <del>${shown(name, before[name])}</del>`}
    ${after && name in after && html` <ins>${shown(name, after[name])}</ins>`}</li>`)}</ul>`;
}

export function Audit() {
  const { range, query } = useSession(), action = query.get("action") ?? "",
    tenant = query.get("tenant") ?? "";
  const [older, setOlder] = useState({ path: "", rows: [], next: null });
  const filters = `${action ? `&action=${action}` : ""}${tenant
    ? `&tenant=${encodeURIComponent(tenant)}` : ""}`;
  const path = `/admin/v1/audit?limit=100&${windowQuery(range)}${filters}`;
  const found = useData(path, 15_000), missing = instead(found, "the audit log");
  const own = older.path === filters ? older : { rows: [], next: found.data?.next_before ?? null };
  const more = async () => {
    const page = await ask(`${path}&before=${own.next}`);
    setOlder({ path: filters, rows: [...own.rows, ...page.changes], next: page.next_before });
  };
  const rows = missing ? [] : [...found.data.changes, ...own.rows];
  return html`<${Panel} title="Audit log" wide tools=${html`
      <input type="search" aria-label="Tenant" placeholder="Tenant" value=${tenant}
        onChange=${(event) => setQuery({ tenant: event.target.value.trim() })} />
      <label class="filter">Changes of <select value=${action}
        onChange=${(event) => setQuery({ action: event.target.value })}>
        <option value="" selected=${!action}>everything</option>${KINDS.map((kind) => html`<option
          value=${kind} selected=${kind === action}>${words(kind)}</option>`)}</select></label>`}>
    ${missing ?? html`<${Table} caption="Changes, newest first" isHidden rows=${rows}
      id=${(row) => row.audit_id} file="audit" none="No change in this range." columns=${[
      { head: "time", get: (row) => row.at, show: (row) => instant(row.at), kind: "text" },
      { head: "by", get: (row) => `${words(row.actor)} ${row.actor_id}`, kind: "text" },
        { head: "from", get: (row) => row.address || null, kind: "text mono" },
      { head: "action", get: (row) => row.action, kind: "text" },
      { head: "tenant", get: (row) => row.tenant, show: (row) => html`<${TenantLink}
        name=${row.tenant} />`, kind: "text" },
      { head: "target", get: (row) => row.target, kind: "text" },
      { head: "before and after", get: (row) => JSON.stringify({ before: row.before,
        after: row.after }), kind: "text wrap",
        show: (row) => html`<${Difference} before=${row.before} after=${row.after} />` }]} />
      ${own.next && html`<button type="button" class="quiet" onClick=${more}>Show older
        changes</button>`}`}<//>`;
}
