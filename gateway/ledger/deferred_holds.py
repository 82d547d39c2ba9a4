"""Holds that are handed in late, or never: nothing hangs on them yet.

A hold keeps what a budget reserves, the name that a client claimed, how far a stream has come, and
the fact that something runs. Where no budget binds its payer and nobody named it, the first two are
empty; and an answer that ends within `LATE_S` needs none of the others: its entry says all of it,
with one commit instead of two. All that last longer are handed in then, or with their first note of
progress. When writing has just failed, or takes long, holds come first: what cannot be billed must
not run. It knows no request, no price and no database; `app` puts it before the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from gateway.ledger.interface import LedgerClient
from tenancy.errors import StoreError
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import Hold, Item, NamedEntry
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.types import UsageEntry

LATE_S = 0.05
"""A hold is handed in between this and twice as long after its request began."""

TOKENS_MAX = 1_000_000
"""What can be more is asked about first: at a dollar for a token it may be beyond all counting."""

CallLater = Callable[[float, Callable[[], None]], object]


class DeferredHolds:
    """A `LedgerClient` before another one. Belongs to one loop."""

    def __init__(
        self, door: LedgerClient, watch: BudgetWatch, call_later: CallLater | None = None
    ) -> None:
        """`watch`: of the door's own database. `call_later`: the loop's."""
        self._door = door
        self._watch = watch
        self._call_later = call_later
        self._young: dict[str, Hold] = {}
        self._old: dict[str, Hold] = {}  # the next tick hands them in
        self._is_ticking = False
        self._firsts = 0  # how many want holds to come first
        self._as_written: asyncio.Future[None] | None = None  # one for all that may wait

    @property
    def found_epoch(self) -> LedgerEpoch | None:
        """See `LedgerClient`."""
        return self._door.found_epoch

    @property
    def interrupted(self) -> int:
        """See `LedgerClient`."""
        return self._door.interrupted

    @property
    def restarts(self) -> int:
        """See `LedgerClient`."""
        return self._door.restarts

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        return self._door.is_well

    @property
    def waiting(self) -> int:
        """Requests that run, and whose holds have not been handed in."""
        return len(self._young) + len(self._old)

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`. A hold on which nothing hangs is as good as written at once."""
        if isinstance(item, UsageEntry):
            self._forget(item.request_id)
        elif isinstance(item, Hold):
            if self._may_wait(item):
                self._young[item.request_id] = item
                if not self._is_ticking:
                    self._tick_later()
                if self._as_written is None:
                    self._as_written = _done()
                return self._as_written
        elif isinstance(item, NamedEntry):
            self._forget(item.entry.request_id)
        return self._door.write(item)

    def note_progress(self, reached: Mapping[str, Progress]) -> None:
        """See `LedgerClient`. What is noted, is noted in holds."""
        for request_id in reached:
            held = self._young.pop(request_id, None) or self._old.pop(request_id, None)
            if held is not None:
                self._hand_in(held)
        self._door.note_progress(reached)

    @contextmanager
    def holds_first(self) -> Iterator[None]:
        """See `LedgerClient`."""
        self._firsts += 1
        self._hand_in_all()
        try:
            with self._door.holds_first():
                yield
        finally:
            self._firsts -= 1

    async def close(self) -> None:
        """See `LedgerClient`. What still runs has its hold, which is closed as its process is."""
        self._firsts += 1
        self._hand_in_all()
        await self._door.close()

    def _may_wait(self, hold: Hold) -> bool:
        if hold.claim is not None or self._firsts or not self._door.is_well:
            return False
        if hold.input_tokens + hold.output_tokens > TOKENS_MAX:
            return False
        return self._look() and not self._watch.has_budget(hold.tenant_id, hold.key_id)

    def _look(self) -> bool:
        """Is it known who has a budget?"""
        try:
            if self._watch.refresh():
                self._hand_in_all()  # a budget that was set counts what runs, before what comes
        except StoreError:
            return False
        return True

    def _forget(self, request_id: str) -> None:
        if self._young.pop(request_id, None) is None:
            self._old.pop(request_id, None)

    def _tick_later(self) -> None:
        self._is_ticking = True
        (self._call_later or asyncio.get_running_loop().call_later)(LATE_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        for hold in self._old.values():
            self._hand_in(hold)
        self._old, self._young = self._young, {}
        if self._old:
            self._tick_later()

    def _hand_in_all(self) -> None:
        for hold in (*self._old.values(), *self._young.values()):
            self._hand_in(hold)
        self._old, self._young = {}, {}

    def _hand_in(self, hold: Hold) -> None:
        """It runs already. If this is refused nothing is noted of it, and its entry says all."""
        written = self._door.write(structs.replace(hold, is_running=True))
        written.add_done_callback(_told)


def _told(written: asyncio.Future[None]) -> None:
    """Nobody waits for it."""
    if not written.cancelled():
        written.exception()


def _done() -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
