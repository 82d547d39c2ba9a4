// A tenant's own page on the public listener: its state, usage, budgets, findings and cache.

import { html, render, useEffect, useRef, useState } from "./parts/html.js";
import { Refused, ask, connection, keepKey, storedKey, useData } from "./parts/api.js";
import { Budgets, Limits } from "./parts/budgets.js";
import { Chart } from "./parts/chart.js";
import { FindingList, useFindings } from "./parts/findings.js";
import { about, count, dollarScale, dollars, dollarsOf, instant, seconds, share,
  words } from "./parts/format.js";
import { Frame, SignIn } from "./parts/frame.js";
import { ratios } from "./parts/history.js";
import { Notice, Panel, Status, Tile, Tiles, instead } from "./parts/pieces.js";
import { href, rangeOf, useRoute, windowQuery } from "./parts/route.js";
import { Table } from "./parts/table.js";

const HOUR_MS = 3_600_000;

function App() {
  const { query } = useRoute(), [isIn, setIn] = useState(storedKey() !== ""), [refused,
    setRefused] = useState(null);
  const main = useRef(null);
  useEffect(() => {
    connection.signedOut = (error) => { keepKey(""); setIn(false); setRefused(error.message); };
  }, []);
  const enter = async (key) => {
    keepKey(key);
    setRefused(null);
    try { await ask("/v1/usage"); setIn(true); } catch (error) {
      if (error instanceof Refused
        && !error.isForbidden) { keepKey(""); setRefused(error.message); } else setIn(true);
    }
  };
  if (!isIn) return html`<${SignIn} refused=${refused} enter=${enter} title="Your usage"
    where="Any key of yours with the scope usage." />`;
  const leave = () => { keepKey(""); setIn(false); };
  return html`<${Frame} links=${[{ href: href([]), title: "Usage", isHere: true }]}
    title="Your usage" hasRange query=${query} who="your key"
    leave=${leave} main=${main}><${Usage} range=${rangeOf(query)} /><//>`;
}

function Usage({ range }) {
  const group = range.seconds > 3 * 86_400 ? "day" : "hour";
  const used = useData(`/v1/usage?group_by=${group}&${windowQuery(range)}`),
    state = useData("/v1/state"), cache = useData("/v1/cache", 15_000);
  const findings = useFindings(null, "/v1/findings"), missing = instead(used, "your usage");
  if (missing) return html`<${Panel} title="Usage" wide>${missing}<//>`;
  const { totals, budgets } = used.data,
    whole = Number(totals.charge_usd) + Number(totals.saved_usd);
  const told = state.data;
  return html`${told && html`<section class="panel wide state" aria-label="State"><p><${Status}
    status=${told.status} />
      ${" "}<b>${used.data.tenant}</b></p>${told.reasons.map((reason) => html`<p
        class="reason">${reason}</p>`)}</section>`}
    ${cache.error?.isForbidden && html`<${Notice} tone="plain">This key may not read the cache: a
      key with the scope cache may.<//>`}
    <${Tiles}>
      <${Tile} label="Hit ratio" value=${share(totals.hit_ratio)}
        note=${`of ${count(totals.prompt_tokens)} prompt tokens read from the cache`} />
      <${Tile} label="Saved by caching" value=${dollars(totals.saved_usd)} note=${whole > 0
        ? `${share(Number(totals.saved_usd) / whole)} of the bill without caching`
          : "nothing is charged"} />
      <${Tile} label="Charged" value=${dollars(totals.charge_usd)}
        note=${`for ${count(totals.requests)} requests`} />
      <${Tile} label="Refused, last hour" value=${told
        ? count(Object.values(told.refusals_last_hour).reduce((a, b) => a + b, 0)) : "–"}
          unit="requests"
        note=${told ? Object.entries(told.refusals_last_hour).map(([code,
          n]) => `${count(n)} ${words(code)}`).join(", ") : ""} /><//>
    <${Panel} title="Findings"><${FindingList} found=${findings} hasTenant=${false} isOwn /><//>
    <${History} rows=${used.data.rows} window=${used.data.window} group=${group} />
    <div class="grid two"><${Panel} title="Budgets"><${Budgets} budgets=${budgets} /><//>
      <${Panel} title="Limits" note="Use of the last minute.">${instead(state, "the use of limits")
        ?? html`<${Limits} limits=${told.limits} />`}<//></div>
    ${cache.data && html`<${Cached} cache=${cache.data} />`}`;
}

function History({ rows, window, group }) {
  const step = group === "day" ? 24 * HOUR_MS : HOUR_MS,
    by = new Map(rows.map((row) => [Date.parse(row.from), row])), at = [];
  const [first, end] = [Date.parse(window.since), Date.parse(window.until)];
  for (let t = Math.floor(first / step) * step; t < end; t += step) at.push(t);
  const values = (name) => at.map((t) => Number(by.get(t)?.[name] ?? 0));
  const write = dollarsOf(values("charge_usd")), parts = [["read", "cache_read_tokens", "read"],
    ["written", "cache_write_tokens", "write"],
    ["computed", "fresh_tokens", "fresh"], ["output", "output_tokens", "out"]];
  const chart = (props) => html`<div class="panel"><${Chart} at=${at} ...${props} /></div>`;
  return html`<div class="charts">
    ${chart({ title: "Hit ratio", unit: "of prompt tokens", write: share, most: 1, showsZero: true,
      axis: (v) => `${Math.round(100 * v)} %`,
      none: "No prompt in this range.", lines: [{ label: "read from the cache", colour: "read",
        isFilled: true, values: ratios(values("cache_read_tokens"), values("prompt_tokens")) }] })}
    ${chart({ title: "Tokens", unit: `per ${group}`, write: about, isBars: true, isStacked: true,
      lines: parts.map(([label, name, colour]) => ({ label, colour, values: values(name) })) })}
    ${chart({ title: "Charged", unit: `dollars per ${group}`, write,
      axis: dollarScale(values("charge_usd")), isBars: true,
        none: "Nothing was charged in this range.",
      lines: [{ label: "charged", colour: "write", values: values("charge_usd") }] })}
    ${chart({ title: "Requests", unit: `per ${group}`, write: count, isBars: true,
      lines: [{ label: "ended", colour: "out", values: values("requests") }] })}</div>`;
}

function Cached({ cache }) {
  const left = (one) => (one.expires_in_s === null ? "without end" : seconds(one.expires_in_s));
  return html`<${Panel} title="Your cache" wide
    note=${`Workspace ${cache.workspace}: ${count(cache.blocks)} blocks, ${count(cache.tokens)}${
      ""} tokens, ${count(cache.promised_blocks)} blocks promised.`}>
    <${Table} caption="Retained prefixes" rows=${cache.leases} id=${(row) => row.lease_id}
      file="leases" none="No prefix is retained." columns=${[
      { head: "lease", get: (row) => row.lease_id, show: (row) => html`<span
        title=${row.lease_id}>${row.lease_id.slice(0, 12)}…</span>`, kind: "text mono" },
      { head: "tokens", get: (row) => row.tokens, show: (row) => count(row.tokens) },
      { head: "classes, and when they end",
        get: (row) => row.classes.map((one) => `${one.class}: ${left(one)}`).join(", "),
          kind: "text" }]} />
    ${cache.erasures.length > 0 && html`<${Table} caption="Erasures" rows=${cache.erasures}
      id=${(row) => row.receipt_id} file="erasures" isPlain columns=${[
      { head: "time", get: (row) => row.at ?? row.at_ms, show: (row) => instant(row.at
        ?? row.at_ms), kind: "text" },
      { head: "target", get: (row) => row.target, kind: "text" }, { head: "blocks",
        get: (row) => count(row.blocks) }, { head: "by level", kind: "text", get: (row) =>
        Object.entries(row.levels ?? {}).map(([name, one]) =>
          `${name}: ${count(one.blocks)} ${one.state}`).join(", ") }]} />`}<//>`;
}

render(html`<${App} />`, document.getElementById("root"));
