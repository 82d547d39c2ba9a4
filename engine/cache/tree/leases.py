"""Leases: how long a block is promised, and when it may no longer be matched.

`BlockTerms` combines all leases on one block; `Deadlines` finds the blocks whose time has come.
Both know no block, no tree and no clock: the caller passes the time.

A lease covers a prefix, so a block's ancestors have at least its terms. Further leases on a block
only lengthen its times, so keeping the longest is enough and renewing is a maximum: O(1) per block,
with no list of leases to walk.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from engine.api import Retention

Item = TypeVar("Item")


def promised_seconds(retention: Retention) -> float:
    """Return the seconds promised: never beyond the limit; all of the limit for a pinned class."""
    limit_s = math.inf if retention.limit_s is None else retention.limit_s
    return limit_s if retention.pinned else min(retention.promise_s, limit_s)


@dataclass(slots=True, eq=False)
class BlockTerms:
    """What a lease asks of each block that it covers, or all leases on one block together.

    `limit_at_s`: not matched at or after. `promise_at_s`: not evicted before, under the class
    `promised_class`. A read at t moves them to at least t + `renew_*_s`; the end of a use at t to
    at least t + `use_*_s`.
    """

    limit_at_s: float
    promise_at_s: float = -math.inf
    promised_class: str = ""
    renew_limit_s: float = -math.inf
    renew_promise_s: float = -math.inf
    renew_class: str = ""
    use_limit_s: float = -math.inf
    use_promise_s: float = -math.inf
    use_class: str = ""

    def merge(self, other: BlockTerms, *, promised: bool = True) -> None:
        """Take over what a lease, or other terms of the same tokens, asks beyond these. `promised`:
        its promise covers this block.
        """
        if other.limit_at_s > self.limit_at_s:
            self.limit_at_s = other.limit_at_s
        if other.renew_limit_s > self.renew_limit_s:
            self.renew_limit_s = other.renew_limit_s
        if other.use_limit_s > self.use_limit_s:
            self.use_limit_s = other.use_limit_s
        if promised:
            self.extend_promise(other.promise_at_s, other.promised_class)
            if other.renew_promise_s > self.renew_promise_s:
                self.renew_promise_s, self.renew_class = other.renew_promise_s, other.renew_class
            if other.use_promise_s > self.use_promise_s:
                self.use_promise_s, self.use_class = other.use_promise_s, other.use_class

    def end_promise(self) -> None:
        """Give up the promise: only a later read or lease may begin another."""
        self.promise_at_s = -math.inf

    def renew_on_read(self, now_s: float, *, promise: bool) -> None:
        """Extend the times after a read. `promise`: the promise may be renewed too."""
        if now_s + self.renew_limit_s > self.limit_at_s:
            self.limit_at_s = now_s + self.renew_limit_s
        if promise:
            self.extend_promise(now_s + self.renew_promise_s, self.renew_class)

    def hold_limit(self, now_s: float) -> None:
        """Extend the limit of a block in use, whose clock counts from the last use and starts when
        that ends.
        """
        if now_s + self.use_limit_s > self.limit_at_s:
            self.limit_at_s = now_s + self.use_limit_s

    def hold_promise(self, now_s: float) -> None:
        """Extend the promise of a block in use, in the same way, before it ends."""
        self.extend_promise(now_s + self.use_promise_s, self.use_class)

    def extend_promise(self, until_s: float, name: str) -> None:
        """Promise until then under a class, unless it is promised for longer."""
        if until_s > self.promise_at_s:
            self.promise_at_s, self.promised_class = until_s, name


NO_LIMIT: Final = BlockTerms(math.inf)
"""The terms of a block under no lease."""


def spans_of(retention: Retention, started_s: float, now_s: float) -> BlockTerms:
    """Return what a lease asks, granted at `now_s` to a request that began at `started_s`."""
    limit_s = math.inf if retention.limit_s is None else retention.limit_s
    promise_s, name = promised_seconds(retention), retention.name
    ends = started_s + limit_s, started_s + promise_s, name
    if retention.clock == "absolute" or not retention.renewed_on_read:
        return BlockTerms(*ends)
    renewed = limit_s, promise_s, name
    if retention.clock == "request_start":
        return BlockTerms(*ends, *renewed)
    return BlockTerms(now_s + limit_s, now_s + promise_s, name, *renewed, *renewed)


class Deadlines(Generic[Item]):
    """A heap of items by the time at which they must be examined; each item is in it once.

    A deadline that moved later is noticed when the old one is due, so renewing costs nothing. `add`
    and each item of `take_due` cost O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._serial = 0

    def add(self, at_s: float, item: Item) -> None:
        """Add an item that is due at `at_s`."""
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, item))

    def items(self) -> Iterator[Item]:
        """Yield every item, in no order. O(1) each."""
        return (item for _, _, item in self._heap)

    def take_due(self, now_s: float) -> list[Item]:
        """Remove and return every item whose time is not after `now_s`."""
        items = []
        while self._heap and self._heap[0][0] <= now_s:
            items.append(heapq.heappop(self._heap)[2])
        return items
