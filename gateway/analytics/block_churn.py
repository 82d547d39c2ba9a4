"""Blocks that came into the cache and left it, by tenant and minute, and how long they lived.

Fed now and then with what the engine has told since the time before, which counts for the minute in
which it is seen. Bounded: the latest minutes, and `TENANTS_MAX` tenants, those that moved
last. It reads no clock; `storage_meter` and the analytics desk feed it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from engine.api import Namespace
from engine.client.cache_event_totals import BlockMoves

MINUTES = 120
TENANTS_MAX = 10_000
Counts = tuple[int, int, int, int, float]
"""Blocks inserted, evicted, expired, erased, and the seconds that those evicted had lived."""

_NONE: Counts = (0, 0, 0, 0, 0.0)


class History:
    """Sums since the start, and of each of the latest minutes."""

    def __init__(self) -> None:
        self.total: Counts = _NONE
        self._minutes: deque[tuple[int, Counts]] = deque(maxlen=MINUTES)

    def add(self, counts: Counts, minute: int) -> None:
        """More has moved. O(1)."""
        self.total = _sum(self.total, counts)
        if self._minutes and self._minutes[-1][0] == minute:
            counts = _sum(self._minutes.pop()[1], counts)
        self._minutes.append((minute, counts))

    def sums(self) -> dict[str, Any]:
        """As they are answered."""
        inserted, evicted, expired, erased, lived_s = self.total
        return {
            "inserted_blocks": inserted,
            "evicted_blocks": evicted,
            "expired_blocks": expired,
            "erased_blocks": erased,
            "evicted_after_s": round(lived_s / evicted, 3) if evicted else None,
        }

    def shown(self) -> dict[str, Any]:
        """The same, with minutes as [minute, inserted, evicted, expired or erased]."""
        return {
            **self.sums(),
            "minutes": [
                [minute, came, taken, over + told, round(lived / taken, 3) if taken else None]
                for minute, (came, taken, over, told, lived) in self._minutes
            ],
        }


class BlockChurn:
    """Of one gateway. Belongs to one thread."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[int, History] = OrderedDict()
        self.all = History()

    def look(
        self,
        moves: Mapping[Namespace, BlockMoves],
        owner_of: Callable[[Namespace], int | None],
        minute: int,
    ) -> None:
        """What the engine has told since it was asked last. O(namespaces that moved)."""
        for namespace, one in moves.items():
            owner = owner_of(namespace)
            if owner is not None:
                lost = one.lost
                new = (one.gained, one.evicted, lost["expired"], lost["erased"], one.lived_s)
                self._of(owner).add(new, minute)
                self.all.add(new, minute)

    def tenant(self, tenant_id: int) -> History:
        """Of one tenant; empty if nothing of it moved."""
        return self._tenants.get(tenant_id, History())

    def latest(self, most: int) -> list[tuple[int, History]]:
        """By tenant id, those that moved last first."""
        return list(islice(reversed(self._tenants.items()), most))

    def _of(self, owner: int) -> History:
        history = self._tenants.setdefault(owner, History())
        self._tenants.move_to_end(owner)
        while len(self._tenants) > TENANTS_MAX:
            self._tenants.popitem(last=False)
        return history


def _sum(a: Counts, b: Counts) -> Counts:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])
