"""Waiting on the loop for what the ledger's thread makes durable.

Each answer waits for two commits, and one commit serves many answers: the loop is woken once for
all of them. It knows futures, no ledger. `metering` waits through it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from contextlib import suppress


class Landings:
    """Waiting for the ledger's thread: the loop is woken once for all that one commit made durable,
    not once for each. Any number wait at a time, on one loop."""

    def __init__(self) -> None:
        self._landed: deque[tuple[asyncio.Future[None], Future[None]]] = deque()
        self._is_waking = False

    async def wait(self, written: Future[None]) -> None:
        """Until it is durable. Raises what the ledger says. Cancelling the waiter changes nothing
        for the writer."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        written.add_done_callback(lambda done: self._land(loop, waiter, done))
        await waiter

    def _land(
        self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], done: Future[None]
    ) -> None:
        """On the ledger's thread. What lands before the loop is awake needs no further call."""
        self._landed.append((waiter, done))
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop has ended before its ledger
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """On the loop. The flag falls first: whatever lands from here on calls again."""
        self._is_waking = False
        while self._landed:
            waiter, done = self._landed.popleft()
            if waiter.done():
                continue  # cancelled meanwhile
            error = done.exception()
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
