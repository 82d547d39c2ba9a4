// Light, dark, or as the system has it.

import { html, useEffect, useReducer, useState } from "./html.js";
import { Select } from "./pieces.js";

const SCHEMES = { auto: "light dark", light: "light", dark: "dark" };

export function SchemePicker() {
  const [scheme, set] = useState(localStorage.getItem("scheme") ?? "auto");
  useEffect(() => {
    document.documentElement.style.colorScheme = SCHEMES[scheme] ?? SCHEMES.auto;
    if (scheme === "auto") localStorage.removeItem("scheme");
    else localStorage.setItem("scheme", scheme);
    dispatchEvent(new Event("schemechange"));
  }, [scheme]);
  return html`<label><span class="unseen">Colours</span>
    <${Select} value=${scheme} options=${Object.keys(SCHEMES)} set=${set} /></label>`;
}

// Return a number that changes whenever the colours do: charts are drawn anew.
export function useScheme() {
  const [turn, changed] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("schemechange", changed);
    media.addEventListener("change", changed);
    return () => {
      removeEventListener("schemechange", changed);
      media.removeEventListener("change", changed);
    };
  }, []);
  return turn;
}
