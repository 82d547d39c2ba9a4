// Charts over time, drawn by uPlot. All charts of a page share one crosshair; a drag over a chart
// chooses a range. A missing value is a gap. `ghost` lines are the period before.

import uPlot from "../vendor/uplot.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { CsvButton } from "./csv.js";
import { about, clock, count, day, instant, time } from "./format.js";
import { iso, setQuery } from "./route.js";
import { Empty } from "./pieces.js";
import { useScheme } from "./scheme.js";

const TALL = 190, MIN_DRAG = 8;
// Steps of an axis that counts: 1, 2, 5, 10, 20, … so that no label is rounded.
const WHOLE = Array.from({ length: 30 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const isKnown = (v) => v !== null && v !== undefined;

// The colour that a custom property has now, in the light or the dark scheme.
function colours(names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}
const faded = (rgb, alpha) => rgb.replace(/^rgba?\(([^)]+)\)$/, (_, inside) =>
  `rgba(${inside.split(/[ ,/]+/).slice(0, 3).join(", ")}, ${alpha})`);

// Sums from below: the drawing of each line covers those that follow it.
function stackedUp(lines) {
  const sums = lines.map(() => []);
  const size = lines[0]?.values.length ?? 0;
  for (let at = 0; at < size; at += 1) {
    let sum = 0;
    const isGap = lines.every((line) => !isKnown(line.values[at]));
    lines.forEach((line, which) => {
      sum += line.values[at] ?? 0;
      sums[which][at] = isGap ? null : sum;
    });
  }
  return sums;
}

function seriesOf(line, tint, isStacked, isBars) {
  const colour = line.isGhost && isBars ? tint.ink : tint[line.colour];
  const bars = isBars && !line.isGhost ? { paths: uPlot.paths.bars({ size: [0.86, 60] }) } : {};
  return {
    label: line.label, stroke: isBars && !line.isGhost ? undefined : colour,
    width: line.isGhost ? 1 : line.width ?? 2, dash: line.isGhost ? [4, 4] : line.dash,
    fill: isStacked || isBars ? line.isGhost ? undefined : colour
      : line.isFilled ? faded(colour, 0.14) : undefined,
    points: isBars || line.isGhost ? { show: false }
      : { show: true, filter: lonely, size: 4, fill: colour, stroke: colour },
    spanGaps: false, ...bars,
  };
}
// Indices of points that no line reaches: values between two gaps.
function lonely(u, which) {
  const values = u.data[which];
  const found = [];
  values.forEach((v, at) => {
    if (isKnown(v) && !isKnown(values[at - 1]) && !isKnown(values[at + 1])) found.push(at);
  });
  return found;
}

const axisTime = (u, splits, _axis, _space, step) => splits.map((s, at) => {
  const ms = s * 1000, isNewDay = at === 0 || day(ms) !== day(splits[at - 1] * 1000);
  return step >= 86_400 ? day(ms) : isNewDay && step >= 3600 ? `${clock(ms)}\n${day(ms)}`
    : clock(ms);
});

function optionsOf(props, drawn, wide, tell) {
  const tint = colours([...new Set(props.lines.map((line) => line.colour)), "soft", "line", "ink"]);
  const axis = { stroke: tint.soft, font: "11px system-ui, sans-serif", grid: { stroke: tint.line,
    width: 1 },
    ticks: { stroke: tint.line, width: 1, size: 4 } };
  return {
    width: wide, height: props.tall ?? TALL, padding: [8, 8, 0, 0], legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "time" },
      points: { size: 6 },
      y: false },
    scales: { x: { time: true }, y: { range: (_u, _low, high) =>
      [0, props.most ?? (high > 0 ? high * 1.08 : 1)] } },
    axes: [{ ...axis, values: axisTime, size: 36, space: 64 },
      { ...axis, size: (_u, texts) => Math.max(58, 18 + 6.4 * Math.max(0, ...(texts
        ?? []).map((text) => text.length))),
        ...(!props.axis && [undefined, count, about].includes(props.write) ? { incrs: WHOLE } : {}),
        values: (_u, splits) => splits.map((v) => (props.axis
        ?? props.write)(v)),
        space: 34 }],
    series: [{}, ...drawn.map((line) => seriesOf(line, tint, props.isStacked, props.isBars))],
    hooks: {
      setCursor: [(u) => tell(isKnown(u.cursor.idx) ? u.cursor.idx : null)],
      setSelect: [(u) => {
        if (u.select.width < MIN_DRAG) return;
        const [from, to] = [u.select.left, u.select.left + u.select.width]
          .map((x) => Math.round(u.posToVal(x, "x")) * 1000);
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (to - from >= 60_000) setQuery({ since: from, until: to, range: null }, true);
      }],
    },
  };
}

function Legend({ props, at, told }) {
  const [, again] = useState(0);
  useEffect(() => { told.current = () => again((n) => n + 1); }, []);
  const index = at.current;
  return html`<ul class="legend">
    <li class="when">${index === null ? "" : time(props.at[index])}</li>
    ${props.lines.filter((line) => !line.isUnnamed).map((line) => html`<li key=${line.label}>
      <i class=${`${line.colour} ${line.isGhost ? "ghost" : line.dash ? "dashed" : ""}`}></i>${line.label}${" "}
      <b>${index === null ? line.total ?? "" : (props.write
        ?? about)(line.values[index])}</b></li>`)}
  </ul>`;
}

// at: times in ms. lines: {label, values, colour, isGhost?, total?, dash?, isFilled?}, drawn in
// order; of stacked ones the first is the lowest. write: a value as text. most: the scale's top.
export function Chart(props) {
  const { title, lines, at, none = "No request in this range." } = props;
  const scheme = useScheme();
  const box = useRef(null), plot = useRef(null), cursor = useRef(null), told = useRef(() => {});
  const hasData = at.length > 0 && lines.some((line) => !line.isGhost
    && line.values.some((v) => isKnown(v) && (v !== 0 || props.showsZero)));
  const shape = [scheme, props.isStacked, props.isBars, props.most, hasData,
    ...lines.map((line) => `${line.label}${line.colour}${line.isGhost}`)].join();
  const stack = props.isStacked ? lines.filter((line) => !line.isGhost) : [];
  const sums = stackedUp(stack);
  const drawn = [...stack.map((line, which) => ({ ...line, values: sums[which] })).reverse(),
    ...lines.filter((line) => !stack.includes(line))];
  const data = [at.map((ms) => ms / 1000), ...drawn.map((line) => at.map((_, k) => line.values[k]
    ?? null))];

  useLayoutEffect(() => {
    if (!hasData) return undefined;
    cursor.current = null;
    const tell = (index) => { cursor.current = index; told.current(); };
    const made = new uPlot(optionsOf(props, drawn, box.current.clientWidth || 300, tell), data,
      box.current);
    plot.current = made;
    const watch = new ResizeObserver(() => {
      const wide = box.current?.clientWidth;
      if (wide && wide !== made.width) made.setSize({ width: wide, height: props.tall ?? TALL });
    });
    watch.observe(box.current);
    return () => { watch.disconnect(); made.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data); }, [JSON.stringify(data)]);

  const summary = lines.filter((line) => !line.isGhost)
    .map((line) => `${line.label}${line.total ? ` ${line.total}` : ""}`).join(", ");
  return html`<figure class="chart">
    <figcaption><h3>${title}${props.unit && html` <span>${props.unit}</span>`}</h3>
      ${hasData && html`<${CsvButton} name=${title.toLowerCase().replaceAll(" ", "-")} what=${title}
        heads=${["time", ...lines.map((line) => line.label)]}
        rows=${() => at.map((ms, k) => [iso(ms), ...lines.map((line) => line.values[k])])} />`}
    </figcaption>
    ${hasData ? html`<div class="plot" ref=${box} role="img" aria-label=${`${title}, ${props.unit
      ?? ""}:
      ${summary}; from ${instant(at[0])} to ${instant(at[at.length - 1])}`}></div>
      <${Legend} props=${props} at=${cursor} told=${told} />` : html`<${Empty}>${none}<//>`}
  </figure>`;
}
