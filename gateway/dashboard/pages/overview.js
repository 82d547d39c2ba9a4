// Overview: four figures that matter, the history, the costliest findings, tenants to look after.

import { html } from "../parts/html.js";
import { useData, useTenants } from "../parts/api.js";
import * as column from "../parts/tables/columns.js";
import { Warnings, enginesOf } from "../parts/engines.js";
import { FindingList, savingOf, useFindings } from "../parts/findings.js";
import { dollars } from "../parts/format.js";
import { HistoryCharts, HistoryTiles, useHistory } from "../parts/charts/history.js";
import { Empty, Panel, instead } from "../parts/pieces.js";
import { href } from "../parts/route.js";
import { useSession } from "../parts/session.js";
import { Endings, FirstToken, IgnoredFields, Misses } from "../parts/tables/since_start.js";
import { Table } from "../parts/tables/table.js";
import { needsCare } from "../parts/accounts/tenant_status.js";

const FINDINGS_SHOWN = 3, TENANTS_SHOWN = 8;

export function Overview() {
  const { range } = useSession(), now = useData("/admin/v1/analytics");
  const found = useHistory(range), findings = useFindings();
  const tenants = useTenants();
  const all = now.data, waste = savingOf(findings.data);
  return html`<${Warnings} engines=${enginesOf(all)} failed=${all?.failed_models} />
    <${HistoryTiles} found=${found} refusedHour=${all?.refused_last_hour.total} />
    <div class="grid two">
      <${Panel} title="Findings" tools=${html`<a href=${href(["findings"])}>All findings</a>`}
        note=${waste > 0 ? `${dollars(waste)} a month could be saved.` : null}>
        <${FindingList} found=${findings} most=${FINDINGS_SHOWN} isBrief /><//>
      <${Panel} title="Tenants to look after"
        tools=${html`<a href=${href(["tenants"])}>All tenants</a>`}>
        ${instead(tenants, "tenants") ?? html`<${LookAfter}
          tenants=${tenants.data.tenants} />`}<//>
    </div>
    <${HistoryCharts} found=${found} />
    ${all && html`<h2 class="divider">Since the gateway's start</h2>
      <div class="grid"><${FirstToken} times=${all.first_token_ms} />
        <${Misses} counts=${all.misses} /><${Endings} counts=${all.endings} />
        <${IgnoredFields} counts=${all.ignored_fields} /></div>`}`;
}

// tenants: of `/admin/v1/tenants`. Those that are refused come first, then those with most errors.
function LookAfter({ tenants }) {
  const rows = tenants.filter(needsCare)
    .map(({ name, state }) => ({ name, ...state, why: state.reasons.join(" ") }))
    .sort((a, b) => (b.status !== "ok") - (a.status !== "ok")
      || b.refused_last_hour - a.refused_last_hour).slice(0, TENANTS_SHOWN);
  if (!rows.length) {
    return html`<${Empty}>All tenants are well: no refusal in the last hour, no budget spent.<//>`;
  }
  return html`<${Table} caption="Tenants with refusals, spent budgets or a suspension" isHidden
    rows=${rows} id=${(row) => row.name} isPlain columns=${[column.tenant("tenant", "name"),
      column.status(), column.text("why", "why", { kind: "text wrap" })]} />`;
}
