// The dashboard: polls /admin/v1 every five seconds and draws the answers. No request leaves
// this host. Each drawing also has a table or a label for screen readers.

import { h, put } from "/dashboard/dom.js";
import { icicle, stacked } from "/dashboard/charts.js";

const INTERVAL_MS = 5000;
const ROWS_MAX = 1000;
const SECTIONS = ["Overview", "Tenants", "Tree", "Leases", "Money", "Engine"];
const $ = (id) => document.getElementById(id);
let timer = 0;
let wanted = "";
let isPaused = false;

// --- numbers -----------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (n) => (n === null || n === undefined ? "–" : whole.format(n));
const about = (n) => (n === null || n === undefined ? "–" : short.format(n));
const part = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)} %`);
const ms = (x) => (x === null || x === undefined ? "–" : x < 1000 ? `${x.toFixed(0)} ms` : `${(x / 1000).toFixed(2)} s`);
const span = (s) => (s === null || s === undefined ? "–" : s < 120 ? `${s.toFixed(1)} s` : s < 7200 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`);
const amount = (x) => `${x < 0 ? "−" : ""}${x !== 0 && Math.abs(x) < 0.0001 ? "under $0.0001" : `$${cents.format(Math.abs(x))}`}`;
const cents = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 4 });
const dollars = (pico) => (pico === null || pico === undefined ? "–" : amount(pico / 1e12));
const usd = (text) => (text === null || text === undefined ? "–" : amount(Number(text)));
const pico = (text) => BigInt(text.replace(".", ""));
const rate = new Intl.NumberFormat("en", { style: "currency", currency: "USD", maximumFractionDigits: 6 });
const price = (micros) => rate.format(micros / 1e6);
const prices = (classes) => Object.entries(classes).map(([name, micros]) => `${name} ${price(micros)}`).join(", ") || "–";
const bytes = (n) => (n > 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(1)} MiB`);
const ratio = (a) => `${part(a.hit_ratio)} ± ${(100 * a.error).toFixed(1)}`;
const gain = (saving, error) => `${dollars(saving)} ± ${dollars(error)}`;
const spell = (name) => name.replaceAll("_", " ");

// --- requests ----------------------------------------------------------------------------------

async function ask(path) {
  const key = sessionStorage.getItem("key") ?? "";
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" });
  if (answer.status === 401 || answer.status === 403) throw new Refused(key ? "Key refused." : "");
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${answer.status} from ${path}`);
  return answer.json();
}

class Refused extends Error {}

// --- pieces ------------------------------------------------------------------------------------

// A row's key is the text of its first cell and its number among rows with the same text.
function keys(rows) {
  const seen = new Map();
  return rows.map(([first]) => {
    const name = first.textContent ?? String(first), many = (seen.get(name) ?? 0) + 1;
    seen.set(name, many);
    return `${many} ${name}`;
  });
}

function table(caption, heads, rows, none = "Nothing yet.") {
  if (!rows.length) return h("p", { class: "none" }, none);
  const rowKeys = keys(rows);
  return h("div", { class: "scroll", role: "region", "aria-label": caption }, h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((row, place) => h("tr", { "data-key": rowKeys[place] }, row.map((cell, at) => (at ? h("td", {}, cell) : h("th", { scope: "row" }, cell))))))));
}

const panel = (title, ...inside) => h("section", { class: "panel" }, h("h2", {}, title), ...inside);
const wide = (title, ...inside) => h("section", { class: "panel wide" }, h("h2", {}, title), ...inside);
const tile = (value, label) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
const bar = (words, x) => [h("span", { class: "bar", style: `width:${Math.round(60 * Math.max(0, Math.min(1, x ?? 0)))}px`, "aria-hidden": "true" }), words];
const link = (name) => h("a", { href: `#Tenant/${encodeURIComponent(name)}` }, name);

const warning = (text) => h("p", { class: "warning", role: "status" }, text);
const warnings = (engine) => [
  ...(engine.ready ? [] : [warning("The engine takes no requests now: it is starting, has died, or the gateway is draining. Block figures are the last known ones.")]),
  ...(engine.floor_blocks_asked > engine.floor_blocks_max
    ? [warning(`Floors request ${count(engine.floor_blocks_asked)} blocks; this engine can guarantee ${count(engine.floor_blocks_max)}. Each floor is reduced in that proportion.`)] : [])];

const COLOURS = [["read", "read from cache"], ["write", "written"], ["fresh", "computed"], ["out", "output"]];
const colourKey = (colours = COLOURS) => h("ul", { class: "key" }, colours.map(([name, text]) => h("li", {}, h("i", { class: name }), text)));
const MOVES = [["read", "inserted"], ["fresh", "evicted"], ["write", "expired or erased"]];

function bill(used) {
  const parts = [["requests", used.totals.charge_usd], ...used.storage.map((x) => [`storage, ${spell(x.class)}`, x.charge_usd]), ["adjustments", used.totals.adjusted_usd]];
  const sum = parts.reduce((all, [, amount]) => all + pico(amount), 0n);
  return panel("Bill", table(`Since ${used.window.since.slice(0, 10)}`, ["for", "amount"], [...parts.map(([name, amount]) => [name, usd(amount)]), ["total", dollars(Number(sum))]]));
}

function traffic(minutes) {
  const series = minutes.map(([at, , read, write, fresh, out]) => ({ at, read, write, fresh, out }));
  return h("div", {}, stacked(series, COLOURS.map(([name]) => name), "Tokens per minute"), colourKey());
}

function churn(moved) {
  const series = moved.minutes.map(([at, read, fresh, write]) => ({ at, read, fresh, write }));
  return h("div", {}, stacked(series, MOVES.map(([name]) => name), "Blocks per minute", "blocks", MOVES.map(([, text]) => text)), colourKey(MOVES),
    table("Blocks since the start", ["inserted", "evicted", "evicted after (mean)", "expired", "erased"],
      [[count(moved.inserted_blocks), count(moved.evicted_blocks), span(moved.evicted_after_s), count(moved.expired_blocks), count(moved.erased_blocks)]]));
}

const ENDS = ["given", "running", "kept", "broken", "given_up", "renewed", "clipped", "refused"];
const promises = (rows, none = "No promises yet.") => table("Prefixes promised since the start: given = running + kept + broken + given up", ["tenant", "class", ...ENDS.map(spell), "kept / ended"],
  rows.map((x) => [link(x.tenant), x.class, ...ENDS.map((name) => count(x[name])), part(x.kept + x.broken ? x.kept / (x.kept + x.broken) : null)]), none);

const CACHED = { hit: "half or more", partial: "less than half", miss: "none" };

function firstToken(times) {
  return table("Time from request to first token, by cached share of the prompt", ["cached", "requests", "p50", "p95", "p99"],
    Object.entries(CACHED).map(([kind, words]) => [words, count(times[kind].count), ms(times[kind].p50), ms(times[kind].p95), ms(times[kind].p99)]));
}

function counted(caption, label, counts, none) {
  const order = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  const most = order[0]?.[1] ?? 1;
  return table(caption, [label, "number"], order.map(([name, n]) => [spell(name), bar(count(n), n / most)]), none);
}

function tenantRows(tenants) {
  return table("Since the start, last active first",
    ["tenant", "requests", "prompt tokens", "read", "written", "computed", "output", "hit ratio", "physical"],
    tenants.map((t) => [link(t.tenant), count(t.requests), about(t.prompt_tokens), about(t.read_tokens), about(t.write_tokens),
      about(t.fresh_tokens), about(t.output_tokens), bar(part(t.hit_ratio), t.hit_ratio), part(t.physical_hit_ratio)]));
}

// --- sections ----------------------------------------------------------------------------------

const views = {
  async Overview() {
    const all = await ask("/admin/v1/analytics");
    const { total, engine } = all;
    const used = engine.blocks ? 1 - engine.free_blocks / engine.blocks : 0;
    return [
      ...warnings(engine),
      h("div", { class: "tiles" },
        tile(part(total.hit_ratio), "of prompt tokens read from cache"),
        tile(part(total.physical_hit_ratio), "of prompt tokens found in cache"),
        tile(about(total.prompt_tokens), "prompt tokens"),
        tile(about(total.output_tokens), "output tokens"),
        tile(count(total.requests), "requests since the start"),
        tile(`${engine.running} / ${engine.waiting}`, "running / waiting"),
        tile(part(used), "of KV blocks in use")),
      h("div", { class: "grid" },
        wide("Tokens", traffic(all.minutes)),
        panel("Time to first token", firstToken(all.first_token_ms)),
        panel("Cache misses by cause", counted("Prompts with a breakpoint that were not read in full", "cause", all.misses, "No misses.")),
        panel("Requests by outcome", counted("All requests", "outcome", all.endings)),
        panel("Ignored fields", counted("Requests with a field that had no effect", "field", all.ignored_fields, "No ignored fields.")),
        wide("Evictions between tenants", table("Blocks evicted for another tenant, and the cost of recomputing them", ["owner", "evicted for", "blocks", "recomputed tokens", "cost"],
          all.taken.map((x) => [x.owner, x.taker, count(x.blocks), count(x.recomputed_tokens), dollars(x.cost_pico)]), "No evictions between tenants.")),
        wide("Block churn", churn(all.churn)),
        wide("Tenants", tenantRows(all.tenants.slice(0, 20)))),
    ];
  },

  async Tenants() {
    const all = await ask("/admin/v1/analytics");
    const found = () => tenantRows(all.tenants.filter((t) => t.tenant.includes(wanted)).slice(0, ROWS_MAX));
    const find = h("input", { type: "search", "aria-label": "Find a tenant", placeholder: "Find a tenant", value: wanted, oninput: (event) => { wanted = event.target.value; put($("found"), found()); reachable(); } });
    return [wide("Tenants", find, h("div", { id: "found" }, found()))];
  },

  async Tenant(name) {
    const [one, used] = await Promise.all([ask(`/admin/v1/analytics/${encodeURIComponent(name)}`), ask(`/admin/v1/usage?tenant=${encodeURIComponent(name)}`)]);
    const owed = used ? [bill(used)] : [];
    if (!one) return [h("h2", { class: "name" }, name), h("div", { class: "grid" }, wide("Since the start", h("p", { class: "none" }, "No requests of this tenant since the start.")), ...owed)];
    const { total } = one;
    return [
      h("h2", { class: "name" }, name),
      h("div", { class: "tiles" },
        tile(part(total.hit_ratio), "of prompt tokens read from cache"),
        tile(part(total.physical_hit_ratio), "of prompt tokens found in cache"),
        tile(count(total.requests), "requests since the start"),
        tile(about(total.prompt_tokens), "prompt tokens"),
        tile(about(total.recomputed_promised_tokens), "promised tokens recomputed")),
      h("div", { class: "grid" },
        wide("Tokens", traffic(one.minutes)),
        panel("Time to first token", firstToken(one.first_token_ms)),
        panel("Cache misses by cause", counted("By cause", "cause", one.misses, "No misses.")),
        panel("Ignored fields", counted("Requests with a field that had no effect", "field", one.ignored_fields, "No ignored fields.")),
        panel("Cost of misses", table("Recomputed tokens of written prefixes", ["cause", "tokens", "cost"],
          one.recomputed.map((x) => [spell(x.cause), count(x.tokens), dollars(x.cost_pico)]), "No written prefix was recomputed.")),
        ...owed,
        panel("Where prompts diverge", table("Positions at which prompts diverge, and the tokens after them", ["position", "prompts", "tokens", "cost"],
          one.breaks.map((b) => [b.place, count(b.count), about(b.tokens), dollars(b.cost_pico)]), "No prompts diverge.")),
        wide("Promises", promises(one.leases)),
        wide("Block churn", churn(one.churn)),
        wide("Value of each retention class", table(`Per million prompt tokens, at ${one.rate_card}; from ${count(one.sampled_prompts)} prompts and ${count(one.sampled_blocks)} sampled blocks`,
          ["class", "hit ratio", "saving", "verdict"],
          one.retention_advice.map((a) => [a.retention, `${a.is_early ? "at least " : ""}${ratio(a)}`, gain(a.saving_pico, a.error_pico), h("span", { class: a.verdict }, a.verdict === "too_few" ? "not enough data" : a.verdict)]))),
        wide("Value of more KV memory", table("Per million prompt tokens, compared with no cache and with the current memory", ["KV memory", "tokens", "hit ratio", "saving", "compared with now"],
          one.size_advice.map((a) => [bytes(a.bytes), about(a.tokens), ratio(a), gain(a.saving_pico, a.error_pico), a.more_error_pico ? gain(a.more_pico, a.more_error_pico) : "current"]), "The engine is not running.")),
        wide("Top prefixes", table("By saved tokens; a prefix is shown by its digest and the position of its end", ["ends at", "tokens", "uses", "hits", "digest"],
          one.top_prefixes.map((p) => [p.path, count(p.tokens), count(p.uses), count(p.hits), p.id]))),
        wide("Prefix tree", h("p", {}, h("a", { href: `#Tree/${encodeURIComponent(name)}` }, "Show the prefix tree")))),
    ];
  },

  async Tree(name) {
    const all = await ask("/admin/v1/analytics");
    const names = all.holdings.map((x) => x.tenant).sort();
    const chosen = name ?? all.holdings.sort((a, b) => b.blocks - a.blocks)[0]?.tenant;
    if (!chosen) return [wide("Prefix tree", h("p", { class: "none" }, "The cache is empty."))];
    const found = await ask(`/admin/v1/tree/${encodeURIComponent(chosen)}`);
    const pick = h("select", { "aria-label": "Tenant", onchange: (event) => { location.hash = `#Tree/${encodeURIComponent(event.target.value)}`; } }, names.map((n) => h("option", n === chosen ? { selected: "" } : {}, n)));
    return [h("div", { class: "grid" },
      wide("Prefix tree", pick,
        h("p", { class: "none" }, "Each bar is a run of tokens without a fork. Its width is the tokens of its subtree, its colour the number of matches.")),
      ...found.namespaces.map((space) => wide(`${chosen} / ${space.workspace ?? `shared scope ${space.shared_scope}`}${space.partition ? " (partition)" : ""}: ${count(space.blocks)} blocks`,
        icicle(space.branches, (b) => `${count(b.tokens)} tokens, ${count(b.total_tokens)} in its subtree, matched ${count(b.hits)} times, ${count(b.promised_blocks)} blocks promised, idle ${b.idle_s.toFixed(0)} s`),
        h("details", {}, h("summary", {}, "As a table"), table("Largest branches", ["branch", "parent", "tokens", "subtree tokens", "hits", "promised blocks", "idle s"],
          space.branches.slice(0, 100).map((b, at) => [String(at), b.parent < 0 ? "–" : String(b.parent), count(b.tokens), count(b.total_tokens), count(b.hits), count(b.promised_blocks), b.idle_s.toFixed(0)]))))))];
  },

  async Leases() {
    const all = await ask("/admin/v1/analytics");
    const blocks = all.engine.blocks || 1;
    return [...warnings(all.engine), h("div", { class: "grid" },
      wide("Blocks by tenant", table("Now, with limits", ["tenant", "blocks", "pinned", "floor", "ceiling", "promised", "promised limit", "share of the pool"],
        all.holdings.sort((a, b) => b.blocks - a.blocks).slice(0, ROWS_MAX).map((x) => [link(x.tenant), count(x.blocks), count(x.pinned_blocks), count(x.floor_blocks), count(x.ceiling_blocks), count(x.promised_blocks), count(x.promised_blocks_max), bar(part(x.blocks / blocks), x.blocks / blocks)]), "The cache is empty.")),
      wide("Promises", promises(all.leases.slice(0, ROWS_MAX))),
      wide("Block churn", table("Since the start, last changed first", ["tenant", "inserted", "evicted", "evicted after (mean)", "expired", "erased"],
        all.churn.tenants.slice(0, ROWS_MAX).map((x) => [link(x.tenant), count(x.inserted_blocks), count(x.evicted_blocks), span(x.evicted_after_s), count(x.expired_blocks), count(x.erased_blocks)]))),
      panel("Tokens", table("Since the start", ["outcome", "tokens"], [
        ["promised, lost and recomputed", count(all.total.recomputed_promised_tokens)],
        ["read by contract", count(all.total.read_tokens)]])),
      panel("Removed blocks", table("Since the engine started", ["reason", "blocks"], [
        ["evicted", count(all.engine.evicted_blocks_total)], ["expired", count(all.engine.expired_blocks_total)]])))];
  },

  async Money() {
    const [used, days, cards, budgets] = await Promise.all([
      ask("/admin/v1/usage?group_by=tenant"), ask("/admin/v1/usage?group_by=day"),
      ask("/admin/v1/rate-cards"), ask("/admin/v1/budgets")]);
    const { totals } = used;
    const hour = (instant) => instant.slice(0, 16).replace("T", " ");
    const period = `${hour(used.window.since)} to ${hour(used.window.until)} UTC`;
    const heads = ["requests", "prompt tokens", "read", "written", "computed", "output", "charged", "saved", "adjusted"];
    const row = (r) => [count(r.requests), about(r.prompt_tokens), about(r.cache_read_tokens), about(r.cache_write_tokens),
      about(r.fresh_tokens), about(r.output_tokens), usd(r.charge_usd), usd(r.saved_usd), usd(r.adjusted_usd)];
    return [
      h("div", { class: "tiles" },
        tile(usd(totals.charge_usd), "charged for requests"), tile(usd(totals.saved_usd), "saved by caching"),
        tile(count(totals.requests), "requests in the ledger"), tile(part(totals.hit_ratio), "of prompt tokens read by contract")),
      h("div", { class: "grid" },
        wide("By tenant", table(period, ["tenant", ...heads], used.rows.map((r) => [link(r.tenant), ...row(r)]))),
        wide("By day", table(period, ["day", ...heads], days.rows.map((r) => [r.from.slice(0, 10), ...row(r)]))),
        panel("Budgets", table("In the current window", ["tenant", "window", "spent", "reserved", "hard limit"],
          (budgets?.budgets ?? []).map((b) => [b.tenant ?? "", b.window, usd(b.spent_usd), usd(b.reserved_usd), usd(b.hard_usd)]), "No tenant has a budget.")),
        wide("Rate cards", table("Dollars per million tokens; storage per hour", ["card", "model", "tier", "input", "read", "written", "output", "storage"],
          (cards?.rate_cards ?? []).map((c) => [`${c.name}@${c.version}`, c.model, c.tier, price(c.input), price(c.cache_read), prices(c.cache_write), price(c.output), prices(c.storage)]), "No rate cards: nothing is charged."))),
    ];
  },

  async Engine() {
    const { engine, restarts } = await ask("/admin/v1/analytics");
    const numbers = Object.entries(engine).filter(([name, v]) => typeof v === "number" && name !== "call_id");
    const rows = (isTotal) => numbers.filter(([name]) => name.endsWith("_total") === isTotal).map(([name, v]) => [spell(name.replace(/_total$/, "")), count(Math.round(v * 100) / 100)]);
    const pool = (engine.blocks ?? 0) * (engine.kv_bytes_per_block ?? 0);
    return [
      ...warnings(engine),
      h("div", { class: "tiles" },
        tile(engine.ready ? "ready" : "not ready", engine.model ?? "engine"),
        tile(`${engine.running} / ${engine.waiting}`, "running / waiting"),
        tile(engine.steps_per_s.toFixed(1), "steps per second"),
        tile(about(engine.prefill_tokens_per_s), "prompt tokens per second"),
        tile(pool ? bytes(pool) : "–", pool ? `of KV, ${engine.kv_format} on ${engine.device}` : "of KV"),
        tile(count(restarts), "restarts")),
      h("div", { class: "grid" },
        panel("Counters", table("Since the engine started", ["counter", "value"], rows(true))),
        panel("Now", table("Last known values", ["counter", "value"], rows(false)))),
    ];
  },
};

// --- rendering ---------------------------------------------------------------------------------

function place() {
  const [section, name] = decodeURIComponent(location.hash.slice(1)).split("/");
  return [views[section] ? section : "Overview", name];
}

// A box that scrolls takes keyboard focus, so that the keyboard can scroll it; other boxes take none.
function reachable() {
  for (const one of document.querySelectorAll(".scroll")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  }
}

async function show() {
  clearTimeout(timer);
  const [section, name] = place();
  put($("nav"), SECTIONS.map((one) => h("a", { href: `#${one}`, ...(one === section || (one === "Tenants" && section === "Tenant") ? { "aria-current": "page" } : {}) }, one)));
  document.title = `${name ?? section} · Trunkline`;
  try {
    const seen = await views[section](name);
    if (place().join() !== [section, name].join()) return;
    put($("view"), seen);
    reachable();
    $("door").hidden = true;
    $("leave").hidden = $("pause").hidden = false;
    $("time").textContent = `as of ${new Date().toLocaleTimeString()}`;
    $("status").textContent = "";
  } catch (error) {
    if (error instanceof Refused) {
      put($("view"), []);
      $("refused").textContent = error.message;
      $("door").hidden = false;
      $("leave").hidden = $("pause").hidden = true;
      $("time").textContent = $("status").textContent = "";
      $("key").focus();
      return;
    }
    $("status").textContent = `Request failed (${error.message}); retrying`;
  }
  if (!isPaused) timer = setTimeout(show, INTERVAL_MS);
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  show();
});
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) clearTimeout(timer);
  else show();
});
$("leave").addEventListener("click", () => { sessionStorage.removeItem("key"); show(); });
addEventListener("resize", reachable);
addEventListener("hashchange", () => { put($("view"), []); $("main").focus(); show(); });
show();
