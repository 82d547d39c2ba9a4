"""What became of promises: given, renewed, kept to their end, broken, by owner and class.

A promise begins where a prefix is kept in a class for which no promise ran; written again it is
renewed. It ends in one of three ways: *kept*, when its time was over; *broken*, when a request read
by contract what had been lost, or the engine that held it died; *given up*, when its owner erased
it or the book had no room for it. So

    given = kept + broken + given up + running

It knows no engine and reads no clock; `contract` tells it, analytics asks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from engine.api import LeaseGrant
from gateway.caching.prefix_index import IndexedPrefix, Key, PrefixIndex

Outcome = Literal["given", "renewed", "clipped", "refused", "kept", "broken", "given_up"]
OUTCOMES: tuple[Outcome, ...] = (
    *("given", "renewed", "clipped", "refused", "kept", "broken", "given_up"),
)
ENDS_SLACK = 1_000
Place = tuple[Key, str]
"""A written prefix, and a class."""


class PromiseTally:
    """Counts of one gateway. Belongs to one thread."""

    def __init__(
        self, entries: PrefixIndex, epoch: Callable[[], str], slack: int = ENDS_SLACK
    ) -> None:
        """`entries` hold the promises; `epoch` says which life of the engine this is; `slack`: ends
        that may be kept beyond twice as many as there are promises."""
        self._slack = slack
        self._entries = entries
        self._epoch = epoch
        self._counts: dict[tuple[int, str], Counter[Outcome]] = {}
        self._running: dict[Place, int] = {}
        self._ends: list[tuple[float, Place]] = []

    def answered(self, owner: int, grants: Sequence[LeaseGrant]) -> None:
        """What the engine said to leases: those not given whole are no promises. O(grants)."""
        for grant in grants:
            if grant.outcome != "granted":
                self._count(owner, grant.retention, grant.outcome)

    def wrote(self, owner: int, key: Key, name: str, now_s: float) -> None:
        """A prefix was written in a class, and perhaps promised. O(log promises)."""
        self.sweep(now_s)
        place = (key, name)
        until_s = self._until_s(place)
        if until_s is None or until_s <= now_s:
            return
        if place in self._running:
            self._count(self._running[place], name, "renewed")
            return
        self._running[place] = owner
        self._tidy()
        heapq.heappush(self._ends, (until_s, place))
        self._count(owner, name, "given")

    def broke(self, entry: IndexedPrefix, now_s: float) -> None:
        """What of it was promised has been lost. O(its classes)."""
        for name, lease in entry.leases.items():
            if lease.promised_until_s > now_s:
                self._end((entry.key, name), "broken")

    def gave_up(self, entry: IndexedPrefix, classes: Iterable[str]) -> None:
        """It is kept no more in these. O(classes)."""
        for name in classes:
            self._end((entry.key, name), "given_up")

    def sweep(self, now_s: float) -> None:
        """Settle those whose time is over. O(ended log promises)."""
        while self._ends and self._ends[0][0] <= now_s:
            _, place = heapq.heappop(self._ends)
            if place not in self._running:
                continue
            until_s = self._until_s(place)
            if until_s is not None and until_s > now_s:  # it has been renewed meanwhile
                heapq.heappush(self._ends, (until_s, place))
            else:
                entry = self._entries.find(place[0])
                lives = entry is not None and entry.epoch == self._epoch()
                self._end(place, "kept" if lives else "broken")

    def counts(self, now_s: float) -> dict[tuple[int, str], dict[str, int]]:
        """By owner and class, with those that run. O(promises)."""
        self.sweep(now_s)
        running = Counter((owner, place[1]) for place, owner in self._running.items())
        return {
            key: {**{outcome: counts[outcome] for outcome in OUTCOMES}, "running": running[key]}
            for key, counts in self._counts.items()
        }

    def by_class(self, now_s: float) -> dict[str, dict[str, int]]:
        """The same, of all owners together. O(promises)."""
        sums: dict[str, Counter[str]] = {}
        for (_, name), counts in self.counts(now_s).items():
            sums.setdefault(name, Counter()).update(counts)
        return {name: dict(counts) for name, counts in sums.items()}

    def _tidy(self) -> None:
        """Ends of promises that ended otherwise must not pile up. O(1) on average."""
        if len(self._ends) > 2 * len(self._running) + self._slack:
            self._ends = [(self._until_s(place) or 0.0, place) for place in self._running]
            heapq.heapify(self._ends)

    def _until_s(self, place: Place) -> float | None:
        entry = self._entries.find(place[0])
        lease = None if entry is None else entry.leases.get(place[1])
        return None if lease is None else lease.promised_until_s

    def _end(self, place: Place, outcome: Outcome) -> None:
        owner = self._running.pop(place, None)
        if owner is not None:
            self._count(owner, place[1], outcome)

    def _count(self, owner: int, name: str, outcome: Outcome) -> None:
        self._counts.setdefault((owner, name), Counter())[outcome] += 1
