"""Rate cards and budgets over HTTP, and their effect on requests."""

from __future__ import annotations

import asyncio

from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient

CARDS, BUDGETS = "/admin/v1/rate-cards", "/admin/v1/budgets"


ADA = "/admin/v1/tenants/ada/budgets"
CARD = {"name": "list", "input": 1_000_000, "output": 2_000_000, "cache_read": 100_000}


async def test_rate_card_charges_later_entries(admin: AdminClient) -> None:
    """Earlier entries are free; each entry has the price of its time, to the pico-dollar."""
    gateway = admin.gateway
    await gateway.ask(body=gateway.chat())
    status, made = await admin.ask("POST", CARDS, CARD)
    await gateway.ask(body=gateway.chat())
    _, listed = await admin.ask("GET", CARDS)
    _, usage, _ = await gateway.ask("/v1/usage", method="GET")
    charges = gateway.store.query(
        "select charge_pico, fresh_tokens, cache_read_tokens, output_tokens, rate_card_id"
        " from ledger order by entry_id"
    )

    assert (status, made["rate_card_id"], made["version"]) == (201, "list@1", 1)
    assert [card["rate_card_id"] for card in listed["rate_cards"]] == ["list@1"]
    assert (charges[0][0], charges[0][4]) == (0, "free")
    charge, fresh, read, output, card = charges[1]
    assert charge == fresh * 1_000_000 + read * 100_000 + output * 2_000_000 > 0
    assert card == "list@1"
    assert usage["totals"]["charge_usd"] == f"0.{charge:012d}"


async def test_hard_budget_refuses_requests_without_retry(admin: AdminClient) -> None:
    """F1: of concurrent requests, those fit whose maximum fits the budget; a retry cannot help
    before the window ends."""
    gateway = admin.gateway
    await admin.ask("POST", CARDS, {"name": "list", "output": 1_000_000})
    _, budgets = await admin.ask("PUT", ADA, {"window": "month", "hard_micros": 16})
    answers = await asyncio.gather(*(gateway.ask(body=gateway.chat()) for _ in range(8)))
    status, error, response = await gateway.ask(body=gateway.chat())
    _, usage, _ = await gateway.ask("/v1/usage", method="GET")
    other, _, _ = await gateway.ask(body=gateway.chat(), who="bob")

    assert budgets["budgets"][0]["hard_usd"] == "0.000016000000"
    assert sorted(status for status, _, _ in answers) == [200] * 2 + [429] * 6
    assert (status, error["error"]["code"]) == (429, "budget_exceeded")
    assert error["error"]["type"] == "insufficient_quota"
    assert error["error"]["message"].startswith("You exceeded your current quota: ")
    assert response.headers["x-should-retry"] == "false"
    assert 0 < int(response.headers["retry-after"]) <= 31 * 86_400
    assert usage["budgets"][0]["spent_usd"] == "0.000016000000"
    assert usage["budgets"][0]["reserved_usd"] == "0.000000000000"
    assert other == 200
    assert gateway.gateway.limits.limiter.running_of(1) == 0
    await gateway.check_quiet()


async def test_changes_and_removes_budgets(admin: AdminClient) -> None:
    """A key's budget applies beside its tenant's; without an amount a budget is removed."""
    await admin.ask("PUT", ADA, {"window": "day", "soft_micros": 5})
    await admin.ask("PUT", ADA, {"window": "day", "hard_micros": 7, "key_id": 1})
    _, two = await admin.ask("GET", f"{BUDGETS}?tenant=ada")
    await admin.ask("PUT", ADA, {"window": "day"})
    _, one = await admin.ask("GET", BUDGETS)

    assert [(row["key_id"], row["window"]) for row in two["budgets"]] == [(None, "day"), (1, "day")]
    assert [(row["tenant"], row["key_id"]) for row in one["budgets"]] == [("ada", 1)]


@each_row(
    ("method", "path", "body", "status"),
    [
        ("POST", CARDS, {}, 400),
        ("POST", CARDS, {"name": "x", "input": -1}, 400),
        ("POST", CARDS, {"name": "x", "input": 10**13}, 400),
        ("POST", CARDS, {"name": "x", "input": 0.5}, 400),
        ("POST", CARDS, {"name": "x", "price": 1}, 400),
        ("POST", CARDS, {"name": "x", "valid_from_ms": 1}, 400),
        ("POST", CARDS, {"name": "x", "valid_from_ms": 10**18}, 400),
        ("POST", CARDS, {"name": "x", "valid_until_ms": 10**18}, 400),
        ("POST", CARDS, {"name": "x", "cache_write": {"5min": 1}}, 400),
        ("POST", CARDS, {"name": "x", "cache_write": {"best_effort": 1}}, 400),
        ("POST", CARDS, {"name": "x", "storage": {"promised": 1}}, 400),
        ("POST", CARDS, {"name": "x", "tier": "Gold"}, 400),
        ("PUT", ADA, {}, 400),
        ("PUT", ADA, {"window": "year", "hard_micros": 1}, 400),
        ("PUT", ADA, {"window": "day", "hard_micros": -1}, 400),
        ("PUT", ADA, {"window": "day", "hard_micros": 10**30}, 400),
        ("PUT", ADA, {"window": "day", "hard_micros": 1, "soft_micros": 2}, 400),
        ("PUT", ADA, {"window": "day", "hard_micros": 1, "key_id": 2}, 400),
        ("PUT", ADA, {"window": "day", "hard_micros": 1, "key_id": 2**63}, 400),
        ("PUT", "/admin/v1/tenants/nobody/budgets", {"window": "day", "hard_micros": 1}, 404),
    ],
)
async def test_refuses_invalid_prices_and_budgets(
    admin: AdminClient, method: str, path: str, body: object, status: int
) -> None:
    """Negative and absurd prices, another tenant's key, a price for yesterday."""
    got, answer = await admin.ask(method, path, body)

    assert got == status
    assert set(answer["error"]) == {"code", "message", "param"}
    assert (await admin.ask("GET", CARDS))[1] == {"rate_cards": []}
    assert (await admin.ask("GET", BUDGETS))[1] == {"budgets": []}


async def test_refuses_overlapping_rate_cards(admin: AdminClient) -> None:
    """No instant may have two prices."""
    await admin.ask("POST", CARDS, CARD)
    status, answer = await admin.ask("POST", CARDS, {**CARD, "name": "other"})

    assert status == 400
    assert "list" in answer["error"]["message"]
