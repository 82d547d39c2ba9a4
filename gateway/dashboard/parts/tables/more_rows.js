// The ends of lists that are longer than what is shown.

import { html } from "../html.js";
import { count } from "../format.js";
import { Notice } from "../pieces.js";

export const ROWS_FIRST = 100;
const ROWS_MAX = 1000;

// rows: of the list, of which the server has more; `what` they are.
export const FirstRows = ({ rows, what, hasMore }) => hasMore && html`<${Notice}>Only the first
  ${" "}${count(rows.length)} ${what} are here.<//>`;

// Of a list that the server gives newest first. limit, set: how many rows are asked for. hasMore:
// whether the server has older ones.
export function MoreRows({ limit, set, hasMore }) {
  if (!hasMore) return null;
  return limit < ROWS_MAX
    ? html`<button type="button" class="quiet" onClick=${() => set(ROWS_MAX)}>Show older</button>`
    : html`<p class="note">The newest ${count(limit)}: an earlier range shows older ones.</p>`;
}
