"""Alerts for exceeded soft budgets: one log event per budget and window, and a metric.

A soft budget refuses nothing, so an operator learns of it here. `StorageMetering` checks budgets
every minute.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gateway.context import Log
from gateway.ledger.query_pool import QueryPool
from gateway.observability.metrics import Metrics
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.errors import StoreError
from tenancy.pricing.budgets import BudgetState, budget_states
from tenancy.types import WallClock


class BudgetAlerts:
    """Soft budgets of all tenants of one gateway. Belongs to one event loop."""

    def __init__(
        self,
        reports: QueryPool,
        authenticator: KeyAuthenticator,
        metrics: Metrics,
        wall: WallClock,
        log: Log,
    ) -> None:
        self._reports, self._authenticator, self._metrics = reports, authenticator, metrics
        self._wall, self._log = wall, log
        self._alerted: dict[tuple[int, int, str], int] = {}  # start of the window alerted for

    async def check(self) -> None:
        """Alert for soft budgets exceeded since the last check; after a start, for all exceeded
        ones.

        O(budgets), on another thread. A failed read of the store is tried again at the next check.
        """
        with suppress(StoreError):
            states = await self._reports.ask(partial(budget_states, clock=self._wall))
            self._alert([state for state in states if state.is_over_soft])

    def _alert(self, passed: list[BudgetState]) -> None:
        alerted = self._alerted
        counts: dict[str, int] = {}
        self._alerted = {}
        for state in passed:
            budget = state.budget
            owner = self._authenticator.tenant(budget.tenant_id)
            if owner is None:
                continue  # deleted meanwhile
            name = self._metrics.tenant_label(owner.tenant.name)
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
                self._log("soft_budget_passed", facts)
        self._metrics.set_soft_budgets(counts)
