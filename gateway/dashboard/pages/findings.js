// Findings: every cause of waste, ranked by dollars a month.

import { html } from "../parts/html.js";
import { FindingList, Legitimate, costly, savingOf, useFindings } from "../parts/findings.js";
import { count, dollars } from "../parts/format.js";
import { Panel, Tile, Tiles } from "../parts/pieces.js";
import { setQuery } from "../parts/route.js";
import { useSession } from "../parts/session.js";

export function Findings() {
  const { query } = useSession();
  const wanted = query.get("tenant"), found = useFindings(wanted || null);
  const list = costly(found.data), tenants = [...new Set(list.map((one) => one.tenant))].sort();
  return html`<${Tiles}>
      <${Tile} label="Could be saved" value=${dollars(savingOf(list))} unit="a month"
        note="if every finding is cured" />
      <${Tile} label="Findings" value=${count(list.length)}
        note=${`of ${count(tenants.length)} tenants`} />
    <//>
    <${Panel} title="Findings" wide
      note="Largest saving first. Texts of prompts are not kept: places and lengths are."
      tools=${wanted ? html`<button type="button" class="quiet small"
        onClick=${() => setQuery({ tenant: null })}
        >All tenants</button>` : html`<label>Tenant <select
          onChange=${(event) => setQuery({ tenant: event.target.value })}>
        <option value="">all</option>
        ${tenants.map((one) => html`<option>${one}</option>`)}</select></label>`}>
      <${FindingList} found=${found} /><${Legitimate} found=${found} /><//>`;
}
