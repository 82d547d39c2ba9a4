// Memory: the levels of the cache. How full each is and of whose bytes, what moves between them,
// what was found on each, and what the cost model chose.

import { html } from "../parts/html.js";
import { SLOW_POLL_MS, useData } from "../parts/api.js";
import { Chart } from "../parts/charts/chart.js";
import * as column from "../parts/tables/columns.js";
import { about, bytes, count, isKnown, number, seconds, share, time, words }
  from "../parts/format.js";
import { Chip, Empty, Notice, Panel, Stack, Tile, Tiles, instead } from "../parts/pieces.js";
import { Table } from "../parts/tables/table.js";

const NAMES = ["device", "host", "disk"], ROWS_FIRST = 12;
const STATES = { open: ["good", "open"], full: ["warn", "full: stores nothing new"],
  off: ["bad", "off"], starting: ["warn", "starting"] };

export function Memory() {
  const now = useData("/admin/v1/levels"), missing = instead(now, "the levels of the cache");
  const tenants = useData("/admin/v1/levels/tenants", SLOW_POLL_MS);
  if (missing) return html`<${Panel} title="Memory" wide>${missing}<//>`;
  const all = now.data, { levels, minutes } = all;
  const names = levels.some((one) => one.name === "remote") ? [...NAMES, "remote"] : NAMES;
  const found = levels.reduce((sum, one) => sum + one.loaded_tokens_total, 0) || 1;
  return html`<${Warnings} levels=${levels} />
    ${!all.is_on && html`<${Off} lines=${all.switch_on} file=${all.config_file} />`}
    <${Tiles}>${levels.map((one) => html`<${Tile} label=${`Found on ${one.name}`}
      value=${share(one.loaded_tokens_total / found)}
      note=${`${about(one.loaded_tokens_total)} cached tokens since the engine's start`} />`)}
      ${all.is_on && html`<${Tile} label="Loading" value=${count(all.loading)} unit="requests"
        note="wait for host memory or disk" />`}
    <//>
    ${all.is_on && all.config_file && html`<p class="note">Configured in
      <code>${all.config_file}</code>.</p>`}
    <div class="grid">${levels.map((one) => html`<${Level} level=${one} />`)}
      <${Panel} title="Bytes by tenant" wide>${instead(tenants, "bytes by tenant")
        ?? html`<${Owners} rows=${tenants.data.tenants} names=${names} />`}<//>
      ${all.is_on && html`<${Found} minutes=${minutes} names=${names} />
        <${Flows} minutes=${minutes} names=${names} /><${Choices} all=${all} />`}
    </div>`;
}

function Warnings({ levels }) {
  return levels.filter((one) => one.state !== "open").map((one) => html`<${Notice}
    tone=${STATES[one.state][0]}>The ${one.name} level is ${one.state}${
    one.reason ? `: ${one.reason}` : ""}${
    one.since_ms ? `, since ${time(one.since_ms)}` : ""}.<//>`);
}

function Off({ lines, file }) {
  return html`<${Panel} title="Nothing is kept below the device" wide
    note=${"What leaves the pool is computed again, and promises end with the engine. Two lines of"
      + " the configuration file give the cache a disk; a restart applies them."}>
    <pre>${lines}</pre>
    <p class="note">${file ? html`This server read <code>${file}</code>.`
      : html`This server read no file: <code>trunkline.toml</code> in the folder that it is started
        in is read at the next start.`}</p>
    <p class="note"><code>trunkline doctor</code> measures the disk and says what it is good for on
      this model.</p><//>`;
}

// Every byte of a level is in one part: promised, used without a promise, or free.
function Level({ level }) {
  const { used_bytes: used, capacity_bytes: capacity } = level;
  const promised = Math.min(level.promised_bytes, used), [tone, text] = STATES[level.state];
  const notes = [capacity ? bytes(capacity) : "without a bound", `${count(level.blocks)} blocks`,
    ...(level.copies ?? []).filter((one) => one.fidelity !== "exact")
      .map((one) => `${one.fidelity} copies ${bytes(one.bytes)}`)];
  return html`<${Panel} title=${level.name[0].toUpperCase() + level.name.slice(1)}
    tools=${html`<${Chip} tone=${tone}>${text}<//>`} note=${notes.join(", ")}>
    <${Stack} whole=${Math.max(1, capacity, used)} write=${bytes}
      parts=${[["promised", promised, "write"], ["used", used - promised, "read"],
        ["free", level.free_bytes, "soft"]]} /><//>`;
}

function Owners({ rows, names }) {
  const of = (row, name, field) => row.levels[name]?.[field] ?? 0;
  const promised = (row) => names.reduce((sum, name) => sum + of(row, name, "promised_bytes"), 0);
  return html`<${Table} caption="Now, on each level" isHidden rows=${rows} id=${(row) => row.tenant}
    file="levels" first=${ROWS_FIRST} down="all" none="The cache is empty." columns=${[
      column.tenant(), column.figure("all", "bytes", bytes),
      ...names.map((name) => column.figure(name, (row) => of(row, name, "used_bytes"), bytes)),
      column.figure("promised", promised, bytes)]} />`;
}

const COLOURS = ["read", "write", "fresh", "out", "violet", "bad"];
const chartOf = (minutes, names) => ({ at: minutes.minute.map((n) => n * 60_000),
  lines: names.map((name, place) => ({ label: words(name).replace(" ", " to "),
    colour: COLOURS[place], values: minutes[name] })) });

function Found({ minutes, names }) {
  return html`<${Panel} title="Where cached tokens were" wide><${Chart} title="Tokens per minute"
    unit="cached prompt tokens by level, last two hours" write=${about} isBars isStacked
    none="No token was found in the last two hours." ...${chartOf(minutes, names)} /><//>`;
}

function Flows({ minutes, names }) {
  const flows = ["device_host", "host_device", "host_disk", "disk_host",
    ...(names.includes("remote") ? ["disk_remote", "remote_host"] : [])];
  return html`<${Panel} title="Between the levels" wide><${Chart} title="Blocks per minute"
    unit="blocks copied, last two hours" write=${count}
    none="No block moved in the last two hours." ...${chartOf(minutes, flows)} /><//>`;
}

const micros = (us) => (isKnown(us) ? `${number(1)(us)} µs` : null);
function worthFrom({ worth }) {
  if (!worth) return null;
  return isKnown(worth.tokens_min) ? `${count(worth.tokens_min)} tokens` : "never";
}

// A row for each figure of the cost model, a column for each level.
function Choices({ all }) {
  const levels = all.levels.filter((one) => one.name !== "device");
  const written = (one) => (one.name === "disk"
    ? `${bytes(one.written_bytes_today)} of ${bytes(all.write_bytes_per_day_max)}` : null);
  const rows = [["loaded", (one) => count(one.chosen_total)],
    ["computed", (one) => count(one.declined_total)],
    ["regret", (one) => seconds(one.regret_s_total)],
    ["reads at", (one) => (one.bytes_per_s ? `${bytes(one.bytes_per_s)}/s` : "not measured yet")],
    ["a token loaded", (one) => micros(one.worth?.load_us_per_token)],
    ["a token computed", (one) => micros(one.worth?.compute_us_per_token)],
    ["worth it from", worthFrom],
    ...["recovered", "failed", "damaged", "dropped", "expired"].map((name) =>
      [name, (one) => count(one[`${name}_total`])]), ["written today", written]];
  return html`<${Panel} title="Load or compute" wide
    note=${"A prefix below the device is loaded where that is faster than computing it. Regret is"
      + " the time that loads took beyond what computing would have."}>
    ${levels.length ? html`<${Table} caption="Since the engine's start" rows=${rows} isPlain
      id=${([name]) => name} columns=${[column.text("figure", ([name]) => name),
        ...levels.map((one) => ({ head: one.name, get: ([, of]) => of(one) }))]} />`
      : html`<${Empty}>The engine has not told of its levels yet.<//>`}<//>`;
}
