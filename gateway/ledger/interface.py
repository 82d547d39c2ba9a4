"""The ledger that a gateway hands its items in to, and whose commits it awaits on its loop.

`ledger_link` has the ledger in a process of its own; here it is in this one, for embedders and
tests. `metering`, `reckoning` and `storage_meter` write through either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import Item


class LedgerClient(Protocol):
    """A ledger, as the gateway's loop sees it. `restarts`: how often its process was replaced;
    `found_epoch` and `interrupted`: see `tenancy.ledger.writer.LedgerWriter`."""

    @property
    def found_epoch(self) -> LedgerEpoch | None: ...

    @property
    def interrupted(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def is_well(self) -> bool:
        """True if the last item was written, and no item has waited for long."""

    def write(self, item: Item) -> asyncio.Future[None]:
        """Hand in an item; returns at once. The future is done when the item is durable, or raises
        the writer's error; after LedgerUnavailable the item is not known to be written. Cancelling
        the future does not withdraw the item."""

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """Note how far requests have come, by request id. There is no answer."""

    def holds_first(self) -> AbstractContextManager[None]:
        """Within it, holds are not deferred: those of running requests are handed in before the
        items written within, and requests admitted within wait for their holds."""

    async def close(self) -> None:
        """Write all items handed in, then stop. Safe to repeat."""


class InProcessLedger:
    """A `LedgerClient` of a ledger whose writer is a thread of this process."""

    restarts = 0

    def __init__(self, ledger: Ledger) -> None:
        """`ledger`: closed with this client."""
        self._ledger = ledger

    @property
    def found_epoch(self) -> LedgerEpoch | None:
        """See `LedgerClient`."""
        return self._ledger.found_epoch

    @property
    def interrupted(self) -> int:
        """See `LedgerClient`."""
        return self._ledger.interrupted

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        return self._ledger.is_well

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`."""
        return asyncio.wrap_future(self._ledger.write(item))

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """See `LedgerClient`."""
        self._ledger.note_progress(reached)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerClient`: holds are never deferred here."""
        return nullcontext()

    async def close(self) -> None:
        """See `LedgerClient`."""
        await asyncio.to_thread(self._ledger.close)
