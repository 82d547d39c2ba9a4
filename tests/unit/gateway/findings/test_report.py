"""`find`: which sums are findings, what they cost, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.analytics.prompt_findings import WORKING_SET
from gateway.findings.report import FindingsWindow, dollars, find
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BadName
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.reuse.finding_counts import FindingCount, add_counts
from tenancy.types import DAY_MS, HOUR_MS, UsageEntry
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

NOW_MS = 100 * DAY_MS
WINDOW = FindingsWindow.of(NOW_MS - DAY_MS, NOW_MS)
CARD = RateCard(
    "std",
    input=1_000_000,
    output=0,
    cache_read=100_000,
    cache_write={"5m": 1_250_000, "1h": 2_000_000},
)


class Books:
    """A database with two tenants and their requests."""

    def __init__(self, folder: Path) -> None:
        self.store = new_sqlite(folder / "t.db")
        add_card(self.store, lambda: 0, CARD)
        self.ids = {
            name: create_tenant(self.store, lambda: 0, name).tenant_id for name in ("ada", "bob")
        }
        self._ledger = Ledger(self.store, lambda: NOW_MS - HOUR_MS)

    def use(self, name: str, requests: int, tokens: int = 1_000) -> None:
        """Book requests of one tenant."""
        for number in range(requests):
            entry = UsageEntry(
                request_id=f"{name}{number}",
                tenant_id=self.ids[name],
                key_id=1,
                model="m",
                ending="done",
                started_ms=NOW_MS - HOUR_MS,
                ended_ms=NOW_MS - HOUR_MS,
                prompt_tokens=tokens,
                cache_read_tokens=0,
                cache_write_tokens=0,
                fresh_tokens=tokens,
                output_tokens=0,
                physical_cached_tokens=0,
            )
            self._ledger.settle(entry).result(60)

    def count(self, name: str, cause: str, requests: int, tokens: int, **more: Any) -> None:
        """Write a count of the last hour."""
        at_ms = NOW_MS - HOUR_MS
        hour_ms = at_ms // HOUR_MS * HOUR_MS
        one = FindingCount(
            self.ids[name], hour_ms, cause, "", requests, tokens, at_ms, at_ms, ("r",), {}, "m"
        )
        add_counts(self.store, [replace(one, **more)])

    def find(self, tenant: str | None = None, *, is_own: bool = False) -> list[dict[str, Any]]:
        """Return the findings of the last day."""
        return list(find(self.store, WINDOW, tenant, is_own=is_own)["findings"])

    def close(self) -> None:
        self._ledger.close()
        self.store.close()


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    found = Books(tmp_path)
    yield found
    found.close()


def test_money_is_that_of_the_card_and_the_ledger(books: Books) -> None:
    books.use("ada", 5)
    books.count("ada", "system_changes", 4, 3_000, place="system")

    (found,) = books.find()
    assert (found["requests"], found["of_requests"]) == (4, 5)
    assert found["of_cost_usd"] == "0.0050"
    assert found["cost_usd"] == "0.0027"  # 3,000 tokens at 0.9 micro-dollars
    assert found["saving_usd_month"] == "0.081"
    assert "about $0.0027 of $0.0050" in found["sentence"]
    assert found["confidence"] == 0.79


def test_order_is_by_saving_and_legitimate_ones_are_last(books: Books) -> None:
    books.use("ada", 10)
    books.use("bob", 10)
    books.count("ada", "new_conversation", 9, 0)
    books.count("ada", "tools_changed", 5, 2_000)
    books.count("bob", "unmarked", 5, 4_000)
    books.count("ada", "model_changed", 5, 6_000)  # once, not every day

    assert [one["cause"] for one in books.find()] == [
        "unmarked",
        "tools_changed",
        "model_changed",
        "new_conversation",
    ]
    assert [one["cause"] for one in books.find("bob")] == ["unmarked"]


@pytest.mark.parametrize(
    ("cause", "requests", "tokens", "is_shown"),
    [
        ("system_changes", 2, 9_000, False),
        ("system_changes", 4, 9_000, False),
        ("system_changes", 5, 9_000, True),
        ("evicted", 3, 2_400, False),
        ("evicted", 3, 2_500, True),
        ("evicted", 2, 9_000, False),
        ("restarted", 1, 100, True),
        ("damaged", 1, 9_000, False),
        ("damaged", 2, 100, True),
        ("level_failed", 3, 2_400, False),
        ("level_failed", 3, 2_500, True),
    ],
)
def test_chance_and_trifles_are_no_findings(
    books: Books, cause: str, requests: int, tokens: int, is_shown: bool
) -> None:
    """Of fifty requests with a thousand tokens each."""
    books.use("ada", 50)
    books.count("ada", cause, requests, tokens)

    assert [one["cause"] for one in books.find()] == ([cause] if is_shown else [])


@pytest.mark.parametrize(
    ("kept", "advised"),
    [({"kept_by:1h": 9}, "1h"), ({"kept_by:1h": 4}, ""), ({"kept_by:12h": 9}, ""), ({}, "")],
)
def test_class_is_advised_if_it_would_have_paid(
    books: Books, kept: dict[str, int], advised: str
) -> None:
    """An hour costs more to write; a class that cache_control cannot name is not advised."""
    books.use("ada", 10)
    books.count("ada", "expired", 9, 9_000, place="5m", facts={"idle_s": 5_400, **kept})

    (found,) = books.find()
    expected = f"Use the retention class {advised}:" if advised else "no longer one would have paid"
    assert expected in found["advice"]
    assert "10 min after its last use" in found["sentence"]


def test_floor_holds_the_largest_working_set_of_an_hour(books: Books) -> None:
    books.use("ada", 10)
    for hours, tokens in ((1, 100), (2, 330)):
        hour_ms = NOW_MS - hours * HOUR_MS
        facts = {"evicted_pressure": 5, WORKING_SET: tokens, f"taker:{books.ids['bob']}": 7}
        books.count("ada", "evicted", 5, 5_000, hour_ms=hour_ms, facts=facts)

    (found,) = books.find()
    assert "Set a floor of 21 blocks (trunkline tenant set ada --floor 21)" in found["advice"]
    assert "evicted for bob" in found["sentence"]


def test_tenants_own_report_names_no_other(books: Books) -> None:
    books.use("ada", 5)
    facts = {"evicted_pressure": 5, f"taker:{books.ids['bob']}": 7}
    books.count("ada", "evicted", 5, 5_000, facts=facts)
    books.count("bob", "evicted", 5, 5_000)

    (own,) = books.find("ada", is_own=True)
    assert "evicted for other tenants in 5 of 5" in own["sentence"]
    assert own["advice"].startswith("Ask the operator for a floor, which")
    assert "bob" not in str(own)


def test_ids_are_stable_and_distinct(books: Books) -> None:
    books.use("ada", 5)
    for place in ("system", "tools"):
        for hours in (1, 2):
            hour_ms = NOW_MS - hours * HOUR_MS
            books.count("ada", "system_changes", 5, 900, place=place, hour_ms=hour_ms)
    before = {one["finding_id"]: one["place"] for one in books.find()}
    books.count("ada", "system_changes", 5, 900, place="system")

    assert len(before) == 2
    assert {one["finding_id"]: one["place"] for one in books.find()} == before


def test_unknown_tenant_is_an_error(books: Books) -> None:
    with pytest.raises(BadName, match="zoe"):
        books.find("zoe")


@pytest.mark.parametrize(
    ("pico", "shown"),
    [
        (0, "0.00"),
        (13_000_000_000, "0.013"),
        (390_000_000_000, "0.39"),
        (1_234_567_000_000, "1.23"),
        (1_350_000, "0.0000014"),
        (99_900_000_000, "0.100"),
    ],
)
def test_dollars_have_the_decimals_that_matter(pico: int, shown: str) -> None:
    assert dollars(pico) == shown
