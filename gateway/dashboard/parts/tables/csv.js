// CSV of what a table or a chart shows, made in the browser.

import { html } from "../html.js";
import { isKnown } from "../format.js";

// A text that begins like a formula would run in a spreadsheet: an apostrophe keeps it text.
function cell(value) {
  if (!isKnown(value)) return "";
  let text = String(value);
  if (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save(name, rows) {
  const text = rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// rows(): the cells of each row, made when the button is pressed.
export function CsvButton({ name, what, heads, rows }) {
  return html`<button type="button" class="quiet small" aria-label=${`Save as CSV: ${what}`}
    onClick=${() => save(name, [heads, ...rows()])}>CSV</button>`;
}
