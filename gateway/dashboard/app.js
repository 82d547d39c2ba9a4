// The administrator's dashboard: sign-in, the frame, and one page for each address.

import { html, render } from "./parts/html.js";
import { storedKey } from "./parts/api.js";
import { href, rangeOf, useRoute, usualRange } from "./parts/route.js";
import { Frame } from "./parts/frame.js";
import { Session, useSignIn } from "./parts/session.js";
import { Access } from "./pages/access.js";
import { Audit } from "./pages/audit.js";
import { Cache } from "./pages/cache.js";
import { Engine } from "./pages/engine.js";
import { Findings } from "./pages/findings.js";
import { Fleet } from "./pages/fleet.js";
import { Memory } from "./pages/memory.js";
import { Money } from "./pages/money.js";
import { Overview } from "./pages/overview.js";
import { OneRequest } from "./pages/request.js";
import { Requests } from "./pages/requests.js";
import { Tenant } from "./pages/tenants/tenant.js";
import { Tenants } from "./pages/tenants/tenants.js";

// `one`: the page of a thing in it, such as a tenant; `hasRange`, `oneHasRange`: which of the two
// show a range of time.
const PAGES = {
  overview: { title: "Overview", page: Overview, hasRange: true },
  tenants: { title: "Tenants", page: Tenants, hasRange: true, one: Tenant, oneHasRange: true },
  requests: { title: "Requests", page: Requests, hasRange: true, one: OneRequest },
  findings: { title: "Findings", page: Findings },
  cache: { title: "Cache", page: Cache },
  memory: { title: "Memory", page: Memory },
  money: { title: "Money", page: Money, hasRange: true },
  access: { title: "Access", page: Access },
  audit: { title: "Audit", page: Audit, hasRange: true },
  engine: { title: "Engine", page: Engine },
  fleet: { title: "Fleet", page: Fleet },
};

function App() {
  const { steps, query } = useRoute();
  const { me, leave, signIn } = useSignIn("/admin/v1/me", "Administrator's key",
    html`The key is in <code>admin.key</code> in the data folder;
      ${" "}<code>trunkline key create --admin</code> makes one.`);
  if (signIn) return signIn;
  const name = Object.hasOwn(PAGES, steps[0]) ? steps[0] : "overview", section = PAGES[name];
  const thing = section.one ? steps.slice(1).join("/") : "";
  const Page = thing ? section.one : section.page;
  const range = rangeOf(query, usualRange(me.server));
  const can = (scope) => me.scopes.includes(scope);
  const links = Object.entries(PAGES).map(([one, { title }]) =>
    ({ href: href([one]), title, isHere: one === name }));
  return html`<${Session.Provider} value=${{ me, can, query, range }}>
    <${Frame} links=${links} title=${thing || section.title} place=${`${name}/${thing}`}
      above=${thing ? { href: href([name]), title: section.title } : null}
      range=${(thing ? section.oneHasRange : section.hasRange) ? range : null}
      who=${me.label || (me.actor === "admin_key" ? `key ${me.actor_id}` : me.actor_id)}
      leave=${storedKey() ? leave : null}>
      <${Page} key=${`${name}/${thing}`} thing=${thing} /><//><//>`;
}

render(html`<${App} />`, document.getElementById("root"));
