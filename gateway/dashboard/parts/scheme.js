// Light, dark, or as the system has it.

import { html, useEffect, useState } from "./html.js";

const SCHEMES = { auto: "light dark", light: "light", dark: "dark" };

export function SchemePicker() {
  const [scheme, set] = useState(localStorage.getItem("scheme") ?? "auto");
  useEffect(() => {
    document.documentElement.style.colorScheme = SCHEMES[scheme] ?? SCHEMES.auto;
    if (scheme === "auto") localStorage.removeItem("scheme");
    else localStorage.setItem("scheme", scheme);
    dispatchEvent(new Event("schemechange"));
  }, [scheme]);
  return html`<label class="scheme"><span class="unseen">Colours</span>
    <select value=${scheme} onChange=${(event) => set(event.target.value)}>
      ${Object.keys(SCHEMES).map((name) => html`<option value=${name}
        selected=${name === scheme}>${name}</option>`)}
    </select></label>`;
}

// A number that changes whenever the colours do: charts are drawn anew.
export function useScheme() {
  const [turn, set] = useState(0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)"), changed = () => set((n) => n + 1);
    addEventListener("schemechange", changed);
    media.addEventListener("change", changed);
    return () => {
      removeEventListener("schemechange", changed);
      media.removeEventListener("change", changed);
    };
  }, []);
  return turn;
}
