// The history of a range: its sums, and its charts with the period before as a ghost.

import { html } from "./html.js";
import { useData } from "./api.js";
import { Chart } from "./chart.js";
import { about, count, dollarScale, dollarsOf, ms, share, words } from "./format.js";
import { instead } from "./pieces.js";

const EVERY_MS = 15_000;
const isKnown = (v) => v !== null && v !== undefined;
export const numbers = (list) => (list ?? []).map((v) => (isKnown(v) ? Number(v) : null));
const plus = (list) => {
  const known = numbers(list).filter(isKnown);
  return known.length ? known.reduce((sum, v) => sum + v, 0) : null;
};
export const ratios = (parts, wholes) => (wholes ?? []).map((whole, at) =>
  (isKnown(whole) && whole > 0 && isKnown(parts[at]) ? parts[at] / whole : null));
const overall = (parts, wholes) => {
  const [part, whole] = [plus(parts), plus(wholes)];
  return isKnown(part) && whole ? part / whole : null;
};
export const saved = (series) => numbers(series.uncached_cost_usd).map((whole, at) =>
  (isKnown(whole) && isKnown(series.cost_usd[at]) ? whole - Number(series.cost_usd[at]) : null));

export function sums(series) {
  if (!series) return null;
  return {
    requests: plus(series.requests), refused: plus(series.refused),
    prompt: plus(series.prompt_tokens), output: plus(series.output_tokens),
    hitRatio: overall(series.read_tokens, series.prompt_tokens),
    cost: plus(series.cost_usd), uncached: plus(series.uncached_cost_usd),
      saved: plus(saved(series)),
  };
}

// A period with almost no requests is no measure of this one.
const enough = (before, now) => (before && before.requests >= 0.05 * now.requests ? before : null);

export function useHistory(range, { tenant = null, base = "/admin/v1/history" } = {}) {
  const owner = tenant === null ? "" : `&tenant=${encodeURIComponent(tenant)}`;
  const found = useData(`${base}?${range.query}${owner}`, range.isLive ? EVERY_MS : 0);
  const now = sums(found.data?.series);
  return { ...found, sums: now, before: enough(sums(found.data?.previous), now) };
}

const line = (label, values, colour, more = {}) => ({ label, values: numbers(values), colour,
  ...more });
const ghost = (label, values, colour = "ghost") =>
  (numbers(values).filter(isKnown).length > 1
    ? [line(label, values, colour, { isGhost: true })] : []);

// The hit ratio: by level where anything came from below the device, else in one line. A level's
// share is of tokens that were not computed, the one line's of tokens read by contract.
const LEVELS = [["device", "on the device", "read"], ["host", "in host memory", "out"],
  ["disk", "on disk", "write"], ["remote", "in the remote store", "violet"]];
function hitRatio(series, before, sums) {
  const prompts = numbers(series.prompt_tokens), of = (name) => series[`${name}_cached_tokens`];
  if (!LEVELS.slice(1).some(([name]) => plus(of(name)))) {
    const hits = ratios(numbers(series.read_tokens), prompts);
    return { lines: [line("read from the cache", hits, "read", { isFilled: true,
      total: share(sums.hitRatio) }),
    ...ghost("period before", before && ratios(numbers(before.read_tokens),
      numbers(before.prompt_tokens)))] };
  }
  const shown = LEVELS.filter(([name]) => name !== "remote" || plus(of(name)));
  return { unit: "of prompt tokens, by where they were found", isStacked: true,
    lines: shown.map(([name, text, colour]) => line(`found ${text}`,
      ratios(numbers(of(name)), prompts), colour,
      { total: share(overall(of(name), series.prompt_tokens)) })) };
}

function money(series, before) {
  const all = [...numbers(series.cost_usd), ...numbers(series.uncached_cost_usd)];
  const write = dollarsOf(all), sum = dollarsOf([plus(series.uncached_cost_usd)]);
  return { write, axis: dollarScale(all), lines: [
    line("without caching", series.uncached_cost_usd, "fresh",
      { total: sum(plus(series.uncached_cost_usd)) }),
    line("cost", series.cost_usd, "read", { isFilled: true, total: sum(plus(series.cost_usd)) }),
    ...ghost("cost, period before", before?.cost_usd)] };
}

function tokens(series, before) {
  const part = (label, name, colour) => line(label, series[name], colour,
    { total: about(plus(series[name])) });
  return [part("read", "read_tokens", "read"), part("written", "written_tokens", "write"),
    part("computed", "computed_tokens", "fresh"), part("output", "output_tokens", "out"),
    ...(before ? ghost("all, period before", numbers(before.prompt_tokens).map((v, at) =>
      (isKnown(v) ? v + Number(before.output_tokens[at] ?? 0) : null))) : [])];
}

const CODES = ["bad", "write", "out", "fresh", "violet", "soft"];
function refusals(series, before) {
  const byCode = Object.entries(series.refusals_by_code ?? {})
    .map(([code, list]) => [code, list, plus(list) ?? 0]).sort((a, b) => b[2] - a[2]);
  const lines = byCode.slice(0, CODES.length).map(([code, list, sum], at) =>
    line(words(code), list, CODES[at], { total: count(sum) }));
  return [...lines, ...ghost("all, period before", before?.refused)];
}

const stepOf = (ms) => (ms >= 86_400_000 ? `${ms / 86_400_000} d` : ms >= 3_600_000
  ? `${ms / 3_600_000} h` : `${ms / 60_000} min`);

// The charts in the order of their worth; `blocks`: with the cache's blocks.
export function HistoryCharts({ found, hasBlocks = true }) {
  const missing = instead(found, "the history");
  if (missing) return html`<section class="panel wide"><h2>History</h2>${missing}</section>`;
  const { series, previous: before, at_ms: at, budget } = found.data;
  const cost = money(series, before);
  const step = stepOf(found.data.step_ms);
  const time = (kind, which) => series[`first_token_ms_${kind}`]?.[which];
  const left = numbers(series.blocks_free);
  const chart = (props) => html`<div class="panel"><${Chart} at=${at} ...${props} /></div>`;
  return html`<div class=${`charts ${found.isOld ? "old" : ""}`}>
    ${chart({ title: "Hit ratio", unit: "of prompt tokens", write: share, most: 1, showsZero: true,
      axis: (v) => `${Math.round(100 * v)} %`, none: "No prompt in this range.",
      ...hitRatio(series, before, found.sums) })}
    ${chart({ title: "Cost", unit: "dollars", write: cost.write, axis: cost.axis, lines: cost.lines,
      none: "Nothing was charged in this range." })}
    ${chart({ title: "Tokens", unit: `per ${step}`, write: about, isBars: true, isStacked: true,
      lines: tokens(series, before) })}
    ${chart({ title: "Time to first token", unit: "p50 solid, p95 dashed", write: ms, lines: [
      line("hit p50", time("hit", "p50"), "read"), line("miss p50", time("miss", "p50"), "bad"),
      line("hit p95", time("hit", "p95"), "read", { dash: [3, 3], width: 1 }),
      line("miss p95", time("miss", "p95"), "bad", { dash: [3, 3], width: 1 })] })}
    ${chart({ title: "Requests", unit: `per ${step}`, write: about, isBars: true, lines: [
      line("ended", series.requests, "out", { total: count(found.sums.requests) }),
      ...ghost("period before", before?.requests)] })}
    ${chart({ title: "Refusals", unit: `per ${step}, by code`, write: about, isBars: true,
      isStacked: true,
      lines: refusals(series, before), none: "No request was refused in this range." })}
    ${hasBlocks && chart({ title: "Blocks", unit: "KV blocks", write: count, axis: about,
      showsZero: true, none: "No sample of the blocks in this range.", lines: [
        line("cached", series.blocks_cached, "read"), line("promised", series.blocks_promised,
          "write"),
        ...(left.some(isKnown) ? [line("free", left, "fresh")] : [])] })}
    ${budget && chart({ title: "Budget spent", unit: `dollars, this ${budget.window}`,
      write: dollarsOf([budget.hard_usd ?? budget.soft_usd]), lines: [
        line("spent", series.budget_spent_usd, "write", { isFilled: true }),
        ...(budget.hard_usd ? [line("hard limit", at.map(() => budget.hard_usd), "bad",
          { width: 1 })] : [])] })}
  </div>`;
}
