// The administrator's dashboard: sign-in, the frame, and one page for each address.

import { html, render, useEffect, useRef, useState } from "./parts/html.js";
import { Refused, ask, connection, keepKey, storedKey } from "./parts/api.js";
import { href, rangeOf, setUsualRange, useRoute } from "./parts/route.js";
import { Frame, SignIn } from "./parts/frame.js";
import { Session } from "./parts/session.js";
import { Loading } from "./parts/pieces.js";
import { Access } from "./pages/access.js";
import { Audit } from "./pages/audit.js";
import { Cache } from "./pages/cache.js";
import { Engine } from "./pages/engine.js";
import { Findings } from "./pages/findings.js";
import { Memory } from "./pages/memory.js";
import { Money } from "./pages/money.js";
import { Overview } from "./pages/overview.js";
import { OneRequest, Requests } from "./pages/requests.js";
import { Tenant } from "./pages/tenant.js";
import { Tenants } from "./pages/tenants.js";

// name: {title, page, one: the page of a thing in it, hasRange, isMoment: a thing has no range}
const PAGES = {
  overview: { title: "Overview", page: Overview, hasRange: true },
  tenants: { title: "Tenants", page: Tenants, one: Tenant, hasRange: true },
  requests: { title: "Requests", page: Requests, one: OneRequest, hasRange: true,
    isMoment: true },
  findings: { title: "Findings", page: Findings },
  cache: { title: "Cache", page: Cache },
  memory: { title: "Memory", page: Memory },
  money: { title: "Money", page: Money, hasRange: true },
  access: { title: "Access", page: Access },
  audit: { title: "Audit", page: Audit, hasRange: true },
  engine: { title: "Engine", page: Engine },
};

function App() {
  const { steps, query } = useRoute();
  const [me, setMe] = useState(null), [refused, setRefused] = useState(null), [isOut,
    setOut] = useState(false);
  const signIn = async (key) => {
    if (key !== undefined) keepKey(key);
    setRefused(null);
    const hadKey = storedKey() !== "";
    try {
      const found = await ask("/admin/v1/me");
      setUsualRange(found.server.began_ms, found.server.at_ms);
      setMe(found);
      setOut(false);
    } catch (error) {
      if (error instanceof Refused) keepKey("");
      if (!(error instanceof Refused)) setTimeout(signIn, 5000);
      else {
        setMe(null);
        setOut(true);
        setRefused(hadKey || error.status !== 401 ? error.message : null);
      }
    }
  };
  useEffect(() => {
    connection.signedOut = (error) => {
      const hadKey = storedKey() !== "";
      keepKey("");
      setMe(null);
      setOut(true);
      setRefused(hadKey ? error.message : null);
    };
    signIn();
  }, []);
  const name = steps[0] in PAGES ? steps[0] : "overview";
  const shown = PAGES[name], thing = steps.slice(1).join("/");
  const Page = thing && shown.one ? shown.one : shown.page;
  const title = thing || shown.title;
  useEffect(() => { document.title = `${title} · Trunkline`; }, [title]);
  const main = useRef(null), first = useRef(true);
  useEffect(() => {
    if (!first.current) { main.current?.focus({ preventScroll: true }); scrollTo(0, 0); }
    first.current = false;
  }, [name, thing]);

  if (isOut) return html`<${SignIn} refused=${refused} enter=${signIn} title="Administrator's key"
    where=${html`The key is in <code>admin.key</code> in the data folder; <code>trunkline key create
      --admin</code> makes one.`} />`;
  if (me === null) return html`<main class="door"><${Loading} what="Connecting" /></main>`;
  const links = Object.entries(PAGES).map(([one, page]) =>
    ({ href: href([one]), title: page.title, isHere: one === name }));
  const leave = storedKey() ? () => { keepKey(""); setMe(null); setOut(true); setRefused(null); }
    : null;
  const can = (scope) => me.scopes.includes(scope);
  return html`<${Session.Provider} value=${{ me, can, query, range: rangeOf(query) }}>
    <${Frame} links=${links} title=${title}
      hasRange=${shown.hasRange && !(thing && shown.isMoment)} query=${query} leave=${leave}
      who=${me.label || (me.actor === "admin_key" ? `key ${me.actor_id}` : me.actor_id)}
        main=${main}
      above=${thing && shown.one ? { href: href([name]), title: shown.title } : null}>
      <${Page} key=${`${name}/${thing}`} thing=${thing} />
    <//><//>`;
}

render(html`<${App} />`, document.getElementById("root"));
