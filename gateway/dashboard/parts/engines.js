// The engines of `/admin/v1/analytics`: one, or one for each of several models.

import { html } from "./html.js";
import { count } from "./format.js";
import { Notice } from "./pieces.js";

const NOTICES_MAX = 4;

// Return the engines, each with its restarts, and with the model's name if there are several.
export function enginesOf(data) {
  if (!data) return [];
  return data.models ?? [{ ...data.engine, restarts: data.restarts }];
}

// What is wrong with engines. `failed`: why models did not start, by name.
export function Warnings({ engines, failed = {} }) {
  const notices = Object.entries(failed).map(([name, reason]) => html`<${Notice} tone="bad">The
    model ${name} failed to start and is not served: ${reason}<//>`);
  return [...notices, ...engines.map((engine) => {
    const asked = engine.floor_blocks_asked, most = engine.floor_blocks_max;
    const which = engine.name ? ` of ${engine.name}` : "";
    return html`${!engine.ready && engine.state !== "failed" && html`<${Notice} tone="bad">The engine${which} takes no requests
      now: it is starting, has died, or the gateway is draining. Figures of blocks are the last
      known ones.<//>`}
      <${Unready} replicas=${engine.replicas ?? []} which=${which} />
      ${asked > most && html`<${Notice}>Floors request ${count(asked)} blocks; the engine${which}
      ${" "}can guarantee ${count(most)}. Each floor is reduced in that proportion.<//>`}`;
  })];
}

// The engines elsewhere that take no request and should. `which`: of which model, if there are
// several.
export function Unready({ replicas, which = "" }) {
  const found = replicas.filter(({ state }) => !["ready", "draining", "drained"].includes(state));
  return [...found.slice(0, NOTICES_MAX).map((one) => html`<${Notice} tone="bad">The engine
      ${" "}${one.name}${which} is ${one.state}: ${one.reason || "it has not answered yet."}<//>`),
    found.length > NOTICES_MAX && html`<${Notice} tone="bad">${count(found.length - NOTICES_MAX)}
      ${" "}further engines${which} take no request: see the table.<//>`];
}
