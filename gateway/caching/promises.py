"""Count what became of promises, by owner and class: given, renewed, kept, broken, given up.

A promise begins when a prefix is written in a class without a running promise; written again, it is
renewed. It ends in one of three ways. *Kept*: its time passed. *Broken*: a request read by contract
what had been lost, or the engine that held it died. *Given up*: its owner erased it, or the index
had no room for it. So

    given = kept + broken + given up + running

The module knows no engine and reads no clock; `gateway.caching.contract` reports to it, analytics
reads it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

from engine.api import LeaseGrant, Namespace
from gateway.caching.prefix_index import IndexedPrefix, PrefixIndex, PrefixKey

PromiseOutcome = Literal["given", "renewed", "clipped", "refused", "kept", "broken", "given_up"]
OUTCOMES: tuple[PromiseOutcome, ...] = get_args(PromiseOutcome)
ENDS_SLACK = 1_000
"""Entries that the heap of ends may hold beyond twice the number of running promises."""
PromiseKey = tuple[PrefixKey, str]
"""A written prefix and the name of a retention class."""


class PromiseTally:
    """The promise counts of one gateway. Belongs to one thread."""

    def __init__(
        self,
        entries: PrefixIndex,
        is_alive: Callable[[str], bool],
        slack: int = ENDS_SLACK,
        *,
        survives: Callable[[Namespace], bool] = lambda _: False,
    ) -> None:
        """`entries` hold the promises. `is_alive`: whether the engine of an epoch still holds its
        cache. `survives`: whether a level holds what was promised in a namespace by engines that
        have ended. `slack`: entries that the heap of ends may hold beyond twice the number of
        running promises."""
        self._slack = slack
        self._entries = entries
        self._is_alive, self._survives = is_alive, survives
        self._counts: dict[tuple[int, str], Counter[PromiseOutcome]] = {}
        self._running: dict[PromiseKey, int] = {}
        self._ends: list[tuple[float, PromiseKey]] = []

    def count_grants(self, owner: int, grants: Sequence[LeaseGrant]) -> None:
        """Count leases that the engine did not fully grant: these are no promises. O(grants)."""
        for grant in grants:
            if grant.outcome != "granted":
                self._count(owner, grant.retention, grant.outcome)

    def record_write(self, owner: int, key: PrefixKey, name: str, now_s: float) -> None:
        """Record that a prefix was written in a class, perhaps promised. O(log promises)."""
        self.sweep(now_s)
        promise = (key, name)
        until_s = self._until_s(promise)
        if until_s is None or until_s <= now_s:
            return
        if promise in self._running:
            self._count(self._running[promise], name, "renewed")
            return
        self._running[promise] = owner
        self._rebuild_heap()
        heapq.heappush(self._ends, (until_s, promise))
        self._count(owner, name, "given")

    def record_broken(self, entry: IndexedPrefix, now_s: float) -> None:
        """Record that the promised part of an entry was lost. O(its classes)."""
        for name, lease in entry.leases.items():
            if lease.promised_until_s > now_s:
                self._end((entry.key, name), "broken")

    def record_given_up(self, entry: IndexedPrefix, classes: Iterable[str]) -> None:
        """Record that an entry is no longer kept in these classes. O(classes)."""
        for name in classes:
            self._end((entry.key, name), "given_up")

    def sweep(self, now_s: float) -> None:
        """Settle promises after their time has passed. O(ended log promises)."""
        while self._ends and self._ends[0][0] <= now_s:
            _, promise = heapq.heappop(self._ends)
            if promise not in self._running:
                continue
            until_s = self._until_s(promise)
            if until_s is not None and until_s > now_s:  # renewed since it was pushed
                heapq.heappush(self._ends, (until_s, promise))
            else:
                entry = self._entries.find(promise[0])
                lives = entry is not None and (
                    self._is_alive(entry.epoch) or self._survives(entry.key[0])
                )
                self._end(promise, "kept" if lives else "broken")

    def counts(self, now_s: float) -> dict[tuple[int, str], dict[str, int]]:
        """Return the counts by owner and class, with the running ones. O(promises)."""
        self.sweep(now_s)
        running = Counter((owner, promise[1]) for promise, owner in self._running.items())
        return {
            key: {**{outcome: counts[outcome] for outcome in OUTCOMES}, "running": running[key]}
            for key, counts in self._counts.items()
        }

    def by_class(self, now_s: float) -> dict[str, dict[str, int]]:
        """Return the counts by class, over all owners. O(promises)."""
        sums: dict[str, Counter[str]] = {}
        for (_, name), counts in self.counts(now_s).items():
            sums.setdefault(name, Counter()).update(counts)
        return {name: dict(counts) for name, counts in sums.items()}

    def _rebuild_heap(self) -> None:
        """Rebuild the heap when promises that ended early fill it. O(1) amortized."""
        if len(self._ends) > 2 * len(self._running) + self._slack:
            self._ends = [(self._until_s(promise) or 0.0, promise) for promise in self._running]
            heapq.heapify(self._ends)

    def _until_s(self, promise: PromiseKey) -> float | None:
        entry = self._entries.find(promise[0])
        lease = None if entry is None else entry.leases.get(promise[1])
        return None if lease is None else lease.promised_until_s

    def _end(self, promise: PromiseKey, outcome: PromiseOutcome) -> None:
        owner = self._running.pop(promise, None)
        if owner is not None:
            self._count(owner, promise[1], outcome)

    def _count(self, owner: int, name: str, outcome: PromiseOutcome) -> None:
        self._counts.setdefault((owner, name), Counter())[outcome] += 1
