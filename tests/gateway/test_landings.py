"""One waking of the loop for everything that a commit made durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from gateway.landings import Landings
from tenancy.errors import LedgerUnavailable


async def waiting(landings: Landings, writes: list[Future[None]]) -> list[asyncio.Task[None]]:
    """A task for each write, all of them waiting."""
    tasks = [asyncio.ensure_future(landings.wait(write)) for write in writes]
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
    writes: list[Future[None]] = [Future() for _ in range(9)]
    tasks = await waiting(Landings(), writes)
    for write in writes:
        write.set_result(None)
    await asyncio.gather(*tasks)

    assert len(calls) == 1


async def test_everybody_hears_what_became_of_his_own_write() -> None:
    """One refused entry must not look like the others, nor the others like it."""
    writes: list[Future[None]] = [Future() for _ in range(3)]
    tasks = await waiting(Landings(), writes)
    writes[0].set_result(None)
    writes[1].set_exception(LedgerUnavailable("not_durable", "no"))
    await tasks[0]
    with pytest.raises(LedgerUnavailable):
        await tasks[1]
    still_waits = not tasks[2].done()
    writes[2].set_result(None)
    await tasks[2]

    assert still_waits


async def test_what_landed_before_anybody_waited_is_heard() -> None:
    """The writer may be faster than the loop."""
    write: Future[None] = Future()
    write.set_result(None)

    async with asyncio.timeout(5):
        await Landings().wait(write)


async def test_a_cancelled_waiter_takes_nothing_from_the_others() -> None:
    """A client that leaves while the disk is busy."""
    writes: list[Future[None]] = [Future(), Future()]
    tasks = await waiting(Landings(), writes)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    for write in writes:
        write.set_result(None)
    await tasks[1]

    assert tasks[0].cancelled()
    assert not writes[0].cancelled()
