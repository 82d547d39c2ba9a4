// Keys of a tenant or of administrators: their table, and what may be done to one.

import { html } from "../html.js";
import { ask } from "../api.js";
import * as column from "../tables/columns.js";
import { FormDialog, toNumber } from "../dialogs/dialog.js";
import { instant } from "../format.js";
import { Chip } from "../pieces.js";
import { Table } from "../tables/table.js";

function noteOf(row) {
  if (row.revoked) return "revoked";
  if (row.replaced_by) return `replaced by key ${row.replaced_by}`;
  return row.declared ? "declared" : "";
}
const endOf = (row) => (row.revoked ? `revoked ${instant(row.revoked)}`
  : row.expires ? instant(row.expires) : "without end");

// open(dialog, {row}): shows a dialog; null where keys may not be changed. canChange(row): whether
// this one may. ownId: the key that is signed in. extra: further columns after the label.
export function KeyTable({ rows, open, canChange, ownId, extra = [], ...table }) {
  const note = (row) => noteOf(row) || (String(row.key_id) === ownId ? "this one" : "");
  const acts = (row) => (noteOf(row) || !canChange(row) ? "" : html`
    <button type="button" class="small"
      onClick=${() => open(RotateKey, { row })}>Rotate</button>${" "}
    <button type="button" class="small danger"
      onClick=${() => open(RevokeKey, { row })}>Revoke</button>`);
  return html`<${Table} isHidden rows=${rows} id=${(row) => row.key_id} ...${table} columns=${[
    column.text("key", "shown", { kind: "text mono" }),
    column.text("label", (row) => row.label || null), ...extra,
    column.text("scopes", (row) => row.scopes.join(", ").replace("admin", "all")),
    column.at("created"), column.text("ends", endOf),
    column.text("note", note, { show: (row) => note(row) && html`<${Chip}>${note(row)}<//>` }),
    ...(open ? [column.text("change", () => null, { show: acts })] : [])]} />`;
}

export const LIFE = { name: "days", label: "Life", kind: "number", unit: "days", least: 0,
  placeholder: "without end" };
export function lifeOf({ days }) {
  return days === "" ? {} : { expires_in_s: Math.round(toNumber(days) * 86_400) };
}

function RotateKey({ row, close, made }) {
  const act = ({ hours }) => ask(`/admin/v1/keys/${row.key_id}/rotate`,
    { method: "POST", body: { grace_s: Math.round(toNumber(hours) * 3600) } });
  return html`<${FormDialog} title=${`Rotate key ${row.shown}`} submit="Rotate" close=${close}
    act=${act} done=${made} fields=${[{ name: "hours", label: "The old key stays valid for",
      kind: "number", value: 24, least: 0, isRequired: true, unit: "hours" }]}>
    <p>A new key takes its place, with the same workspace, scopes, limits and budgets.</p><//>`;
}

function RevokeKey({ row, close, done }) {
  const act = () => ask(`/admin/v1/keys/${row.key_id}/revoke`, { method: "POST" });
  return html`<${FormDialog} title=${`Revoke key ${row.shown}`} submit="Revoke" isDangerous
    confirm=${row.label || `key ${row.key_id}`} close=${close} act=${act} done=${done}>
    <p>Its next request is refused. This cannot be undone.</p><//>`;
}
