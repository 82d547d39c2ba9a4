// Who is signed in: the form, the key of this tab or of the tab that opened it, and what the server
// says of its owner.

import { createContext, html, useContext, useEffect, useRef, useState } from "./html.js";
import { POLL_MS, Refused, ask, connection, keepKey, storedKey } from "./api.js";
import { Brand, Loading } from "./pieces.js";
import { joinTabs } from "./tabs.js";

export const Session = createContext(null);
// The administrator's pages have {me, can(scope), query, range}.
export const useSession = () => useContext(Session);

// Return {me, leave, signIn}. `me`: the answer of `path` to the key of this tab; `signIn`: what is
// shown until it has come and while signed out, the form with `title` and `where` a key is found.
export function useSignIn(path, title, where) {
  // `me` is null while signed out, and `refused` why, in the server's words.
  const [{ me, refused }, set] = useState({ me: undefined, refused: null }), retry = useRef(0);
  const tabs = useRef(null);
  const leave = (refused = null) => { keepKey(""); set({ me: null, refused }); };
  const enter = async () => {
    clearTimeout(retry.current);
    try {
      set({ me: await ask(path), refused: null });
    } catch (error) {
      if (!(error instanceof Refused) || error.isPassing) {
        const why = error instanceof Refused ? error.message : "The server does not answer";
        set((old) => ({ ...old, refused: `${why.replace(/\.$/, "")}; trying again.` }));
        retry.current = setTimeout(enter, POLL_MS);
      } else if (!error.isSignedOut) leave(error.message);
    }
  };
  useEffect(() => {
    connection.signedOut = (error) => leave(storedKey() ? error.message : null);
    tabs.current = joinTabs(path, leave);
    tabs.current.askKey().then(enter);
  }, []);
  const leaveAll = () => { tabs.current.tellLeft(); leave(); };
  if (me) return { me, leave: leaveAll };
  return { signIn: me === undefined
    ? html`<main class="sign-in"><${Loading} what="Connecting" /></main>`
    : html`<${SignIn} title=${title} where=${where} refused=${refused} enter=${enter} />` };
}

function SignIn({ title, where, refused, enter }) {
  const submit = (event) => {
    event.preventDefault();
    keepKey(event.target.key.value.trim());
    event.target.reset();
    enter();
  };
  return html`<main class="sign-in"><form onSubmit=${submit}>
    <${Brand} />
    <h1>${title}</h1>
    <p>${where} The browser keeps it in its tabs of this page until they are closed.</p>
    <label for="key">Key</label>
    <input id="key" name="key" type="password" autocomplete="off" spellcheck="false" required
      pattern="\\s*[!-~]+\\s*" title="A key has no spaces and no letters with accents." autofocus />
    <button class="main">Sign in</button>
    <p role="alert" id="refused" class="bad">${refused ?? ""}</p>
  </form></main>`;
}
