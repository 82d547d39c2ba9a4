// Findings: every cause of waste, ranked by dollars a month.

import { html } from "../parts/html.js";
import { FindingList, Legitimate, costly, savingOf, useFindings } from "../parts/findings.js";
import { count, dollars } from "../parts/format.js";
import { Filter, Panel, Tile, Tiles } from "../parts/pieces.js";
import { setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";

const DAYS = { 1: "24 h", 7: "7 d", 30: "30 d" }, DAYS_USUAL = "7";

export function Findings() {
  const { query } = useSession(), chosen = query.get("tenant") ?? "";
  const days = Object.hasOwn(DAYS, query.get("days")) ? query.get("days") : DAYS_USUAL;
  const found = useFindings(chosen, undefined, Number(days));
  const list = costly(found.data), tenants = [...new Set(list.map((one) => one.tenant))].sort();
  const range = html`<${Filter} label="Of the last" value=${days} options=${Object.entries(DAYS)}
    set=${(value) => setQuery({ days: value })} />`;
  const tenant = chosen ? html`<button type="button" class="quiet small"
      onClick=${() => setQuery({ tenant: null })}>All tenants</button>`
    : html`<${Filter} label="Tenant" value="" options=${[["", "all"], ...tenants]}
      set=${(tenant) => setQuery({ tenant })} />`;
  return html`<${Tiles}>
      <${Tile} label="Could be saved" value=${dollars(found.data && savingOf(found.data))}
        unit="a month" note=${`if every finding is cured, ${found.data?.pace ?? ""}`} />
      <${Tile} label="Findings" value=${count(found.data && list.length)}
        note=${`of ${count(tenants.length)} tenants`} />
    <//>
    <${Panel} title="Findings" wide tools=${html`${range} ${tenant}`}
      note="Largest saving first. Texts of prompts are not kept: places and lengths are.">
      <${FindingList} found=${found} chosen=${query.get("finding")} />
      <${Legitimate} found=${found} chosen=${query.get("finding")} /><//>`;
}
