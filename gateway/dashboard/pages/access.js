// Access: administrators' keys with their scopes, shared scopes between tenants, and webhooks.

import { html, useState } from "../parts/html.js";
import { ask, useData } from "../parts/api.js";
import { Dialog, Form, whole } from "../parts/dialog.js";
import { instant } from "../parts/format.js";
import { Chip, Panel, TenantLink, instead } from "../parts/pieces.js";
import { NewSecret } from "../parts/secret.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/table.js";
import { RevokeKey, RotateKey, endOf } from "./tenant_acts.js";

const TONES = { delivered: "good", pending: "warn", dead: "bad" };

export function Access() {
  const { can, me } = useSession(), [act, setAct] = useState(null);
  const keys = useData("/admin/v1/keys?limit=1000", 15_000);
  const scopes = useData("/admin/v1/shared-scopes", 15_000);
  const hooks = useData("/admin/v1/webhooks?limit=20", 15_000);
  const close = () => setAct(null);
  const done = () => { close(); keys.again(); };
  const made = (key) => { keys.again(); setAct({ of: NewSecret, made: key, server: me.server }); };
  const open = (of, more = {}) => () => setAct({ of, done, made, ...more });
  const own = (keys.data?.keys ?? []).filter((one) => one.tenant === null);
  return html`<${Panel} title="Administrators' keys" wide
      note="They open the admin API and this dashboard, as far as their scopes go; none generates."
      tools=${can("tenants") && html`<button type="button" class="main small"
        onClick=${open(NewAdminKey, { offered: me.scopes })}>New key</button>`}>
      ${instead(keys, "keys") ?? html`<${AdminKeys} keys=${own} open=${open} me=${me}
        canChange=${can("tenants")} />`}<//>
    <${Panel} title="Shared scopes" wide note="Caches that workspaces of several tenants share.">
      ${instead(scopes, "shared scopes") ?? html`<${Scopes}
        rows=${scopes.data.shared_scopes} />`}<//>
    <${Panel} title="Webhooks" wide note="Events for other programs, from the configuration file."
      >${instead(hooks, "webhooks") ?? html`<${Webhooks} data=${hooks.data}
        test=${can("tenants") ? (one) => setAct({ of: TestWebhook, one, done: () => {
          close();
          hooks.again();
        } }) : null} />`}<//>
    ${act && html`<${act.of} ...${act} close=${close} />`}`;
}

function AdminKeys({ keys, open, canChange, me }) {
  const holds = (row) => row.scopes.every((one) => one === "admin"
    ? me.scopes.length === 4 : me.scopes.includes(one));
  const acts = (row) => (row.revoked || row.replaced_by || !holds(row) ? "" : html`
    <button type="button" class="small" onClick=${open(RotateKey, { row })}>Rotate</button>
    ${" "}<button type="button" class="small danger" onClick=${open(RevokeKey, { row })}
      >Revoke</button>`);
  const isOwn = (row) => me.actor === "admin_key" && String(row.key_id) === me.actor_id;
  const note = (row) => (row.revoked ? "revoked"
    : row.replaced_by ? `replaced by ${row.replaced_by}` : isOwn(row) ? "this one" : "");
  return html`<${Table} caption="Administrators' keys" isHidden rows=${keys} file="admin-keys"
    id=${(row) => row.key_id} none="No administrator has a key." columns=${[
    { head: "key", get: (row) => row.shown, kind: "text mono" },
    { head: "label", get: (row) => row.label || null, kind: "text" },
    { head: "scopes", kind: "text", get: (row) => row.scopes.join(", ").replace("admin", "all") },
    { head: "created", get: (row) => row.created, show: (row) => instant(row.created),
      kind: "text" },
    { head: "ends", get: endOf, kind: "text" },
    { head: "note", get: note, show: (row) => note(row) && html`<${Chip}>${note(row)}<//>`,
      kind: "text" },
    ...(canChange ? [{ head: "change", get: () => null, show: acts, kind: "text" }] : [])]} />`;
}

function Scopes({ rows }) {
  return html`<${Table} caption="Shared scopes" isHidden rows=${rows} id=${(row) => row.scope_id}
    file="shared-scopes" none="No shared scope: each tenant's cache is its own." columns=${[
    { head: "name", get: (row) => row.name, kind: "text" },
    { head: "owner", get: (row) => row.owner, kind: "text",
      show: (row) => html`<${TenantLink} name=${row.owner} />` },
    { head: "members", get: (row) => row.members.join(", "), kind: "text wrap" },
    { head: "created", get: (row) => row.created, show: (row) => instant(row.created),
      kind: "text" }]} />`;
}

function Webhooks({ data, test }) {
  const number = (name) => ({ head: name, get: (row) => row[name] });
  const button = (row) => html`<button type="button" class="small"
    onClick=${() => test(row)}>Send a test</button>`;
  return html`<${Table} caption="Webhooks" isHidden rows=${data.webhooks} file="webhooks"
    id=${(row) => row.name} none="No webhook is configured." columns=${[
    { head: "name", get: (row) => row.name, kind: "text" },
    { head: "format", get: (row) => row.format, kind: "text" },
    { head: "events", get: (row) => row.events.join(", "), kind: "text wrap" },
    number("pending"), number("delivered"), number("dead"),
    ...(test ? [{ head: "change", get: () => null, show: button, kind: "text" }] : [])]} />
    ${data.deliveries.length > 0 && html`<${Table} caption="Latest deliveries"
      rows=${data.deliveries} id=${(row) => `${row.event_id} ${row.webhook}`} file="deliveries"
      columns=${[
    { head: "created", get: (row) => row.created, show: (row) => instant(row.created),
      kind: "text" },
    { head: "webhook", get: (row) => row.webhook, kind: "text" },
    { head: "event", get: (row) => row.type, kind: "text" },
    { head: "state", get: (row) => row.state, kind: "text",
      show: (row) => html`<${Chip} tone=${TONES[row.state]}>${row.state}<//>` },
    { head: "next attempt", get: (row) => row.next_attempt, kind: "text",
      show: (row) => instant(row.next_attempt) },
    number("attempts"), { head: "last error", get: (row) => row.last_error, kind: "text wrap" }]}
      />`}`;
}

function TestWebhook({ one, close, done }) {
  const act = async () => {
    await ask(`/admin/v1/webhooks/${encodeURIComponent(one.name)}/test`, { method: "POST" });
    done();
  };
  return html`<${Dialog} title=${`Test ${one.name}`} close=${close}><${Form} submit="Send"
    close=${close} act=${act}><p>One event of the type test is sent; its delivery is in the
    list.</p><//><//>`;
}

// `offered`: the scopes of the administrator that asks; it can hand out no other.
function NewAdminKey({ offered, close, made }) {
  const act = async (values) => {
    const days = whole(values.days);
    made(await ask("/admin/v1/keys", { method: "POST", body: { label: values.label,
      scopes: values.scopes,
      ...(days === null ? {} : { expires_in_s: Math.round(days * 86_400) }) } }));
  };
  return html`<${Dialog} title="New administrator's key" close=${close}>
    <${Form} submit="Create key" close=${close} act=${act} fields=${[
    { name: "label", label: "Label", placeholder: "such as: on call" },
    { name: "days", label: "Life", kind: "number", unit: "days", least: 0,
      placeholder: "without end" },
    { name: "scopes", label: "Scopes", kind: "checks", value: ["read"],
      options: offered }]} /><//>`;
}
