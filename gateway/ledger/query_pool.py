"""Connections for database calls that may take long, with a share for each tenant.

A long query must delay neither authentication, which uses the store's only reading connection, nor
short queries. So there are more connections, each with a thread, opened on first use. Operators
leave one connection to tenants, tenants leave one to operators, and a tenant uses one at a time.
This module knows no query. The gateway has two pools: `gateway.api` runs its reports in one; what
requests name (stored items, kept answers, cached contents) is read and written in the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from tenancy.storage.interface import Store

T = TypeVar("T")

CONNECTIONS = 3
"""Connections and threads: queries that run at once."""


class QueryPool:
    """Additional connections to a database. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        """`store`: the open store of the same database."""
        self._store = store
        self._spare: list[Store] = []
        self._threads = ThreadPoolExecutor(CONNECTIONS, "reports")
        self._total_limit = asyncio.Semaphore(CONNECTIONS)
        self._operator_limit = asyncio.Semaphore(CONNECTIONS - 1)
        self._tenant_limit = asyncio.Semaphore(CONNECTIONS - 1)
        # An entry lives while a query of the tenant waits or runs.
        self._limit_by_tenant: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def ask(self, question: Callable[[Store], T], tenant_id: int | None = None) -> T:
        """Run a query of a tenant, or of an operator if `tenant_id` is None, and return its result.

        Queries run first come, first served. Raises what the query raises.
        """
        limits, acquired = self._limits_for(tenant_id), 0
        try:
            for limit in limits:
                await limit.acquire()
                acquired += 1
            # Taken here: a thread that looks first and takes later may find the connection gone.
            spare = self._spare.pop() if self._spare else None
            future = self._threads.submit(self._answer, question, spare)
        except BaseException:
            _release(limits[:acquired])
            raise
        # The caller may be cancelled before the thread is done; its place stays taken until then.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(_release, limits))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Wait for running queries, then close all connections. Safe to repeat; no query may
        follow."""
        await asyncio.to_thread(self._threads.shutdown)
        while self._spare:
            await asyncio.to_thread(self._spare.pop().close)

    def _limits_for(self, tenant_id: int | None) -> list[asyncio.Semaphore]:
        """Return the semaphores to acquire, in order. Each queue is first come, first served, and
        longer the further it is from the thread."""
        if tenant_id is None:
            return [self._operator_limit, self._total_limit]
        by_tenant = self._limit_by_tenant.setdefault(tenant_id, asyncio.Semaphore(1))
        return [by_tenant, self._tenant_limit, self._total_limit]

    def _answer(self, question: Callable[[Store], T], spare: Store | None) -> T:
        store = self._store.open_another() if spare is None else spare
        try:
            return question(store)
        finally:
            self._spare.append(store)


def _release(limits: list[asyncio.Semaphore]) -> None:
    for limit in reversed(limits):
        limit.release()
