"""One hold, one entry, however a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.dialects.canonical import UsageRecord
from gateway.ledger.interface import InProcessLedger
from gateway.ledger.metering import LedgerReservation
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, LedgerUnavailable
from tenancy.ledger.ledger import Ledger
from tenancy.limits import Demand
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import Identity

RECORD = UsageRecord(total_in=10, read={"best_effort": 4}, fresh=6, out=3, physical_cached=4)


class Books:
    """A ledger with one tenant, at a fixed time."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder / "test.db")
        tenant = create_tenant(self.store, self.wall, "ada")
        key = create_key(self.store, self.wall, tenant.tenant_id)
        self.identity: Identity = KeyAuthenticator(self.store, self.wall, lambda: 0.0).authenticate(
            key
        )
        self.ledger = Ledger(self.store, self.wall)

    def wall(self) -> int:
        return 1_000

    def account(self, request_id: str) -> LedgerReservation:
        return LedgerReservation(
            InProcessLedger(self.ledger), self.wall, request_id, self.identity, "m"
        )

    def rows(self) -> list[tuple[object, ...]]:
        return self.store.query("select request_id, ending, output_tokens from ledger")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(tmp_path)
    yield books
    books.ledger.close()
    books.store.close()


async def test_a_hold_becomes_one_entry_with_disjoint_counts(books: Books) -> None:
    """prompt = read + write + fresh, or somebody pays twice for the same tokens."""
    account = books.account("a")
    await account.open()
    held = books.ledger.open_holds()
    await account.settle("done", RECORD)

    (row,) = books.store.query(
        "select prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens,"
        " physical_cached_tokens from ledger"
    )
    assert (held, books.ledger.open_holds()) == (1, 0)
    assert row == (10, 4, 0, 6, 3, 4)


async def test_settling_twice_keeps_the_first(books: Books) -> None:
    """Every path out settles; the first to come knows best."""
    account = books.account("a")
    await account.open()
    await account.settle("done", RECORD)
    await account.settle("cancelled", UsageRecord(total_in=0))

    assert books.rows() == [("a", "done", 3)]


async def test_a_waiter_that_is_cancelled_has_settled_and_leaves_the_writer_alive(
    books: Books,
) -> None:
    """A cancelled future would kill the one thread that writes for everybody."""
    first, second = books.account("a"), books.account("b")
    await first.open()
    waiting = asyncio.ensure_future(first.settle("cancelled", RECORD))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await second.open()
    await second.settle("done", RECORD)

    assert waiting.cancelled()
    assert books.rows() == [("a", "cancelled", 3), ("b", "done", 3)]


async def test_a_closed_ledger_refuses_before_anything_runs(books: Books) -> None:
    """Fail closed."""
    await asyncio.to_thread(books.ledger.close)

    with pytest.raises(LedgerUnavailable):
        await books.account("a").open()


async def test_what_does_not_fit_a_budget_leaves_nothing_to_settle(books: Books) -> None:
    """It never ran, so it has no entry; and the client is told which wall it met."""
    add_card(books.store, books.wall, RateCard("std", input=1_000_000, output=1_000_000))
    set_budget(books.store, Budget(1, "day", hard_micros=10))
    account = LedgerReservation(
        InProcessLedger(books.ledger), books.wall, "a", books.identity, "m", most=Demand(8, 3)
    )
    with pytest.raises(BudgetExceeded):
        await account.open()
    await account.settle("failed", RECORD)

    assert (account.is_open, books.rows(), books.ledger.open_holds()) == (False, [], 0)


async def test_an_entry_keeps_the_classes_and_the_circumstances(books: Books) -> None:
    """What prices and reconciliation go by."""
    account = LedgerReservation(
        InProcessLedger(books.ledger), books.wall, "a", books.identity, "m", dialect="d", epoch="e"
    )
    await account.open()
    await account.settle("done", RECORD, 0.25)
    (row,) = books.store.query(
        "select reads, writes, workspace, dialect, epoch, ttft_ms from ledger"
    )

    assert row == ('{"best_effort":4}', "{}", "default", "d", "e", 250)
