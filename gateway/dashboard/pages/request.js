// One request by its id: its tokens, times, price and ledger entry, and no text of it.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { NONE, count, dollars, dollarsOf, exactDollars, instant, isKnown, ms, share,
  words } from "../parts/format.js";
import { Empty, Panel, Stack, TenantLink, Tile, Tiles, instead } from "../parts/pieces.js";
import { href } from "../parts/route.js";
import { Facts, Table } from "../parts/tables/table.js";

export function OneRequest({ thing: id }) {
  const found = useData(`/admin/v1/requests/${encodeURIComponent(id)}`, 0);
  const missing = instead(found, "this request");
  if (missing) return html`<${Panel} title=${`Request ${id}`} wide>${missing}<//>`;
  const one = found.data, { prompt_tokens: prompt, read_tokens: read } = one;
  return html`<${Tiles}>
      <${Tile} label="Ending" value=${one.code || one.ending}
        note=${one.status ? `HTTP ${one.status}` : ""}
        tone=${one.ending === "done" ? "" : "alarm"} />
      <${Tile} label="Read from the cache" value=${prompt ? share(read / prompt) : NONE}
        note=${`${count(read)} of ${count(prompt)} prompt tokens`} />
      <${Tile} label="First token" value=${ms(one.first_token_ms)}
        note=${`${ms(one.total_ms)} in all`} />
      <${Tile} label="Cost" value=${dollars(one.cost_usd)}
        note=${one.price ? `${dollars(one.price.saved_usd)} saved by caching` : ""} /><//>
    <div class="grid">
      <${About} one=${one} /><${Times} one=${one} /><${Prefix} one=${one} />
      <${Price} price=${one.price} /><${Entry} entry=${one.entry} />
    </div>`;
}

function About({ one }) {
  return html`<${Panel} title="Request" note="Its line in the log has the same id.">
    <${Facts} caption="The request" rows=${[["id", one.request_id],
      ["tenant", html`<${TenantLink} name=${one.tenant} />`], 
      ["key", one.key_label ? `${one.key_label} (${one.key_id})` : one.key_id], ["user", one.user],
      ["workspace", one.workspace], ["endpoint", one.endpoint],
      ["dialect", one.dialect && words(one.dialect)], ["model", one.model],
      ["streamed", isKnown(one.stream) ? (one.stream ? "yes" : "no") : null],
      ["ending", one.ending], ["code", one.code]]} /><//>`;
}

const STEPS = [["received_ms", "received"], ["submitted_ms", "given to the engine"],
  ["started_ms", "started"], ["first_token_ms", "first token"], ["settled_ms", "charged"],
  ["ended_ms", "ended"]];

// Return the steps that are known as [text, ms]; a load comes between its turn and its start.
function stepsOf({ times, load_ms: load }) {
  const known = STEPS.map(([field, text]) => [text, times[field]]).filter(([, at]) => isKnown(at));
  const started = known.findIndex(([text]) => text === "started");
  if (!load || started < 1) return known;
  const end = known[started][1], turn = Math.max(known[started - 1][1], end - load);
  return known.toSpliced(started, 1, ["had its turn", turn], ["loaded", end]);
}

function Times({ one }) {
  const steps = stepsOf(one);
  if (!steps.length) {
    return html`<${Panel} title="Times"><${Empty}>The times of this request are no longer
      kept.<//><//>`;
  }
  const begin = steps[0][1], whole = Math.max(1, steps.at(-1)[1] - begin);
  const part = (duration) => `${(100 * duration) / whole}%`;
  return html`<${Panel} title="Times" note=${instant(begin)}>
    <ol class="steps">${steps.map(([text, at], place) => {
      const from = steps[place - 1]?.[1] ?? at;
      return html`<li><span>${text}</span>
        <span class="track" aria-hidden="true"><i class="fill out"
          style=${{ left: part(from - begin), width: part(at - from) }}></i></span>
        <b>+${ms(at - begin)}</b></li>`;
    })}</ol><//>`;
}

const PARTS = { tools: "tools", system: "system text", messages: "messages" };

function Prefix({ one }) {
  const number = (text, n) => [text, n ? count(n) : null];
  const each = (text, numbers) =>
    Object.entries(numbers ?? {}).map(([name, n]) => [`${text} ${words(name)}`, count(n)]);
  const isCopy = one.fidelity && one.fidelity !== "exact";
  return html`<${Panel} title="Prefix"
    note=${one.missed ? `Cause of the miss by contract: ${words(one.missed)}.` : null}>
    <${Stack} whole=${one.prompt_tokens || 1} parts=${[["read", one.read_tokens, "read"],
      ["written", one.written_tokens, "write"], ["computed", one.computed_tokens, "fresh"]]} />
    <${Facts} caption="Tokens" rows=${[["prompt", count(one.prompt_tokens)],
      ["output", count(one.output_tokens)], ["found in the cache", count(one.cached_tokens)],
      ...each("of them from", one.loaded_tokens),
      ["computed, because", one.cause && html`<a
        href=${href(["findings"], { finding: one.finding_id })}>${words(one.cause)}</a>${
        one.place ? ` at ${one.place}` : ""}`],
      number("tokens computed again", one.wasted_tokens),
      ["their cost", one.wasted_tokens ? dollars(one.wasted_usd) : null],
      ...Object.entries(PARTS).map(([part, name]) => number(name, one.part_tokens?.[part])),
      ["copies allowed; read", isCopy ? `${one.fidelity}; ${one.read_fidelity}` : null],
      ["attention window", one.attention?.replace(";", ", ")],
      ["waited for its load", one.load_ms ? ms(one.load_ms) : null],
      number("missed", one.missed_tokens),
      number("promised, but recomputed", one.recomputed_promised_tokens),
      ...each("read,", one.read_by_class), ...each("written,", one.written_by_class)]} /><//>`;
}

function Price({ price }) {
  if (!price) return html`<${Panel} title="Price"><${Empty}>Nothing was charged.<//><//>`;
  const write = dollarsOf([price.cost_usd]);
  const total = { line: "total", tokens: null, usd_per_mtok: null, usd: price.cost_usd };
  return html`<${Panel} title="Price" note=${`Rate card ${price.rate_card_id}`}>
    <${Table} caption="Price by line" isHidden isPlain rows=${[...price.lines, total]}
      id=${(row) => row.line} columns=${[column.text("line", (row) => words(row.line)),
        column.figure("tokens"), column.figure("per million", "usd_per_mtok", exactDollars),
        column.figure("amount", "usd", write)]} />
    <p class="note">${write(price.uncached_cost_usd)} without caching;
      ${" "}${write(price.saved_usd)} saved.</p><//>`;
}

function Entry({ entry }) {
  const shown = (v) => (typeof v === "object" ? JSON.stringify(v) : String(v));
  return html`<${Panel} title="Ledger entry">${entry
    ? html`<details><summary>All fields</summary><${Facts} caption="Ledger entry"
      rows=${Object.entries(entry).map(([name, v]) =>
        [words(name), isKnown(v) ? shown(v) : null])} /></details>`
    : html`<${Empty}>No entry: the request never ran.<//>`}<//>`;
}
