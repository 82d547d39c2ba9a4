// Tables of what the gateway has counted since its start, of all tenants or of one.

import { html } from "../html.js";
import * as column from "./columns.js";
import { about, ms, number, share, words } from "../format.js";
import { Panel } from "../pieces.js";
import { Table } from "./table.js";

// counts: a number by name.
function Counted({ title, caption, head, counts, none }) {
  const rows = Object.entries(counts ?? {}).sort((a, b) => b[1] - a[1]);
  return html`<${Panel} title=${title}><${Table} caption=${caption} isPlain rows=${rows}
    id=${([name]) => name} none=${none}
    columns=${[column.text(head, ([name]) => words(name)),
      column.figure("number", ([, n]) => n)]} /><//>`;
}

export const Misses = ({ counts }) => html`<${Counted} title="Misses by cause" head="cause"
  caption="Prompts with a breakpoint that were not read in full" counts=${counts}
  none="No misses." />`;
export const Endings = ({ counts }) => html`<${Counted} title="Requests by ending" head="ending"
  caption="All requests" counts=${counts} none="No requests since the start." />`;
export const IgnoredFields = ({ counts }) => html`<${Counted} title="Ignored fields" head="field"
  caption="Requests with a field that had no effect" counts=${counts}
  none="No ignored fields." />`;

const CACHED = { hit: "half or more", partial: "less than half", miss: "none" };
export function FirstToken({ times }) {
  const rows = Object.entries(CACHED).map(([kind, cached]) => ({ cached, ...times[kind] }));
  return html`<${Panel} title="Time to first token"><${Table} isPlain rows=${rows}
    caption="By cached share of the prompt" id=${(row) => row.cached}
    columns=${[column.text("cached"), column.figure("requests", "count"),
      ...["p50", "p95", "p99"].map((name) => column.figure(name, name, ms))]} /><//>`;
}

// rows: of tenants, each with its tokens by class. Only what was written was paid for.
export function ReadsPerWrite({ rows }) {
  const written = rows.flatMap(({ tenant, read_by_class: read, write_by_class: write }) =>
    Object.entries(write).filter(([, tokens]) => tokens).map(([name, tokens]) =>
      ({ tenant, class: name, read: read[name] ?? 0, written: tokens })));
  const ratio = (row) => row.read / row.written;
  return html`<${Panel} title="Reads per write" wide
    note=${"Tokens read for each token that was written at a breakpoint. Below the break-even of"
      + " the class's prices, breakpoints cost more than they save."}>
    <${Table} caption="By tenant and retention class, since the start" rows=${written} first=${12}
      id=${(row) => `${row.tenant} ${row.class}`} file="reads-per-write" down="written"
      none="Nothing was written at a breakpoint." columns=${[column.tenant(), column.text("class"),
        column.figure("tokens read", "read", about),
        column.figure("tokens written", "written", about),
        column.figure("reads per write", ratio, number(2))]} /><//>`;
}

const ENDS = ["given", "running", "kept", "broken", "given_up", "renewed", "clipped", "refused"];
export function Promises({ rows }) {
  const kept = (row) => (row.kept + row.broken ? row.kept / (row.kept + row.broken) : null);
  return html`<${Panel} title="Promises" wide><${Table} rows=${rows} file="promises" first=${12}
    caption="Prefixes promised since the start: given = running + kept + broken + given up"
    id=${(row) => `${row.tenant} ${row.class}`} none="No promises yet."
    columns=${[column.tenant(), column.text("class"),
      ...ENDS.map((name) => column.figure(words(name), name)),
      column.figure("kept / ended", kept, share)]} /><//>`;
}
