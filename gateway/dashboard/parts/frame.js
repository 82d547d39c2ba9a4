// The frame of every page: navigation, range, scheme; and the form to sign in.

import { html, useState } from "./html.js";
import { Disconnected } from "./pieces.js";
import { RangePicker } from "./range_picker.js";
import { SchemePicker } from "./scheme.js";

const Mark = () => html`<img src="/dashboard/favicon.svg" width="24" height="24" alt="" />`;

export function Frame({ links, title, hasRange, query, who, leave, main, above, children }) {
  const [isOpen, setOpen] = useState(false);
  return html`<a class="skip" href="#main"
    onClick=${(event) => { event.preventDefault(); main.current.focus(); }}
      >Skip to content</a>
    <div class="frame">
      <aside class=${isOpen ? "open" : ""}>
        <div class="brand"><${Mark} /><span>Trunkline</span>
          <button type="button" class="menu" aria-expanded=${isOpen} aria-controls="sections"
            onClick=${() => setOpen(!isOpen)}>Menu</button></div>
        <nav id="sections" aria-label="Sections" onClick=${() => setOpen(false)}>
          ${links.map((one) => html`<a href=${one.href} aria-current=${one.isHere ? "page"
            : undefined}
            >${one.title}</a>`)}</nav>
        <div class="who"><span title="Signed in as">${who}</span><${SchemePicker} />
          ${leave && html`<button type="button" class="quiet small" onClick=${leave}>Sign
            out</button>`}</div>
      </aside>
      <div class="page">
        <${Disconnected} />
        <header class="top"><h1>${above && html`<a href=${above.href}>${above.title}</a> <span
          aria-hidden="true">/</span> `}${title}</h1>
          ${hasRange && html`<${RangePicker} query=${query} />`}</header>
        <main id="main" ref=${main} tabindex="-1">${children}</main>
      </div>
    </div>`;
}

export function SignIn({ title, where, refused, enter }) {
  const submit = (event) => {
    event.preventDefault();
    enter(event.target.key.value.trim());
    event.target.reset();
  };
  return html`<main class="door"><form onSubmit=${submit}>
    <div class="brand"><${Mark} /><span>Trunkline</span></div>
    <h1>${title}</h1>
    <p>${where} The browser keeps it until this tab is closed.</p>
    <label for="key">Key</label>
    <input id="key" name="key" type="password" autocomplete="off" spellcheck="false" required
      autofocus />
    <button class="main">Sign in</button>
    <p role="alert" id="refused" class="bad">${refused ?? ""}</p>
  </form></main>`;
}
