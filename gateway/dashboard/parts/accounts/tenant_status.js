// Which tenants need to be looked after, and why.

import { isKnown } from "../format.js";

// Return tenants of `/admin/v1/tenants` with their `status`, with `refused` (requests of the last
// hour; null if that is not known), and with `spent` and `soft`: a budget that is used up, and one
// over its soft limit. now: of `/admin/v1/analytics`.
export function withStatus(tenants, budgets = [], now = null) {
  const budgetsOf = Map.groupBy(budgets, (budget) => budget.tenant);
  const refusals = new Map(Object.entries(now?.refused_last_hour.tenants ?? {}));
  return tenants.map((one) => {
    const own = budgetsOf.get(one.name) ?? [];
    const refused = now ? refusals.get(one.name) ?? 0 : null;
    const spent = own.find((budget) => isKnown(budget.hard_usd)
      && Number(budget.spent_usd) + Number(budget.reserved_usd) >= Number(budget.hard_usd));
    const soft = own.find((budget) => budget.is_over_soft);
    const status = one.status === "suspended" ? "suspended"
      : spent ? "over_budget" : refused ? "limited" : "ok";
    return { ...one, refused, spent, soft, status };
  });
}
