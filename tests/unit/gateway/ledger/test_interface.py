"""Conformance of both ledger clients: in this process, and in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from gateway.ledger.client import LedgerProcessClient
from gateway.ledger.interface import InProcessLedger, LedgerClient, OpenedLedger
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, IdempotencyConflict, LedgerUnavailable, TenancyError
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord, find
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import (
    Hold,
    NamedEntry,
    StorageReading,
    StorageReadings,
)
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import TokenCounts
from tests.unit.tenancy.conftest import used
from tests.unit.tenancy.ledger.written import endings, holds
from tests.unit.tenancy.storage.new_sqlite import new_sqlite


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: the tests read the file in the event loop."""


class LedgerUnderTest:
    """A ledger client, and what was written."""

    def __init__(self, client: LedgerClient, store: SqliteStore) -> None:
        self.client = client
        self.store = store

    async def error(self, item: Hold | NamedEntry) -> TenancyError:
        """Return the error that refuses the item."""
        with pytest.raises(TenancyError) as caught:
            await self.client.write(item)
        return caught.value


async def open_client(kind: str, store: SqliteStore) -> OpenedLedger:
    if kind == "in_process":
        return InProcessLedger(Ledger(store, lambda: 1_000))
    client = LedgerProcessClient(store.path.name, store.path.parent, lambda event, facts: None)
    await client.open()
    return client


@pytest.fixture(params=["in_process", "process"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LedgerUnderTest]:
    with closing(new_sqlite(tmp_path / "test.db")) as store:
        create_tenant(store, lambda: 1, "ada")
        client = await open_client(request.param, store)
        yield LedgerUnderTest(client, store)
        await client.close()


def hold(request_id: str, claim: Claim | None = None, output: int = 0) -> Hold:
    return Hold(request_id, 1, 1, "m", 10, output_tokens=output, claim=claim)


async def test_settles_hold_into_one_entry(ledger: LedgerUnderTest) -> None:
    """However often the entry is sent."""
    await ledger.client.write(hold("a"))
    held = holds(ledger.store)
    await ledger.client.write(used("a", 10))
    await ledger.client.write(structs.replace(used("a", 10), output_tokens=99))
    again = await ledger.error(hold("a"))

    assert (held, holds(ledger.store)) == (1, 0)
    assert endings(ledger.store) == {"a": ("done", 4)}
    assert (type(again), again.code) == (LedgerUnavailable, "duplicate_request")


async def test_refuses_only_impossible_items_of_a_batch(ledger: LedgerUnderTest) -> None:
    """One impossible entry among hundreds, and one that cannot be encoded."""
    wrong = structs.replace(used("wrong", 10), fresh_tokens=1)
    unencodable = used("\ud800", 10)
    good = [used(str(number), 10) for number in range(300)]
    items = [*good[:150], wrong, *good[150:]]
    if isinstance(ledger.client, LedgerProcessClient):
        items.insert(7, unencodable)
    answers = await asyncio.gather(*map(ledger.client.write, items), return_exceptions=True)

    refused = [answer for answer in answers if isinstance(answer, LedgerUnavailable)]
    assert {error.code for error in refused} == {"impossible_entry"}
    assert len(refused) == len(items) - 300
    assert len(endings(ledger.store)) == 300


async def test_writes_item_of_cancelled_caller(ledger: LedgerUnderTest) -> None:
    """A client that disconnects while the disk is busy has settled, too."""
    waiters = [ledger.client.write(used(name, 10)) for name in "ab"]
    waiters[0].cancel()
    await waiters[1]

    assert set(endings(ledger.store)) == {"a", "b"}


async def test_close_writes_queued_items(ledger: LedgerUnderTest) -> None:
    """In the middle of a burst; afterwards items are refused."""
    waiters = [ledger.client.write(used(str(number), 10)) for number in range(400)]
    await ledger.client.close()
    await ledger.client.close()
    late = await ledger.error(hold("late"))

    assert all(waiter.done() and waiter.exception() is None for waiter in waiters)
    assert len(endings(ledger.store)) == 400
    assert (type(late), late.code) == (LedgerUnavailable, "closed")


async def test_refusals_keep_their_attributes(ledger: LedgerUnderTest) -> None:
    """Such as the end of a budget's window, and the conflicting idempotency key."""
    add_card(ledger.store, lambda: 1, RateCard("std", output=10**6))
    set_budget(ledger.store, Budget(1, "day", hard_micros=50))
    claim = Claim("n", bytes(32), 10)
    await ledger.client.write(hold("a", claim, output=40))
    named = await ledger.error(hold("b", claim))
    dear = await ledger.error(hold("c", output=20))

    assert (type(named), named.code) == (IdempotencyConflict, "idempotency_in_flight")
    assert isinstance(dear, BudgetExceeded)
    assert (dear.scope, dear.window, dear.hard_pico) == ("tenant", "day", 50 * 10**6)
    assert (dear.spent_pico, dear.reserved_pico) == (0, 40 * 10**6)
    assert dear.resets_ms == 86_400_000
    assert dear.retry_after_s is not None


async def test_keeps_large_response_for_replay(ledger: LedgerUnderTest) -> None:
    """Byte for byte; it takes many reads of the socket."""
    body = bytes(range(256)) * 20_000
    claim, answer = Claim("n", bytes(32), 10), ReplayedResponse("{}", body)
    await ledger.client.write(hold("a", claim))
    await ledger.client.write(NamedEntry(used("a", 10), ReplayRecord(10**15, 10**9, answer)))

    assert find(ledger.store, 1, claim, 11) == answer


async def test_writes_totals_storage_and_progress(ledger: LedgerUnderTest) -> None:
    """They have no hold, and progress has no waiter."""
    await ledger.client.write(hold("open"))
    ledger.client.note_progress({"open": TokenCounts(output_tokens=3)})
    reading = StorageReading(1, "1h", 7, "m")
    await ledger.client.write(StorageReadings("e1", 10, (reading,)))
    await ledger.client.write(EngineTotals("e", 10, *range(1, 7)))
    await ledger.client.close()
    with closing(ledger.store.open_another()) as store:
        # A ledger process has closed its open holds itself.
        Ledger(store, lambda: 1).close()

    assert ledger.store.query("select token_seconds from storage_hours") == [(7,)]
    assert ledger.store.query("select output_tokens from engine_epochs") == [(3,)]
    assert endings(ledger.store) == {"open": ("interrupted", 3)}


async def test_start_reports_interrupted_requests(tmp_path: Path) -> None:
    found = []
    for kind in ("in_process", "process"):
        with closing(new_sqlite(tmp_path / f"{kind}.db")) as store:
            create_tenant(store, lambda: 1, "ada")
            with store.change() as db:
                db.execute(
                    "insert into holds (request_id, tenant_id, key_id, model, started_ms,"
                    " booked_ms) values ('a', 1, 1, 'm', 10, 10)"
                )
            client = await open_client(kind, store)
            found.append((client.interrupted, client.found_epoch, client.restarts))
            await client.close()

    assert found == [(1, None, 0)] * 2
