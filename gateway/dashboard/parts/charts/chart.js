// Charts over time, drawn by uPlot. All charts of a page share one crosshair; a drag over a chart
// chooses a range. A missing value is a gap. `ghost` lines are the period before.

import uPlot from "../../vendor/uplot.js";
import { html, useEffect, useLayoutEffect, useReducer, useRef } from "../html.js";
import { CsvButton } from "../tables/csv.js";
import { about, clock, count, day, instant, isKnown, iso, time } from "../format.js";
import { setQuery } from "../route.js";
import { Empty } from "../pieces.js";
import { useScheme } from "../scheme.js";

const HEIGHT = 190, DRAG_MIN = 8, RANGE_MIN_MS = 60_000;
// Steps of the time's axis, in seconds: whole minutes, as its labels tell no less.
const MINUTE = 60, HOUR = 3_600, DAY = 86_400;
const STEPS = [...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
  ...[1, 2, 3, 4, 6, 8, 12].map((n) => n * HOUR), ...[1, 2, 5, 10, 30].map((n) => n * DAY)];
// Steps of an axis that counts: 1, 2, 5, 10, 20, … so that no label is rounded.
const WHOLE = Array.from({ length: 30 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));

// The colours that custom properties have now, in the light or the dark scheme.
function colours(names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = Object.fromEntries(names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
  return found;
}
const faded = (rgb) => rgb.replace(/^rgba?\(([^)]+)\)$/, (_, inside) =>
  `rgba(${inside.split(/[ ,/]+/).slice(0, 3).join(", ")}, 0.14)`);

// Sums from below: the drawing of each line covers those that follow it.
function stackedUp(lines) {
  const sums = lines.map(() => []);
  lines[0]?.values.forEach((_, at) => {
    const isGap = lines.every((line) => !isKnown(line.values[at]));
    let sum = 0;
    lines.forEach((line, which) => {
      sum += line.values[at] ?? 0;
      sums[which].push(isGap ? null : sum);
    });
  });
  return sums;
}

// Return the lines in the order of drawing: stacked ones from the highest sum down, then others.
function drawnOf({ lines, isStacked }) {
  if (!isStacked) return lines;
  const stack = lines.filter((line) => !line.isGhost), sums = stackedUp(stack);
  return [...stack.map((line, which) => ({ ...line, values: sums[which] })).reverse(),
    ...lines.filter((line) => line.isGhost)];
}

function seriesOf(line, tint, { isStacked, isBars }) {
  if (line.isGhost) {
    return { stroke: isBars ? tint.ink : tint[line.colour], width: 1, dash: [4, 4],
      points: { show: false } };
  }
  const colour = tint[line.colour];
  if (isBars) {
    return { fill: colour, points: { show: false }, paths: uPlot.paths.bars({ size: [0.86, 60] }) };
  }
  return { stroke: colour, width: line.width ?? 2, dash: line.dash,
    fill: isStacked ? colour : line.isFilled ? faded(colour) : undefined,
    points: { show: true, filter: lonely, size: 4, fill: colour, stroke: colour } };
}
// Indices of points that no line reaches: values between two gaps.
function lonely(u, which) {
  const isGap = (at) => !isKnown(u.data[which][at]);
  return [...u.data[which].keys()].filter((at) => !isGap(at) && isGap(at - 1) && isGap(at + 1));
}

function timeLabels(_u, splits, _axis, _space, step) {
  return splits.map((s, at) => {
    const ms = s * 1000, isNewDay = at === 0 || day(ms) !== day(splits[at - 1] * 1000);
    if (step >= 86_400) return day(ms);
    return isNewDay && step >= 3600 ? `${clock(ms)}\n${day(ms)}` : clock(ms);
  });
}

// Choose the range of a drag.
function select(u) {
  if (u.select.width < DRAG_MIN) return;
  const [since, until] = [u.select.left, u.select.left + u.select.width]
    .map((x) => Math.round(u.posToVal(x, "x")) * 1000);
  u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  if (until - since >= RANGE_MIN_MS) setQuery({ since, until, range: null }, true);
}

// `latest()`: the properties of now; the axis outlives those it was made with.
function optionsOf(props, drawn, width, latest, tell) {
  const tint = colours([...new Set(props.lines.map((line) => line.colour)), "soft", "line", "ink"]);
  const axis = { stroke: tint.soft, font: "11px system-ui, sans-serif",
    grid: { stroke: tint.line, width: 1 }, ticks: { stroke: tint.line, width: 1, size: 4 } };
  const isCount = !props.axis && [count, about].includes(props.write);
  return {
    width, height: HEIGHT, padding: [8, 8, 0, 0], legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "time" },
      points: { size: 6 }, y: false },
    scales: { x: { time: true },
      y: { range: (_u, _low, high) => [0, props.most ?? (high > 0 ? high * 1.08 : 1)] } },
    axes: [{ ...axis, values: timeLabels, incrs: STEPS, size: 36, space: 64 },
      { ...axis, space: 34, ...(isCount ? { incrs: WHOLE } : {}),
        size: (_u, texts) => Math.max(58, ...(texts ?? []).map((text) => 18 + 6.4 * text.length)),
        values: (_u, splits) => splits.map((v) => (latest().axis ?? latest().write)(v)) }],
    series: [{}, ...drawn.map((line) => seriesOf(line, tint, props))],
    hooks: { setCursor: [(u) => tell(u.cursor.idx ?? null)], setSelect: [select] },
  };
}

// The values under the cursor, or else the totals. Drawn apart from its chart: it changes with
// every move. `cursor`: {index, moved()}.
function Legend({ lines, at, write, cursor }) {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => { cursor.moved = again; }, []);
  const { index } = cursor;
  return html`<ul class="legend">
    <li class="when">${index === null ? "" : time(at[index])}</li>
    ${lines.map((line) => html`<li key=${line.label}>
      <i class=${`${line.colour} ${line.isGhost ? "ghost" : line.dash ? "dashed" : ""}`}></i>${
        line.label} <b>${index === null ? line.total ?? "" : write(line.values[index])}</b></li>`)}
  </ul>`;
}

// at: times in ms. lines: {label, values, colour, isGhost?, total?, dash?, width?, isFilled?},
// drawn in order; of stacked ones the first is the lowest. write, axis: a value as text in the
// legend and beside the scale. most: the scale's top. showsZero: whether zeros alone are worth a
// chart; without one `none` stands in its place.
export function Chart(props) {
  const { title, unit = "", lines, at, write, none = "No request in this range." } = props;
  const scheme = useScheme(), box = useRef(null), plot = useRef(null), latest = useRef(props);
  const cursor = useRef({ index: null, moved: () => {} }).current;
  latest.current = props;
  const own = lines.filter((line) => !line.isGhost);
  const hasData = own.some((line) =>
    line.values.some((v) => isKnown(v) && (v !== 0 || props.showsZero)));
  const shape = [scheme, props.isStacked, props.isBars, props.most, hasData,
    ...lines.map((line) => `${line.label}${line.colour}${line.isGhost}`)].join();
  const drawn = drawnOf(props);
  const data = [at.map((ms) => ms / 1000),
    ...drawn.map((line) => at.map((_, k) => line.values[k] ?? null))];

  useLayoutEffect(() => {
    if (!hasData) return undefined;
    const tell = (index) => { cursor.index = index; cursor.moved(); };
    tell(null);
    const width = () => box.current?.clientWidth || 300;
    const made = new uPlot(optionsOf(props, drawn, width(), () => latest.current, tell), data,
      box.current);
    plot.current = made;
    const watch = new ResizeObserver(() => {
      if (width() !== made.width) made.setSize({ width: width(), height: HEIGHT });
    });
    watch.observe(box.current);
    return () => { watch.disconnect(); made.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data); }, [JSON.stringify(data)]);

  const summary = own.map((line) => [line.label, line.total].filter(Boolean).join(" ")).join(", ");
  return html`<figure class="chart">
    <figcaption><h3>${title}${unit && html` <span>${unit}</span>`}</h3>
      ${hasData && html`<${CsvButton} name=${title.toLowerCase().replaceAll(" ", "-")} what=${title}
        heads=${["time", ...lines.map((line) => line.label)]}
        rows=${() => at.map((ms, k) => [iso(ms), ...lines.map((line) => line.values[k])])} />`}
    </figcaption>
    ${hasData ? html`<div class="plot" ref=${box} role="img" aria-label=${
        `${title}, ${unit}: ${summary}; from ${instant(at[0])} to ${instant(at.at(-1))}`}></div>
      <${Legend} lines=${lines} at=${at} write=${write} cursor=${cursor} />`
      : html`<${Empty}>${none}<//>`}
  </figure>`;
}
