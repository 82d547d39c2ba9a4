// CSV of what a table or a chart shows, made in the browser.

import { html } from "./html.js";

// A cell that begins like a formula would run in a spreadsheet: an apostrophe makes it text.
function cell(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "number" ? String(value) : guarded(String(value));
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
const guarded = (text) => (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}`
  : text);

const csvOf = (heads, rows) =>
  `${[heads, ...rows].map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;

function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.csv`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

export function CsvButton({ name, what, heads, rows }) {
  return html`<button type="button" class="quiet small" aria-label=${`Save as CSV: ${what}`}
    onClick=${() => save(name, csvOf(heads, rows()))}>CSV</button>`;
}
