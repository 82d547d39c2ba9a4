// A prefix tree as an icicle: the width is the tokens of the subtree, the shade the matches.

import { html } from "./html.js";
import { count } from "./format.js";
import { Empty } from "./pieces.js";
import { Table } from "./table.js";

const WIDE = 1000, ROW = 26, REACHED_MAX = 60, LEAST = 1.5;

function shapesOf(branches) {
  const children = new Map([[-1, []], ...branches.map((_, at) => [at, []])]);
  branches.forEach((b, at) => children.get(b.parent).push(at));
  const hottest = Math.max(1, ...branches.map((b) => b.hits));
  const shapes = [], stack = [[-1, 0, WIDE, 0]];
  while (stack.length) {
    const [parent, left, room, depth] = stack.pop();
    const below = children.get(parent).sort((a,
      b) => branches[b].total_tokens - branches[a].total_tokens);
    const sum = parent < 0 ? below.reduce((n, at) => n + branches[at].total_tokens, 0)
      : branches[parent].total_tokens;
    let x = left;
    for (const at of below) {
      const b = branches[at], wide = (room * b.total_tokens) / Math.max(1, sum);
      if (wide >= LEAST) {
        shapes.push({ at, b, x, depth, wide,
          heat: 0.2 + 0.8 * (Math.log1p(b.hits) / Math.log1p(hottest)) });
        stack.push([at, x, wide, depth + 1]);
      }
      x += wide;
    }
  }
  return shapes.sort((a, b) => a.depth - b.depth || a.x - b.x);
}

const told = (b) => `${count(b.tokens)} tokens, ${count(b.total_tokens)} in its subtree, matched ${
  count(b.hits)} times, ${count(b.promised_blocks)} blocks promised, idle ${b.idle_s.toFixed(0)} s`;

export function PrefixTree({ branches, name }) {
  if (!branches.length) return html`<${Empty}>Nothing is cached here.<//>`;
  const shapes = shapesOf(branches);
  const tall = (Math.max(...shapes.map((one) => one.depth)) + 1) * ROW;
  return html`<svg class="tree" viewBox=${`0 0 ${WIDE} ${tall}`} preserveAspectRatio="none"
      style=${{ height: `${tall}px` }} role="group"
        aria-label=${`Branches of ${name}, widest first`}>
      ${shapes.map((one, place) => html`<rect key=${one.at} x=${one.x} y=${one.depth * ROW}
        width=${Math.max(1, one.wide - 1)} height=${ROW - 2} fill-opacity=${one.heat.toFixed(2)}
          role="img"
        tabindex=${place < REACHED_MAX ? 0 : -1}
          aria-label=${told(one.b)}><title>${told(one.b)}</title></rect>`)}
    </svg>
    <details><summary>As a table</summary><${Table} caption=${`Largest branches of ${name}`}
      rows=${branches.slice(0, 100).map((b, at) => ({ ...b, at }))} id=${(b) => b.at}
        file="prefix-tree"
      columns=${[{ head: "branch", get: (b) => b.at }, { head: "parent", get: (b) => (b.parent < 0
        ? null : b.parent) },
    ...[["tokens", "tokens"], ["subtree tokens", "total_tokens"], ["hits", "hits"],
      ["promised blocks", "promised_blocks"]]
      .map(([head, field]) => ({ head, get: (b) => b[field], show: (b) => count(b[field]) })),
    { head: "idle, s", get: (b) => Math.round(b.idle_s) }]} /></details>`;
}
