// Tables: sorted by a click on a head, saved as CSV, with a caption for screen readers.

import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { CsvButton } from "./csv.js";
import { NONE, count } from "./format.js";
import { Empty } from "./pieces.js";

const FIRST_ROWS = 100;

function compared(a, b) {
  const [isNoA, isNoB] = [a, b].map((v) => v === null || v === undefined || v === "");
  if (isNoA || isNoB) return isNoA - isNoB;
  return typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true });
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

// columns: {head, get(row), show?(row), kind?: "text", csv?(row), hint?}. The first column is the
// row's name. `order`: the index of the column that sorts at first, negative + 1 for downwards;
// null keeps the given order. `first`: rows that are shown at first.
// `id(row)`: unique. `isPlain`: no sorting, no CSV.
export function Table({ caption, columns, rows, id, order = null, none, file, isPlain, isHidden,
  first = FIRST_ROWS }) {
  const [sort, setSort] = useState(order);
  const [most, setMost] = useState(first);
  if (!rows.length) return html`<${Empty}>${none ?? "Nothing in this range."}<//>`;
  const which = sort === null ? null : sort < 0 ? -sort - 1 : sort;
  const sorted = which === null ? rows : [...rows].sort((a, b) => {
    const [x, y] = [columns[which].get(a), columns[which].get(b)];
    const hasNone = [x, y].some((v) => v === null || v === undefined || v === "");
    return sort < 0 && !hasNone ? compared(y, x) : compared(x, y);
  });
  const press = (at) => {
    const down = -at - 1, isText = (columns[at].kind ?? "").startsWith("text");
    setSort(sort === at ? down : sort === down ? at : isText ? at : down);
  };
  const head = (column, at) => {
    const direction = which === at ? (sort < 0 ? "descending" : "ascending") : undefined;
    return html`<th scope="col" class=${(column.kind ?? "").startsWith("text") ? "text" : ""}
      aria-sort=${direction}
      title=${column.hint}>${isPlain ? column.head : html`<button type="button" class="sort"
      onClick=${() => press(at)}>${column.head}<span aria-hidden="true">${
      direction === "descending" ? "↓" : direction ? "↑" : ""}</span></button>`}</th>`;
  };
  const value = (column, row) => (column.show ? column.show(row) : column.get(row) ?? NONE);
  return html`<div class="table">
    <${Scroller} label=${caption}><table>
      <caption class=${isHidden ? "unseen" : ""}>${caption}</caption>
      <thead><tr>${columns.map(head)}</tr></thead>
      <tbody>${sorted.slice(0, most).map((row, at) => html`<tr key=${id ? id(row) : at}>
        ${columns.map((column, k) => (k === 0
          ? html`<th scope="row" class=${column.kind ?? ""}>${value(column, row)}</th>`
          : html`<td class=${column.kind ?? ""}>${value(column, row)}</td>`))}</tr>`)}</tbody>
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
