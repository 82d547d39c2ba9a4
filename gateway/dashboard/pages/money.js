// Money: charges and savings, usage, budgets, and rate cards in dollars per million tokens.

import { html, useState } from "../parts/html.js";
import { ask, useData } from "../parts/api.js";
import { Budgets } from "../parts/budgets.js";
import { Dialog, Form, micros } from "../parts/dialog.js";
import { about, count, day, dollars, dollarsOf, instant, price, share,
  time } from "../parts/format.js";
import { Panel, TenantLink, Tile, Tiles, instead } from "../parts/pieces.js";
import { setQuery, windowQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";
import { SetBudget } from "./tenant_acts.js";

const GROUPS = ["tenant", "model", "key", "user", "day", "hour"];

export function Money() {
  const { range, query, can, me } = useSession(), [act, setAct] = useState(null);
  const group = GROUPS.includes(query.get("by")) ? query.get("by") : "tenant";
  const used = useData(`/admin/v1/usage?group_by=${group}&${windowQuery(range)}`, 15_000);
  const budgets = useData("/admin/v1/budgets", 15_000), cards = useData("/admin/v1/rate-cards",
    15_000);
  const close = () => setAct(null), done = () => { close(); budgets.again(); cards.again(); };
  const totals = used.data?.totals;
  return html`${totals && html`<${Tiles}>
      <${Tile} label="Charged" value=${dollars(totals.charge_usd)}
        note=${`for ${count(totals.requests)} requests`} />
      <${Tile} label="Saved by caching" value=${dollars(totals.saved_usd)} note=${savedNote(totals)}
        />
      <${Tile} label="Hit ratio" value=${share(totals.hit_ratio)}
        note=${`of ${about(totals.prompt_tokens)} prompt tokens`} />
      <${Tile} label="Adjusted" value=${dollars(totals.adjusted_usd)} note="credits and corrections"
        /><//>`}
    <${Panel} title="Usage" wide note=${used.data && `${used.data.window.since.slice(0,
      16).replace("T", " ")} to ${
      used.data.window.until.slice(0, 16).replace("T", " ")} UTC, whole hours of the ledger.`}
        tools=${html`<label class="filter">By <select value=${group}
      onChange=${(event) => setQuery({ by: event.target.value })}>
      ${GROUPS.map((name) =>
    html`<option selected=${name === group}>${name}</option>`)}</select></label>`}>
      ${instead(used, "usage") ?? html`<${Usage} rows=${used.data.rows} group=${group} />`}<//>
    <${Panel} title="Budgets" wide>${instead(budgets, "budgets") ?? html`<${Budgets}
      budgets=${budgets.data.budgets} hasTenant none="No tenant has a budget."
        tools=${can("money") ? (budget) => html`<button type="button" class="link"
          onClick=${() => setAct({ of: SetBudget, tenant: budget.tenant, budget, done })}
        >Change</button>` : null} />`}<//>
    <${Panel} title="Rate cards" wide
      note="Dollars per million tokens; storage per million token hours." tools=${can("money")
        && html`<button type="button" class="main small"
        onClick=${() => setAct({ of: NewCard, done, classes: ["*", ...me.server.classes] })}>New
          rate card</button>`}>
        ${instead(cards, "rate cards") ?? html`<${Cards} cards=${cards.data.rate_cards} />`}<//>
    ${act && html`<${act.of} ...${act} close=${close} />`}`;
}

function savedNote(totals) {
  const whole = Number(totals.charge_usd) + Number(totals.saved_usd);
  return whole > 0 ? `${share(Number(totals.saved_usd) / whole)} of the bill without caching`
    : "no prices: nothing is charged";
}

function Usage({ rows, group }) {
  const name = (row) => (group === "day" || group === "hour" ? row.from : group === "key"
    ? row.key_id : row[group]);
  const shown = (row) => (group === "tenant" ? html`<${TenantLink} name=${row.tenant} />`
    : group === "day" ? day(row.from)
    : group === "hour" ? time(row.from) : group === "key" ? `key ${row.key_id}`
      : row[group] ?? "no user named");
  const number = (head, field, show = count) => ({ head, get: (row) => row[field],
    show: (row) => show(row[field]) });
  const usd = (head, field) => { const write = dollarsOf(rows.map((row) => row[field]));
    return { head, get: (row) => Number(row[field]), show: (row) => write(row[field]),
      csv: (row) => row[field] }; };
  const isTime = group === "day" || group === "hour";
  return html`<${Table} key=${group} caption=${`Usage by ${group}`} isHidden rows=${rows} id=${name}
    file=${`usage-by-${group}`} order=${isTime ? -1 : -8} columns=${[
    { head: group, get: name, show: shown, kind: "text" }, number("requests", "requests"),
      number("prompt tokens", "prompt_tokens"),
    number("read", "cache_read_tokens"), number("written", "cache_write_tokens"), number("computed",
      "fresh_tokens"), number("output", "output_tokens"),
    usd("charged", "charge_usd"), usd("saved", "saved_usd"), usd("adjusted", "adjusted_usd"),
      number("hit ratio", "hit_ratio", share)]} />`;
}

function Cards({ cards }) {
  const prices = (classes) => Object.entries(classes).map(([name,
    one]) => `${name} ${price(one)}`).join(", ") || "–";
  return html`<${Table} caption="Rate cards" isHidden rows=${cards} id=${(card) => card.rate_card_id
    ?? `${card.name}@${card.version}`} file="rate-cards"
    none="No rate card: nothing is charged." columns=${[{ head: "card",
      get: (card) => `${card.name}@${card.version}`, kind: "text" },
    { head: "model", get: (card) => card.model, kind: "text" }, { head: "tier",
      get: (card) => card.tier, kind: "text" },
    ...[["input", "input"], ["read", "cache_read"], ["output", "output"]].map(([head,
      field]) => ({ head, get: (card) => card[field] / 1e6, show: (card) => price(card[field]) })),
    { head: "written", get: (card) => prices(card.cache_write), kind: "text" }, { head: "storage",
      get: (card) => prices(card.storage), kind: "text" },
    { head: "valid from", get: (card) => card.valid_from_ms, show: (card) => (card.valid_from_ms
      ? instant(card.valid_from_ms) : "always"), kind: "text" }]} />`;
}

function NewCard({ close, done, classes }) {
  const act = async (values) => {
    const isGiven = (kind) => (name) => values[`${kind}_${name}`] !== "";
    const byClass = (kind) => Object.fromEntries(classes.filter(isGiven(kind))
      .map((name) => [name, micros(values[`${kind}_${name}`])]));
    const from = values.from ? { valid_from_ms: new Date(values.from).getTime() } : {};
    const text = (name) => (values[name] ? { [name]: values[name] } : {});
    await ask("/admin/v1/rate-cards", { method: "POST", body: { name: values.name, ...text("model"),
      ...text("tier"), input: micros(values.input) ?? 0,
      output: micros(values.output) ?? 0, cache_read: micros(values.cache_read) ?? 0,
        cache_write: byClass("write"), storage: byClass("storage"), ...from } });
    done();
  };
  const usd = (name, label, isRequired) => ({ name, label, kind: "dollars", least: 0, isRequired,
    unit: "per million tokens" });
  return html`<${Dialog} title="New rate card" close=${close}><${Form} submit="Add rate card"
    close=${close} act=${act} fields=${[
    { name: "name", label: "Name", isRequired: true, hint: "an existing name gets a new version" },
    { name: "model", label: "Model", placeholder: "every model" }, { name: "tier", label: "Tier",
      placeholder: "every tier" },
    usd("input", "Input", true), usd("cache_read", "Cache read", true), usd("output", "Output",
      true),
    ...classes.map((name) => ({ ...usd(`write_${name}`, `Cache write, ${name === "*"
      ? "other classes" : name}`), placeholder: "the input price" })),
    ...classes.map((name) => ({ ...usd(`storage_${name}`, `Storage, ${name === "*" ? "other classes"
      : name}`), unit: "per million token hours", placeholder: "free" })),
    { name: "from", label: "Valid from", placeholder: "now; or 2027-01-01" }]}>
    <p class="note">It applies to requests that are admitted from then on. Cards are never changed:
      a new version takes their place.</p><//><//>`;
}
