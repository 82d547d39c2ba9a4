"""Alerts for exceeded soft budgets."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.background.budget_alerts import BudgetAlerts
from tenancy.errors import StoreError
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.unit.gateway.gateway_fixture import GatewayFixture


def exceeded(gateway: GatewayFixture) -> str:
    """Return the metric."""
    lines = gateway.gateway.context.metrics.exposition().decode().splitlines()
    return " ".join(line for line in lines if line.startswith("trunkline_soft_budgets_passed"))


def alerts_of(gateway: GatewayFixture) -> BudgetAlerts:
    of = gateway.gateway.context
    return BudgetAlerts(of.reports, of.authenticator, of.metrics, of.wall, of.log)


def alerts(gateway: GatewayFixture) -> list[dict[str, Any]]:
    return [line for line in gateway.lines if line["event"] == "soft_budget_passed"]


async def test_alerts_once_per_budget_and_window(
    gateway: GatewayFixture,
) -> None:
    """A raised budget alerts again when it is exceeded again."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=20))
    watch = alerts_of(gateway)
    await watch.check()
    before = alerts(gateway), exceeded(gateway)

    await gateway.ask(body=gateway.chat("one " * 40))
    await watch.check()
    await watch.check()
    (line,) = alerts(gateway)
    after = exceeded(gateway)
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=10**6))
    await watch.check()
    raised = exceeded(gateway)
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=20))
    await watch.check()

    assert before == ([], "")
    assert (line["tenant_id"], line["key_id"], line["window"]) == (1, 0, "day")
    assert line["spent_pico"] > 20_000_000
    assert after == 'trunkline_soft_budgets_passed{tenant="ada"} 1.0'
    assert raised == ""
    assert len(alerts(gateway)) == 2


async def test_failed_read_is_tried_again_without_new_alerts(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "month", soft_micros=0))
    await gateway.ask(body=gateway.chat("one two"))
    watch, reports = alerts_of(gateway), gateway.gateway.context.reports
    await watch.check()
    with monkeypatch.context() as patch:
        patch.setattr(reports, "ask", AsyncMock(side_effect=StoreError("unusable", "away")))
        await watch.check()
    meanwhile = exceeded(gateway)
    await watch.check()

    assert meanwhile == 'trunkline_soft_budgets_passed{tenant="ada"} 1.0'
    assert len(alerts(gateway)) == 1
