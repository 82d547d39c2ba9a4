// Audit: every change that administrators, commands and the file made, newest first.

import { html, useState } from "../parts/html.js";
import { SLOW_POLL_MS, address, useData } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { instant, isKnown, words } from "../parts/format.js";
import { MoreRows, ROWS_FIRST } from "../parts/tables/more_rows.js";
import { Filter, Panel, Search, instead } from "../parts/pieces.js";
import { setQuery, windowOf } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/tables/table.js";

const KINDS = ["tenant", "key", "shared_scope", "rate_card", "budget", "ledger", "cache"];

export function Audit() {
  const { range, query } = useSession(), [limit, setLimit] = useState(ROWS_FIRST);
  const [action, tenant] = ["action", "tenant"].map((name) => query.get(name) ?? "");
  const found = useData(address("/admin/v1/audit",
    { limit, ...windowOf(range), action, tenant }), SLOW_POLL_MS);
  return html`<${Panel} title="Audit log" wide tools=${html`
      <${Search} label="Tenant" value=${tenant} set=${(text) => setQuery({ tenant: text })} />
      <${Filter} label="Changes of" value=${action} set=${(kind) => setQuery({ action: kind })}
        options=${[["", "everything"], ...KINDS.map((kind) => [kind, words(kind)])]} />`}>
    ${instead(found, "the audit log") ?? html`<${List} rows=${found.data.changes} />
      <${MoreRows} limit=${limit} set=${setLimit} hasMore=${found.data.next_before} />`}<//>`;
}

function List({ rows }) {
  const difference = (row) => html`<${Difference} before=${row.before} after=${row.after} />`;
  return html`<${Table} caption="Changes, newest first" isHidden rows=${rows} first=${Infinity}
    id=${(row) => row.audit_id} file="audit" none="No change in this range." columns=${[
      column.at("time", "at"), column.text("by", (row) => `${words(row.actor)} ${row.actor_id}`),
      column.text("from", (row) => row.address || null, { kind: "text mono" }),
      column.text("action"), column.tenant(), column.text("target"),
      column.text("before and after",
        (row) => JSON.stringify({ before: row.before, after: row.after }),
        { show: difference, kind: "text wrap" })]} />`;
}

const isNothing = (v) => !isKnown(v) || v === ""
  || (typeof v === "object" && !Object.keys(v).length);

function valueText(name, v) {
  if (isNothing(v)) return "nothing";
  if (name.endsWith("_ms") && typeof v === "number") return instant(v);
  if (Array.isArray(v)) return v.join(", ");
  return typeof v === "object" ? JSON.stringify(v) : String(v);
}

function Difference({ before, after }) {
  const names = Object.keys({ ...before, ...after })
    .filter((name) => !isNothing(before?.[name]) || !isNothing(after?.[name]));
  const side = (values, name) => values && name in values && valueText(name, values[name]);
  return html`<ul class="diff">${names.map((name) => {
    const [old, now] = [before, after].map((values) => side(values, name));
    return html`<li><b>${words(name.replace(/_ms$/, ""))}</b>
      ${old && html` <del>${old}</del>`}${now && html` <ins>${now}</ins>`}</li>`;
  })}</ul>`;
}
