// Findings: every cause of waste, ranked by dollars a month.

import { html } from "../parts/html.js";
import { FindingList, Legitimate, costly, savingOf, useFindings } from "../parts/findings.js";
import { count, dollars } from "../parts/format.js";
import { Filter, Panel, Tile, Tiles } from "../parts/pieces.js";
import { setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";

export function Findings() {
  const chosen = useSession().query.get("tenant") ?? "", found = useFindings(chosen);
  const list = costly(found.data), tenants = [...new Set(list.map((one) => one.tenant))].sort();
  const tools = chosen ? html`<button type="button" class="quiet small"
      onClick=${() => setQuery({ tenant: null })}>All tenants</button>`
    : html`<${Filter} label="Tenant" value="" options=${[["", "all"], ...tenants]}
      set=${(tenant) => setQuery({ tenant })} />`;
  return html`<${Tiles}>
      <${Tile} label="Could be saved" value=${dollars(found.data && savingOf(found.data))}
        unit="a month" note="if every finding is cured" />
      <${Tile} label="Findings" value=${count(found.data && list.length)}
        note=${`of ${count(tenants.length)} tenants`} />
    <//>
    <${Panel} title="Findings" wide tools=${tools}
      note="Largest saving first. Texts of prompts are not kept: places and lengths are.">
      <${FindingList} found=${found} /><${Legitimate} found=${found} /><//>`;
}
