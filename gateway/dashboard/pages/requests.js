// Requests: the list of ended requests, and one request by its id.

import { html, useState } from "../parts/html.js";
import { ask, useData } from "../parts/api.js";
import { NONE, about, count, dollars, dollarsOf, instant, moment, ms, number,
  share, words } from "../parts/format.js";
import { Chip, Empty, Panel, TenantLink, Tile, Tiles, instead } from "../parts/pieces.js";
import { href, setQuery, windowQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";

const ENDINGS = ["done", "refused", "cancelled", "failed"];
const tone = (row) => (row.ending === "done" ? "good" : row.ending === "refused" ? "bad" : "warn");
const stateOf = (row) => html`<${Chip} tone=${tone(row)}>${row.code || row.ending}<//>`;

export function Requests() {
  const { range, query } = useSession(), tenant = query.get("tenant") ?? "",
    code = query.get("code") ?? "";
  const [older, setOlder] = useState({ path: "", rows: [], next: null });
  const filters = `${tenant ? `&tenant=${encodeURIComponent(tenant)}` : ""}${code
    ? `&code=${encodeURIComponent(code)}` : ""}`;
  const path = `/admin/v1/requests?limit=100&${windowQuery(range)}${filters}`;
  const found = useData(path), missing = instead(found, "the list of requests");
  const own = older.path === filters ? older : { rows: [], next: found.data?.next_before ?? null };
  const more = async () => {
    const page = await ask(`${path}&before=${encodeURIComponent(own.next)}`);
    setOlder({ path: filters, rows: [...own.rows, ...page.requests], next: page.next_before });
  };
  const go = (event) => { event.preventDefault(); location.hash = href(["requests",
    event.target.id_.value.trim()]); };
  return html`<${Panel} title="Requests" wide
    note="Ended requests, newest first. Prompts and answers are never kept." tools=${html`
      <form class="inline" onSubmit=${go}><input name="id_" type="search" aria-label="Request by id"
        placeholder="Request by id" required /></form>
      <input type="search" aria-label="Tenant" placeholder="Tenant" value=${tenant}
        onChange=${(event) => setQuery({ tenant: event.target.value.trim() })} />
      <input type="search" aria-label="Ending or code" placeholder="Ending or code" list="endings"
        value=${code} onChange=${(event) => setQuery({ code: event.target.value.trim() })} />
      <datalist id="endings">${ENDINGS.map((one) => html`<option value=${one} />`)}</datalist>`}>
    ${missing ?? html`<${List} rows=${[...found.data.requests, ...own.rows]} />
      ${own.next && html`<button type="button" class="quiet" onClick=${more}>Show older
        requests</button>`}`}<//>`;
}

function List({ rows }) {
  const write = dollarsOf(rows.map((row) => row.cost_usd));
  const column = (head, field, show = count) => ({ head, get: (row) => row[field],
    show: (row) => show(row[field]) });
  return html`<${Table} caption="Requests in the range" isHidden rows=${rows}
    id=${(row) => row.request_id} file="requests" none="No request in this range." columns=${[
    { head: "received", get: (row) => row.received_ms,
      csv: (row) => new Date(row.received_ms).toISOString(), kind: "text",
      show: (row) => html`<a class="whole" title=${instant(row.received_ms)}
        href=${href(["requests", row.request_id])}>${moment(row.received_ms)}</a>` },
    { head: "tenant", get: (row) => row.tenant, show: (row) => html`<${TenantLink}
      name=${row.tenant} />`, kind: "text" },
    { head: "ending", get: (row) => row.code || row.ending, show: stateOf, kind: "text" },
      { head: "dialect", get: (row) => row.dialect && words(row.dialect), kind: "text" },
    column("prompt", "prompt_tokens"), column("read", "read_tokens"), column("written",
      "written_tokens"), column("output", "output_tokens"),
    column("first token", "first_token_ms", ms), column("total", "total_ms", ms),
      { ...column("cost", "cost_usd", write), get: (row) => (row.cost_usd === null ? null
        : Number(row.cost_usd)) },
    { head: "miss", get: (row) => (row.missed ? words(row.missed) : null), kind: "text" },
    { head: "id", get: (row) => row.request_id, show: (row) => html`<span
      title=${row.request_id}>${row.request_id.slice(0, 12)}…</span>`, kind: "text mono" }]} />`;
}

export function OneRequest({ thing: id }) {
  const found = useData(`/admin/v1/requests/${encodeURIComponent(id)}`, 0), missing = instead(found,
    "this request");
  if (missing) return html`<${Panel} title=${`Request ${id}`} wide>${missing}<//>`;
  const one = found.data, prompt = one.prompt_tokens || 0;
  return html`<${Tiles}>
      <${Tile} label="Ending" value=${one.code || one.ending} note=${one.status
        ? `HTTP ${one.status}` : ""} tone=${one.ending === "done" ? "" : "alarm"} />
      <${Tile} label="Read from the cache" value=${prompt ? share(one.read_tokens / prompt) : NONE}
        note=${`${count(one.read_tokens)} of ${count(prompt)} prompt tokens`} />
      <${Tile} label="First token" value=${ms(one.first_token_ms)}
        note=${`${ms(one.total_ms)} in all`} />
      <${Tile} label="Cost" value=${dollars(one.cost_usd)} note=${one.price?.saved_usd
        ? `${dollars(one.price.saved_usd)} saved by caching` : ""} /><//>
    <div class="grid">
      <${Panel} title="Request" note="Its line in the log has the same id.">
        <${Facts} caption="The request" rows=${[["id", one.request_id],
        ["tenant", html`<${TenantLink} name=${one.tenant} />`],
        ["key", one.key_id], ["workspace", one.workspace], ["endpoint", one.endpoint], ["dialect",
          one.dialect && words(one.dialect)], ["model", one.model],
        ["streamed", one.stream === null || one.stream === undefined ? null : one.stream ? "yes"
          : "no"], ["ending", one.ending], ["code", one.code || null]]} /><//>
      <${Times} one=${one} />
      <${Prefix} one=${one} />
      <${Price} price=${one.price} />
      <${Entry} entry=${one.entry} />
    </div>`;
}

function Facts({ caption, rows }) {
  return html`<${Table} caption=${caption} isHidden isPlain rows=${rows.filter(([, v]) => v !== null
    && v !== undefined && v !== "")} id=${([name]) => name} columns=${[
    { head: "field", get: ([name]) => name, kind: "text" }, { head: "value", get: ([, v]) => v,
      kind: "text wrap" }]} />`;
}

const STEPS = [["received_ms", "received"], ["submitted_ms", "given to the engine"], ["started_ms",
  "started"], ["first_token_ms", "first token"],
  ["settled_ms", "charged"], ["ended_ms", "ended"]];
function Times({ one }) {
  const known = STEPS.map(([field, text]) => [text, one.times?.[field]]).filter(([,
    at]) => at !== null && at !== undefined);
  const started = known.findIndex(([text]) => text === "started");
  if (one.load_ms && started > 0) {  // its turn came before the load did
    const at = Math.max(known[started - 1][1], known[started][1] - one.load_ms);
    known.splice(started, 1, ["had its turn", at], ["loaded", known[started][1]]);
  }
  if (!known.length) return html`<${Panel} title="Times"><${Empty}>The times of this request are no
    longer kept.<//><//>`;
  const begin = known[0][1], whole = Math.max(1, known[known.length - 1][1] - begin);
  return html`<${Panel} title="Times" note=${instant(begin)}><ol class="steps">${known.map(([text,
    at], place) => html`<li>
    <span>${text}</span><span class="track" aria-hidden="true"><i class="fill out"
      style=${{ left: `${(100 * ((known[place - 1]?.[1] ?? at) - begin)) / whole}%`,
      width: `${(100 * (at - (known[place - 1]?.[1]
        ?? at))) / whole}%` }}></i></span><b>+${ms(at - begin)}</b></li>`)}</ol><//>`;
}

function Prefix({ one }) {
  const parts = [["read", one.read_tokens, "read"], ["written", one.written_tokens, "write"],
    ["computed", one.computed_tokens, "fresh"]];
  const prompt = one.prompt_tokens || 1;
  return html`<${Panel} title="Prefix" note=${one.missed
    ? `Cause of the miss: ${words(one.missed)}.` : null}>
    <div class="stack" role="img" aria-label=${parts.map(([text,
      n]) => `${text} ${n}`).join(", ")}>${parts.map(([, n, colour]) =>
      n > 0 && html`<i class=${colour} style=${{ width: `${(100 * n) / prompt}%` }}></i>`)}</div>
    <ul class="legend">${parts.map(([text, n, colour]) => html`<li><i
      class=${colour}></i>${text} <b>${about(n)}</b></li>`)}</ul>
    <${Facts} caption="Tokens" rows=${[["prompt", count(one.prompt_tokens)], ["output",
      count(one.output_tokens)], ["found in the cache", count(one.cached_tokens)],
      ...Object.entries(one.loaded_tokens ?? {}).map(([name, n]) => [`of them from ${name}`,
        count(n)]),
      ["copies allowed; read", one.fidelity && one.fidelity !== "exact"
        ? `${one.fidelity}; ${one.read_fidelity}` : null],
      ["attention window", one.attention ? one.attention.replace(";", ", ") : null],
      ["waited for its load", one.load_ms ? ms(one.load_ms) : null],
      ["missed", one.missed_tokens ? count(one.missed_tokens) : null], ["promised, but recomputed",
        one.recomputed_promised_tokens ? count(one.recomputed_promised_tokens) : null],
      ...Object.entries(one.read_by_class ?? {}).map(([name, n]) => [`read, ${words(name)}`,
        count(n)]),
      ...Object.entries(one.written_by_class ?? {}).map(([name, n]) => [`written, ${words(name)}`,
        count(n)])]} /><//>`;
}

function Price({ price }) {
  if (!price) return html`<${Panel} title="Price"><${Empty}>Nothing was charged.<//><//>`;
  const write = dollarsOf([price.cost_usd]);
  return html`<${Panel} title="Price" note=${`Rate card ${price.rate_card_id}`}><${Table}
    caption="Price by line" isHidden isPlain rows=${[...price.lines,
      { line: "total", tokens: null, usd_per_mtok: null, usd: price.cost_usd }]}
        id=${(row) => row.line} columns=${[
      { head: "line", get: (row) => words(row.line), kind: "text" }, { head: "tokens",
        get: (row) => count(row.tokens) },
      { head: "$ per million", get: (row) => number(2)(row.usd_per_mtok) },
      { head: "amount", get: (row) => write(row.usd) }]} />
    <p class="note">${write(price.uncached_cost_usd)} without
      caching; ${write(price.saved_usd)} saved.</p><//>`;
}

function Entry({ entry }) {
  if (!entry) return html`<${Panel} title="Ledger entry"><${Empty}>No entry: the request never
    ran.<//><//>`;
  const shown = (v) => (v !== null && typeof v === "object" ? JSON.stringify(v) : String(v));
  return html`<${Panel} title="Ledger entry"><details><summary>All fields</summary><${Facts}
    caption="Ledger entry"
    rows=${Object.entries(entry).map(([name, v]) => [words(name), v === null ? null : shown(v)])}
      /></details><//>`;
}
