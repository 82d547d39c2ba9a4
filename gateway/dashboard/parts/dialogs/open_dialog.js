// The dialog that is open on a page.

import { html, useState } from "../html.js";
import { NewSecret } from "./secret.js";

// Return {open, dialog}. open(of, props): opens a dialog, with `close`; with `done`, which asks for
// the page's data again; and with `made`, which shows a new key before that.
export function useDialog(again) {
  const [shown, set] = useState(null), close = () => set(null);
  const open = (of, props = {}) => set({ of, ...props });
  const done = () => { close(); again(); };
  const made = (key) => { again(); open(NewSecret, { made: key }); };
  return { open, dialog: shown && html`<${shown.of} key="dialog" close=${close} done=${done}
    made=${made} ...${shown} />` };
}
