"""`find`: which sums are findings, what they cost, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.findings.report import FindingsWindow, dollars, find
from tenancy.accounts.tenants import change_tenant, create_tenant
from tenancy.errors import BadName
from tenancy.ledger.ledger import Ledger
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.reuse.finding_counts import WORKING_SET, FindingCount, add_counts
from tenancy.types import DAY_MS, HOUR_MS, MINUTE_MS, UsageEntry
from tests.actors import TESTER
from tests.tables import each_row
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

    def use(
        self,
        name: str,
        requests: int,
        tokens: int = 1_000,
        cached: int = 0,
        at_ms: int | None = None,
    ) -> None:
        """Book requests of one tenant; `at_ms`: when they were received, which ids tell."""
        for number in range(requests):
            known = f"{at_ms:012x}{number:020x}" if at_ms is not None else f"{name}{number}"
            entry = UsageEntry(
                request_id=known,
                tenant_id=self.ids[name],
                key_id=1,
                model="m",
                ending="done",
                started_ms=NOW_MS - HOUR_MS,
                ended_ms=NOW_MS - HOUR_MS,
                prompt_tokens=tokens,
                cache_read_tokens=cached,
                cache_write_tokens=0,
                fresh_tokens=tokens - cached,
                output_tokens=0,
                physical_cached_tokens=cached,
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


def test_waste_is_priced_as_it_was_charged(books: Books) -> None:
    """Tokens of a changing prefix that were written at a breakpoint cost the write's price."""
    books.use("ada", 5)
    facts = {"write:5m": 2_000, "write:1h": 500}
    books.count("ada", "system_changes", 4, 3_000, place="system", facts=facts)

    (found,) = books.find()
    # 2,000 at 1.15, 500 at 1.9 and 500 at 0.9 micro-dollars
    assert found["cost_usd"] == "0.0037"
    assert "2,500 of them charged as written" in found["sentence"]


@pytest.mark.parametrize(("read_back", "is_shown"), [(0, True), (399, True), (400, False)])
def test_writes_that_are_not_read_are_named(books: Books, read_back: int, is_shown: bool) -> None:
    """Their cost is what a write costs more than input."""
    books.use("ada", 5)
    facts = {"write:5m": 4_000, "read_back_tokens": read_back}
    books.count("ada", "written_never_read", 4, 4_000, facts=facts)

    found = books.find()
    assert [one["cause"] for one in found] == ["written_never_read"] * is_shown
    for one in found:
        assert one["cost_usd"] == "0.0010"  # 4,000 tokens at 0.25 micro-dollars
        assert (
            f"4,000 tokens were written at breakpoints in 4 of 5 requests, and {read_back:,}"
            in (one["sentence"])
        )


def test_start_of_a_session_is_seen_in_long_sessions(books: Books) -> None:
    """An agent misses once in a hundred requests, and pays for it."""
    books.use("ada", 400, tokens=100, cached=90)
    books.count("ada", "system_changes", 4, 300, place="system")

    assert [one["cause"] for one in books.find()] == ["system_changes"]


def test_a_stable_prompt_is_advised_before_a_floor(books: Books) -> None:
    """A floor takes blocks from other tenants."""
    books.use("ada", 20)
    books.count("ada", "tools_changed", 4, 2_000)
    books.count("ada", "evicted", 9, 9_000, facts={"evicted_pressure": 9, WORKING_SET: 320})

    changed, evicted = books.find()
    assert (changed["cause"], evicted["cause"]) == ("tools_changed", "evicted")
    assert evicted["advice"].startswith("First stop changing the prompts")
    assert "set a floor of 20 blocks" in evicted["advice"]


def test_own_ceiling_is_raised_to_a_number(books: Books) -> None:
    change_tenant(books.store, "ada", {"ceiling_blocks": 50}, by=TESTER)
    books.use("ada", 10)
    books.count("ada", "evicted", 9, 9_000, facts={"evicted_own_quota": 9, WORKING_SET: 320})

    (found,) = books.find()
    assert "from 50 to 70 blocks (trunkline tenant set ada --ceiling 70)" in found["advice"]


def test_refused_models_are_named_with_the_alias(books: Books) -> None:
    """Refusals are not in the ledger."""
    books.use("ada", 18)
    books.count("ada", "not_served", 42, 0, place="gpt-4o")

    (found,) = books.find()
    assert found["sentence"] == "ada: asks for gpt-4o, which is not served, in 42 of 60 requests."
    assert 'model.aliases = ["gpt-4o"]' in found["advice"]


@pytest.mark.parametrize(
    ("minutes", "pace", "saving"),
    [(10, "hour", "0.65"), (180, "3 h", "0.22"), (24 * 60 * 6, "6 d", "0.0045")],
)
def test_month_is_at_the_pace_of_the_observed_time(
    books: Books, minutes: int, pace: str, saving: str
) -> None:
    """Also when the server is young, and no less while no request comes."""
    last_ms = NOW_MS - HOUR_MS
    for at_ms in (last_ms - minutes * MINUTE_MS, last_ms):
        books.use("ada", 1, at_ms=at_ms)
    books.count("ada", "system_changes", 3, 1_000, place="system")
    answers = [
        find(books.store, FindingsWindow.of(NOW_MS - 7 * DAY_MS, NOW_MS + later_ms))
        for later_ms in (0, 40 * MINUTE_MS)
    ]

    for answer in answers:
        assert answer["pace"] == f"at the pace of the last {pace}"
        assert answer["findings"][0]["saving_usd_month"] == saving


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
        ("system_changes", 1, 9_000, False),
        ("system_changes", 2, 2_400, False),
        ("system_changes", 2, 2_500, True),
        ("not_served", 2, 0, False),
        ("not_served", 3, 0, True),
        ("evicted", 3, 2_400, False),
        ("evicted", 3, 2_500, True),
        ("evicted", 1, 9_000, False),
        ("prompt_changes", 4, 9_000, False),
        ("prompt_changes", 5, 2_500, True),
        ("restarted", 1, 100, True),
        ("promise_broken", 1, 100, True),
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


def test_one_floor_is_advised_for_all_models(books: Books) -> None:
    """It holds in the cache of each: following the second advice must not undo the first."""
    books.use("ada", 20)
    for model, tokens in (("m", 330), ("n", 100)):
        facts = {"evicted_pressure": 9, WORKING_SET: tokens}
        books.count("ada", "evicted", 9, 9_000, facts=facts, model=model)

    found = books.find()
    assert {one["model"] for one in found} == {"m", "n"}
    assert all("trunkline tenant set ada --floor 21)" in one["advice"] for one in found)


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


@each_row(
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


def test_a_broken_promise_costs_the_operator_what_was_not_charged(books: Books) -> None:
    """Once, not every month; also where that is more than all that the tenant was charged. It says
    what would have kept it, and to the tenant that it need not change anything."""
    books.use("ada", 3, 10_000, cached=10_000)
    books.count("ada", "promise_broken", 1, 9_000, place="1h")

    (found,) = books.find()
    (own,) = books.find("ada", is_own=True)
    assert found["of_cost_usd"] == "0.0030"
    assert found["cost_usd"] == found["saving_usd_month"] == "0.0081"  # 9,000 at 0.9 micro-dollars
    assert "class 1h were lost with an engine in 1 of 3 requests" in found["sentence"]
    assert "about $0.0081 not charged for them" in found["sentence"]
    for cure in ("disk", "host memory", "second replica", "drain", "store"):
        assert cure in found["advice"]
    assert "charged as reads" in own["advice"]
