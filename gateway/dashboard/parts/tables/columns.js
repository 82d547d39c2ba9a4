// The columns of tables: {head, get(row), show?(row), kind?, csv?(row), hint?}. `kind`: classes, of
// "text", "mono", "wrap" (may be of many lines), "fold" (where there is no room), "whole" (never),
// and "least" (hidden where there is no room; CSV has it). `get` here is a function of the row, or
// the name of its field.

import { html } from "../html.js";
import { count, instant } from "../format.js";
import { Status, TenantLink } from "../pieces.js";

const getter = (get) => (typeof get === "function" ? get : (row) => row[get]);

export function text(head, get = head, more = {}) {
  return { head, get: getter(get), kind: "text", ...more };
}

// `write`: the number as text.
export function figure(head, get = head, write = count) {
  const of = getter(get);
  return { head, get: of, show: (row) => write(of(row)) };
}

export function tenant(head = "tenant", get = head) {
  const of = getter(get);
  return text(head, of, { show: (row) => html`<${TenantLink} name=${of(row)} />` });
}

export function status(head = "status", get = head) {
  const of = getter(get);
  return text(head, of, { show: (row) => html`<${Status} status=${of(row)} />` });
}

// `write`: a time, in milliseconds or RFC 3339, as text.
export function at(head, get = head, write = instant) {
  const of = getter(get);
  return text(head, of, { show: (row) => write(of(row)), kind: "text whole" });
}

// A long id: its beginning; the pointer shows all of it.
export function digest(head, get = head) {
  const of = getter(get);
  return { head, get: of, kind: "text mono",
    show: (row) => html`<span title=${of(row)}>${of(row).slice(0, 12)}…</span>` };
}
