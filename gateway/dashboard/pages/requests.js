// Requests: the list of ended requests.

import { html, useState } from "../parts/html.js";
import { address, useData } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { count, dollarsOf, instant, isKnown, iso, moment, ms, words } from "../parts/format.js";
import { Chip, Panel, Search, instead } from "../parts/pieces.js";
import { MoreRows, ROWS_FIRST } from "../parts/tables/more_rows.js";
import { href, setQuery, windowOf } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/tables/table.js";

const ENDINGS = ["done", "refused", "cancelled", "failed"];
const TONES = { done: "good", refused: "bad" };

// Why the prompt was computed again: as findings say it, or else the contract.
const why = (row) => words(row.cause ?? row.missed ?? "");

export function Requests() {
  const { range, query } = useSession(), [limit, setLimit] = useState(ROWS_FIRST);
  const [tenant, code] = ["tenant", "code"].map((name) => query.get(name) ?? "");
  const found = useData(address("/admin/v1/requests",
    { limit, ...windowOf(range), tenant, code }));
  const go = (event) => {
    event.preventDefault();
    location.hash = href(["requests", event.target.request.value.trim()]);
  };
  return html`<${Panel} title="Requests" wide
    note="Ended requests, newest first. Prompts and answers are never kept." tools=${html`
      <form onSubmit=${go}><input name="request" type="search" aria-label="Request by id"
        placeholder="Request by id" required /></form>
      <${Search} label="Tenant" value=${tenant} set=${(text) => setQuery({ tenant: text })} />
      <${Search} label="Ending or code" value=${code} list="endings"
        set=${(text) => setQuery({ code: text })} />
      <datalist id="endings">${ENDINGS.map((one) => html`<option value=${one} />`)}</datalist>`}>
    ${instead(found, "the list of requests") ?? html`<${List} rows=${found.data.requests} />
      <${MoreRows} limit=${limit} set=${setLimit} hasMore=${found.data.next_before} />`}<//>`;
}

function List({ rows }) {
  const write = dollarsOf(rows.map((row) => row.cost_usd));
  const received = (row) => html`<a title=${instant(row.received_ms)}
    href=${href(["requests", row.request_id])}>${moment(row.received_ms)}</a>`;
  const ending = (row) =>
    html`<${Chip} tone=${TONES[row.ending] ?? "warn"}>${row.code || row.ending}<//>`;
  const shownWhy = (row) => (row.finding_id && row.wasted_tokens
    ? html`<a title=${`${row.place ?? ""} ${count(row.wasted_tokens)} tokens again`}
      href=${href(["findings"], { finding: row.finding_id })}>${why(row)}</a>` : why(row));
  const worded = (name) => (row) => row[name] && words(row[name]);
  return html`<${Table} caption="Requests in the range" isHidden rows=${rows} first=${Infinity}
    id=${(row) => row.request_id} file="requests" none="No request in this range." columns=${[
      column.text("received", "received_ms",
        { show: received, csv: (row) => iso(row.received_ms), kind: "text whole" }),
      { ...column.tenant(), kind: "text fold" },
      column.text("ending", (row) => row.code || row.ending, { show: ending, kind: "text fold" }),
      column.text("dialect", worded("dialect"), { kind: "text least" }),
      column.figure("prompt", "prompt_tokens"), column.figure("read", "read_tokens"),
      column.figure("written", "written_tokens"), column.figure("output", "output_tokens"),
      column.figure("first token", "first_token_ms", ms), column.figure("total", "total_ms", ms),
      column.figure("cost", (row) => (isKnown(row.cost_usd) ? Number(row.cost_usd) : null), write),
      column.text("why", why, { show: (row) => shownWhy(row), kind: "text fold" }),
      column.text("key", (row) => row.key_label ?? row.key_id, { kind: "text least" }),
      column.text("user", "user", { kind: "text least" }),
      { ...column.digest("id", "request_id"), kind: "text mono least" }]} />`;
}
