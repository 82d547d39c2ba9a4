// Usage of the ledger in words.

import { share, time } from "../format.js";

// totals: of a usage report.
export function savedNote(totals) {
  const saved = Number(totals.saved_usd), whole = Number(totals.charge_usd) + saved;
  return whole > 0 ? `${share(saved / whole)} of the bill without caching` : "nothing is charged";
}

// window: of a usage report, which is widened to whole hours.
export const windowText = ({ since, until }) => `${time(since)} to ${time(until)}`;
