// A trend without axes, for tiles. Gaps stay gaps.

import { html } from "../html.js";
import { isKnown } from "../format.js";

const WIDE = 120, TALL = 28;

// Return the stretches of known values, each a list of their indices.
function stretches(values) {
  const found = [];
  values.forEach((v, at) => {
    if (!isKnown(v)) return;
    if (at > 0 && isKnown(values[at - 1])) found.at(-1).push(at);
    else found.push([at]);
  });
  return found;
}

export function Sparkline({ values, colour, label }) {
  const known = values.filter(isKnown);
  if (known.length < 2) return html`<div class="spark"></div>`;
  const least = Math.min(0, ...known), room = Math.max(...known) - least || 1;
  const x = (at) => ((at / (values.length - 1)) * WIDE).toFixed(1);
  const y = (at) => (TALL - 2 - ((values[at] - least) / room) * (TALL - 4)).toFixed(1);
  let line = "", area = "";
  for (const stretch of stretches(values)) {
    const points = stretch.map((at) => `${x(at)} ${y(at)}`).join("L");
    line += `M${points}${stretch.length === 1 ? "h.01" : ""}`; // a value between two gaps: a point
    area += `M${x(stretch[0])} ${TALL}L${points}L${x(stretch.at(-1))} ${TALL}Z`;
  }
  return html`<svg class=${`spark ${colour}`} viewBox=${`0 0 ${WIDE} ${TALL}`} role="img"
    preserveAspectRatio="none" aria-label=${`Trend of ${label}`}>
    <path class="area" d=${area} /><path class="line" d=${line} /></svg>`;
}
