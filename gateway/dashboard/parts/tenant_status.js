// Which tenants need to be looked after, and why.

import { isKnown } from "./format.js";

// Most tenants of one answer of `/admin/v1/tenants`.
export const TENANTS_MAX = 1000;

// Return tenants of `/admin/v1/tenants` with their `status`, with `refused` (requests of the last
// hour; null if that is not known), and with `spent` and `soft`: a budget that is used up, and one
// over its soft limit. now: of `/admin/v1/analytics`.
export function withStatus(tenants, budgets = [], now = null) {
  return tenants.map((one) => {
    const own = budgets.filter((budget) => budget.tenant === one.name);
    const refused = now ? now.refused_last_hour.tenants[one.name] ?? 0 : null;
    const spent = own.find((budget) => isKnown(budget.hard_usd)
      && Number(budget.spent_usd) + Number(budget.reserved_usd) >= Number(budget.hard_usd));
    const soft = own.find((budget) => budget.is_over_soft);
    const status = one.status === "suspended" ? "suspended"
      : spent ? "over_budget" : refused ? "limited" : "ok";
    return { ...one, refused, spent, soft, status };
  });
}
