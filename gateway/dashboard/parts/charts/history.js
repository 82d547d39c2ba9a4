// The history of a range: its sums as tiles, and its charts with the period before as a ghost.

import { html } from "../html.js";
import { SLOW_POLL_MS, address, useData } from "../api.js";
import { Chart } from "./chart.js";
import { about, count, dollars, dollarsOf, exactDollars, isKnown, ms, percent, share,
  words } from "../format.js";
import { Panel, Tile, Tiles, instead } from "../pieces.js";
import { DAY_MS, HOUR_MS } from "../route.js";

// --- numbers -------------------------------------------------------------------------------------

const numbers = (list) => (list ?? []).map((v) => (isKnown(v) ? Number(v) : null));
function plus(list) {
  const known = numbers(list).filter(isKnown);
  return known.length ? known.reduce((sum, v) => sum + v, 0) : null;
}
export const ratios = (parts, wholes) => numbers(wholes).map((whole, at) =>
  (whole > 0 && isKnown(parts[at]) ? parts[at] / whole : null));
function overall(parts, wholes) {
  const [part, whole] = [plus(parts), plus(wholes)];
  return isKnown(part) && whole ? part / whole : null;
}

// The dollars of each bucket. One without a request beside a gap is a part of the gap: the server
// ran in a part of it, and the line would fall to zero.
export function amounts(series, name) {
  const { requests } = series, isGap = (at) => at in requests && requests[at] === null;
  return numbers(series[name]).map((v, at) =>
    (requests[at] === 0 && (isGap(at - 1) || isGap(at + 1)) ? null : v));
}
function savings(series) {
  const cost = amounts(series, "cost_usd");
  return amounts(series, "uncached_cost_usd").map((v, at) => (isKnown(v) ? v - cost[at] : null));
}

function sumsOf(series) {
  if (!series) return null;
  const cost = plus(series.cost_usd), uncached = plus(series.uncached_cost_usd);
  return {
    requests: plus(series.requests), refused: plus(series.refused),
    prompt: plus(series.prompt_tokens), hitRatio: overall(series.read_tokens, series.prompt_tokens),
    cost, uncached, saved: isKnown(cost) && isKnown(uncached) ? uncached - cost : null,
  };
}

// Return the answer, with its `sums` and those of the period `before`.
export function useHistory(range, tenant = null) {
  const path = address("/admin/v1/history", { ...range.history, tenant });
  const found = useData(path, range.isLive ? SLOW_POLL_MS : 0);
  const sums = sumsOf(found.data?.series), before = sumsOf(found.data?.previous);
  // A period with almost no requests is no measure of this one.
  const isEnough = before && before.requests >= 0.05 * sums.requests;
  return { ...found, sums, before: isEnough ? before : null };
}

// --- tiles ---------------------------------------------------------------------------------------

// Return a change against the period before as {text, isGood}: of a share in points, else of a
// number in percent; null where there is no trend.
const CHANGE_MAX = 10;
function changeOf(now, before, { isShare = false } = {}) {
  if (!isKnown(now) || !isKnown(before)) return null;
  const step = isShare ? now - before : now / before - 1;
  if (!isShare && !(before > 0 && step <= CHANGE_MAX)) return null;
  const sign = step > 0 ? "+" : step < 0 ? "−" : "±", size = share(Math.abs(step));
  return { text: sign + (isShare ? size.replace("%", "points") : size), isGood: step >= 0 };
}

// `refusedHour`: refusals of the last hour, if they are known.
export function HistoryTiles({ found: { sums, before, data }, refusedHour }) {
  if (!data) return null;
  const { series } = data, { hit, miss } = data.first_token_ms ?? {};
  const pair = (times) => `${ms(times?.p50)} / ${ms(times?.p99)}`;
  return html`<${Tiles}>
    <${Tile} label="Hit ratio" value=${share(sums.hitRatio)}
      change=${changeOf(sums.hitRatio, before?.hitRatio, { isShare: true })}
      note=${`of ${count(sums.prompt)} prompt tokens read from the cache`}
      values=${ratios(series.read_tokens, series.prompt_tokens)} />
    <${Tile} label="Saved by caching" value=${dollars(sums.saved)}
      change=${changeOf(sums.saved, before?.saved)} values=${savings(series)}
      note=${sums.uncached ? `${share(sums.saved / sums.uncached)} of ${
        dollars(sums.uncached)} without caching` : "nothing is charged"} />
    <${Tile} label="First token, p50 / p99" value=${pair(hit)} unit="hit"
      note=${`${pair(miss)} on a miss; over the whole range`}
      values=${numbers(series.first_token_ms_hit?.p50)} colour="out" />
    <${Tile} label="Refused, last hour" value=${count(refusedHour)} unit="requests"
      tone=${refusedHour > 0 ? "alarm" : ""} colour="bad" values=${numbers(series.refused)}
      note=${`${count(sums.refused)} of ${
        count((sums.requests ?? 0) + (sums.refused ?? 0))} requests in the range`} />
  <//>`;
}

// --- charts --------------------------------------------------------------------------------------

const line = (label, values, colour, more = {}) =>
  ({ label, values: numbers(values), colour, ...more });
const ghost = (label, values) => (numbers(values).filter(isKnown).length > 1
  ? [line(label, values, "ghost", { isGhost: true })] : []);

export const HIT_RATIO = { title: "Hit ratio", unit: "of prompt tokens", write: share,
  axis: percent, most: 1, showsZero: true, none: "No prompt in this range." };

// The hit ratio: by level where anything came from below the device, else in one line. A level's
// share is of tokens that were not computed, the one line's of tokens read by contract.
const LEVELS = [["device", "on the device", "read"], ["host", "in host memory", "out"],
  ["disk", "on disk", "write"], ["remote", "in the remote store", "violet"]];
function hitRatio(series, before, sums) {
  const prompts = series.prompt_tokens, of = (name) => series[`${name}_cached_tokens`];
  if (!LEVELS.slice(1).some(([name]) => plus(of(name)))) {
    return { ...HIT_RATIO, lines: [
      line("read from the cache", ratios(series.read_tokens, prompts), "read",
        { isFilled: true, total: share(sums.hitRatio) }),
      ...ghost("period before", before && ratios(before.read_tokens, before.prompt_tokens))] };
  }
  const shown = LEVELS.filter(([name]) => name !== "remote" || plus(of(name)));
  return { ...HIT_RATIO, unit: "of prompt tokens, by where they were found", isStacked: true,
    lines: shown.map(([name, text, colour]) => line(`found ${text}`, ratios(of(name), prompts),
      colour, { total: share(overall(of(name), prompts)) })) };
}

function money(series, before, { cost, uncached }) {
  const [paid, full] = ["cost_usd", "uncached_cost_usd"].map((name) => amounts(series, name));
  const sum = dollarsOf([uncached]);
  return { title: "Cost", unit: "dollars", write: dollarsOf([...paid, ...full]), axis: exactDollars,
    none: "Nothing was charged in this range.", lines: [
      line("without caching", full, "fresh", { total: sum(uncached) }),
      line("cost", paid, "read", { isFilled: true, total: sum(cost) }),
      ...ghost("cost, period before", before && amounts(before, "cost_usd"))] };
}

function tokens(series, before, step) {
  const part = (label, name, colour) =>
    line(label, series[name], colour, { total: about(plus(series[name])) });
  const all = before?.prompt_tokens.map((v, at) =>
    (isKnown(v) ? v + before.output_tokens[at] : null));
  return { title: "Tokens", unit: `per ${step}`, write: about, isBars: true, isStacked: true,
    lines: [part("read", "read_tokens", "read"), part("written", "written_tokens", "write"),
      part("computed", "computed_tokens", "fresh"), part("output", "output_tokens", "out"),
      ...ghost("all, period before", all)] };
}

function firstToken({ first_token_ms_hit: hit, first_token_ms_miss: miss }) {
  const dashed = { dash: [3, 3], width: 1 };
  return { title: "Time to first token", unit: "p50 solid, p95 dashed", write: ms, lines: [
    line("hit p50", hit?.p50, "read"), line("miss p50", miss?.p50, "bad"),
    line("hit p95", hit?.p95, "read", dashed), line("miss p95", miss?.p95, "bad", dashed)] };
}

function requests(series, before, step) {
  return { title: "Requests", unit: `per ${step}`, write: about, isBars: true, lines: [
    line("ended", series.requests, "out", { total: count(plus(series.requests)) }),
    ...ghost("period before", before?.requests)] };
}

const CODE_COLOURS = ["bad", "write", "out", "fresh", "violet", "soft"];
function refusals(series, before, step) {
  const byCode = Object.entries(series.refusals_by_code ?? {})
    .map(([code, list]) => ({ code, list, sum: plus(list) ?? 0 })).sort((a, b) => b.sum - a.sum);
  return { title: "Refusals", unit: `per ${step}, by code`, write: about, isBars: true,
    isStacked: true, none: "No request was refused in this range.",
    lines: [...byCode.slice(0, CODE_COLOURS.length).map(({ code, list, sum }, at) =>
      line(words(code), list, CODE_COLOURS[at], { total: count(sum) })),
    ...ghost("all, period before", before?.refused)] };
}

function blocks(series) {
  const free = numbers(series.blocks_free);
  return { title: "Blocks", unit: "KV blocks", write: count, axis: about, showsZero: true,
    none: "No sample of the blocks in this range.", lines: [
      line("cached", series.blocks_cached, "read"),
      line("promised", series.blocks_promised, "write"),
      ...(free.some(isKnown) ? [line("free", free, "fresh")] : [])] };
}

function budgetSpent(series, budget) {
  const hard = series.budget_spent_usd.map(() => budget.hard_usd);
  return { title: "Budget spent", unit: `dollars, this ${budget.window}`,
    write: dollarsOf([budget.hard_usd ?? budget.soft_usd]), lines: [
      line("spent", series.budget_spent_usd, "write", { isFilled: true }),
      ...(budget.hard_usd ? [line("hard limit", hard, "bad", { width: 1 })] : [])] };
}

function stepText(ms) {
  const [unit, text] = ms >= DAY_MS ? [DAY_MS, "d"] : ms >= HOUR_MS ? [HOUR_MS, "h"]
    : [60_000, "min"];
  return `${ms / unit} ${text}`;
}

// Charts side by side. charts: properties of each but `at`. `isOld`: of another range than asked.
export const Charts = ({ at, charts, isOld }) =>
  html`<div class=${`charts ${isOld ? "old" : ""}`}>${charts.map((one) =>
    html`<div class="panel" key=${one.title}><${Chart} at=${at} ...${one} /></div>`)}</div>`;

// The charts of `useHistory` in the order of their worth.
export function HistoryCharts({ found }) {
  const missing = instead(found, "the history");
  if (missing) return html`<${Panel} title="History" wide>${missing}<//>`;
  const { series, previous, at_ms: at, budget, step_ms: ms } = found.data, step = stepText(ms);
  return html`<${Charts} at=${at} isOld=${found.isOld} charts=${[
    hitRatio(series, previous, found.sums), money(series, previous, found.sums),
    tokens(series, previous, step), firstToken(series), requests(series, previous, step),
    refusals(series, previous, step), blocks(series),
    ...(budget ? [budgetSpent(series, budget)] : [])]} />`;
}
