"""The database once more, for questions that take their time.

A long question must not keep anybody's authentication waiting for the one connection that reads,
so it has its own, opened when it is first needed. One question runs at a time, in a thread: many at
once would take every thread there is. It knows no question; `usage_report` asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from tenancy.store import Store

T = TypeVar("T")


class Reports:
    """A second way to read a database. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        """`store`: the one beside which another is opened."""
        self._first = store
        self._store: Store | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: Callable[[Store], T]) -> T:
        """Its answer, after those who asked before. Raises what the question raises."""
        async with self._turn:
            return await asyncio.to_thread(self._answer, question)

    async def close(self) -> None:
        """After the question that runs, if one does."""
        async with self._turn:
            if self._store is not None:
                await asyncio.to_thread(self._store.close)
                self._store = None

    def _answer(self, question: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = self._first.another()
        return question(self._store)
