// Fleet: the engines elsewhere of each model, which tenant has its prefixes where, and why the last
// requests went where they went.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { Unready } from "../parts/engines.js";
import { NONE, about, count, isKnown, ms, percent, seconds, share } from "../parts/format.js";
import { Bar, Chip, Empty, Filter, Panel, Tile, Tiles, instead } from "../parts/pieces.js";
import { href, setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/tables/table.js";

const ROWS_FIRST = 16, TIE_S = 0.005;
const TONES = { ready: "good", wrong: "bad", lost: "bad" };
const TERMS = { wait_s: "waiting", fill_s: "computing the prompt", displaced_s: "evictions",
  decode_s: "the answer" };
const inMs = (s) => ms(isKnown(s) ? 1000 * s : null);
const sumOf = (rows, get) => rows.reduce((sum, row) => sum + (get(row) ?? 0), 0);
const ratio = (part, whole) => (whole ? part / whole : null);

export function Fleet() {
  const now = useData("/admin/v1/fleet"), missing = instead(now, "the fleet");
  if (missing) return html`<${Panel} title="Fleet" wide>${missing}<//>`;
  const { models } = now.data;
  if (!models.length) {
    return html`<${Panel} title="Fleet" wide><${Empty}>Each model has one engine, which this gateway
      started itself: every request goes to it. The page${" "}
      <a href=${href(["engine"])}>Engine</a> shows it.<//><//>`;
  }
  return models.map((model) => html`
    ${models.length > 1 && html`<h2>${model.model}</h2>`}
    <${OneModel} key=${model.model} model=${model} broken=${now.data.broken_promises} />`);
}

function OneModel({ model, broken }) {
  const { replicas } = model, ready = replicas.filter((one) => one.state === "ready");
  const waits = ready.map((one) => one.wait_s ?? 0);
  const prompt = sumOf(replicas, (one) => one.routed_tokens?.prompt);
  const cached = sumOf(replicas, (one) => one.routed_tokens?.cached);
  return html`<${Unready} replicas=${replicas} />
    <${Tiles}>
      <${Tile} label="Replicas" value=${`${count(ready.length)} / ${count(replicas.length)}`}
        unit="ready" tone=${ready.length ? "" : "alarm"} note="engines elsewhere of this model" />
      <${Tile} label="Found" value=${share(ratio(cached, prompt))}
        note=${`${about(cached)} of ${about(prompt)} prompt tokens, since the gateway's start`} />
      <${Tile} label="Shortest wait" value=${waits.length ? inMs(Math.min(...waits)) : NONE}
        note=${waits.length ? `${inMs(Math.max(...waits))} at the replica with most to do` : ""} />
      <${Tile} label="Moved" value=${count(model.moved_requests)} unit="requests"
        note=${`finished elsewhere; prefixes asked anew: ${count(model.prefixes_asked_anew)}`} />
      ${apartOf(model)}
      <${Tile} label="Promises broken" value=${count(broken)} tone=${broken ? "alarm" : ""}
        note=${`moved ${count(model.promise_moves.moved ?? 0)}, restored ${
          count(model.promise_moves.found ?? 0)} after a death`} />
    <//>
    <div class="grid">
      <${Replicas} rows=${replicas} />
      <${Tenants} model=${model} />
      <${Choices} rows=${model.choices} count=${replicas.length} />
    </div>`;
}

// Return a tile of the prompts that one engine computes for another, where there are any or engines
// with roles.
function apartOf({ prompts_apart: outcomes, replicas }) {
  const ends = Object.entries(outcomes).filter(([, number]) => number);
  if (!ends.length && replicas.every((one) => one.role === "any")) return null;
  const others = ends.filter(([name]) => name !== "apart")
    .map(([name, number]) => `${name.replace("_", " ")} ${count(number)}`);
  return html`<${Tile} label="Apart" value=${count(outcomes.apart ?? 0)} unit="prompts"
    note=${others.join(", ") || "computed by another engine than the answer"} />`;
}

function Replicas({ rows }) {
  const found = (row) => ratio(row.routed_tokens?.cached, row.routed_tokens?.prompt);
  return html`<${Panel} title="Replicas" wide
    note="What each engine has told, and what the requests found that this gateway sent there.">
    <${Table} caption="Replicas" isHidden rows=${rows} id=${(row) => row.name} file="replicas"
      first=${ROWS_FIRST} columns=${[column.text("replica", "name"),
        column.text("state", "state", { show: (row) =>
          html`<${Chip} tone=${TONES[row.state] ?? "warn"}>${row.state}<//>` }),
        ...(rows.some((row) => row.role !== "any") ? [column.text("role", "role")] : []),
        column.figure("wait", "wait_s", inMs), column.figure("rows"),
        column.figure("prompt tokens", (row) => row.routed_tokens?.prompt, about),
        { head: "found", get: found, show: (row) => html`<${Bar} part=${found(row)} />` },
        column.figure("prefix tokens", "device_prefix_tokens", about),
        column.figure("promised tokens", "promised_tokens", about),
        column.figure("report, ago", "report_age_s", seconds),
        column.text("reason", "reason", { kind: "text least" })]} /><//>`;
}

// --- tenants x replicas --------------------------------------------------------------------------

function Tenants({ model }) {
  const { query } = useSession(), names = model.replicas.map((one) => one.name);
  const rows = model.tenants.map((one, place) => ({ ...one,
    name: one.tenant ?? `deleted ${place + 1}`,
    ...Object.fromEntries(["promised_tokens", "prompt_tokens", "cached_tokens"].map((field) =>
      [field, sumOf(Object.values(one.replicas), (there) => there[field])])) }));
  const chosen = rows.find((one) => one.name === query.get("tenant"));
  return html`<${Panel} title="Tenants by replica" wide
    note=${"Where the tokens of each tenant's prefixes are: a bar for each replica. Found: the share"
      + " of prompt tokens that were cached."
      + (model.has_more_tenants ? " Tenants with fewer tokens are left out." : "")}
    tools=${rows.length > 0 && html`<${Filter} label="Tenant" value=${chosen?.name ?? ""}
      options=${[["", "all"], ...rows.map((one) => one.name).sort()]}
      set=${(tenant) => setQuery({ tenant })} />`}>
    ${chosen ? html`<${OneTenant} tenant=${chosen} names=${names} />`
      : html`<${AllTenants} rows=${rows} names=${names} />`}<//>`;
}

function AllTenants({ rows, names }) {
  const found = (row) => ratio(row.cached_tokens, row.prompt_tokens);
  const held = (row) => names.filter((name) => row.replicas[name]?.tokens > 0);
  return html`<${Table} caption="Tenants by replica" isHidden rows=${rows} id=${(row) => row.name}
    first=${ROWS_FIRST} down="tokens" file="tenants-by-replica" none="No tenant has a prefix there."
    columns=${[column.tenant(), column.figure("tokens", "tokens", about),
      column.figure("promised", "promised_tokens", about),
      column.figure("prompt tokens", "prompt_tokens", about),
      { head: "found", get: found, show: (row) => html`<${Bar} part=${found(row)} />` },
      column.figure("replicas", (row) => held(row).length),
      column.text("where", (row) => placesOf(row, held(row)), { kind: "text",
        show: (row) => html`<${Places} row=${row} names=${names} held=${held(row)} />` })]} />`;
}

function placesOf(row, held) {
  return [...held].sort((a, b) => row.replicas[b].tokens - row.replicas[a].tokens)
    .map((name) => `${name} ${percent(ratio(row.replicas[name].tokens, row.tokens))}`).join(", ");
}

function Places({ row, names, held }) {
  const text = placesOf(row, held), [first, ...others] = text.split(", ");
  const most = Math.max(1, ...held.map((name) => row.replicas[name].tokens));
  const height = (name) => `${(100 * (row.replicas[name]?.tokens ?? 0)) / most}%`;
  return html`<span class="places"><span class="skyline" role="img" title=${text}
      aria-label=${text || "nowhere"}>${names.map((name) =>
        html`<i style=${{ height: height(name) }}></i>`)}</span>
    <span>${first || NONE}${others.length > 0 && ` +${others.length}`}</span></span>`;
}

function OneTenant({ tenant, names }) {
  const rows = names.filter((name) => tenant.replicas[name])
    .map((name) => ({ name, ...tenant.replicas[name] }));
  const found = (row) => ratio(row.cached_tokens, row.prompt_tokens);
  const part = (row) => ratio(row.tokens, tenant.tokens);
  return html`<${Table} caption=${`Replicas of ${tenant.name}`} isHidden rows=${rows}
    id=${(row) => row.name} first=${ROWS_FIRST} down="tokens" file="replicas-of-tenant"
    columns=${[column.text("replica", "name"), column.figure("tokens", "tokens", about),
      { head: "share", get: part, show: (row) => html`<${Bar} part=${part(row)} />` },
      column.figure("promised", "promised_tokens", about),
      column.figure("prompt tokens", "prompt_tokens", about),
      { head: "found", get: found, show: (row) => html`<${Bar} part=${found(row)} />` }]} />`;
}

// --- choices -------------------------------------------------------------------------------------

function Choices({ rows, count: several }) {
  const chosen = (row) => row.costs.find((one) => one.replica === row.replica);
  const term = (name) => (row) => chosen(row)?.[name];
  return html`<${Panel} title="Last choices" wide note=${"Newest first. A request goes to the"
    + " replica that is predicted to be done with it first, in seconds of four terms."}>
    <${Table} caption="Last choices" isHidden rows=${rows} id=${(row) => row.request_id}
      first=${ROWS_FIRST} file="choices" none=${several > 1
        ? "No request has been sent yet." : "One replica: every request goes to it."} columns=${[
        column.text("request", "request_id", { kind: "text mono fold", show: (row) => html`<a
          href=${href(["requests", row.request_id])}>${row.request_id}</a>` }),
        column.text("went to", "replica"), column.figure("done in", term("total_s"), inMs),
        column.figure("wait", term("wait_s"), inMs), column.figure("prompt", term("fill_s"), inMs),
        column.figure("answer", term("decode_s"), inMs),
        column.figure("tokens there", (row) => tokensAt(chosen(row)), about),
        column.text("why", why, { kind: "text wrap" })]} /><//>`;
}

const tokensAt = (cost) => (cost ? cost.device_tokens + cost.below_tokens : null);

// Return why a request went where it went, in seconds.
function why({ replica, policy, costs, refused, pair }) {
  if (pair) return `${pair.prompt_at} computed the prompt in ${inMs(pair.prompt_s)}`;
  const own = costs.find((one) => one.replica === replica);
  const [next] = costs.filter((one) => one.replica !== replica);
  if (!own) return "no replica could take it";
  const away = Object.keys(refused).length;
  if (!next) return away ? `the only one that could take it, of ${away + 1}` : "the only one";
  if (policy === "round_robin") return "its turn";
  const more = next.total_s - own.total_s;
  if (Math.abs(more) <= TIE_S) return `as soon as ${next.replica}: by the prefix's hash`;
  const [most] = Object.keys(TERMS).sort((a, b) => (next[b] - own[b]) - (next[a] - own[a]));
  return `${next.replica} would take ${inMs(more)} longer: ${inMs(next[most] - own[most])} for ${
    TERMS[most]}`;
}
