"""Metrics of money: the dollars that each tenant was charged, and its budgets.

The sums are the ledger's, so that they continue over a restart and are those of invoices before
adjustments. The sums of past days are read once a day, those of the last two days every time.
`HistorySampling` updates them.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from functools import partial

from gateway.ledger.query_pool import QueryPool
from gateway.observability.metrics import BudgetGauges, Metrics
from tenancy.accounting.usage import UsageTotal, usage
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.errors import StoreError
from tenancy.pricing.budgets import BudgetState, budget_states
from tenancy.pricing.charges import PICO_PER_DOLLAR, PICO_PER_MICRO
from tenancy.types import DAY_MS, WallClock


class MoneyMetrics:
    """The money metrics of one gateway. Belongs to one event loop."""

    def __init__(
        self, reports: QueryPool, authenticator: KeyAuthenticator, metrics: Metrics, wall: WallClock
    ) -> None:
        self._reports, self._authenticator, self._metrics = reports, authenticator, metrics
        self._wall = wall
        self._past: list[UsageTotal] = []
        self._past_until_ms = -1

    async def update(self) -> None:
        """Read sums and budgets and set the metrics; a failed read leaves them as they were.

        O(days * keys * models) of the last two days, and once a day of all.
        """
        # An entry counts on the day on which its request began, and no request takes a day.
        until_ms = (self._wall() // DAY_MS - 1) * DAY_MS
        with suppress(StoreError):
            if until_ms != self._past_until_ms:
                self._past = await self._reports.ask(partial(usage, until_ms=until_ms))
                self._past_until_ms = until_ms
            recent = await self._reports.ask(partial(usage, since_ms=until_ms))
            states = await self._reports.ask(partial(budget_states, clock=self._wall))
            self._set_charges([*self._past, *recent])
            self._set_budgets(states)

    def _set_charges(self, totals: list[UsageTotal]) -> None:
        metrics = self._metrics
        sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        # Of many tenants, those with the largest bills have names.
        for one in sorted(totals, key=lambda one: one.charge_pico, reverse=True):
            row = sums[metrics.tenant_label(one.tenant)]
            row[0] += one.charge_pico
            row[1] += one.charge_pico + one.saved_pico
        metrics.money.dollars = {
            tenant: (charged / PICO_PER_DOLLAR, uncached / PICO_PER_DOLLAR)
            for tenant, (charged, uncached) in sums.items()
        }

    def _set_budgets(self, states: list[BudgetState]) -> None:
        """Set the gauges of tenants' own budgets; keys have none, as their number is not bounded.

        Tenants that share a label are left out: their budgets cannot be added.
        """
        rows: list[BudgetGauges] = []
        for state in states:
            budget = state.budget
            owner = self._authenticator.tenant(budget.tenant_id)
            if budget.key_id or owner is None:
                continue
            name = owner.tenant.name
            if self._metrics.tenant_label(name) != name:
                continue
            hard, soft = budget.hard_micros, budget.soft_micros
            rows.append(
                BudgetGauges(
                    tenant=name,
                    window=budget.window,
                    spent_usd=(state.spent_pico + state.reserved_pico) / PICO_PER_DOLLAR,
                    hard_usd=None if hard is None else hard * PICO_PER_MICRO / PICO_PER_DOLLAR,
                    soft_usd=None if soft is None else soft * PICO_PER_MICRO / PICO_PER_DOLLAR,
                )
            )
        self._metrics.money.budgets = rows
