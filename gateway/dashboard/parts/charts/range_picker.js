// The choice of a time range; it is kept in the address.

import { html, useState } from "../html.js";
import { instant, zone } from "../format.js";
import { RANGES_MS, setQuery } from "../route.js";

// The value of a `datetime-local` field.
const local = (at) => instant(at).slice(0, 16).replace(" ", "T");

export function RangePicker({ range }) {
  const [isOpen, setOpen] = useState(false), [since, until] = range.window();
  const show = (chosen) => {
    setOpen(false);
    setQuery({ range: null, since: null, until: null, ...chosen }, true);
  };
  const submit = (event) => {
    event.preventDefault();
    const fields = event.target;
    const [from, to] = [fields.since, fields.until].map((one) => new Date(one.value).getTime());
    if (to > from) { show({ since: from, until: to }); return; }
    fields.until.setCustomValidity("Expected a time after the first.");
    fields.until.reportValidity();
  };
  return html`<div class="ranges" role="group" aria-label="Time range">
    ${Object.keys(RANGES_MS).map((name) => html`<button type="button"
      aria-pressed=${range.name === name} onClick=${() => show({ range: name })}>
      ${name.replace(/(?=[hd])/, " ")}</button>`)}
    <button type="button" aria-pressed=${range.name === "custom"} aria-expanded=${isOpen}
      onClick=${() => setOpen(!isOpen)}>Custom</button>
    ${isOpen && html`<form class="custom" onSubmit=${submit}
      onKeyDown=${(event) => event.key === "Escape" && setOpen(false)}>
      <label>From <input name="since" type="datetime-local" required value=${local(since)}
        /></label>
      <label>to <input name="until" type="datetime-local" required value=${local(until)}
        onInput=${(event) => event.target.setCustomValidity("")} /></label>
      <span class="soft">${zone()}</span><button class="main">Show</button></form>`}
  </div>`;
}
