"""The database a few times more, for questions that take their time.

A long question must not keep anybody's authentication waiting for the one connection that reads,
nor the short ones behind it, so there are some more, each with a thread, opened when they are first
needed. Operators leave one of the places to tenants and tenants one to operators, whatever the
others ask, and a tenant has one at a time. It knows no question; `usage_report` and others ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from tenancy.storage.interface import Store

T = TypeVar("T")

PLACES = 3
"""Questions that run at once: connections, and threads."""


class QueryPool:
    """More ways to read a database. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        """`store`: the one beside which others are opened."""
        self._first = store
        self._spare: list[Store] = []
        self._threads = ThreadPoolExecutor(PLACES, "reports")
        self._places = asyncio.Semaphore(PLACES)
        self._operators = asyncio.Semaphore(PLACES - 1)
        self._tenants = asyncio.Semaphore(PLACES - 1)
        # As long as a question of the tenant's waits or runs.
        self._own: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def ask(self, question: Callable[[Store], T], tenant_id: int | None = None) -> T:
        """Its answer, after those who asked before: for a tenant, or for an operator. Raises what
        the question raises."""
        doors, passed = self._doors(tenant_id), 0
        try:
            for door in doors:  # each is the longer a queue, the further from the thread
                await door.acquire()
                passed += 1
            # Taken here, since a thread that looks and then takes may find that another was faster.
            spare = self._spare.pop() if self._spare else None
            work = self._threads.submit(self._answer, question, spare)
        except BaseException:
            _leave(doors[:passed])
            raise
        # Whoever asked may be gone before the thread is done: it has its place until then.
        loop = asyncio.get_running_loop()
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(_leave, doors))
        return await asyncio.wrap_future(work)

    async def close(self) -> None:
        """After the questions that run. Safe to call twice; nobody asks any more."""
        await asyncio.to_thread(self._threads.shutdown)
        while self._spare:
            await asyncio.to_thread(self._spare.pop().close)

    def _doors(self, tenant_id: int | None) -> list[asyncio.Semaphore]:
        """Whose turn it is is settled at one after the other, each first come, first served."""
        if tenant_id is None:
            return [self._operators, self._places]
        own = self._own.setdefault(tenant_id, asyncio.Semaphore(1))
        return [own, self._tenants, self._places]

    def _answer(self, question: Callable[[Store], T], spare: Store | None) -> T:
        store = self._first.another() if spare is None else spare
        try:
            return question(store)
        finally:
            self._spare.append(store)


def _leave(doors: list[asyncio.Semaphore]) -> None:
    for door in reversed(doors):
        door.release()
