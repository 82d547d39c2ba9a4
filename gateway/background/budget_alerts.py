"""Alerts for exceeded soft budgets: one log event per budget and window, and a metric.

A soft budget refuses nothing, so an operator learns of it here. `StorageMetering` checks budgets
every minute.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gateway.context import Context
from tenancy.errors import StoreError
from tenancy.pricing.budgets import BudgetState, budget_states


class BudgetAlerts:
    """Soft budgets of all tenants of one gateway. Belongs to one event loop."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._alerted: dict[tuple[int, int, str], int] = {}  # start of the window alerted for

    async def check(self) -> None:
        """Alert for soft budgets exceeded since the last check; after a start, for all exceeded
        ones.

        O(budgets), on another thread. A failed read of the store is tried again at the next check.
        """
        gateway = self._gateway
        with suppress(StoreError):
            states = await gateway.reports.ask(partial(budget_states, clock=gateway.wall))
            self._alert([state for state in states if state.is_over_soft])

    def _alert(self, passed: list[BudgetState]) -> None:
        gateway, alerted = self._gateway, self._alerted
        counts: dict[str, int] = {}
        self._alerted = {}
        for state in passed:
            budget = state.budget
            owner = gateway.authenticator.tenant(budget.tenant_id)
            if owner is None:
                continue  # deleted meanwhile
            name = gateway.metrics.tenant_label(owner.tenant.name)
            counts[name] = counts.get(name, 0) + 1
            key = budget.tenant_id, budget.key_id, budget.window
            self._alerted[key] = state.starts_ms
            if alerted.get(key) != state.starts_ms:
                facts: dict[str, object] = {
                    "tenant": owner.tenant.name,
                    "tenant_id": budget.tenant_id,
                    "key_id": budget.key_id,
                    "window": budget.window,
                    "soft_micros": budget.soft_micros,
                    "spent_pico": state.spent_pico,
                    "resets_ms": state.resets_ms,
                }
                gateway.log("soft_budget_passed", facts)
        gateway.metrics.set_soft_budgets(counts)
