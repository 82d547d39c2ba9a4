"""The audit finds each kind of damage, and nothing in correct books."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from msgspec import structs

from tenancy.accounting.audit import check_books
from tenancy.accounting.closing import close_days
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.adjustments import Adjustment, adjust
from tenancy.ledger.ledger import Hold, Ledger
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, UsageEntry
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall


def entry(request_id: str, at_ms: int) -> UsageEntry:
    return UsageEntry(
        request_id,
        1,
        1,
        "m",
        "done",
        at_ms,
        at_ms,
        10,
        2,
        3,
        5,
        4,
        0,
        {"5m": 2},
        {"1h": 3},
        epoch="e1",
    )


@pytest.fixture
def books(store: Store, wall: Wall) -> Iterator[Store]:
    """A ledger of two days with every kind of row, the first day closed."""
    create_tenant(store, wall, "ada")
    add_card(store, wall, RateCard("std", input=1_000_000, cache_read=7, cache_write={"1h": 9}))
    set_budget(store, Budget(1, "month", hard_micros=10**6))
    ledger = Ledger(store, wall)
    for number in range(5):
        ledger.settle(entry(str(number), wall())).result(60)
    adjust(store, wall, Adjustment("x", "3", -9, "an outage"), by=TESTER)
    wall.ms += DAY_MS
    close_days(store, wall, "1970-01-01", by=TESTER)
    for number in range(5, 9):
        ledger.hold(Hold(str(number), 1, 1, "m", wall(), 9, 9)).result(60)
        ledger.settle(entry(str(number), wall())).result(60)
    ledger.hold(Hold("open", 1, 1, "m", wall(), 9, 9)).result(60)
    yield store
    ledger.close()


def test_correct_books_have_no_findings(books: Store) -> None:
    """Entries, sums, chains, a close, an adjustment, a budget with an open hold."""
    assert check_books(books) == []


def test_sql_sums_equal_python_sums(store: Store, wall: Wall) -> None:
    """For hits and misses, with and without TTFT, and with savings below zero."""
    create_tenant(store, wall, "ada")
    add_card(store, wall, RateCard("dear", input=1, cache_read=3, cache_write={"1h": 7_000_003}))
    ledger = Ledger(store, wall)
    for number in range(40):
        read, ttft_ms = number % 3, number % 5 or None
        one = entry(str(number), wall() + number * 900_000)
        changed = structs.replace(
            one, read={}, cache_read_tokens=read, fresh_tokens=7 - read, ttft_ms=ttft_ms
        )
        ledger.hold(Hold(str(number), 1, 1, "m", one.started_ms, 9, 9)).result(60)
        ledger.settle(changed).result(60)
    ledger.close()

    assert store.query("select min(saved_pico) from ledger")[0][0] < -1_000_000
    assert check_books(store) == []


NO_TRIGGERS = "drop trigger ledger_entries_never_change; drop trigger ledger_entries_stay;"
DAMAGE = {
    "a charge": f"{NO_TRIGGERS} update ledger set charge_pico = 1 where entry_id = 8",
    "an owner": f"{NO_TRIGGERS} update ledger set key_id = 2 where entry_id = 8",
    "an entry gone": f"{NO_TRIGGERS} delete from ledger where entry_id = 7",
    "an entry of a closed day": f"{NO_TRIGGERS} update ledger set model = 'x' where entry_id = 2",
    "a sum": "update usage_hours set prompt_tokens = prompt_tokens + 1",
    "a sum by day": "update usage_days set prompt_tokens = prompt_tokens + 1",
    "a sum by day gone": "delete from usage_days",
    "a sum gone": "delete from usage_hours",
    "all sums gone": "delete from usage_hours; delete from usage_days",
    "a sum of nothing": "insert into usage_hours (tenant_id, hour_ms, key_id, model, requests)"
    " values (1, 0, 9, 'z', 1)",
    "an adjustment": "drop trigger adjustments_never_change; update adjustments set amount_pico=-8",
    "a close": "drop trigger closes_never_change; update closes set entries = 4",
    "a budget": "update budget_windows set spent_micros = 0",
    "a hold": "delete from holds",
    "an epoch": "update epoch_sums set output_tokens = 0",
    "a seal": "drop trigger seals_never_change; update seals set chain = x'00'",
    "a card": "drop trigger rate_cards_never_change; update rate_cards set prices ="
    " json_set(prices, '$.input', 5)",
}


def _of_postgres(statement: str) -> str:
    """Translate the statement: PostgreSQL has triggers per table and other JSON and byte
    literals."""
    if found := re.search(r"drop trigger (\w+)_(stay|never_change)", statement):
        table = found[1].replace("ledger_entries", "ledger")
        return f"drop trigger {found[1]}_{found[2]} on {table}"
    return statement.replace("x'00'", "'\\x00'").replace(
        "json_set(prices, '$.input', 5)", "jsonb_set(prices::jsonb, '{input}', '5')"
    )


@pytest.mark.parametrize("what", DAMAGE)
def test_each_damaged_row_is_found(books: Store, what: str) -> None:
    """By any program with access to the file."""
    with books.change() as db:
        for statement in DAMAGE[what].split(";"):
            db.execute(statement if books.is_local else _of_postgres(statement))

    assert check_books(books)


def test_findings_are_bounded(books: Store) -> None:
    """A broken chain breaks all later ones."""
    with books.change() as db:
        db.execute("insert into tenants (name, status, created_ms) values ('bob', 'active', 0)")
        for number in range(200):
            db.execute(
                "insert into usage_hours (tenant_id, hour_ms, key_id, model, requests)"
                " values (2, ?, 1, 'z', 1)",
                (number * 3_600_000,),
            )

    assert len(check_books(books)) == 100
