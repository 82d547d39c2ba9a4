"""Leases: how long a block is promised and when it may no longer be matched.

`BlockTerms` is what all leases on one block come to; `Deadlines` finds the blocks whose time has
come. Both know no block, no tree and no clock: they are given the time.

A lease covers a prefix, so whatever a block is granted its ancestors are granted too. Several
leases on one block only ever lengthen its times, so the longest is all that needs keeping, and
renewing one is a maximum: O(1) a block, with no list of leases to walk.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

from msgspec import Struct

from engine.api import Retention

Item = TypeVar("Item")


def promise_of(retention: Retention) -> float:
    """Seconds promised: never beyond the limit; a pinned class promises all of it."""
    limit_s = math.inf if retention.limit_s is None else retention.limit_s
    return limit_s if retention.pinned else min(retention.promise_s, limit_s)


class LeaseSpans(Struct, frozen=True, gc=False):
    """What one lease asks of each block that it covers: see `BlockTerms`."""

    name: str
    limit_at_s: float
    promise_at_s: float
    renew_limit_s: float = -math.inf
    renew_promise_s: float = -math.inf
    use_limit_s: float = -math.inf
    use_promise_s: float = -math.inf


def spans_of(retention: Retention, started_s: float, now_s: float) -> LeaseSpans:
    """Asked for now, by a request that began at `started_s`."""
    limit_s = math.inf if retention.limit_s is None else retention.limit_s
    promise_s = promise_of(retention)
    ends = (retention.name, started_s + limit_s, started_s + promise_s)
    if retention.clock == "absolute" or not retention.renewed_on_read:
        return LeaseSpans(*ends)
    if retention.clock == "request_start":
        return LeaseSpans(*ends, limit_s, promise_s)
    ends = (retention.name, now_s + limit_s, now_s + promise_s)
    return LeaseSpans(*ends, limit_s, promise_s, limit_s, promise_s)


class BlockTerms:
    """What the leases on one block come to.

    `limit_at_s`: not matched at or after. `promise_at_s`: not evicted before, as the class
    `promised_as` has it. A read at t moves them to at least t + `renew_*_s`; the end of a use at t
    to at least t + `use_*_s`.
    """

    __slots__ = (
        "limit_at_s",
        "promise_at_s",
        "promised_as",
        "renew_as",
        "renew_limit_s",
        "renew_promise_s",
        "use_as",
        "use_limit_s",
        "use_promise_s",
    )

    def __init__(self, limit_at_s: float) -> None:
        self.limit_at_s = limit_at_s
        self.promise_at_s = -math.inf
        self.renew_limit_s = -math.inf
        self.renew_promise_s = -math.inf
        self.use_limit_s = -math.inf
        self.use_promise_s = -math.inf
        self.promised_as = self.renew_as = self.use_as = ""

    def extend(self, spans: LeaseSpans, *, promised: bool) -> None:
        """Add a lease. `promised`: its promise reaches here."""
        if spans.limit_at_s > self.limit_at_s:
            self.limit_at_s = spans.limit_at_s
        if spans.renew_limit_s > self.renew_limit_s:
            self.renew_limit_s = spans.renew_limit_s
        if spans.use_limit_s > self.use_limit_s:
            self.use_limit_s = spans.use_limit_s
        if promised:
            self._promise(spans.promise_at_s, spans.name)
            if spans.renew_promise_s > self.renew_promise_s:
                self.renew_promise_s, self.renew_as = spans.renew_promise_s, spans.name
            if spans.use_promise_s > self.use_promise_s:
                self.use_promise_s, self.use_as = spans.use_promise_s, spans.name

    def renew(self, now_s: float, *, promise: bool) -> None:
        """It was read. `promise`: it may be promised anew."""
        if now_s + self.renew_limit_s > self.limit_at_s:
            self.limit_at_s = now_s + self.renew_limit_s
        if promise:
            self._promise(now_s + self.renew_promise_s, self.renew_as)

    def hold(self, now_s: float) -> None:
        """It is in use now: a clock that counts from the last use has not begun to run."""
        self.limit_at_s = max(self.limit_at_s, now_s + self.use_limit_s)

    def keep(self, now_s: float) -> None:
        """The same for its promise, which has not ended yet."""
        self._promise(now_s + self.use_promise_s, self.use_as)

    def use(self, now_s: float, *, promise: bool) -> None:
        """It was in use until now: a clock that counts from the last use starts again."""
        if now_s + self.use_limit_s > self.limit_at_s:
            self.limit_at_s = now_s + self.use_limit_s
        if promise:
            self._promise(now_s + self.use_promise_s, self.use_as)

    def _promise(self, until_s: float, name: str) -> None:
        if until_s > self.promise_at_s:
            self.promise_at_s, self.promised_as = until_s, name


class Deadlines(Generic[Item]):
    """Items by the time at which they should be looked at again; each stands in it once.

    A deadline that moved later is noticed when the old one comes up, so renewing costs nothing.
    `add` and each item of `due` cost O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._serial = 0

    def add(self, at_s: float, item: Item) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, item))

    def due(self, now_s: float) -> list[Item]:
        """Take out every item whose recorded time is not after `now_s`."""
        items = []
        while self._heap and self._heap[0][0] <= now_s:
            items.append(heapq.heappop(self._heap)[2])
        return items
