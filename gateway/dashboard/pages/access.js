// Access: administrators' keys with their scopes, shared scopes between tenants, and webhooks.

import { html } from "../parts/html.js";
import { useDialog } from "../parts/dialogs/open_dialog.js";
import { SLOW_POLL_MS, address, ask, useData, useKeys } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { FormDialog } from "../parts/dialogs/dialog.js";
import { KeyTable, LIFE, lifeOf } from "../parts/accounts/keys.js";
import { FirstRows } from "../parts/tables/more_rows.js";
import { Chip, Panel, instead } from "../parts/pieces.js";
import { useSession } from "../parts/session.js";
import { Table } from "../parts/tables/table.js";

const DELIVERIES_MAX = 20;
const ADMIN_SCOPES = ["erase", "money", "read", "tenants"];
const TONES = { delivered: "good", pending: "warn", dead: "bad" };

export function Access() {
  const { can, me } = useSession();
  const keys = useKeys("/admin/v1/keys?admin=true");
  const scopes = useData("/admin/v1/shared-scopes", SLOW_POLL_MS);
  const hooks = useData(address("/admin/v1/webhooks", { limit: DELIVERIES_MAX }), SLOW_POLL_MS);
  const acts = useDialog(() => { keys.again(); hooks.again(); });
  const open = can("tenants") ? acts.open : null;
  return html`<${Panel} title="Administrators' keys" wide
      note="They open the admin API and this dashboard, as far as their scopes go; none generates."
      tools=${open && html`<button type="button" class="main small"
        onClick=${() => open(NewAdminKey)}>New key</button>`}>
      ${instead(keys, "keys") ?? html`<${AdminKeys} data=${keys.data} open=${open} me=${me} />`}<//>
    <${Panel} title="Shared scopes" wide note="Caches that workspaces of several tenants share.">
      ${instead(scopes, "shared scopes")
        ?? html`<${Scopes} rows=${scopes.data.shared_scopes} />`}<//>
    <${Panel} title="Webhooks" wide note="Events for other programs, from the configuration file.">
      ${instead(hooks, "webhooks") ?? html`<${Webhooks} rows=${hooks.data.webhooks} open=${open} />
        <${Deliveries} rows=${hooks.data.deliveries} />`}<//>
    ${acts.dialog}`;
}

function AdminKeys({ data, open, me }) {
  // A key may change another that has no scope beyond its own.
  const holds = (row) => row.scopes.every((one) =>
    (one === "admin" ? ADMIN_SCOPES : [one]).every((name) => me.scopes.includes(name)));
  return html`<${FirstRows} rows=${data.keys} what="keys" hasMore=${data.has_more} />
    <${KeyTable} caption="Administrators' keys" file="admin-keys" open=${open} canChange=${holds}
      rows=${data.keys} none="No administrator has a key."
      ownId=${me.actor === "admin_key" ? me.actor_id : null} />`;
}

function Scopes({ rows }) {
  return html`<${Table} caption="Shared scopes" isHidden rows=${rows} id=${(row) => row.scope_id}
    file="shared-scopes" none="No shared scope: each tenant's cache is its own." columns=${[
      column.text("name"), column.tenant("owner"),
      column.text("members", (row) => row.members.join(", "), { kind: "text wrap" }),
      column.at("created")]} />`;
}

function Webhooks({ rows, open }) {
  const button = (row) => html`<button type="button" class="small"
    onClick=${() => open(TestWebhook, { name: row.name })}>Send a test</button>`;
  return html`<${Table} caption="Webhooks" isHidden rows=${rows} file="webhooks"
    id=${(row) => row.name} none="No webhook is configured." columns=${[
      column.text("name"), column.text("format"),
      column.text("events", (row) => row.events.join(", "), { kind: "text wrap" }),
      ...["pending", "delivered", "dead"].map((name) => column.figure(name)),
      ...(open ? [column.text("change", () => null, { show: button })] : [])]} />`;
}

function Deliveries({ rows }) {
  if (!rows.length) return null;
  return html`<${Table} caption="Latest deliveries" rows=${rows} file="deliveries"
    id=${(row) => `${row.event_id} ${row.webhook}`} columns=${[
      column.at("created"), column.text("webhook"), column.text("event", "type"),
      column.text("state", "state",
        { show: (row) => html`<${Chip} tone=${TONES[row.state]}>${row.state}<//>` }),
      column.at("next attempt", "next_attempt"), column.figure("attempts"),
      column.text("last error", "last_error", { kind: "text wrap" })]} />`;
}

function TestWebhook({ name, close, done }) {
  const act = () =>
    ask(`/admin/v1/webhooks/${encodeURIComponent(name)}/test`, { method: "POST" });
  return html`<${FormDialog} title=${`Test ${name}`} submit="Send" close=${close} act=${act}
    done=${done}>
    <p>One event of the type test is sent; its delivery is in the list.</p><//>`;
}

// An administrator can hand out its own scopes and no other.
function NewAdminKey({ close, made }) {
  const { scopes: options } = useSession().me;
  const act = ({ label, scopes, ...values }) => ask("/admin/v1/keys",
    { method: "POST", body: { label, scopes, ...lifeOf(values) } });
  return html`<${FormDialog} title="New administrator's key" submit="Create key" close=${close}
    act=${act} done=${made} fields=${[
      { name: "label", label: "Label", placeholder: "such as: on call" }, LIFE,
      { name: "scopes", label: "Scopes", kind: "checks", value: ["read"], options }]} />`;
}
