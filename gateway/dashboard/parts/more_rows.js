// The end of a list that the server gives newest first.

import { html } from "./html.js";
import { count } from "./format.js";

export const ROWS_FIRST = 100;
const ROWS_MAX = 1000;

// limit, set: how many rows are asked for. hasMore: whether the server has older ones.
export function MoreRows({ limit, set, hasMore }) {
  if (!hasMore) return null;
  return limit < ROWS_MAX
    ? html`<button type="button" class="quiet" onClick=${() => set(ROWS_MAX)}>Show older</button>`
    : html`<p class="note">The newest ${count(limit)}: an earlier range shows older ones.</p>`;
}
