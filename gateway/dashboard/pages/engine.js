// Engine: its state, load and counters.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { enginesOf } from "../parts/engines.js";
import { about, bytes, count, number, words } from "../parts/format.js";
import { Panel, Tile, Tiles, instead } from "../parts/pieces.js";
import { Table } from "../parts/table.js";
import { warnings } from "./overview.js";

const UNITS = [[/tokens_per_s$/, "tokens per second"], [/_per_s$/, "per second"], [/bytes/,
  "bytes"], [/block_size/, "tokens"], [/blocks/, "blocks"], [/tokens/, "tokens"],
  [/_ms$/, "ms"], [/_s$/, "s"],
  [/requests|running|waiting|loading|compiling|preemptions/, "requests"], [/step/, "steps"]];
const NAMES = { step: "steps", kv_bytes_per_block: "KV memory of a block",
  floor_blocks_asked: "floors asked", floor_blocks_max: "floors, at most",
  context_tokens: "context", waiting_tokens: "waiting prompt tokens",
  window_gone_tokens_total: "computed again, as a window's blocks had gone",
  unneeded_tokens_total: "sampled after the end of their text" };
// `step` counts since the start too, without the usual end of a counter's name.
const isCounter = (name) => name.endsWith("_total") || name === "step";
const nameOf = (name) => NAMES[name] ?? words(name.replace(/_total$|_per_s$/, ""));
const unitOf = (name) => UNITS.find(([form]) => form.test(name))?.[1] ?? "";

const openTo = ({ tenants }) => (!tenants ? "" : tenants.length ? `open to ${tenants.join(", ")}`
  : "closed to all tenants");

export function Engine() {
  const now = useData("/admin/v1/analytics"), missing = instead(now, "the engine");
  if (missing) return html`<${Panel} title="Engine" wide>${missing}<//>`;
  const engines = enginesOf(now.data);
  return html`${warnings(engines)}${engines.map((engine) => html`${engine.name
    && html`<h2>${engine.name} <span class="soft">${openTo(engine)}</span></h2>`}<${OneEngine}
    engine=${engine} />`)}`;
}

function OneEngine({ engine }) {
  const pool = (engine.blocks ?? 0) * (engine.kv_bytes_per_block ?? 0), { restarts } = engine;
  const numbers = Object.entries(engine).filter(([name, v]) => typeof v === "number"
    && !["call_id", "restarts"].includes(name));
  const table = (title, caption, isTotal) => html`<${Panel} title=${title}><${Table}
    caption=${caption} isHidden isPlain id=${([name]) => name}
    rows=${numbers.filter(([name]) => isCounter(name) === isTotal)} columns=${[
      { head: isTotal ? "counter" : "figure", get: ([name]) => nameOf(name),
        kind: "text wrap" },
      { head: "value", get: ([, v]) => (Number.isInteger(v) ? count(v) : number(2)(v)) },
      { head: "unit", get: ([name]) => unitOf(name.replace(/_total$/, "")), kind: "text" }]}
        /><//>`;
  return html`<${Tiles}>
      <${Tile} label="Engine" value=${engine.ready ? "ready" : "not ready"} note=${engine.model
        ?? ""} tone=${engine.ready ? "" : "alarm"} />
      <${Tile} label="Requests" value=${`${count(engine.running)} / ${count(engine.waiting)}`}
        unit="running / waiting"
        note=${`${number(1)(engine.steps_per_s)} steps per second`} />
      <${Tile} label="Prefill" value=${about(engine.prefill_tokens_per_s)} unit="tokens per second"
        note="prompt tokens computed" />
      <${Tile} label="KV memory" value=${pool ? bytes(pool) : "–"} note=${`${engine.kv_format
        ?? ""} on ${engine.device ?? "?"}; ${count(restarts)} restarts`} />
    <//>
    <div class="grid two">${table("Now", "Last known values",
      false)}${table("Since the engine's start", "Counters", true)}</div>`;
}
