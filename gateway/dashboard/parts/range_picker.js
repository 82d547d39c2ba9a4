// The choice of a time range; it is kept in the address.

import { html, useState } from "./html.js";
import { instant, zone } from "./format.js";
import { RANGES, rangeOf, setQuery } from "./route.js";

const WORDS = { "1h": "1 h", "24h": "24 h", "7d": "7 d", "30d": "30 d" };
const local = (at) => instant(at).slice(0, 16).replace(" ", "T");

export function RangePicker({ query }) {
  const range = rangeOf(query), [isOpen, setOpen] = useState(false);
  const [since, until] = range.window();
  const choose = (event) => {
    event.preventDefault();
    const [from, to] = ["since",
      "until"].map((name) => new Date(event.target[name].value).getTime());
    if (!(to > from)) { event.target.until.setCustomValidity("Expected a time after the first.");
      event.target.reportValidity(); return; }
    setQuery({ since: from, until: to, range: null }, true);
    setOpen(false);
  };
  return html`<div class="ranges" role="group" aria-label="Time range">
    ${Object.keys(RANGES).map((name) => html`<button type="button"
      aria-pressed=${range.name === name}
      onClick=${() => { setOpen(false); setQuery({ range: name, since: null, until: null },
        true); }}
      >${WORDS[name]}</button>`)}
    <button type="button" aria-pressed=${range.name === "custom"} aria-expanded=${isOpen}
      onClick=${() => setOpen(!isOpen)}>Custom</button>
    ${isOpen && html`<form class="custom" onSubmit=${choose}
      onKeyDown=${(event) => event.key === "Escape" && setOpen(false)}>
      <label>From <input name="since" type="datetime-local" required value=${local(since)}
        /></label>
      <label>to <input name="until" type="datetime-local" required value=${local(until)}
        onInput=${(event) => event.target.setCustomValidity("")} /></label>
      <span class="soft">${zone()}</span><button class="main">Show</button></form>`}
  </div>`;
}
