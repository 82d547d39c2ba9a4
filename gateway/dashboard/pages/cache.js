// Cache: the pool, blocks by tenant, promises, evictions between tenants, churn, and prefix trees.

import { html } from "../parts/html.js";
import { SLOW_POLL_MS, useData } from "../parts/api.js";
import { Chart } from "../parts/charts/chart.js";
import * as column from "../parts/tables/columns.js";
import { Warnings, enginesOf } from "../parts/engines.js";
import { count, dollarsOf, fromPico, seconds, share } from "../parts/format.js";
import { Bar, Empty, Filter, Panel, Stack, Tile, Tiles, instead } from "../parts/pieces.js";
import { PrefixTree } from "../parts/prefix_tree.js";
import { setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Promises, ReadsPerWrite } from "../parts/tables/since_start.js";
import { Table } from "../parts/tables/table.js";

const ROWS_FIRST = 12;
const sumOf = (rows, name) => rows.reduce((sum, row) => sum + (row[name] ?? 0), 0);

export function Cache() {
  const { query } = useSession(), now = useData("/admin/v1/analytics");
  const missing = instead(now, "the cache");
  if (missing) return html`<${Panel} title="Cache" wide>${missing}<//>`;
  const all = now.data, engines = enginesOf(all), sum = (name) => sumOf(engines, name);
  const blocks = sum("blocks"), used = blocks - sum("free_blocks");
  const promised = sumOf(all.holdings, "promised_blocks");
  const below = sumOf(all.holdings, "promised_below");
  const inPool = (engine) => (engines.length > 1
    ? engine.promised_blocks - engine.promised_below : promised - below);
  return html`<${Warnings} engines=${engines} failed=${all.failed_models} />
    <${Tiles}>
      <${Tile} label="Blocks in use" value=${share(used / (blocks || 1))}
        note=${`${count(used)} of ${count(blocks)} KV blocks`} />
      <${Tile} label="Cached" value=${count(sum("cached_blocks"))} unit="blocks"
        note="can be found by prefix" />
      <${Tile} label="Promised" value=${count(promised)} unit="blocks"
        note=${below ? `${count(below)} kept below, the others held in the pool`
          : "are not evicted while promised"} />
      <${Tile} label="Evicted" value=${count(sum("evicted_blocks_total"))} unit="blocks"
        note=${`${count(sum("expired_blocks_total"))} expired, since the engine's start`} />
    <//>
    ${engines.map((engine) => html`<${Pool} engine=${engine} promised=${inPool(engine)} />`)}
    <div class="grid">
      <${Holdings} rows=${all.holdings} blocks=${blocks || 1} engines=${engines} />
      <${Trees} names=${all.holdings.map((row) => row.tenant)} chosen=${query.get("tenant")} />
      <${Evictions} rows=${all.taken} />
      <${ReadsPerWrite} rows=${all.tenants} />
      <${Promises} rows=${all.leases} />
      <${Churn} churn=${all.churn} />
    </div>`;
}

// Every block is in one part: free, promised, or cached without a promise, and in use by a request.
function Pool({ engine, promised }) {
  const kept = Math.min(promised, engine.cached_blocks);
  const parts = [["in use by a request", engine.pinned_blocks, "out"], ["promised", kept, "write"],
    ["cached without a promise", engine.cached_blocks - kept, "read"],
    ["free", engine.free_blocks, "soft"]];
  return html`<${Panel} title=${engine.name ? `The pool of ${engine.name}` : "The pool"}
    note=${`${count(engine.blocks)} KV blocks of ${count(engine.block_size)} tokens`}>
    <${Stack} parts=${parts} whole=${parts.reduce((sum, [, n]) => sum + n, 0)} /><//>`;
}

function Holdings({ rows, blocks, engines }) {
  const ofModels = engines.length > 1 ? engines.map(({ name }) =>
    column.figure(name, (row) => row.blocks_by_model[name] ?? 0)) : [];
  const part = (row) => row.blocks / blocks;
  return html`<${Panel} title="Blocks by tenant" wide
    note="The 1,000 tenants with most blocks, if there are more."><${Table}
    caption="Now, with limits" isHidden rows=${rows} id=${(row) => row.tenant} file="blocks"
    first=${ROWS_FIRST} down="blocks" none="The cache is empty." columns=${[
      column.tenant(), column.figure("blocks"), ...ofModels,
      { head: "share of the pool", get: part,
        show: (row) => html`<${Bar} part=${part(row)} />` },
      column.figure("pinned", "pinned_blocks"), column.figure("floor", "floor_blocks"),
      column.figure("ceiling", "ceiling_blocks"), column.figure("promised", "promised_blocks"),
      column.figure("kept below", "promised_below"),
      column.figure("promised, at most", "promised_blocks_max")]} /><//>`;
}

// names: tenants, the one with most blocks first.
function Trees({ names, chosen }) {
  const name = chosen ?? names[0] ?? null;
  const found = useData(name && `/admin/v1/tree/${encodeURIComponent(name)}`, SLOW_POLL_MS);
  if (!name) return html`<${Panel} title="Prefix tree" wide><${Empty}>The cache is empty.<//><//>`;
  const titleOf = ({ model, workspace, shared_scope: scope, partition }) => `${
    model ? `${model}: ` : ""}${name} / ${workspace ?? `shared scope ${scope}`}${
    partition ? " (partition)" : ""}`;
  const options = [...new Set([...names, name])].sort();
  return html`<${Panel} title="Prefix tree" wide
    note=${"Each bar is a run of tokens without a fork. Its width is the tokens of its subtree,"
      + " its shade the number of matches."}
    tools=${html`<${Filter} label="Tenant" value=${name} options=${options}
      set=${(tenant) => setQuery({ tenant })} />`}>
    ${instead(found, "the prefix tree") ?? (found.data.namespaces.length
      ? found.data.namespaces.map((space) => html`
        <h3 class="tree-name">${titleOf(space)} <span
          class="soft">${count(space.blocks)} blocks</span></h3>
        <${PrefixTree} branches=${space.branches} name=${titleOf(space)} />`)
      : html`<${Empty}>Nothing of ${name} is cached.<//>`)}
    ${found.data?.has_more && html`<p class="note">Smaller trees are left out.</p>`}<//>`;
}

function Evictions({ rows }) {
  const cost = (row) => (row.recomputed_tokens ? fromPico(row.cost_pico) : null);
  return html`<${Panel} title="Evictions between tenants" wide
    note=${"Blocks evicted for another tenant: the 50 pairs with most blocks. Tokens and cost are"
      + " those of prompts that evictions made the owner compute again, divided by blocks."}>
    <${Table} caption="Owner and tenant that the blocks were evicted for" isHidden rows=${rows}
      id=${(row) => `${row.owner} ${row.taker}`} file="evictions" first=${ROWS_FIRST} down="blocks"
      none="No evictions between tenants." columns=${[
        column.tenant("owner"), column.tenant("evicted for", "taker"), column.figure("blocks"),
        column.figure("computed again", (row) => row.recomputed_tokens || null),
        column.figure("their cost", cost, dollarsOf(rows.map(cost)))]} /><//>`;
}

function Churn({ churn }) {
  const line = (label, place, colour) =>
    ({ label, colour, values: churn.minutes.map((row) => row[place]) });
  return html`<${Panel} title="Block churn" wide>
    <${Chart} title="Blocks per minute" unit="KV blocks, last two hours" write=${count} isBars
      isStacked at=${churn.minutes.map(([minute]) => minute * 60_000)}
      none="No block moved in the last two hours." lines=${[line("inserted", 1, "read"),
        line("evicted", 2, "bad"), line("expired or erased", 3, "write")]} />
    <${Table} caption="By tenant, since the start" rows=${churn.tenants} id=${(row) => row.tenant}
      file="churn" first=${ROWS_FIRST} none="No block moved yet." down="inserted" columns=${[
        column.tenant(), ...["inserted", "evicted", "expired", "erased"].map((name) =>
          column.figure(name, `${name}_blocks`)),
        column.figure("evicted after, mean", "evicted_after_s", seconds)]} /><//>`;
}
