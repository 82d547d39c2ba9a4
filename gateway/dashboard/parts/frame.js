// The frame of every page: navigation, range, scheme, and who is signed in.

import { html, useEffect, useRef, useState } from "./html.js";
import { zone } from "./format.js";
import { Brand, Disconnected } from "./pieces.js";
import { RangePicker } from "./charts/range_picker.js";
import { SchemePicker } from "./scheme.js";

// links: {href, title, isHere}. above: {href, title} of the page that this one is a thing of.
// range: null on a page without one. Another `place` moves the focus to the page's content.
export function Frame({ links, title, above, range, who, leave, place, children }) {
  const [isOpen, setOpen] = useState(false), main = useRef(null), isFirst = useRef(true);
  useEffect(() => { document.title = `${title} · Trunkline`; }, [title]);
  useEffect(() => {
    if (!isFirst.current) {
      main.current.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [place]);
  const skip = (event) => { event.preventDefault(); main.current.focus(); };
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <div class="frame">
      <aside class=${isOpen ? "open" : ""}>
        <${Brand}><button type="button" class="menu" aria-expanded=${isOpen}
          aria-controls="sections" onClick=${() => setOpen(!isOpen)}>Menu</button><//>
        <nav id="sections" aria-label="Sections" onClick=${() => setOpen(false)}>
          ${links.map((one) => html`<a href=${one.href}
            aria-current=${one.isHere ? "page" : undefined}>${one.title}</a>`)}</nav>
        <div class="who">
          <span title="Signed in as">${who}</span>
          <span title="Zone of the times shown">${zone()}</span>
          <${SchemePicker} />
          ${leave && html`<button type="button" class="quiet small" onClick=${leave}>Sign
            out</button>`}</div>
      </aside>
      <div class="page">
        <${Disconnected} />
        <header class="top">
          <h1>${above && html`<a href=${above.href}>${above.title}</a>
            ${" "}<span aria-hidden="true">/</span> `}${title}</h1>
          ${range && html`<${RangePicker} range=${range} />`}</header>
        <main id="main" ref=${main} tabindex="-1">${children}</main>
      </div>
    </div>`;
}
