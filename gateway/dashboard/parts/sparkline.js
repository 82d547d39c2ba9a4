// A trend without axes, for tiles. Gaps stay gaps.

import { html } from "./html.js";

const WIDE = 120, TALL = 28;

export function Sparkline({ values, colour, label }) {
  const known = values.filter((v) => v !== null && v !== undefined);
  if (known.length < 2) return html`<div class="spark"></div>`;
  const most = Math.max(...known), least = Math.min(0, ...known), room = most - least || 1;
  const x = (at) => (at / (values.length - 1)) * WIDE;
  const y = (v) => TALL - 2 - ((v - least) / room) * (TALL - 4);
  let line = "", area = "", from = null;
  values.forEach((v, at) => {
    if (v === null || v === undefined) { from = null; return; }
    const point = `${x(at).toFixed(1)} ${y(v).toFixed(1)}`;
    if (from === null) {
      line += `M${point}`;
      from = at;
    } else line += `L${point}`;
    const next = values[at + 1];
    if (next === null || next === undefined) {
      area += `M${x(from).toFixed(1)} ${TALL}`;
      for (let k = from; k <= at; k += 1) area += `L${x(k).toFixed(1)} ${y(values[k]).toFixed(1)}`;
      area += `L${x(at).toFixed(1)} ${TALL}Z`;
      if (from === at) line += "h.01"; // a value between two gaps: a point
    }
  });
  return html`<svg class=${`spark ${colour}`} viewBox=${`0 0 ${WIDE} ${TALL}`} role="img"
    preserveAspectRatio="none" aria-label=${`Trend of ${label}`}>
    <path class="area" d=${area} /><path class="line" d=${line} /></svg>`;
}
