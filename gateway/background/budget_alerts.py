"""Soft budgets that are passed: told to the log, once for each window, and to the metrics.

A soft budget refuses nothing, so who set one waits to be told. `storage_meter` lets it look, every
minute.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gateway.context import Context
from tenancy.errors import StoreError
from tenancy.pricing.budgets import BudgetState, budget_states


class SoftBudgets:
    """Of all tenants of one gateway. Belongs to one loop."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self._told: dict[tuple[int, int, str], int] = {}  # in which window each was passed

    async def look(self) -> None:
        """Tell of those that have been passed since the last look; of all of them after a start. A
        file that cannot be read is looked at the next time. O(budgets), on another thread."""
        gateway = self._gateway
        with suppress(StoreError):
            states = await gateway.reports.ask(partial(budget_states, clock=gateway.wall))
            self._tell([state for state in states if state.is_over_soft])

    def _tell(self, passed: list[BudgetState]) -> None:
        gateway, told = self._gateway, self._told
        counts: dict[str, int] = {}
        self._told = {}
        for state in passed:
            budget = state.budget
            owner = gateway.registry.tenant(budget.tenant_id)
            if owner is None:
                continue  # deleted meanwhile
            name = gateway.telemetry.tenant_label(owner.tenant.name)
            counts[name] = counts.get(name, 0) + 1
            which = budget.tenant_id, budget.key_id, budget.window
            self._told[which] = state.starts_ms
            if told.get(which) != state.starts_ms:
                facts: dict[str, object] = {
                    "tenant_id": budget.tenant_id,
                    "key_id": budget.key_id,
                    "window": budget.window,
                    "soft_micros": budget.soft_micros,
                    "spent_pico": state.spent_pico,
                    "resets_ms": state.resets_ms,
                }
                gateway.log("soft_budget_passed", facts)
        gateway.telemetry.set_soft_budgets(counts)
