"""A soft budget refuses nothing, and says when it is passed."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.background.budget_alerts import BudgetAlerts
from gateway.ledger.metering import wall_ms
from tenancy.errors import StoreError
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tests.unit.gateway.gateway_fixture import GatewayFixture

pytestmark = pytest.mark.usefixtures("noon")


def passed(gateway: GatewayFixture) -> str:
    """What the metrics say."""
    lines = gateway.gateway.context.telemetry.exposition().decode().splitlines()
    return " ".join(line for line in lines if line.startswith("trunkline_soft_budgets_passed"))


def told(gateway: GatewayFixture) -> list[dict[str, Any]]:
    return [line for line in gateway.lines if line["event"] == "soft_budget_passed"]


async def test_a_soft_budget_that_is_passed_is_told_once_for_its_window(
    gateway: GatewayFixture,
) -> None:
    """A raised one is told again when it is passed again."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=20))
    watch = BudgetAlerts(gateway.gateway.context)
    await watch.check()
    before = told(gateway), passed(gateway)

    await gateway.ask(body=gateway.chat("one " * 40))
    await watch.check()
    await watch.check()
    (line,) = told(gateway)
    after = passed(gateway)
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=10**6))
    await watch.check()
    raised = passed(gateway)
    set_budget(gateway.store, Budget(1, "day", hard_micros=10**9, soft_micros=20))
    await watch.check()

    assert before == ([], "")
    assert (line["tenant_id"], line["key_id"], line["window"]) == (1, 0, "day")
    assert line["spent_pico"] > 20_000_000
    assert after == 'trunkline_soft_budgets_passed{tenant="ada"} 1.0'
    assert raised == ""
    assert len(told(gateway)) == 2


async def test_a_file_that_cannot_be_read_is_looked_at_again(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told stays told."""
    add_card(gateway.store, wall_ms, RateCard("std", input=1_000_000))
    set_budget(gateway.store, Budget(1, "month", soft_micros=0))
    await gateway.ask(body=gateway.chat("one two"))
    watch, reports = BudgetAlerts(gateway.gateway.context), gateway.gateway.context.reports
    await watch.check()
    with monkeypatch.context() as patch:
        patch.setattr(reports, "ask", AsyncMock(side_effect=StoreError("unusable", "away")))
        await watch.check()
    meanwhile = passed(gateway)
    await watch.check()

    assert meanwhile == 'trunkline_soft_budgets_passed{tenant="ada"} 1.0'
    assert len(told(gateway)) == 1
