"""Where the gateway hands in what must be durable, and waits for it on its loop.

`ledger_link` has the ledger in a process of its own; here is the one in this process, for embedders
and tests. `metering`, `reckoning` and `storage_meter` write through either.
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


class LedgerDoor(Protocol):
    """A ledger, as far as a loop sees it. `restarts`: how often its process was started again;
    the rest is `tenancy.ledger.writer.LedgerWriter`'s."""

    @property
    def found_epoch(self) -> LedgerEpoch | None: ...

    @property
    def interrupted(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    @property
    def is_well(self) -> bool:
        """Was the last thing that was handed in written, and is nothing waited for long?"""

    def write(self, item: Item) -> asyncio.Future[None]:
        """Hand it in, at once. The future is done when it is durable, or raises what the writer
        answers; LedgerUnavailable: nobody may be told that it was written. Cancelling it changes
        nothing for the writer."""

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """Keep how far requests have come, by request id. Nobody is told."""

    def holds_first(self) -> AbstractContextManager[None]:
        """What runs has its hold, handed in before whatever is written within; and whatever is
        admitted within waits for its hold."""

    async def close(self) -> None:
        """Write what has been handed in, then stop. Safe to call twice."""


class LedgerHere:
    """A ledger whose writer is a thread of this process."""

    restarts = 0

    def __init__(self, ledger: Ledger) -> None:
        """It is closed with this."""
        self._ledger = ledger

    @property
    def found_epoch(self) -> LedgerEpoch | None:
        """See `LedgerDoor`."""
        return self._ledger.found_epoch

    @property
    def interrupted(self) -> int:
        """See `LedgerDoor`."""
        return self._ledger.interrupted

    @property
    def is_well(self) -> bool:
        """See `LedgerDoor`."""
        return self._ledger.is_well

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerDoor`."""
        return asyncio.wrap_future(self._ledger.write(item))

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """See `LedgerDoor`."""
        self._ledger.note_progress(reached)

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerDoor`: they always are."""
        return nullcontext()

    async def close(self) -> None:
        """See `LedgerDoor`."""
        await asyncio.to_thread(self._ledger.close)
