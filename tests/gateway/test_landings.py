"""One waking of the loop for everything that a commit made durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.landings import Landings
from tenancy.bookkeeping import Hold, Item
from tenancy.errors import LedgerUnavailable
from tenancy.ledger import Told

HOLD = Hold("r", 1, 1, "m", 0)


class Writer:
    """Takes items, and tells when a test says so; at once where it `is_quick`."""

    def __init__(self, *, is_quick: bool = False) -> None:
        self.is_quick = is_quick
        self.told: list[Told] = []

    def put(self, item: Item, told: Told) -> None:
        self.told.append(told)
        if self.is_quick:
            told.set_result(None)


async def waiting(writer: Writer, count: int) -> list[asyncio.Task[None]]:
    """So many tasks, each of which waits for a write."""
    landings = Landings()
    tasks = [asyncio.ensure_future(landings.write(writer, HOLD)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_all_that_lands_at_once_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every waking is a byte through a pipe, taken from the thread that should be writing."""
    calls: list[object] = []
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe

    def counted(call: Callable[[], object]) -> object:
        calls.append(call)
        return wake(call)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    writer = Writer()
    tasks = await waiting(writer, 9)
    for told in writer.told:
        told.set_result(None)
    await asyncio.gather(*tasks)

    assert len(calls) == 1


async def test_everybody_hears_what_became_of_his_own_write() -> None:
    """One refused entry must not look like the others, nor the others like it."""
    writer = Writer()
    tasks = await waiting(writer, 3)
    writer.told[0].set_result(None)
    writer.told[1].set_exception(LedgerUnavailable("not_durable", "no"))
    await tasks[0]
    with pytest.raises(LedgerUnavailable):
        await tasks[1]
    still_waits = not tasks[2].done()
    writer.told[2].set_result(None)
    await tasks[2]

    assert still_waits


async def test_what_landed_before_anybody_waited_is_heard() -> None:
    """The writer may be faster than the loop."""
    async with asyncio.timeout(5):
        await Landings().write(Writer(is_quick=True), HOLD)


async def test_a_cancelled_waiter_takes_nothing_from_the_others() -> None:
    """A client that leaves while the disk is busy: its item stays with the writer."""
    writer = Writer()
    tasks = await waiting(writer, 2)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    for told in writer.told:
        told.set_result(None)
    await tasks[1]

    assert tasks[0].cancelled()
