// Cache: the pool, blocks by tenant, promises, evictions between tenants, churn, and prefix trees.

import { html } from "../parts/html.js";
import { useData } from "../parts/api.js";
import { Chart } from "../parts/chart.js";
import { enginesOf, sumOf } from "../parts/engines.js";
import { count, dollarsOf, fromPico, seconds, share, words } from "../parts/format.js";
import { Bar, Empty, Panel, TenantLink, Tile, Tiles, instead } from "../parts/pieces.js";
import { PrefixTree } from "../parts/prefix_tree.js";
import { setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";
import { warnings } from "./overview.js";

const ENDS = ["given", "running", "kept", "broken", "given_up", "renewed", "clipped", "refused"];
const number = (head, name) => ({ head, get: (row) => row[name], show: (row) => count(row[name]) });
const tenantColumn = { head: "tenant", get: (row) => row.tenant, show: (row) => html`<${TenantLink}
  name=${row.tenant} />`, kind: "text" };

export function Promises({ rows }) {
  const kept = (row) => (row.kept + row.broken ? row.kept / (row.kept + row.broken) : null);
  return html`<${Table}
    caption="Prefixes promised since the start: given = running + kept + broken + given up"
      rows=${rows}
    id=${(row) => `${row.tenant} ${row.class}`} none="No promises yet." file="promises" first=${12}
      columns=${[tenantColumn,
    { head: "class", get: (row) => row.class, kind: "text" },
      ...ENDS.map((name) => number(words(name), name)),
    { head: "kept / ended", get: kept, show: (row) => share(kept(row)) }]} />`;
}

export function Cache() {
  const { query } = useSession(), now = useData("/admin/v1/analytics"), missing = instead(now,
    "the cache");
  if (missing) return html`<${Panel} title="Cache" wide>${missing}<//>`;
  const all = now.data, engines = enginesOf(all), sum = (name) => sumOf(engines, name);
  const blocks = sum("blocks") || 1, used = sum("blocks") - sum("free_blocks");
  const total = (name) => all.holdings.reduce((sum, row) => sum + row[name], 0);
  const promised = total("promised_blocks"), below = total("promised_below");
  const isSplit = engines.length > 1;
  const ofModels = isSplit ? engines.map(({ name }) => ({ head: name,
    get: (row) => row.blocks_by_model[name] ?? 0,
    show: (row) => count(row.blocks_by_model[name] ?? 0) })) : [];
  return html`${warnings(engines)}
    <${Tiles}>
      <${Tile} label="Blocks in use" value=${share(used / blocks)}
        note=${`${count(used)} of ${count(sum("blocks"))} KV blocks`} />
      <${Tile} label="Cached" value=${count(sum("cached_blocks"))} unit="blocks"
        note="can be found by prefix" />
      <${Tile} label="Promised" value=${count(promised)} unit="blocks"
        note=${below ? `${count(below)} kept below, the others held in the pool`
          : "are not evicted while promised"} />
      <${Tile} label="Evicted" value=${count(sum("evicted_blocks_total"))} unit="blocks"
        note=${`${count(sum("expired_blocks_total"))} expired, since the engine's start`} />
    <//>
    ${engines.map((engine) => html`<${Pool} engine=${engine}
      promised=${isSplit ? engine.promised_blocks - engine.promised_below : promised - below} />`)}
    <div class="grid">
      <${Panel} title="Blocks by tenant" wide><${Table} caption="Now, with limits" isHidden
        rows=${all.holdings} id=${(row) => row.tenant} file="blocks" first=${12} order=${-2}
        none="The cache is empty." columns=${[tenantColumn, number("blocks", "blocks"), ...ofModels,
        { head: "share of the pool", get: (row) => row.blocks / blocks, show: (row) => html`<${Bar}
          part=${row.blocks / blocks} />` },
        number("pinned", "pinned_blocks"), number("floor", "floor_blocks"), number("ceiling",
          "ceiling_blocks"), number("promised", "promised_blocks"),
        number("kept below", "promised_below"),
        number("promised, at most", "promised_blocks_max")]} /><//>
      <${Trees} names=${all.holdings.map((row) => row.tenant).sort()}
        first=${all.holdings[0]?.tenant} chosen=${query.get("tenant")} />
      <${Taken} rows=${all.taken} />
      <${Panel} title="Promises" wide><${Promises} rows=${all.leases} /><//>
      <${Churn} churn=${all.churn} />
    </div>`;
}

// Every block is in one part: free, promised, or cached without a promise, and in use by a request.
function Pool({ engine, promised }) {
  const pinned = engine.pinned_blocks, kept = Math.min(promised, engine.cached_blocks);
  const parts = [["in use by a request", pinned, "out"], ["promised", kept, "write"],
    ["cached without a promise", engine.cached_blocks - kept, "read"],
    ["free", engine.free_blocks, "soft"]].map(([text, n, colour]) => [text, Math.max(0, n),
      colour]);
  const whole = Math.max(1, parts.reduce((sum, [, n]) => sum + n, 0));
  return html`<${Panel} title=${engine.name ? `The pool of ${engine.name}` : "The pool"}
    note=${`${count(engine.blocks)} KV blocks of ${count(engine.block_size)} tokens`}>
    <div class="stack tall" role="img" aria-label=${parts.map(([text,
      n]) => `${text} ${n}`).join(", ")}>${parts.map(([, n, colour]) =>
      n > 0 && html`<i class=${colour} style=${{ width: `${(100 * n) / whole}%` }}></i>`)}</div>
    <ul class="legend">${parts.map(([text, n, colour]) => html`<li><i
      class=${colour}></i>${text} <b>${count(n)}</b></li>`)}</ul><//>`;
}

function Taken({ rows }) {
  const write = dollarsOf(rows.map((row) => fromPico(row.cost_pico)));
  return html`<${Panel} title="Evictions between tenants" wide
    note="Blocks evicted for another tenant, and the cost of computing them again."><${Table}
    caption="Owner and tenant that the blocks were evicted for" isHidden rows=${rows}
      id=${(row) => `${row.owner} ${row.taker}`} file="evictions" first=${12}
    none="No evictions between tenants." order=${-3} columns=${[
      { head: "owner", get: (row) => row.owner, show: (row) => html`<${TenantLink} name=${row.owner}
        />`, kind: "text" },
      { head: "evicted for", get: (row) => row.taker, show: (row) => html`<${TenantLink}
        name=${row.taker} />`, kind: "text" },
      number("blocks", "blocks"), number("recomputed tokens", "recomputed_tokens"),
      { head: "cost", get: (row) => fromPico(row.cost_pico),
        show: (row) => write(fromPico(row.cost_pico)) }]} /><//>`;
}

function Churn({ churn }) {
  const at = churn.minutes.map(([minute]) => minute * 60_000);
  const line = (label, place, colour) => ({ label, colour,
    values: churn.minutes.map((row) => row[place]) });
  const totals = [["inserted", "inserted_blocks"], ["evicted", "evicted_blocks"], ["expired",
    "expired_blocks"], ["erased", "erased_blocks"]];
  const after = { head: "evicted after, mean", get: (row) => row.evicted_after_s,
    show: (row) => seconds(row.evicted_after_s) };
  return html`<${Panel} title="Block churn" wide><${Chart} title="Blocks per minute"
    unit="KV blocks, last two hours" at=${at} write=${count} isBars isStacked
      none="No block moved in the last two hours." lines=${[line("inserted", 1, "read"),
        line("evicted", 2, "bad"), line("expired or erased", 3, "write")]} />
    <${Table} caption="By tenant, since the start" rows=${churn.tenants} id=${(row) => row.tenant}
      file="churn" first=${12} none="No block moved yet." order=${-2}
      columns=${[tenantColumn, ...totals.map(([head, name]) => number(head, name)), after]} /><//>`;
}

function Trees({ names, first, chosen }) {
  const name = chosen && names.includes(chosen) ? chosen : chosen ?? first;
  const found = useData(name ? `/admin/v1/tree/${encodeURIComponent(name)}` : null, 15_000);
  const pick = html`<label>Tenant <select value=${name}
    onChange=${(event) => setQuery({ tenant: event.target.value })}>
    ${names.map((one) => html`<option value=${one}
      selected=${one === name}>${one}</option>`)}</select></label>`;
  if (!name) return html`<${Panel} title="Prefix tree" wide><${Empty}>The cache is empty.<//><//>`;
  return html`<${Panel} title="Prefix tree" wide tools=${pick}
    note=${"Each bar is a run of tokens without a fork. Its width is the tokens of its subtree,"
      + " its shade the number of matches."}>
    ${instead(found, "the prefix tree") ?? (found.data.namespaces.length
      ? found.data.namespaces.map((space) => {
      const title = `${space.model ? `${space.model}: ` : ""}${name} / ${space.workspace
        ?? `shared scope ${space.shared_scope}`}${space.partition ? " (partition)" : ""}`;
      return html`<h3 class="tree-name">${title} <span
        class="soft">${count(space.blocks)} blocks</span></h3>
        <${PrefixTree} branches=${space.branches} name=${title} />`; }) : html`<${Empty}>Nothing
          of ${name} is cached.<//>`)}<//>`;
}
