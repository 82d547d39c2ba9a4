"""Leases: how long a block is promised and when it may no longer be matched.

`Terms` is what all leases on one block come to; `Deadlines` finds the blocks whose time has come.
Both know no block, no tree and no clock: they are given the time.

A lease covers a prefix, so whatever a block is granted its ancestors are granted too. Several
leases on one block only ever lengthen its times, so the longest is all that needs keeping, and
renewing one is a maximum: O(1) a block, with no list of leases to walk.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

from engine.api import Retention

Item = TypeVar("Item")


def promise_of(retention: Retention) -> float:
    """Seconds promised: never beyond the limit; a pinned class promises all of it."""
    limit_s = math.inf if retention.limit_s is None else retention.limit_s
    return limit_s if retention.pinned else min(retention.promise_s, limit_s)


class Terms:
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

    def extend(
        self, retention: Retention, started_s: float, now_s: float, *, promised: bool
    ) -> None:
        """Add a lease whose request began at `started_s`. `promised`: its promise reaches here."""
        limit_s = math.inf if retention.limit_s is None else retention.limit_s
        promise_s = promise_of(retention) if promised else -math.inf
        renewed = retention.renewed_on_read and retention.clock != "absolute"
        base_s = now_s if renewed and retention.clock == "last_use" else started_s
        self.limit_at_s = max(self.limit_at_s, base_s + limit_s)
        self._promise(base_s + promise_s, retention.name)
        if renewed:
            self.renew_limit_s = max(self.renew_limit_s, limit_s)
            if promise_s > self.renew_promise_s:
                self.renew_promise_s, self.renew_as = promise_s, retention.name
            if retention.clock == "last_use":
                self.use_limit_s = max(self.use_limit_s, limit_s)
                if promise_s > self.use_promise_s:
                    self.use_promise_s, self.use_as = promise_s, retention.name

    def renew(self, now_s: float, *, promise: bool) -> None:
        """It was read. `promise`: it may be promised anew."""
        self.limit_at_s = max(self.limit_at_s, now_s + self.renew_limit_s)
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
        self.limit_at_s = max(self.limit_at_s, now_s + self.use_limit_s)
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

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_s: float, item: Item) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, item))

    def due(self, now_s: float) -> list[Item]:
        """Take out every item whose recorded time is not after `now_s`."""
        items = []
        while self._heap and self._heap[0][0] <= now_s:
            items.append(heapq.heappop(self._heap)[2])
        return items
