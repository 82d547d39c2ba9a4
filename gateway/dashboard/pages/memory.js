// Memory: the levels of the cache. How full each is and of whose bytes, what moves between them,
// what was found on each, and what the cost model chose.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { Chart } from "../parts/chart.js";
import { about, bytes, count, number, seconds, share, time, words } from "../parts/format.js";
import { Chip, Empty, Notice, Panel, TenantLink, Tile, Tiles, instead } from "../parts/pieces.js";
import { Table } from "../parts/table.js";

const NAMES = ["device", "host", "disk"];
const STATES = { open: ["good", "open"], full: ["warn", "full: stores nothing new"],
  off: ["bad", "off"] };
const rate = (n) => (n ? `${bytes(n)}/s` : "not measured yet");
const micro = (us) => (us === undefined || us === null ? null : `${number(1)(us)} us`);

export function Memory() {
  const now = useData("/admin/v1/levels"), tenants = useData("/admin/v1/levels/tenants", 15_000);
  const missing = instead(now, "the levels of the cache");
  if (missing) return html`<${Panel} title="Memory" wide>${missing}<//>`;
  const all = now.data, { levels } = all;
  const names = levels.some((one) => one.name === "remote") ? [...NAMES, "remote"] : NAMES;
  const found = Math.max(1, levels.reduce((sum, one) => sum + one.loaded_tokens_total, 0));
  return html`${levels.filter((one) => one.state !== "open").map((one) => html`<${Notice}
      tone=${one.state === "off" ? "bad" : "warn"}>The ${one.name} level is ${one.state}${one.reason
        ? `: ${one.reason}` : ""}${one.since_ms ? `, since ${time(one.since_ms)}` : ""}.<//>`)}
    ${!all.is_on && html`<${Off} lines=${all.switch_on} />`}
    <${Tiles}>${levels.map((one) => html`<${Tile} label=${`Found on ${one.name}`}
      value=${share(one.loaded_tokens_total / found)}
      note=${`${about(one.loaded_tokens_total)} cached tokens since the engine's start`} />`)}
      ${all.is_on && html`<${Tile} label="Loading" value=${count(all.loading)} unit="requests"
        note="wait for host memory or disk" />`}
    <//>
    <div class="grid">${levels.map((one) => html`<${Level} level=${one} />`)}
      <${Panel} title="Bytes by tenant" wide>${instead(tenants, "bytes by tenant")
        ?? html`<${Owners} rows=${tenants.data.tenants}
          names=${names} />`}<//>
      ${all.is_on && html`<${Found} minutes=${all.minutes} names=${names} />
        <${Flows} minutes=${all.minutes} names=${names} /><${Choices} all=${all} />`}
    </div>`;
}

function Off({ lines }) {
  return html`<${Panel} title="Nothing is kept below the device" wide
    note=${"What leaves the pool is computed again, and promises end with the engine. Two lines of"
      + " the configuration file give the cache a disk; a restart applies them."}>
    <pre>${lines}</pre>
    <p class="note"><code>trunkline doctor</code>${" measures the disk and says what it is good for"
      + " on this model."}</p><//>`;
}

// Every byte of a level is in one part: promised, used without a promise, or free.
function Level({ level }) {
  const promised = Math.min(level.promised_bytes, level.used_bytes);
  const parts = [["promised", promised, "write"], ["used", level.used_bytes - promised, "read"],
    ["free", level.free_bytes, "soft"]];
  const whole = Math.max(1, level.capacity_bytes, level.used_bytes);
  const [tone, text] = STATES[level.state];
  return html`<${Panel} title=${`${level.name[0].toUpperCase()}${level.name.slice(1)}`}
    tools=${html`<${Chip} tone=${tone}>${text}<//>`}
    note=${[level.capacity_bytes ? bytes(level.capacity_bytes) : "without a bound",
      `${count(level.blocks)} blocks`,
      ...(level.copies ?? []).filter((one) => one.fidelity !== "exact").map((one) =>
        `${one.fidelity} copies ${bytes(one.bytes)}`)].join(", ")}>
    <div class="stack tall" role="img" aria-label=${parts.map(([name,
      n]) => `${name} ${bytes(n)}`).join(", ")}>${parts.map(([, n, colour]) =>
      n > 0 && html`<i class=${colour} style=${{ width: `${(100 * n) / whole}%` }}></i>`)}</div>
    <ul class="legend">${parts.map(([name, n, colour]) => html`<li><i
      class=${colour}></i>${name} <b>${bytes(n)}</b></li>`)}</ul><//>`;
}

function Owners({ rows, names }) {
  const of = (row, name, field) => row.levels[name]?.[field] ?? 0;
  const column = (name) => ({ head: name, get: (row) => of(row, name, "used_bytes"),
    show: (row) => bytes(of(row, name, "used_bytes")) });
  const promised = (row) => names.reduce((sum, name) => sum + of(row, name, "promised_bytes"), 0);
  return html`<${Table} caption="Now, on each level" isHidden rows=${rows} id=${(row) => row.tenant}
    file="levels" first=${12} order=${-2} none="The cache is empty." columns=${[
      { head: "tenant", get: (row) => row.tenant, show: (row) => html`<${TenantLink}
        name=${row.tenant} />`, kind: "text" },
      { head: "all", get: (row) => row.bytes, show: (row) => bytes(row.bytes) },
      ...names.map(column),
      { head: "promised", get: promised, show: (row) => bytes(promised(row)) }]} />`;
}

const drawn = (minutes, names, colours) => names.map((name, place) => ({
  label: words(name).replace(" ", " to "), colour: colours[place], values: minutes[name] }));

function Found({ minutes, names }) {
  return html`<${Panel} title="Where cached tokens were" wide><${Chart} title="Tokens per minute"
    unit="cached prompt tokens by level, last two hours" at=${minutes.minute.map((n) => n * 60_000)}
    write=${about} isBars isStacked none="No token was found in the last two hours."
    lines=${drawn(minutes, names, ["read", "write", "fresh", "out"])} /><//>`;
}

function Flows({ minutes, names }) {
  const flows = ["device_host", "host_device", "host_disk", "disk_host",
    ...(names.includes("remote") ? ["disk_remote", "remote_host"] : [])];
  return html`<${Panel} title="Between the levels" wide><${Chart} title="Blocks per minute"
    unit="blocks copied, last two hours" at=${minutes.minute.map((n) => n * 60_000)} write=${count}
    none="No block moved in the last two hours."
    lines=${drawn(minutes, flows, ["read", "write", "fresh", "out", "violet", "bad"])} /><//>`;
}

function Choices({ all }) {
  const rows = all.levels.filter((one) => one.name !== "device");
  const total = (head, name) => ({ head, get: (row) => row[name], show: (row) => count(row[name]) });
  return html`<${Panel} title="Load or compute" wide
    note=${"A prefix below the device is loaded where that is faster than computing it. Regret is"
      + " the time that loads took beyond what computing would have."}>
    ${rows.length ? html`<${Table} caption="Since the engine's start" rows=${rows} isPlain
      id=${(row) => row.name} columns=${[
      { head: "level", get: (row) => row.name, kind: "text" }, total("loaded", "chosen_total"),
      total("computed", "declined_total"),
      { head: "regret", get: (row) => row.regret_s_total, show: (row) =>
        seconds(row.regret_s_total) },
      { head: "reads at", get: (row) => row.bytes_per_s, show: (row) => rate(row.bytes_per_s) },
      { head: "a token loaded", get: (row) => micro(row.worth?.load_us_per_token) },
      { head: "a token computed", get: (row) => micro(row.worth?.compute_us_per_token) },
      { head: "worth it from", get: (row) => (row.worth ? row.worth.tokens_min === null ? "never"
        : `${count(row.worth.tokens_min)} tokens` : null) },
      total("recovered", "recovered_total"), total("failed", "failed_total"),
      total("damaged", "damaged_total"), total("dropped", "dropped_total"),
      total("expired", "expired_total"),
      { head: "written today", get: (row) => row.written_bytes_today, show: (row) => (row.name
        === "disk" ? `${bytes(row.written_bytes_today)} of ${bytes(all.write_bytes_per_day_max)}`
        : null) }]} />` : html`<${Empty}>The engine has not told of its levels yet.<//>`}<//>`;
}
