// A prefix tree as an icicle: the width is the tokens of the subtree, the shade the matches.

import { html } from "./html.js";
import * as column from "./tables/columns.js";
import { count, seconds } from "./format.js";
import { Empty } from "./pieces.js";
import { Table } from "./tables/table.js";

const WIDE = 1000, ROW = 26, WIDTH_MIN = 1.5, FOCUSABLE_MAX = 60, ROWS_MAX = 100;

// Return the rectangles of branches that are wide enough to be seen, from the root down: `b` is the
// branch, `heat` its shade from 0.2 to 1.
function shapesOf(branches) {
  const children = new Map([-1, ...branches.keys()].map((at) => [at, []]));
  branches.forEach((b, at) => children.get(b.parent).push(at));
  const hottest = Math.max(1, ...branches.map((b) => b.hits));
  const tokens = (at) => branches[at].total_tokens;
  const shapes = [], stack = [{ at: -1, left: 0, room: WIDE, depth: 0 }];
  while (stack.length) {
    const { at: parent, left, room, depth } = stack.pop();
    const below = children.get(parent).sort((a, b) => tokens(b) - tokens(a));
    const whole = parent < 0 ? below.reduce((sum, at) => sum + tokens(at), 0) : tokens(parent);
    let x = left;
    for (const at of below) {
      const b = branches[at], wide = (room * tokens(at)) / Math.max(1, whole);
      if (wide >= WIDTH_MIN) {
        const heat = 0.2 + 0.8 * (Math.log1p(b.hits) / Math.log1p(hottest));
        shapes.push({ at, b, x, depth, wide, heat });
        stack.push({ at, left: x, room: wide, depth: depth + 1 });
      }
      x += wide;
    }
  }
  return shapes.sort((a, b) => a.depth - b.depth || a.x - b.x);
}

const described = (b) => `${count(b.tokens)} tokens, ${count(b.total_tokens)} in its subtree, ${
  ""}matched ${count(b.hits)} times, ${count(b.promised_blocks)} blocks promised, ${
  ""}idle ${seconds(b.idle_s)}`;

export function PrefixTree({ branches, name }) {
  if (!branches.length) return html`<${Empty}>Nothing is cached here.<//>`;
  const shapes = shapesOf(branches);
  const tall = (Math.max(...shapes.map((one) => one.depth)) + 1) * ROW;
  return html`<svg class="tree" viewBox=${`0 0 ${WIDE} ${tall}`} preserveAspectRatio="none"
      style=${{ height: `${tall}px` }} role="group"
      aria-label=${`Branches of ${name}, widest first`}>
      ${shapes.map((one, place) => html`<rect key=${one.at} x=${one.x} y=${one.depth * ROW}
        width=${Math.max(1, one.wide - 1)} height=${ROW - 2} fill-opacity=${one.heat.toFixed(2)}
        role="img" tabindex=${place < FOCUSABLE_MAX ? 0 : -1} aria-label=${described(one.b)}>
        <title>${described(one.b)}</title></rect>`)}
    </svg>
    <details><summary>As a table</summary><${Table} caption=${`Largest branches of ${name}`}
      rows=${branches.slice(0, ROWS_MAX).map((b, at) => ({ ...b, at }))} id=${(b) => b.at}
      file="prefix-tree" columns=${[{ head: "branch", get: (b) => b.at },
        { head: "parent", get: (b) => (b.parent < 0 ? null : b.parent) }, column.figure("tokens"),
        column.figure("subtree tokens", "total_tokens"), column.figure("hits"),
        column.figure("promised blocks", "promised_blocks"),
        column.figure("idle", "idle_s", seconds)]} /></details>`;
}
