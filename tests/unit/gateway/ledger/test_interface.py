"""Both doors to a ledger, in this process and in one of its own, keep the same promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from gateway.ledger.client import LedgerProcessClient
from gateway.ledger.interface import InProcessLedger, LedgerClient
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import BudgetExceeded, IdempotencyConflict, LedgerUnavailable, TenancyError
from tenancy.ledger.idempotency import Claim, ReplayRecord, StoredResponse, find
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import EngineTotals, Hold, NamedEntry, StorageReading
from tenancy.pricing.budgets import Budget, set_budget
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tests.unit.tenancy.conftest import used


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Not here: the tests look into the file, and nobody is served meanwhile."""


class Books:
    """A door, and a look at what was written."""

    def __init__(self, door: LedgerClient, store: SqliteStore) -> None:
        self.door = door
        self.store = store

    def endings(self) -> dict[str, tuple[str, int]]:
        """(ending, output tokens) of each entry."""
        rows = self.store.query("select request_id, ending, output_tokens from ledger")
        return {request_id: (ending, tokens) for request_id, ending, tokens in rows}

    def holds(self) -> int:
        return int(self.store.query("select count(*) from holds")[0][0])

    async def error(self, item: Hold | NamedEntry) -> TenancyError:
        """Why it is refused."""
        with pytest.raises(TenancyError) as caught:
            await self.door.write(item)
        return caught.value


async def opened(kind: str, store: SqliteStore) -> LedgerClient:
    if kind == "here":
        return InProcessLedger(Ledger(store, lambda: 1_000))
    return await LedgerProcessClient.open(
        store.path.name, store.path.parent, lambda event, facts: None
    )


@pytest.fixture(params=["here", "link"])
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Books]:
    with closing(SqliteStore(tmp_path / "test.db")) as store:
        create_tenant(store, lambda: 1, "ada")
        door = await opened(request.param, store)
        yield Books(door, store)
        await door.close()


def hold(request_id: str, claim: Claim | None = None, output: int = 0) -> Hold:
    return Hold(request_id, 1, 1, "m", 10, output_tokens=output, claim=claim)


async def test_a_hold_is_settled_into_one_entry(books: Books) -> None:
    """However often it is sent."""
    await books.door.write(hold("a"))
    held = books.holds()
    await books.door.write(used("a", 10))
    await books.door.write(structs.replace(used("a", 10), output_tokens=99))
    again = await books.error(hold("a"))

    assert (held, books.holds()) == (1, 0)
    assert books.endings() == {"a": ("done", 4)}
    assert (type(again), again.code) == (LedgerUnavailable, "duplicate_request")


async def test_many_at_once_are_answered_each_by_its_own(books: Books) -> None:
    """One impossible entry among hundreds, and one that nobody can even write down."""
    wrong = structs.replace(used("wrong", 10), fresh_tokens=1)
    unheard = used("\ud800", 10)
    good = [used(str(number), 10) for number in range(300)]
    items = [*good[:150], wrong, *good[150:]]
    if isinstance(books.door, LedgerProcessClient):
        items.insert(7, unheard)
    answers = await asyncio.gather(*map(books.door.write, items), return_exceptions=True)

    refused = [answer for answer in answers if isinstance(answer, LedgerUnavailable)]
    assert {error.code for error in refused} == {"impossible_entry"}
    assert len(refused) == len(items) - 300
    assert len(books.endings()) == 300


async def test_what_is_handed_in_is_written_whoever_waits(books: Books) -> None:
    """A client that leaves while the disk is busy has settled too."""
    waiters = [books.door.write(used(name, 10)) for name in "ab"]
    waiters[0].cancel()
    await waiters[1]

    assert set(books.endings()) == {"a", "b"}


async def test_closing_writes_what_was_handed_in(books: Books) -> None:
    """In the middle of a burst; afterwards nothing is taken."""
    waiters = [books.door.write(used(str(number), 10)) for number in range(400)]
    await books.door.close()
    await books.door.close()
    late = await books.error(hold("late"))

    assert all(waiter.done() and waiter.exception() is None for waiter in waiters)
    assert len(books.endings()) == 400
    assert (type(late), late.code) == (LedgerUnavailable, "closed")


async def test_refusals_arrive_with_all_that_they_say(books: Books) -> None:
    """When a budget's window ends, and whose name it is."""
    add_card(books.store, lambda: 1, RateCard("std", output=10**6))
    set_budget(books.store, Budget(1, "day", hard_micros=50))
    claim = Claim("n", bytes(32), 10)
    await books.door.write(hold("a", claim, output=40))
    named = await books.error(hold("b", claim))
    dear = await books.error(hold("c", output=20))

    assert (type(named), named.code) == (IdempotencyConflict, "idempotency_in_flight")
    assert isinstance(dear, BudgetExceeded)
    assert (dear.scope, dear.window, dear.hard_pico) == ("tenant", "day", 50 * 10**6)
    assert (dear.spent_pico, dear.reserved_pico) == (0, 40 * 10**6)
    assert dear.resets_ms == 86_400_000
    assert dear.retry_after_s is not None


async def test_an_answer_is_kept_whatever_its_size(books: Books) -> None:
    """Byte for byte; it takes many turns of a socket."""
    body = bytes(range(256)) * 20_000
    claim, answer = Claim("n", bytes(32), 10), StoredResponse("{}", body)
    await books.door.write(hold("a", claim))
    await books.door.write(NamedEntry(used("a", 10), ReplayRecord(10**15, 10**9, answer)))

    assert find(books.store, 1, claim, 11) == answer


async def test_the_engines_counts_storage_and_progress_are_written(books: Books) -> None:
    """They have no hold, and the last of them nobody who waits."""
    await books.door.write(hold("open"))
    books.door.note_progress({"open": Progress(output_tokens=3)})
    await books.door.write(StorageReading(1, "1h", 7, 10, "m"))
    await books.door.write(EngineTotals("e", 10, *range(1, 7)))
    await books.door.close()
    with closing(books.store.another()) as store:
        ledger = Ledger(store, lambda: 1)  # what a process left open it has closed itself
        ledger.close()

    assert books.store.query("select token_seconds from storage_hours") == [(7,)]
    assert books.store.query("select output_tokens from engine_epochs") == [(3,)]
    assert books.endings() == {"open": ("interrupted", 3)}


async def test_a_start_says_what_it_has_closed(tmp_path: Path) -> None:
    """For the log: who lost an answer."""
    found = []
    for kind in ("here", "link"):
        with closing(SqliteStore(tmp_path / f"{kind}.db")) as store:
            create_tenant(store, lambda: 1, "ada")
            with store.change() as db:
                db.execute(
                    "insert into holds (request_id, tenant_id, key_id, model, started_ms,"
                    " booked_ms) values ('a', 1, 1, 'm', 10, 10)"
                )
            door = await opened(kind, store)
            found.append((door.interrupted, door.found_epoch, door.restarts))
            await door.close()

    assert found == [(1, None, 0)] * 2
