// What an administrator may do to a tenant: settings, keys, budgets, suspension, erasure, deletion.

import { html, useState } from "../../parts/html.js";
import { ask } from "../../parts/api.js";
import { Dialog, FormDialog, toMicros, toNumber } from "../../parts/dialogs/dialog.js";
import { words } from "../../parts/format.js";
import { LIFE, lifeOf } from "../../parts/accounts/keys.js";
import { href } from "../../parts/route.js";
import { useSession } from "../../parts/session.js";
import { Facts } from "../../parts/tables/table.js";

export const pathOf = (name) => `/admin/v1/tenants/${encodeURIComponent(name)}`;

// --- settings ------------------------------------------------------------------------------------

// Numbers of which an empty one is no limit: the least, the label and a hint.
const LIMITS = {
  requests_per_minute: [1, "Requests per minute"],
  tokens_per_minute: [1, "Tokens per minute"],
  input_tokens_per_minute: [1, "Input tokens per minute",
    "prompt tokens that are not read from the cache"],
  output_tokens_per_minute: [1, "Output tokens per minute"],
  requests_at_once: [1, "Requests at once"],
  ceiling_blocks: [0, "Ceiling, blocks", "most blocks that the tenant may hold"],
  promised_blocks_max: [0, "Promised blocks, at most"],
};
const CHOICES = {
  fidelity: ["Fidelity of copies", [["exact", "exact"], ["near", "near: 8 bits a value"],
    ["rough", "rough: 4 bits a value"]],
  "how far copies below the device may be from what the model computed"],
  at_rest: ["Copies at rest", [["local", "on the server's disk"],
    ["remote", "in the remote store, too"], ["never", "nowhere"]]],
};
const NEW = { tier: "standard", floor_blocks: 0, weight: 1, fidelity: "exact", at_rest: "local",
  attention: "allowed" };

// The fields of a tenant's settings; `tenant` null: of a new one. classes: of the server.
export function settingsFields(tenant, classes) {
  const { tier, floor_blocks, weight, attention, ...given } = tenant ?? NEW;
  return [
    { name: "tier", label: "Tier", value: tier, isRequired: true, hint: "selects the rate card" },
    ...Object.entries(LIMITS).map(([name, [least, label, hint]]) => ({ name, label, hint, least,
      kind: "number", step: 1, value: given[name], placeholder: "no limit" })),
    { name: "floor_blocks", label: "Floor, blocks", kind: "number", step: 1, least: 0,
      value: floor_blocks, isRequired: true, hint: "blocks that other tenants never take" },
    { name: "weight", label: "Weight", kind: "number", least: 0, value: weight, isRequired: true,
      hint: "share of the rest, beside other tenants" },
    { name: "default_class", label: "Retention class by default", kind: "select",
      value: given.default_class, options: [["", "the dialect's"], ...classes] },
    ...Object.entries(CHOICES).map(([name, [label, options, hint]]) =>
      ({ name, label, hint, kind: "select", value: given[name], options })),
    { name: "attention", label: "Attention windows", value: attention, isRequired: true,
      pattern: "allowed|never|window=[0-9]{1,7};sinks=[0-9]{1,5}",
      hint: "allowed, never, or a window for requests that name none: window=4096;sinks=64" },
    { name: "classes", label: "Retention classes allowed (none chosen: all)", kind: "checks",
      value: given.classes, options: classes },
  ];
}

// The settings as the API takes them. values: of the fields.
export function settingsOf({ tier, floor_blocks, weight, classes, default_class, fidelity, at_rest,
  attention, ...values }) {
  const limits = Object.keys(LIMITS).map((name) => [name, toNumber(values[name])]);
  return { tier, floor_blocks: Number(floor_blocks), weight: Number(weight),
    ...Object.fromEntries(limits), classes: classes.length ? classes : null,
    default_class: default_class || null, fidelity, at_rest, attention };
}

export function EditTenant({ tenant, close, done }) {
  const act = (values) =>
    ask(pathOf(tenant.name), { method: "PATCH", body: settingsOf(values) });
  return html`<${FormDialog} title=${`Settings of ${tenant.name}`} submit="Save settings"
    close=${close} act=${act} done=${done}
    fields=${settingsFields(tenant, useSession().me.server.classes)} />`;
}

// --- suspension, deletion, erasure ---------------------------------------------------------------

export function SetStatus({ tenant, close, done }) {
  const isOn = tenant.status === "active", verb = isOn ? "Suspend" : "Resume";
  const act = () => ask(pathOf(tenant.name),
    { method: "PATCH", body: { status: isOn ? "suspended" : "active" } });
  return html`<${FormDialog} title=${`${verb} ${tenant.name}`} submit=${verb} isDangerous=${isOn}
    confirm=${isOn ? tenant.name : undefined} close=${close} act=${act} done=${done}><p>${isOn
      ? "Every request of its keys is refused from now on. Its cache, keys and budgets stay."
      : "Its keys work again from the next request on."}</p><//>`;
}

export function DeleteTenant({ tenant, close }) {
  const act = () => ask(pathOf(tenant.name), { method: "DELETE" });
  const done = () => { location.hash = href(["tenants"]); };
  return html`<${FormDialog} title=${`Delete ${tenant.name}`} submit="Delete tenant" isDangerous
    confirm=${tenant.name} close=${close} act=${act} done=${done}><p>Its keys stop working, its
      cache and stored responses are erased, its budgets end. Its ledger entries stay under a
      pseudonym. This cannot be undone.</p><//>`;
}

export function EraseCache({ tenant, close }) {
  const [receipt, setReceipt] = useState(null);
  const act = ({ workspace, lease_id }) => ask("/admin/v1/erase", { method: "POST", body: {
    tenant: tenant.name, ...(workspace && { workspace }), ...(lease_id && { lease_id }) } });
  if (receipt) {
    const text = (v) => (typeof v === "object" ? JSON.stringify(v) : String(v));
    return html`<${Dialog} title="Erased: the receipt" close=${close}>
      <${Facts} caption=${`Receipt of the erasure for ${tenant.name}`}
        rows=${Object.entries(receipt).map(([name, v]) => [words(name), text(v)])} />
      <div class="buttons"><button type="button" class="main"
        onClick=${close}>Close</button></div><//>`;
  }
  return html`<${FormDialog} title=${`Erase the cache of ${tenant.name}`} submit="Erase" isDangerous
    confirm=${tenant.name} close=${close} act=${act} done=${setReceipt} fields=${[
      { name: "workspace", label: "Workspace", placeholder: "all workspaces" },
      { name: "lease_id", label: "Lease", placeholder: "all leases" }]}>
    <p>Erased prefixes cannot be found again: the next requests compute them anew. Without a lease,
      cached contents and stored responses end too.</p><//>`;
}

// --- keys and budgets ----------------------------------------------------------------------------

const KEY_SCOPES = ["inference", "usage", "cache"];
// What a key may settle for its clients, by the API's name.
const MODES = [
  { name: "cache_key", label: "prompt_cache_key", kind: "select", value: "",
    options: [["", "the server's"], "hint", "namespace"],
    hint: "as a namespace, prompts with different keys share no cache" },
  { name: "tolerance", label: "Unsupported fields", kind: "select", value: "",
    options: [["", "the server's"], "standard", "strict", "lenient"],
    hint: "strict refuses most, lenient fewest" }];

export function NewKey({ tenant, close, made }) {
  const act = ({ label, workspace, scopes, cache_key, tolerance, ...values }) => ask(
    `${pathOf(tenant.name)}/keys`, { method: "POST", body: { label, workspace, scopes,
      cache_key: cache_key || null, tolerance: tolerance || null, ...lifeOf(values) } });
  return html`<${FormDialog} title=${`New key of ${tenant.name}`} submit="Create key"
    close=${close} act=${act} done=${made} fields=${[
      { name: "label", label: "Label", placeholder: "such as: production" },
      { name: "workspace", label: "Workspace", value: "default", isRequired: true,
        hint: "keys of one workspace share a cache" }, LIFE, ...MODES,
      { name: "scopes", label: "Scopes", kind: "checks", value: KEY_SCOPES,
        options: KEY_SCOPES }]} />`;
}

// `budget`: the one to change; without it a new one, of the whole tenant or of one of `keys`.
export function SetBudget({ tenant, budget, keys = [], close, done }) {
  const act = ({ key, window, hard, soft }) => ask(`${pathOf(tenant.name)}/budgets`, {
    method: "PUT", body: { key_id: Number(key), window, hard_micros: toMicros(hard),
      soft_micros: toMicros(soft) } });
  const whole = ["0", "the whole tenant"], owners = budget
    ? [budget.key_id ? [String(budget.key_id), `key ${budget.key_id}`] : whole]
    : [whole, ...keys.map((one) => [String(one.key_id), `key ${one.shown} ${one.label}`])];
  return html`<${FormDialog} title=${`Budget of ${tenant.name}`} submit="Set budget" close=${close}
    act=${act} done=${done} fields=${[
      { name: "key", label: "Of", kind: "select", value: owners[0][0], options: owners },
      { name: "window", label: "Window", kind: "select", value: budget?.window ?? "month",
        options: budget ? [budget.window] : ["month", "day"], hint: "in UTC" },
      { name: "hard", label: "Hard limit", kind: "dollars", least: 0, value: budget?.hard_usd,
        hint: "requests are refused beyond it" },
      { name: "soft", label: "Soft limit", kind: "dollars", least: 0, value: budget?.soft_usd,
        hint: "an alert is sent beyond it" }]}>
    <p class="note">Without both amounts the budget is removed.</p><//>`;
}
