"""The events of webhooks: what is found, once, and the sentence for people."""

from __future__ import annotations

import msgspec
import pytest

from gateway.background import webhook_events
from gateway.background.webhook_events import (
    EXPIRES_WITHIN_MS,
    budget_events,
    finding_events,
    key_events,
    message_of,
    ratio_events,
)
from gateway.findings.report import FindingsWindow
from tenancy.accounting.usage import UsageTotal
from tenancy.accounting.webhook_outbox import WebhookEvent
from tenancy.accounts.keys import Key
from tenancy.pricing.budgets import Budget, BudgetState
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS
from tests.tables import each_row
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.gateway_fixture import GatewayFixture

NOW_MS = 1_795_000_000_000
FINDING = {
    "finding_id": "f_1",
    "tenant": "hr",
    "cause": "volatile_system",
    "sentence": "hr: the system message changes in 44 of 45 requests.",
    "advice": "Put the changing part behind the stable text.",
    "saving_usd_month": "0.013",
    "legitimate": False,
    "examples": [],
}


def sentence(event: WebhookEvent) -> str:
    """Return the event as a receiver of sentences gets it."""
    return message_of(msgspec.json.encode({"type": event.kind, "data": event.data}))


def state(spent_dollars: float, *, hard: int | None = 100, soft: int | None = None) -> BudgetState:
    """Return a budget's state; limits in dollars."""
    micros = [None if one is None else one * 10**6 for one in (hard, soft)]
    budget = Budget(1, "month", micros[0], micros[1], 7)
    return BudgetState(budget, 5, NOW_MS, int(spent_dollars * 10**12), 0, False)


@each_row(
    ("spent", "reached"), [(49.9, None), (50, 50), (79.9, 50), (80, 80), (99.9, 80), (130, 100)]
)
def test_budgets_tell_the_highest_threshold_reached(spent: float, reached: int | None) -> None:
    """Each threshold of a window is an event of its own, with an id of its own."""
    found = budget_events([state(spent)], lambda _: "ada")

    assert [one.data["threshold_percent"] for one in found] == (
        [] if reached is None else [reached]
    )


def test_a_budget_without_a_hard_limit_tells_of_its_soft_one() -> None:
    """And one without any tells nothing."""
    (found,) = budget_events([state(6, hard=None, soft=10), state(6, hard=None)], lambda _: "ada")

    assert (found.data["limit_usd"], found.data["is_hard"]) == ("10.000000000000", False)
    assert sentence(found) == "ada, key 7: 50 % of the month's budget is spent ($6.00 of $10.00)"


def test_small_budgets_have_readable_amounts() -> None:
    """Two decimals of a budget of a tenth of a cent would say nothing."""
    small = BudgetState(Budget(1, "day", 500, None), 5, NOW_MS, 383_100_000, 0, False)
    (found,) = budget_events([small], lambda _: "ada")

    assert sentence(found) == "ada: 50 % of the day's budget is spent ($0.000383 of $0.000500)"


def test_thresholds_and_windows_have_ids_of_their_own() -> None:
    """The same threshold of the same window has the same id after a restart."""
    half, again, most = (budget_events([state(spent)], str)[0] for spent in (50, 55, 80))
    next_window = msgspec.structs.replace(state(50), starts_ms=6)

    assert half.event_id == again.event_id
    assert len({half.event_id, most.event_id, budget_events([next_window], str)[0].event_id}) == 3


def key(key_id: int, expires_ms: int | None, **more: int) -> Key:
    found = Key(key_id, "ada", "default", "web", "tl-x", 1, expires_ms, None)
    return msgspec.structs.replace(found, **more)


def test_a_key_that_expires_within_a_week_is_told() -> None:
    """One that was replaced or revoked, has expired, or expires later is not."""
    soon = NOW_MS + EXPIRES_WITHIN_MS
    found = key_events(
        [
            key(1, soon),
            key(2, soon + 1),
            key(3, None),
            key(4, NOW_MS),
            key(5, soon, revoked_ms=1),
            key(6, soon, replaced_by=9),
        ],
        {"ada": 3},
        NOW_MS,
    )

    assert [(one.data["key_id"], one.tenant_id) for one in found] == [(1, 3)]
    assert sentence(found[0]) == "key 1 (web) of ada expires 2026-11-25T11:06:40.000Z"


def total(tenant: str, prompt: int, read: int) -> UsageTotal:
    return UsageTotal(tenant, prompt_tokens=prompt, cache_read_tokens=read)


def test_a_hit_ratio_that_fell_is_told_once_a_day() -> None:
    """Ratios of little traffic, or that rose, are not."""
    early = [total("ada", 10**6, 9 * 10**5), total("bob", 10**4, 10**4), total("cid", 10**6, 10**5)]
    late = [total("ada", 10**6, 4 * 10**5), total("bob", 10**4, 0), total("cid", 10**6, 10**6)]
    found = ratio_events(early, late, {"ada": 1}, NOW_MS)
    next_day = ratio_events(early, late, {"ada": 1}, NOW_MS + DAY_MS)

    assert [one.data["tenant"] for one in found] == ["ada"]
    assert sentence(found[0]) == "ada: hit ratio fell from 90.0 % to 40.0 % within a day"
    assert found[0].event_id != next_day[0].event_id


async def test_finds_restarts_and_refusals_since_the_last_search(gateway: GatewayFixture) -> None:
    """Not those before its start, and none twice."""
    (replica,) = gateway.gateway.context.models.default.replicas
    replica.link = link = FakeLink(restarts=3)
    gateway.gateway.limits.limited[1] = 2
    events = gateway.gateway.events()
    first = [*events.count(), *await events.read()]
    link.restarts = 4
    gateway.gateway.limits.limited[1] += 5
    second = [*events.count(), *await events.read()]
    third = [*events.count(), *await events.read()]

    assert [one.kind for one in first] == ["tenant.limited"]
    assert [one.kind for one in second] == ["engine.restarted", "tenant.limited"]
    assert sentence(second[1]) == "ada: 5 requests refused by its limits"
    assert third == []


async def test_refused_requests_are_counted_by_tenant(unopened_gateway: GatewayFixture) -> None:
    """By the limit of concurrent requests, which needs no minute to refill."""
    gateway = unopened_gateway
    gateway.set_limits(requests_per_tenant_max=1)
    await gateway.open()
    context = gateway.gateway.context
    gateway.gateway.limits.limiter.reserve(context.authenticator.authenticate(gateway.keys["ada"]))
    status, _, _ = await gateway.ask(body=gateway.chat())

    assert status == 429
    assert gateway.gateway.limits.limited == {1: 1}


def test_findings_that_cost_something_are_told() -> None:
    """By an id that stays; a legitimate cause is no news."""
    found = finding_events([FINDING, {**FINDING, "legitimate": True}], {"hr": 1})
    later = finding_events([{**FINDING, "sentence": "other words"}], {"hr": 1})

    assert [(one.tenant_id, one.data["cause"]) for one in found] == [(1, "volatile_system")]
    assert sentence(found[0]).startswith("hr: the system message changes in 44 of 45 requests. Put")
    assert found[0].event_id == later[0].event_id


async def test_findings_of_the_report_are_told(
    gateway: GatewayFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the last 24 hours."""
    windows = []

    def report(store: Store, window: FindingsWindow) -> dict[str, object]:
        windows.append(window)
        return {"findings": [FINDING]}

    monkeypatch.setattr(webhook_events, "find", report)
    gateway.wall = lambda: NOW_MS
    events = await gateway.gateway.events().read()

    assert [one.data["cause"] for one in events if one.kind == "finding.new"] == [FINDING["cause"]]
    assert DAY_MS <= windows[0].until_ms - windows[0].since_ms < DAY_MS + 3_600_000
    assert windows[0].until_ms == NOW_MS
