// Tables: sorted by a click on a head, saved as CSV, with a caption for screen readers.

import { html, useLayoutEffect, useRef, useState } from "../html.js";
import { CsvButton } from "./csv.js";
import { NONE, count, isKnown } from "../format.js";
import { Empty } from "../pieces.js";

const ROWS_FIRST = 100;

// Made once: `localeCompare` makes its own for each pair.
const texts = new Intl.Collator("en", { numeric: true });
const isNothing = (v) => !isKnown(v) || v === "";

// Rows without a value come last in both directions.
function compared(a, b, isDown) {
  if (isNothing(a) || isNothing(b)) return isNothing(a) - isNothing(b);
  const order = typeof a === "number" && typeof b === "number" ? a - b
    : texts.compare(a, b);
  return isDown ? -order : order;
}

// A box that scrolls takes focus, so that the keyboard can scroll it; other boxes take none.
function Scroller({ label, children }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    const set = () => {
      const it = box.current;
      if (it.scrollWidth > it.clientWidth) it.tabIndex = 0;
      else it.removeAttribute("tabindex");
    };
    set();
    const watch = new ResizeObserver(set);
    watch.observe(box.current);
    return () => watch.disconnect();
  });
  return html`<div class="scroll" ref=${box} role="region" aria-label=${label}>${children}</div>`;
}

function Head({ column, sort, press }) {
  const direction = sort?.head !== column.head ? undefined
    : sort.isDown ? "descending" : "ascending";
  const kind = (column.kind ?? "").replaceAll(/ ?(mono|wrap|fold)/g, "");
  const arrow = { descending: "↓", ascending: "↑" }[direction] ?? "";
  return html`<th scope="col" class=${kind} aria-sort=${direction} title=${column.hint}>
    ${press ? html`<button type="button" class="sort" onClick=${press}>${column.head}<span
      aria-hidden="true">${arrow}</span></button>` : column.head}</th>`;
}

// columns: as in `columns.js`; the first is the row's name. `id(row)`: unique. `down`: the head of
// the column that sorts the rows at first, downwards; without it they keep the given order. `none`:
// in place of no rows. `file`: the name of the CSV. `first`: rows that are shown at first.
// `isPlain`: no sorting, no CSV. `isHidden`: the caption is for screen readers alone.
export function Table({ caption, columns, rows, id, down, none = "Nothing in this range.", file,
  isPlain, isHidden, first = ROWS_FIRST }) {
  const [sort, setSort] = useState(down ? { head: down, isDown: true } : null);
  const [most, setMost] = useState(first);
  if (!rows.length) return html`<${Empty}>${none}<//>`;
  const by = columns.find((one) => one.head === sort?.head);
  const sorted = by ? [...rows].sort((a, b) => compared(by.get(a), by.get(b), sort.isDown)) : rows;
  const press = ({ head, kind = "" }) => setSort({ head,
    isDown: sort?.head === head ? !sort.isDown : !kind.startsWith("text") });
  const value = (column, row) => (column.show ?? column.get)(row) ?? NONE;
  const cell = (column, place, row) => (place === 0
    ? html`<th scope="row" class=${column.kind ?? ""}>${value(column, row)}</th>`
    : html`<td class=${column.kind ?? ""}>${value(column, row)}</td>`);
  return html`<div class="table">
    <${Scroller} label=${caption}><table>
      <caption class=${isHidden ? "unseen" : ""}>${caption}</caption>
      <thead><tr>${columns.map((column) => html`<${Head} column=${column} sort=${sort}
        press=${isPlain ? null : () => press(column)} />`)}</tr></thead>
      <tbody>${sorted.slice(0, most).map((row) => html`<tr key=${id(row)}>${
        columns.map((column, place) => cell(column, place, row))}</tr>`)}</tbody>
    </table><//>
    <div class="below">
      ${sorted.length > most && html`<button type="button" class="quiet small"
        onClick=${() => setMost(Infinity)}>Show all ${count(sorted.length)} rows</button>`}
      ${file && html`<${CsvButton} name=${file} what=${caption}
        heads=${columns.map((one) => one.head)}
        rows=${() => sorted.map((row) => columns.map((one) => (one.csv ?? one.get)(row)))} />`}
    </div>
  </div>`;
}

// Rows of [name, value]; those without a value are left out.
export function Facts({ caption, rows }) {
  return html`<${Table} caption=${caption} isHidden isPlain id=${([name]) => name}
    rows=${rows.filter(([, v]) => !isNothing(v))} columns=${[
      { head: "field", get: ([name]) => name, kind: "text" },
      { head: "value", get: ([, v]) => v, kind: "text wrap" }]} />`;
}
