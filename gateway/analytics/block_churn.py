"""Blocks inserted into the cache and removed from it, by tenant and minute, and how long they
lived.

`background.storage_metering` and `api.admin.analytics` feed the engine's reports, which count for
the minute in which they are read. Memory is bounded: the latest minutes, and the `TENANTS_MAX`
tenants with the latest moves. This module reads no clock.
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
"""Blocks inserted, evicted, expired, erased, and the seconds that the evicted blocks had lived."""

_NO_COUNTS: Counts = (0, 0, 0, 0, 0.0)


class ChurnHistory:
    """Totals since the start, and counts of each of the latest minutes."""

    def __init__(self) -> None:
        self.total: Counts = _NO_COUNTS
        self._minutes: deque[tuple[int, Counts]] = deque(maxlen=MINUTES)

    def add(self, counts: Counts, minute: int) -> None:
        """Add counts; of an earlier minute than the last, by a clock that was set back, to the
        last. O(1)."""
        self.total = _add(self.total, counts)
        if self._minutes and self._minutes[-1][0] >= minute:
            minute, before = self._minutes.pop()
            counts = _add(before, counts)
        self._minutes.append((minute, counts))

    def totals(self) -> dict[str, Any]:
        """Return the totals as JSON fields."""
        inserted, evicted, expired, erased, lived_s = self.total
        return {
            "inserted_blocks": inserted,
            "evicted_blocks": evicted,
            "expired_blocks": expired,
            "erased_blocks": erased,
            "evicted_after_s": round(lived_s / evicted, 3) if evicted else None,
        }

    def details(self) -> dict[str, Any]:
        """Return the totals, and minutes as [minute, inserted, evicted, expired or erased, lifetime
        in s]."""
        return {
            **self.totals(),
            "minutes": [
                [
                    minute,
                    inserted,
                    evicted,
                    expired + erased,
                    round(lived_s / evicted, 3) if evicted else None,
                ]
                for minute, (inserted, evicted, expired, erased, lived_s) in self._minutes
            ],
        }


class BlockChurn:
    """Block churn of a gateway. Belongs to one thread."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[int, ChurnHistory] = OrderedDict()
        self.all = ChurnHistory()

    def update(
        self,
        moves: Mapping[Namespace, BlockMoves],
        owner_of: Callable[[Namespace], int | None],
        minute: int,
    ) -> None:
        """Count the blocks that moved since the last call. O(namespaces that moved)."""
        for namespace, moved in moves.items():
            owner = owner_of(namespace)
            if owner is not None:
                lost = moved.lost
                new = (moved.gained, moved.evicted, lost["expired"], lost["erased"], moved.lived_s)
                self._history_of(owner).add(new, minute)
                self.all.add(new, minute)

    def tenant(self, tenant_id: int) -> ChurnHistory:
        """Return one tenant's history; empty if none of its blocks moved."""
        return self._tenants.get(tenant_id, ChurnHistory())

    def latest(self, limit: int) -> list[tuple[int, ChurnHistory]]:
        """Return histories by tenant id, the most recently changed first."""
        return list(islice(reversed(self._tenants.items()), limit))

    def _history_of(self, owner: int) -> ChurnHistory:
        history = self._tenants.setdefault(owner, ChurnHistory())
        self._tenants.move_to_end(owner)
        while len(self._tenants) > TENANTS_MAX:
            self._tenants.popitem(last=False)
        return history


def _add(a: Counts, b: Counts) -> Counts:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])
