"""`LedgerClient`: how the gateway's event loop writes to the ledger and awaits commits.

`gateway.ledger.client` runs the ledger in a separate process. `InProcessLedger` runs it in a thread
of this process, for embedded gateways and tests. `metering`, `background.reconciliation` and
`background.storage_metering` write through either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import Item
from tenancy.types import TokenCounts


class LedgerClient(Protocol):
    """A ledger, as the gateway's event loop sees it.

    `restarts`: number of times its process was replaced.
    """

    @property
    def restarts(self) -> int: ...

    @property
    def is_well(self) -> bool:
        """Return whether the last item was written and no item has waited for long."""

    def write(self, item: Item) -> asyncio.Future[None]:
        """Write an item; return at once.

        The future is done when the item is durable, or raises the writer's error. After
        LedgerUnavailable the item may or may not have been written. Cancelling the future does not
        withdraw the item.
        """

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """Record how far requests have come, by request id. Waits for nothing and confirms
        nothing."""

    def holds_first(self) -> AbstractContextManager[None]:
        """Defer no holds in this context.

        The holds of running requests are written before the items of this context, and a request
        that is admitted meanwhile waits for its hold.
        """

    async def close(self) -> None:
        """Write all queued items, then stop. Safe to repeat."""


class OpenedLedger(LedgerClient, Protocol):
    """A ledger that tells what it found when it was opened; see
    `tenancy.ledger.writer.LedgerWriter`."""

    @property
    def found_epoch(self) -> LedgerEpoch | None: ...

    @property
    def interrupted(self) -> int: ...


class InProcessLedger:
    """A `LedgerClient` over a ledger that writes in a thread of this process."""

    restarts = 0

    def __init__(self, ledger: Ledger) -> None:
        """`ledger`: closed with this client."""
        self._ledger = ledger
        self.found_epoch, self.interrupted = ledger.found_epoch, ledger.interrupted

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        return self._ledger.is_well

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`."""
        return asyncio.wrap_future(self._ledger.write(item))

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """See `LedgerClient`."""
        self._ledger.note_progress(reached)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerClient`. Does nothing: this client defers no hold."""
        return nullcontext()

    async def close(self) -> None:
        """See `LedgerClient`."""
        await asyncio.to_thread(self._ledger.close)
