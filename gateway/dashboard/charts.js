// Two charts: stacked bars by minute, and a prefix tree as an icicle. Drawings stretch; labels do not.

import { h, s } from "/dashboard/dom.js";

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function stacked(series, names, title, unit = "tokens", words = names) {
  if (!series.length) return h("p", { class: "none" }, "Nothing yet.");
  const width = 1000, height = 150;
  const now = Math.floor(Date.now() / 60000);
  const last = Math.max(series[series.length - 1].at, now), first = Math.max(last - 119, Math.min(series[0].at, last - 29));
  series = series.filter((m) => m.at >= first);
  const most = Math.max(1, ...series.map((m) => names.reduce((sum, name) => sum + m[name], 0)));
  const step = width / (last - first + 1);
  const bars = series.flatMap((m) => {
    let y = height;
    const label = `${clock(m.at)}: ${names.map((name, at) => `${words[at]} ${short.format(m[name])}`).join(", ")}`;
    return names.map((name) => {
      const tall = (m[name] / most) * height;
      y -= tall;
      return s("rect", { class: name, x: (m.at - first) * step, y, width: Math.max(1, step - 1), height: tall }, s("title", {}, label));
    });
  });
  const total = series.reduce((sum, m) => sum + names.reduce((inner, name) => inner + m[name], 0), 0);
  return h("div", { class: "chart" },
    h("p", {}, `${short.format(most)} ${unit}`),
    s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", style: `height:${height}px`, role: "img", "aria-label": `${title}: ${short.format(total)} ${unit} in ${series.length} minutes, at most ${short.format(most)} in one` }, bars),
    h("p", {}, h("span", {}, clock(first)), h("span", {}, clock(last))));
}

const clock = (minute) => new Date(minute * 60000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

export function icicle(branches, tell) {
  if (!branches.length) return h("p", { class: "none" }, "Nothing is cached here.");
  const width = 1000, row = 26;
  const children = new Map([[-1, []]]);
  branches.forEach((b, at) => { children.set(at, []); });
  branches.forEach((b, at) => children.get(b.parent).push(at));
  const hottest = Math.max(1, ...branches.map((b) => b.hits));
  const shapes = [];
  let deepest = 0;
  const stack = [[-1, 0, width, 0]];
  while (stack.length) {
    const [parent, left, room, depth] = stack.pop();
    const below = children.get(parent).sort((a, b) => branches[b].total_tokens - branches[a].total_tokens);
    const sum = parent < 0 ? below.reduce((n, at) => n + branches[at].total_tokens, 0) : branches[parent].total_tokens;
    let x = left;
    for (const at of below) {
      const b = branches[at];
      const wide = (room * b.total_tokens) / Math.max(1, sum);
      if (wide >= 1.5) {
        deepest = Math.max(deepest, depth);
        const heat = 0.25 + 0.75 * (Math.log1p(b.hits) / Math.log1p(hottest));
        const words = tell(b);
        shapes.push(s("rect", { class: "leaf read", x, y: depth * row, width: Math.max(1, wide - 1), height: row - 2, "fill-opacity": heat.toFixed(2), tabindex: shapes.length < 60 ? 0 : -1, role: "listitem", "aria-label": words }, s("title", {}, words)));
        stack.push([at, x, wide, depth + 1]);
      }
      x += wide;
    }
  }
  const tall = (deepest + 1) * row;
  return s("svg", { viewBox: `0 0 ${width} ${tall}`, preserveAspectRatio: "none", style: `height:${tall}px`, role: "list", "aria-label": "Branches of the prefix tree, widest first" }, shapes);
}
