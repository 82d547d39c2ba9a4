"""Deferred ledger holds: a hold that reserves nothing is written late, or never.

A hold records what a budget reserves, the idempotency key that a client claimed, how far a stream
has come, and that a request runs. Without a budget for the payer and without an idempotency key the
first two are empty, and a request that ends within `DEFER_S` needs neither of the others: its entry
says everything, with one commit instead of two. The hold of a longer request is written after that
time, or with its first progress note. After a failed or slow write all holds are written first: no
request may run that cannot be billed. This module knows no price and no database; `app` puts a
`DeferredHolds` before the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec import structs

from gateway.ledger.interface import LedgerClient
from tenancy.errors import StoreError
from tenancy.ledger.transactions import Hold, Item, NamedEntry
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.types import TokenCounts, UsageEntry

DEFER_S = 0.05
"""Seconds. A hold is written between one and two times this long after its request began."""

TOKENS_MAX = 1_000_000
"""Tokens. A larger hold is written at once: at a dollar a token its price may exceed what the
ledger can count."""

CallLater = Callable[[float, Callable[[], None]], object]


class DeferredHolds:
    """A `LedgerClient` in front of another one. Belongs to one event loop."""

    def __init__(
        self, ledger: LedgerClient, watch: BudgetWatch, call_later: CallLater | None = None
    ) -> None:
        """`watch`: of the same database as `ledger`. `call_later`: the event loop's by default."""
        self._ledger = ledger
        self._watch = watch
        self._call_later = call_later
        self._new_holds: dict[str, Hold] = {}
        self._aged_holds: dict[str, Hold] = {}  # written at the next tick
        self._is_ticking = False
        self._holds_first_depth = 0  # open `holds_first` contexts
        self._written_future: asyncio.Future[None] | None = None  # shared by all deferred holds

    @property
    def restarts(self) -> int:
        """See `LedgerClient`."""
        return self._ledger.restarts

    @property
    def is_well(self) -> bool:
        """See `LedgerClient`."""
        return self._ledger.is_well

    @property
    def waiting(self) -> int:
        """Number of running requests that have no written hold."""
        return len(self._new_holds) + len(self._aged_holds)

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`. A deferred hold counts as written at once."""
        if isinstance(item, UsageEntry):
            self._forget(item.request_id)
        elif isinstance(item, Hold):
            if self._may_defer(item):
                self._new_holds[item.request_id] = item
                if not self._is_ticking:
                    self._tick_later()
                if self._written_future is None:
                    self._written_future = _done_future()
                return self._written_future
        elif isinstance(item, NamedEntry):
            self._forget(item.entry.request_id)
        return self._ledger.write(item)

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """See `LedgerClient`. Writes the deferred holds of these requests first: notes are kept in
        holds."""
        for request_id in reached:
            held = self._new_holds.pop(request_id, None) or self._aged_holds.pop(request_id, None)
            if held is not None:
                self._write_hold(held)
        self._ledger.note_progress(reached)

    @contextmanager
    def holds_first(self) -> Iterator[None]:
        """See `LedgerClient`."""
        self._holds_first_depth += 1
        self._write_all()
        try:
            with self._ledger.holds_first():
                yield
        finally:
            self._holds_first_depth -= 1

    async def close(self) -> None:
        """See `LedgerClient`. Holds of running requests are written, and closed by the ledger."""
        self._holds_first_depth += 1
        self._write_all()
        await self._ledger.close()

    def _may_defer(self, hold: Hold) -> bool:
        if hold.claim is not None or self._holds_first_depth or not self._ledger.is_well:
            return False
        if hold.input_tokens + hold.output_tokens > TOKENS_MAX:
            return False
        return self._refresh_budgets() and not self._watch.has_budget(hold.tenant_id, hold.key_id)

    def _refresh_budgets(self) -> bool:
        """Return whether the set of budgets is known."""
        try:
            if self._watch.refresh():
                self._write_all()  # a new budget must count the requests that run already
        except StoreError:
            return False
        return True

    def _forget(self, request_id: str) -> None:
        if self._new_holds.pop(request_id, None) is None:
            self._aged_holds.pop(request_id, None)

    def _tick_later(self) -> None:
        self._is_ticking = True
        (self._call_later or asyncio.get_running_loop().call_later)(DEFER_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        for hold in self._aged_holds.values():
            self._write_hold(hold)
        self._aged_holds, self._new_holds = self._new_holds, {}
        if self._aged_holds:
            self._tick_later()

    def _write_all(self) -> None:
        for hold in (*self._aged_holds.values(), *self._new_holds.values()):
            self._write_hold(hold)
        self._aged_holds, self._new_holds = {}, {}

    def _write_hold(self, hold: Hold) -> None:
        """Write the hold of a running request. If it is refused, the request's entry says
        everything."""
        written = self._ledger.write(structs.replace(hold, is_running=True))
        written.add_done_callback(_consume_outcome)


def _consume_outcome(written: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it: no caller awaits this future."""
    if not written.cancelled():
        written.exception()


def _done_future() -> asyncio.Future[None]:
    """Return a future that is done."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done
