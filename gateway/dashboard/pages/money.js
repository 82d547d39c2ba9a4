// Money: charges and savings, usage, budgets, and rate cards in dollars per million tokens.

import { html } from "../parts/html.js";
import { useDialog } from "../parts/dialogs/open_dialog.js";
import { SLOW_POLL_MS, address, ask, useData } from "../parts/api.js";
import { Budgets } from "../parts/accounts/budgets.js";
import * as column from "../parts/tables/columns.js";
import { FormDialog, toMicros } from "../parts/dialogs/dialog.js";
import { NONE, about, count, dollars, dollarsOf, instant, price, share, time, utcDay }
  from "../parts/format.js";
import { Filter, Panel, Tile, Tiles, instead } from "../parts/pieces.js";
import { setQuery, windowOf } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/tables/table.js";
import { savedNote, windowText } from "../parts/accounts/usage.js";
import { SetBudget } from "./tenants/tenant_dialogs.js";

export function Money() {
  const { range, query, can } = useSession();
  const group = Object.hasOwn(GROUPS, query.get("by")) ? query.get("by") : "tenant";
  const used = useData(address("/admin/v1/usage", { group_by: group, ...windowOf(range) }),
    SLOW_POLL_MS);
  const budgets = useData("/admin/v1/budgets", SLOW_POLL_MS);
  const cards = useData("/admin/v1/rate-cards", SLOW_POLL_MS);
  const { open, dialog } = useDialog(() => { budgets.again(); cards.again(); });
  const change = (budget) => html`<button type="button" class="link"
    onClick=${() => open(SetBudget, { tenant: { name: budget.tenant }, budget })}>Change</button>`;
  return html`${used.data && html`<${Totals} totals=${used.data.totals} />`}
    <${Panel} title="Usage" wide
      note=${used.data && `${windowText(used.data.window)}, whole hours of the ledger.`}
      tools=${html`<${Filter} label="By" value=${group} options=${Object.keys(GROUPS)}
        set=${(by) => setQuery({ by })} />`}>
      ${instead(used, "usage") ?? html`<${Usage} rows=${used.data.rows} group=${group} />`}<//>
    <${Panel} title="Budgets" wide>${instead(budgets, "budgets")
      ?? html`<${Budgets} budgets=${budgets.data.budgets} hasTenant none="No tenant has a budget."
        tools=${can("money") ? change : null} />`}<//>
    <${Panel} title="Rate cards" wide
      note="Dollars per million tokens; storage per million token hours."
      tools=${can("money") && html`<button type="button" class="main small"
        onClick=${() => open(NewCard)}>New rate card</button>`}>
      ${instead(cards, "rate cards") ?? html`<${Cards} cards=${cards.data.rate_cards} />`}<//>
    ${dialog}`;
}

function Totals({ totals }) {
  return html`<${Tiles}>
    <${Tile} label="Charged" value=${dollars(totals.charge_usd)}
      note=${`for ${count(totals.requests)} requests`} />
    <${Tile} label="Saved by caching" value=${dollars(totals.saved_usd)}
      note=${savedNote(totals)} />
    <${Tile} label="Hit ratio" value=${share(totals.hit_ratio)}
      note=${`of ${about(totals.prompt_tokens)} prompt tokens`} />
    <${Tile} label="Adjusted" value=${dollars(totals.adjusted_usd)}
      note="credits and corrections" /><//>`;
}

// The first column of usage by each of the groups; days of the ledger are UTC's.
const GROUPS = {
  tenant: column.tenant(),
  model: column.text("model"),
  key: column.text("key", "key_id", { show: (row) => `key ${row.key_id}` }),
  user: column.text("user", "user", { show: (row) => row.user ?? "no user named" }),
  day: column.at("day, UTC", "from", utcDay),
  hour: column.at("hour", "from", time),
};

function Usage({ rows, group }) {
  const first = GROUPS[group];
  const usd = (head, field) => ({
    ...column.figure(head, (row) => Number(row[field]), dollarsOf(rows.map((row) => row[field]))),
    csv: (row) => row[field] });
  return html`<${Table} key=${group} caption=${`Usage by ${group}`} isHidden rows=${rows}
    id=${first.get} file=${`usage-by-${group}`}
    down=${group === "day" || group === "hour" ? first.head : "charged"} columns=${[
      first, column.figure("requests"), column.figure("prompt tokens", "prompt_tokens"),
      column.figure("read", "cache_read_tokens"), column.figure("written", "cache_write_tokens"),
      column.figure("computed", "fresh_tokens"), column.figure("output", "output_tokens"),
      usd("charged", "charge_usd"), usd("saved", "saved_usd"), usd("adjusted", "adjusted_usd"),
      column.figure("hit ratio", "hit_ratio", share)]} />`;
}

function Cards({ cards }) {
  const amount = (head, field) =>
    ({ ...column.figure(head, field, price), csv: (card) => card[field] / 1e6 });
  const byClass = (name) => column.text(name === "cache_write" ? "written" : name, (card) =>
    Object.entries(card[name]).map(([one, micros]) => `${one} ${price(micros)}`).join(", ") || NONE,
  { kind: "text wrap" });
  const name = (card) => `${card.name}@${card.version}`;
  return html`<${Table} caption="Rate cards" isHidden rows=${cards} id=${name} file="rate-cards"
    none="No rate card: nothing is charged." columns=${[column.text("card", name),
      column.text("model"), column.text("tier"), amount("input", "input"),
      amount("read", "cache_read"), amount("output", "output"), byClass("cache_write"),
      byClass("storage"), column.at("valid from", "valid_from_ms",
        (from) => (from ? instant(from) : "always")), column.at("until", "valid_until_ms",
        (until) => (until ? instant(until) : NONE))]} />`;
}

function NewCard({ close, done }) {
  const classes = ["*", ...useSession().me.server.classes];
  const act = (values) => {
    const byClass = (kind) => Object.fromEntries(classes.map((name) => [name, `${kind}_${name}`])
      .filter(([, field]) => values[field] !== "")
      .map(([name, field]) => [name, toMicros(values[field])]));
    return ask("/admin/v1/rate-cards", { method: "POST", body: {
      name: values.name,
      ...(values.model && { model: values.model }), ...(values.tier && { tier: values.tier }),
      input: toMicros(values.input), output: toMicros(values.output),
      cache_read: toMicros(values.cache_read),
      cache_write: byClass("cache_write"), storage: byClass("storage"),
      ...(values.from && { valid_from_ms: new Date(values.from).getTime() }),
      ...(values.until && { valid_until_ms: new Date(values.until).getTime() }) } });
  };
  const usd = { kind: "dollars", least: 0, unit: "per million tokens" };
  const text = (name) => (name === "*" ? "other classes" : name);
  return html`<${FormDialog} title="New rate card" submit="Add rate card" close=${close} act=${act}
    done=${done} fields=${[
      { name: "name", label: "Name", isRequired: true,
        hint: "an existing name gets a new version" },
      { name: "model", label: "Model", placeholder: "every model" },
      { name: "tier", label: "Tier", placeholder: "every tier" },
      { ...usd, name: "input", label: "Input", isRequired: true },
      { ...usd, name: "cache_read", label: "Cache read", isRequired: true },
      { ...usd, name: "output", label: "Output", isRequired: true },
      ...classes.map((name) => ({ ...usd, name: `cache_write_${name}`,
        label: `Cache write, ${text(name)}`, placeholder: "the input price" })),
      ...classes.map((name) => ({ ...usd, name: `storage_${name}`,
        label: `Storage, ${text(name)}`, unit: "per million token hours", placeholder: "free" })),
      { name: "from", label: "Valid from", kind: "time", hint: "if not from now on" },
      { name: "until", label: "Valid until", kind: "time",
        hint: "if it ends; later nothing is charged, unless another card applies" }]}>
    <p class="note">It applies to requests that are admitted from then on. Cards are never changed:
      a new version takes their place.</p><//>`;
}
