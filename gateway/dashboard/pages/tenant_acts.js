// What an administrator may do to a tenant: settings, keys, budgets, suspension, erasure, deletion.

import { html, useState } from "../parts/html.js";
import { ask } from "../parts/api.js";
import { Dialog, Form, micros, whole } from "../parts/dialog.js";
import { instant } from "../parts/format.js";
import { Notice } from "../parts/pieces.js";
import { Table } from "../parts/table.js";
import { href } from "../parts/route.js";

const NUMBERS = [
  ["requests_per_minute", "Requests per minute"], ["tokens_per_minute", "Tokens per minute"],
  ["input_tokens_per_minute", "Input tokens per minute",
    "prompt tokens that are not read from the cache"],
  ["output_tokens_per_minute", "Output tokens per minute"], ["requests_at_once",
    "Requests at once"],
  ["ceiling_blocks", "Ceiling", "most blocks that the tenant may hold"],
  ["promised_blocks_max", "Promised blocks, at most"],
];
const FIDELITIES = [["exact", "exact"], ["near", "near: 8 bits a value"],
  ["rough", "rough: 4 bits a value"]];
export const pathOf = (name) => `/admin/v1/tenants/${encodeURIComponent(name)}`;

// The fields of a tenant's settings; an empty number is no limit.
export function SETTINGS(tenant, classes) {
  const value = (name) => tenant?.[name] ?? "";
  return [
    { name: "tier", label: "Tier", value: tenant?.tier ?? "standard", isRequired: true,
      hint: "selects the rate card" },
    ...NUMBERS.slice(0, 5).map(([name, label, hint]) => ({ name, label, hint, kind: "number",
      step: 1, least: 1,
      value: value(name), placeholder: "no limit" })),
    { name: "floor_blocks", label: "Floor", kind: "number", step: 1, least: 0,
      value: tenant?.floor_blocks ?? 0,
      unit: "blocks", hint: "blocks that other tenants never take" },
    ...NUMBERS.slice(5).map(([name, label, hint]) => ({ name, label, hint, kind: "number", step: 1,
      least: 0,
      value: value(name), unit: "blocks", placeholder: "no limit" })),
    { name: "weight", label: "Weight", kind: "number", least: 0, value: tenant?.weight ?? 1,
      hint: "share of the rest, beside other tenants" },
    { name: "default_class", label: "Retention class by default", kind: "select",
      value: tenant?.default_class ?? "", options: [["", "the dialect's"], ...classes] },
    { name: "fidelity", label: "Fidelity of copies", kind: "select",
      value: tenant?.fidelity ?? "exact", options: FIDELITIES,
      hint: "how far copies below the device may be from what the model computed" },
    { name: "at_rest", label: "Copies at rest", kind: "select", value: tenant?.at_rest ?? "local",
      options: [["local", "on the server's disk"], ["remote", "in the remote store, too"],
        ["never", "nowhere"]] },
    { name: "attention", label: "Attention windows", value: tenant?.attention ?? "allowed",
      isRequired: true, pattern: "allowed|never|window=[0-9]{1,7};sinks=[0-9]{1,5}",
      hint: "allowed, never, or a window for requests that name none: window=4096;sinks=64" },
    { name: "classes", label: "Retention classes allowed (none chosen: all)", kind: "checks",
      value: tenant?.classes ?? [],
      options: classes },
  ];
}
export function settingsOf(values) {
  const numbers = Object.fromEntries(NUMBERS.map(([name]) => [name, whole(values[name])]));
  return { tier: values.tier, floor_blocks: Number(values.floor_blocks || 0),
    weight: Number(values.weight || 1), ...numbers,
    classes: values.classes.length ? values.classes : null,
    default_class: values.default_class || null,
    fidelity: values.fidelity, at_rest: values.at_rest, attention: values.attention };
}

export function EditTenant({ tenant, classes, close, done }) {
  const act = async (values) => {
    await ask(pathOf(tenant.name), { method: "PATCH", body: settingsOf(values) });
    done();
  };
  return html`<${Dialog} title=${`Settings of ${tenant.name}`} close=${close}><${Form}
    submit="Save settings" close=${close}
    act=${act} fields=${SETTINGS(tenant, classes)} /><//>`;
}

export function SetStatus({ tenant, close, done }) {
  const isOn = tenant.status === "active";
  const act = async () => {
    await ask(pathOf(tenant.name), { method: "PATCH", body: { status: isOn ? "suspended"
      : "active" } });
    done();
  };
  return html`<${Dialog} title=${isOn ? `Suspend ${tenant.name}` : `Resume ${tenant.name}`}
    close=${close}>
    <${Form} submit=${isOn ? "Suspend" : "Resume"} close=${close} act=${act} isDangerous=${isOn}
      confirm=${isOn ? tenant.name : undefined}><p>${isOn
      ? "Every request of its keys is refused from now on. Its cache, keys and budgets stay."
      : "Its keys work again from the next request on."}</p><//><//>`;
}

export function DeleteTenant({ tenant, close }) {
  const act = async () => {
    await ask(pathOf(tenant.name), { method: "DELETE" });
    location.hash = href(["tenants"]);
  };
  return html`<${Dialog} title=${`Delete ${tenant.name}`} close=${close}><${Form}
    submit="Delete tenant" isDangerous
    confirm=${tenant.name} close=${close} act=${act}><p>Its keys stop working, its cache and stored
      responses are
    erased, its budgets end. Its ledger entries stay under a pseudonym. This cannot be
      undone.</p><//><//>`;
}

export function EraseCache({ tenant, close }) {
  const [receipt, setReceipt] = useState(null);
  const act = async (values) => {
    const body = { tenant: tenant.name, ...(values.workspace ? { workspace: values.workspace }
      : {}),
      ...(values.lease_id ? { lease_id: values.lease_id } : {}) };
    setReceipt(await ask("/admin/v1/erase", { method: "POST", body }));
  };
  if (receipt) return html`<${Dialog} title="Erased: the receipt" close=${close}>
    <${Table} caption=${`Receipt of the erasure for ${tenant.name}`} isPlain
      rows=${Object.entries(receipt)} id=${([name]) => name}
      columns=${[{ head: "field", get: ([name]) => name.replaceAll("_", " "), kind: "text" },
      { head: "value", get: ([, v]) => (typeof v === "object" ? JSON.stringify(v) : String(v)),
        kind: "text wrap" }]} />
    <div class="buttons"><button type="button" class="main"
      onClick=${close}>Close</button></div><//>`;
  return html`<${Dialog} title=${`Erase the cache of ${tenant.name}`} close=${close}><${Form}
    submit="Erase" isDangerous
    confirm=${tenant.name} close=${close} act=${act} fields=${[
      { name: "workspace", label: "Workspace", placeholder: "all workspaces" },
      { name: "lease_id", label: "Lease", placeholder: "all leases" }]}>
    <p>Erased prefixes cannot be found again: the next requests compute them anew. Without a lease,
      cached contents
      and stored responses end too.</p><//><//>`;
}

export function NewKey({ tenant, close, made }) {
  const act = async (values) => {
    const days = whole(values.days);
    made(await ask(`${pathOf(tenant.name)}/keys`, { method: "POST", body: { label: values.label,
      workspace: values.workspace || "default", scopes: values.scopes,
      ...(days === null ? {} : { expires_in_s: Math.round(days * 86_400) }) } }));
  };
  return html`<${Dialog} title=${`New key of ${tenant.name}`} close=${close}><${Form}
    submit="Create key" close=${close} act=${act}
    fields=${[{ name: "label", label: "Label", placeholder: "such as: production" },
    { name: "workspace", label: "Workspace", value: "default",
      hint: "keys of one workspace share a cache" },
    { name: "days", label: "Life", kind: "number", unit: "days", least: 0,
      placeholder: "without end" },
    { name: "scopes", label: "Scopes", kind: "checks", value: ["inference", "usage", "cache"],
      options: ["inference", "usage", "cache"] }]} /><//>`;
}

export function RotateKey({ row, close, made }) {
  const act = async (values) => made(await ask(`/admin/v1/keys/${row.key_id}/rotate`,
    { method: "POST",
    body: { grace_s: Math.round(Number(values.hours || 0) * 3600) } }));
  return html`<${Dialog} title=${`Rotate key ${row.shown}`} close=${close}><${Form} submit="Rotate"
    close=${close} act=${act}
    fields=${[{ name: "hours", label: "The old key stays valid for", kind: "number", value: 24,
      least: 0, unit: "hours" }]}>
    <p>A new key takes its place, with the same workspace, scopes, limits and budgets.</p><//><//>`;
}

export function RevokeKey({ row, close, done }) {
  const name = row.label || `key ${row.key_id}`;
  const act = async () => { await ask(`/admin/v1/keys/${row.key_id}/revoke`,
    { method: "POST" }); done(); };
  return html`<${Dialog} title=${`Revoke key ${row.shown}`} close=${close}><${Form} submit="Revoke"
    isDangerous confirm=${name}
    close=${close} act=${act}><p>Its next request is refused. This cannot be undone.</p><//><//>`;
}

export function SetBudget({ tenant, budget, keys, close, done }) {
  const act = async (values) => {
    await ask(`${pathOf(tenant)}/budgets`, { method: "PUT", body: { window: values.window,
      hard_micros: micros(values.hard), soft_micros: micros(values.soft), key_id: Number(values.key
        || 0) } });
    done();
  };
  const owner = [["0", "the whole tenant"], ...(keys ?? []).map((one) => [String(one.key_id),
    `key ${one.shown} ${one.label}`])];
  return html`<${Dialog} title=${`Budget of ${tenant}`} close=${close}><${Form} submit="Set budget"
    close=${close} act=${act}
    fields=${[{ name: "key", label: "Of", kind: "select", value: String(budget?.key_id ?? 0),
      options: owner },
    { name: "window", label: "Window", kind: "select", value: budget?.window ?? "month",
      options: ["month", "day"], hint: "in UTC" },
    { name: "hard", label: "Hard limit", kind: "dollars", least: 0, value: budget?.hard_usd ?? "",
      hint: "requests are refused beyond it" },
    { name: "soft", label: "Soft limit", kind: "dollars", least: 0, value: budget?.soft_usd ?? "",
      hint: "an alert is sent beyond it" }]}>
    <p class="note">Without both amounts the budget is removed.</p><//><//>`;
}

export function Declared({ tenant }) {
  return tenant.declared ? html`<${Notice} tone="plain">The configuration file declares this tenant:
    its settings are
    changed there.<//>` : null;
}
export const endOf = (key) => (key.revoked ? `revoked ${instant(key.revoked)}` : key.expires
  ? instant(key.expires) : "without end");
