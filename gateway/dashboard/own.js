// A tenant's own page on the public listener: its state, usage, budgets, findings and cache.

import { html, render } from "./parts/html.js";
import { SLOW_POLL_MS, address, useData } from "./parts/api.js";
import { Budgets, Limits } from "./parts/accounts/budgets.js";
import * as column from "./parts/tables/columns.js";
import { FindingList, useFindings } from "./parts/findings.js";
import { NONE, about, count, dollars, dollarsOf, exactDollars, instant, seconds,
  share, words } from "./parts/format.js";
import { Frame } from "./parts/frame.js";
import { Charts, HIT_RATIO, ratios } from "./parts/charts/history.js";
import { Panel, Status, Tile, Tiles, instead } from "./parts/pieces.js";
import { DAY_MS, HOUR_MS, href, rangeOf, useRoute, windowOf } from "./parts/route.js";
import { useSignIn } from "./parts/session.js";
import { Table } from "./parts/tables/table.js";
import { savedNote } from "./parts/accounts/usage.js";

function App() {
  const range = rangeOf(useRoute().query);
  const { leave, signIn } = useSignIn("/v1/state", "Your usage",
    "Any key of yours with the scope usage.");
  if (signIn) return signIn;
  return html`<${Frame} links=${[{ href: href([]), title: "Usage", isHere: true }]}
    title="Your usage" range=${range} who="your key" leave=${leave}>
    <${Usage} range=${range} /><//>`;
}

function Usage({ range }) {
  const group = range.length_ms > 3 * DAY_MS ? "day" : "hour";
  const used = useData(address("/v1/usage", { group_by: group, ...windowOf(range) }));
  const state = useData("/v1/state"), cache = useData("/v1/cache", SLOW_POLL_MS);
  const findings = useFindings(null, "/v1/findings"), missing = instead(used, "your usage");
  if (missing) return html`<${Panel} title="Usage" wide>${missing}<//>`;
  const { totals, budgets, rows, tenant } = used.data;
  const refusals = Object.entries(state.data?.refusals_last_hour ?? {});
  return html`${state.data && html`<${State} tenant=${tenant} state=${state.data} />`}
    <${Tiles}>
      <${Tile} label="Hit ratio" value=${share(totals.hit_ratio)}
        note=${`of ${count(totals.prompt_tokens)} prompt tokens read from the cache`} />
      <${Tile} label="Saved by caching" value=${dollars(totals.saved_usd)}
        note=${savedNote(totals)} />
      <${Tile} label="Charged" value=${dollars(totals.charge_usd)}
        note=${`for ${count(totals.requests)} requests`} />
      <${Tile} label="Refused, last hour" unit="requests"
        value=${state.data ? count(refusals.reduce((sum, [, n]) => sum + n, 0)) : NONE}
        note=${refusals.map(([code, n]) => `${count(n)} ${words(code)}`).join(", ")} /><//>
    <${Panel} title="Findings"><${FindingList} found=${findings} hasTenant=${false} isOwn /><//>
    <${History} rows=${rows} window=${used.data.window} group=${group} />
    <div class="grid two"><${Panel} title="Budgets"><${Budgets} budgets=${budgets} /><//>
      <${Panel} title="Limits" note="Use of the last minute.">
        ${instead(state, "the use of limits")
          ?? html`<${Limits} limits=${state.data.limits} />`}<//></div>
    <${Panel} title="Your cache" wide>${instead(cache, "your cache")
      ?? html`<${Cached} cache=${cache.data} />`}<//>`;
}

const State = ({ tenant, state }) => html`<section class="panel wide state" aria-label="State">
  <p><${Status} status=${state.status} /> <b>${tenant}</b></p>
  ${state.reasons.map((reason) => html`<p class="reason">${reason}</p>`)}</section>`;

function History({ rows, window, group }) {
  const step = group === "day" ? DAY_MS : HOUR_MS;
  const found = new Map(rows.map((row) => [Date.parse(row.from), row])), at = [];
  const [first, end] = [Date.parse(window.since), Date.parse(window.until)];
  for (let t = Math.floor(first / step) * step; t < end; t += step) at.push(t);
  const values = (name) => at.map((t) => Number(found.get(t)?.[name] ?? 0));
  const line = (label, name, colour) => ({ label, colour, values: values(name) });
  const bars = { unit: `per ${group}`, write: count, isBars: true };
  return html`<${Charts} at=${at} charts=${[
    { ...HIT_RATIO, lines: [{ label: "read from the cache", colour: "read", isFilled: true,
      values: ratios(values("cache_read_tokens"), values("prompt_tokens")) }] },
    { ...bars, title: "Tokens", write: about, isStacked: true, lines: [
      line("read", "cache_read_tokens", "read"), line("written", "cache_write_tokens", "write"),
      line("computed", "fresh_tokens", "fresh"), line("output", "output_tokens", "out")] },
    { ...bars, title: "Charged", unit: `dollars per ${group}`, axis: exactDollars,
      write: dollarsOf(values("charge_usd")), none: "Nothing was charged in this range.",
      lines: [line("charged", "charge_usd", "write")] },
    { ...bars, title: "Requests", lines: [line("ended", "requests", "out")] }]} />`;
}

function Cached({ cache }) {
  const ends = (one) => `${one.class}: ${
    one.expires_in_s === null ? "without end" : seconds(one.expires_in_s)}`;
  const levels = (row) => Object.entries(row.levels ?? {})
    .map(([name, one]) => `${name}: ${count(one.blocks)} ${one.state}`).join(", ");
  const complete = (row) => (row.completed_at ? instant(row.completed_at)
    : `pending ${row.pending_at.length ? `at ${row.pending_at.join(", ")}` : ""}`);
  return html`<p class="note">Workspace ${cache.workspace}: ${count(cache.blocks)} blocks,
      ${" "}${count(cache.tokens)} tokens, ${count(cache.promised_blocks)} blocks promised.</p>
    <${Table} caption="Retained prefixes" rows=${cache.leases} id=${(row) => row.lease_id}
      file="leases" none="No prefix is retained." columns=${[
        column.digest("lease", "lease_id"), column.figure("tokens"),
        column.text("classes, and when they end", (row) => row.classes.map(ends).join(", "))]} />
    ${cache.has_more_leases && html`<p class="note">Those least recently used are left out.</p>`}
    ${cache.erasures.length > 0 && html`<${Table} caption="Erasures" rows=${cache.erasures}
      id=${(row) => row.receipt_id} isPlain columns=${[column.at("time", "at"),
        column.text("erased", "what"), column.figure("blocks"),
        column.text("by level", levels), column.text("complete", complete)]} />`}`;
}

render(html`<${App} />`, document.getElementById("root"));
