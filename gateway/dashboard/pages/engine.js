// Engine: its state, load and counters, and the drafts of all engines.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { Warnings, enginesOf } from "../parts/engines.js";
import { NONE, about, bytes, count, number, share, words } from "../parts/format.js";
import { Panel, Tile, Tiles, instead } from "../parts/pieces.js";
import * as column from "../parts/tables/columns.js";
import { Table } from "../parts/tables/table.js";

// The unit of a figure is told by its name: by the first of these that fits.
const UNITS = [[/tokens_per_s$/, "tokens per second"], [/_per_s$/, "per second"],
  [/bytes/, "bytes"], [/block_size/, "tokens"], [/blocks/, "blocks"], [/tokens/, "tokens"],
  [/_ms$/, "ms"], [/_s$/, "s"],
  [/requests|running|waiting|loading|compiling|preemptions/, "requests"], [/step/, "steps"]];
const NAMES = { step: "steps", kv_bytes_per_block: "KV memory of a block",
  floor_blocks_asked: "floors asked", floor_blocks_max: "floors, at most",
  context_tokens: "context", waiting_tokens: "waiting prompt tokens",
  resume_gap_tokens_total: "cached, but computed again from the last point to resume at",
  unneeded_tokens_total: "sampled after the end of their text" };
const NO_FIGURES = ["call_id", "restarts"];
// `step` counts since the start too, without the usual end of a counter's name.
const isCounter = ([name]) => name.endsWith("_total") || name === "step";
const nameOf = ([name]) => NAMES[name] ?? words(name.replace(/_total$|_per_s$/, ""));
const unitOf = ([name]) =>
  UNITS.find(([form]) => form.test(name.replace(/_total$/, "")))?.[1] ?? "";

export function Engine() {
  const now = useData("/admin/v1/analytics"), missing = instead(now, "the engine");
  if (missing) return html`<${Panel} title="Engine" wide>${missing}<//>`;
  const engines = enginesOf(now.data);
  return html`<${Warnings} engines=${engines} failed=${now.data.failed_models} />${engines.map((engine) => html`
    ${engine.name && html`<h2>${engine.name} <span class="soft">${openTo(engine)}</span></h2>`}
    <${OneEngine} engine=${engine} />`)}
    <${Drafts} rows=${now.data.drafts} />`;
}

// An accepted draft is an output token that took no step of its own.
function Drafts({ rows }) {
  return html`<${Panel} title="Drafts" wide
    note="Tokens that were guessed and then verified, several in a step. They change no token.">
    <${Table} caption="Drafts by tenant and source" isHidden rows=${rows} down="drafted"
      id=${(row) => `${row.tenant} ${row.source}`} file="drafts"
      none="No ended request has had a draft since the gateway's start." columns=${[
        column.tenant(), column.text("source", "source"),
        column.figure("drafted", "drafted"), column.figure("accepted", "accepted"),
        { head: "share", get: (row) => row.accepted / row.drafted, show: (row) =>
          share(row.accepted / row.drafted) },
        column.figure("steps saved", "accepted"),
      ]} /><//>`;
}

function openTo({ tenants }) {
  if (!tenants) return "";
  return tenants.length ? `open to ${tenants.join(", ")}` : "closed to all tenants";
}

function OneEngine({ engine }) {
  const pool = engine.blocks * engine.kv_bytes_per_block;
  const figures = Object.entries(engine)
    .filter(([name, v]) => typeof v === "number" && !NO_FIGURES.includes(name));
  return html`<${Tiles}>
      <${Tile} label="Engine" value=${engine.ready ? "ready" : engine.state ?? "not ready"}
        note=${[engine.model, engine.draft_model && `drafts by ${engine.draft_model}`]
          .filter(Boolean).join("; ")} tone=${engine.ready ? "" : "alarm"} />
      <${Tile} label="Requests" value=${`${count(engine.running)} / ${count(engine.waiting)}`}
        unit="running / waiting" note=${`${number(1)(engine.steps_per_s)} steps per second while busy`} />
      <${Tile} label="Prefill" value=${about(engine.prefill_tokens_per_s)} unit="tokens per second"
        note="prompt tokens computed, while busy" />
      <${Tile} label="KV memory" value=${pool ? bytes(pool) : NONE} note=${`${
        engine.kv_format ?? ""} on ${engine.device ?? "?"}; ${count(engine.restarts)} restarts`} />
    <//>
    ${engine.replicas && html`<${Replicas} engine=${engine} />`}
    <div class="grid two">
      <${Figures} title="Now" caption="Last known values"
        rows=${figures.filter((one) => !isCounter(one))} />
      <${Figures} title="Since the engine's start" caption="Counters"
        rows=${figures.filter(isCounter)} /></div>`;
}

// The engines elsewhere that share a model's requests. Figures beside are the sums of them.
function Replicas({ engine }) {
  return html`<${Panel} title="Engines elsewhere" wide note=${`Requests that went on at another one
    after theirs was lost: ${count(engine.moved_requests)}`}>
    <${Table} caption="Engines elsewhere" isHidden rows=${engine.replicas} id=${(row) => row.name}
      file="replicas" columns=${[column.text("engine", "name"), column.text("state", "state"),
        column.text("reason", "reason"), column.figure("running", "running"),
        column.figure("waiting", "waiting"), column.figure("blocks", "blocks"),
        column.figure("free", "free_blocks"), column.figure("losses", "losses")]} /><//>`;
}

function Figures({ title, caption, rows }) {
  return html`<${Panel} title=${title}><${Table} caption=${caption} isHidden isPlain rows=${rows}
    id=${([name]) => name} columns=${[{ head: "figure", get: nameOf, kind: "text wrap" },
      { head: "value", get: ([, v]) => (Number.isInteger(v) ? count(v) : number(2)(v)) },
      { head: "unit", get: unitOf, kind: "text" }]} /><//>`;
}
