// The tabs of one browser at one page of this host. A key stays in the tabs that have it; a tab that
// was opened by a link asks the others for theirs, and one that signs out takes it from all.

import { keepKey, storedKey } from "./api.js";

const ANSWER_MS = 300;

// Join the tabs of `page`. Return {askKey, tellLeft}: `askKey()` resolves when this tab has a key of
// another one, or none has answered; `tellLeft()` is called before the key is forgotten. `left()`:
// called when another tab has signed out of this tab's key.
export function joinTabs(page, left) {
  const channel = new BroadcastChannel(`trunkline:${page}`);
  let settle = null;
  channel.onmessage = ({ data: { kind, key } }) => {
    const own = storedKey();
    if (kind === "ask" && own) channel.postMessage({ kind: "key", key: own });
    else if (kind === "key" && settle && !own) {
      keepKey(key);
      settle();
    } else if (kind === "left" && own && own === key) left();
  };
  const askKey = () => (storedKey() ? Promise.resolve() : new Promise((resolve) => {
    const timer = setTimeout(() => settle(), ANSWER_MS);
    settle = () => {
      clearTimeout(timer);
      settle = null;
      resolve();
    };
    channel.postMessage({ kind: "ask" });
  }));
  const tellLeft = () => {
    if (storedKey()) channel.postMessage({ kind: "left", key: storedKey() });
  };
  return { askKey, tellLeft };
}
