"""Waiting on the loop for what the ledger's thread makes durable.

Each answer waits for two commits, and one commit serves many answers: the loop is woken once for
all of them. It knows no entry and no hold. `metering` writes through it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol

from tenancy.bookkeeping import Item
from tenancy.ledger import Told


class Writer(Protocol):
    """`tenancy.ledger.Ledger`, as far as it matters here."""

    def put(self, item: Item, told: Told) -> None:
        """Make it durable, then tell."""


class Landings:
    """Waiting for the ledger's thread: the loop is woken once for all that one commit made durable,
    not once for each. Any number wait at a time, on one loop."""

    def __init__(self) -> None:
        self._landed: deque[_Write] = deque()
        self._is_waking = False

    async def write(self, writer: Writer, item: Item) -> None:
        """Until it is durable. The item is handed in before anything is waited for, and cancelling
        the waiter changes nothing for the writer. Raises what the writer says."""
        loop = asyncio.get_running_loop()
        write = _Write(self, loop)
        writer.put(item, write)
        await write.waiter

    def land(self, loop: asyncio.AbstractEventLoop, write: _Write) -> None:
        """On the ledger's thread. What lands before the loop is awake needs no further call."""
        self._landed.append(write)
        if not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop has ended before its ledger
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """On the loop. The flag falls first: whatever lands from here on calls again."""
        self._is_waking = False
        while self._landed:
            write = self._landed.popleft()
            if write.waiter.done():
                continue  # cancelled meanwhile
            if write.error is None:
                write.waiter.set_result(None)
            else:
                write.waiter.set_exception(write.error)


class _Write:
    """One item on its way, and who waits for it: a `Told`."""

    __slots__ = ("_landings", "_loop", "error", "waiter")

    def __init__(self, landings: Landings, loop: asyncio.AbstractEventLoop) -> None:
        self._landings = landings
        self._loop = loop
        self.error: BaseException | None = None
        self.waiter: asyncio.Future[None] = loop.create_future()

    def set_result(self, _: None) -> None:
        """See `Told`."""
        self._landings.land(self._loop, self)

    def set_exception(self, exception: BaseException) -> None:
        """See `Told`."""
        self.error = exception
        self._landings.land(self._loop, self)
