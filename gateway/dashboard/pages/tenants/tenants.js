// Tenants: the table with search, filter and order, and the making of a tenant.

import { html, useState } from "../../parts/html.js";
import { SLOW_POLL_MS, address, ask, useData, useTenants } from "../../parts/api.js";
import * as column from "../../parts/tables/columns.js";
import { FormDialog } from "../../parts/dialogs/dialog.js";
import { NONE, about, count, dollarsOf, isKnown } from "../../parts/format.js";
import { FirstRows } from "../../parts/tables/more_rows.js";
import { Bar, Filter, Panel, Search, instead } from "../../parts/pieces.js";
import { href, setQuery, windowOf } from "../../parts/route.js";
import { useSession } from "../../parts/session.js";
import { Table } from "../../parts/tables/table.js";
import { needsCare } from "../../parts/accounts/tenant_status.js";
import { settingsFields, settingsOf } from "./tenant_dialogs.js";

const SHOWN = { all: () => true, attention: needsCare,
  suspended: (one) => one.status === "suspended" };
const TEXTS = [["all", "all"], ["attention", "to look after"], ["suspended", "suspended"]];

export function Tenants() {
  const { range, query, can } = useSession(), [isMaking, setMaking] = useState(false);
  const tenants = useTenants();
  const now = useData("/admin/v1/analytics");
  const used = useData(address("/admin/v1/usage", { group_by: "tenant", ...windowOf(range) }),
    range.isLive ? SLOW_POLL_MS : 0);
  const q = query.get("q") ?? "", shown = query.get("show") ?? "all";
  const byTenant = (list = []) => new Map(list.map((row) => [row.tenant, row]));
  const sums = byTenant(used.data?.rows), held = byTenant(now.data?.holdings);
  const rows = (tenants.data?.tenants ?? [])
    .filter((one) => one.name.includes(q.toLowerCase())).filter(SHOWN[shown] ?? SHOWN.all)
    .map((one) => ({ ...one, used: sums.get(one.name),
      blocks: held.get(one.name)?.blocks ?? 0 }));
  return html`<${Panel} title="Tenants" wide
    note="Sums of the ledger for the whole hours of the range."
    tools=${html`<${Search} label="Find a tenant" value=${q} isLive
        set=${(text) => setQuery({ q: text })} />
      <${Filter} label="Show" value=${shown} options=${TEXTS}
        set=${(name) => setQuery({ show: name === "all" ? null : name })} />
      ${can("tenants") && html`<button type="button" class="main"
        onClick=${() => setMaking(true)}>New tenant</button>`}`}>
    ${instead(tenants, "tenants") ?? html`<${FirstRows} rows=${tenants.data.tenants} what="tenants"
        hasMore=${tenants.data.has_more} /><${TenantTable} q=${q} rows=${rows} />`}<//>
    ${isMaking && html`<${NewTenant} close=${() => setMaking(false)} />`}`;
}

// rows: of `/admin/v1/tenants`, each with `used` (its row of a usage report, if any) and `blocks`.
function TenantTable({ rows, q }) {
  const usd = (head, field) => column.figure(head,
    (row) => (row.used ? Number(row.used[field]) : null),
    dollarsOf(rows.map((row) => row.used?.[field])));
  const hits = (row) => row.used?.hit_ratio;
  const refused = ({ name, state: { refused_last_hour: n, top_code: code } }) => (n ? html`<a
    class="bad" href=${href(["requests"], { tenant: name, code: "refused" })}>${count(n)}</a>
    <div class="soft code">${code.split("_").map((part, place) => (place
      ? html`_<wbr />${part}` : part))}</div>` : count(n));
  return html`<${Table} caption="Tenants in the range" isHidden rows=${rows} id=${(row) => row.name}
    file="tenants" down="requests" none=${q ? `No tenant has “${q}” in its name.` : "No tenant."}
    columns=${[column.tenant("tenant", "name"), column.status("status", (row) => row.state.status),
      column.figure("requests", (row) => row.used?.requests ?? 0),
      column.figure("prompt tokens", (row) => row.used?.prompt_tokens ?? 0, about),
      { head: "hit ratio", get: hits,
        show: (row) => (isKnown(hits(row)) ? html`<${Bar} part=${hits(row)} />` : NONE) },
      usd("charged", "charge_usd"), usd("saved", "saved_usd"),
      { head: "refused, 1 h", get: (row) => row.state.refused_last_hour, show: refused,
        kind: "fold" },
      column.figure("blocks now", "blocks"), column.text("tier")]} />`;
}

function NewTenant({ close }) {
  const { classes } = useSession().me.server;
  const act = (values) => ask("/admin/v1/tenants",
    { method: "POST", body: { name: values.name, ...settingsOf(values) } });
  const done = ({ name }) => { location.hash = href(["tenants", name]); };
  return html`<${FormDialog} title="New tenant" submit="Create tenant" close=${close} act=${act}
    done=${done} fields=${[{ name: "name", label: "Name", isRequired: true,
      hint: "1 to 64 of a–z, 0–9, “-”, “_”, “.”" }, ...settingsFields(null, classes)]} />`;
}
