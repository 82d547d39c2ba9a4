"""The disk's writes of a day: how many there were, whose, and who may write more.

What is written cannot be given back, so a part of the day's bytes is held for payers that have not
written theirs: by weight among those that use the disk, or as much as their floors, and as one
share for all that have nothing on it yet. The rest is the first comer's. So the payer that is above
its share is refused first, and one that is alone may write all. This module knows no index.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Protocol

import msgspec

from engine.api import Payer
from engine.storage.space.quotas import DiskQuotas, DiskUsage

DAY_MS: Final = 86_400_000
HELD_PART: Final = 1 / 2
"""The part of the day's bytes that is held for shares."""
BY_PAYER, DAY, TOTAL = "written_by_payer", "written_day", "written_today"


class StoredValues(Protocol):
    """Where the counts are kept: `engine.storage.index.index_file.IndexFile`."""

    def meta(self, name: str, default: int | bytes) -> Any:
        """Return a value of the store, or the default."""

    def set_meta(self, name: str, value: int | bytes) -> None:
        """Set a value of the store."""


class WriteBudget:
    """The writes of one store, by payer and by the day of the store's clock.

    Planned bytes count until their batch ends, written ones for the day.
    """

    def __init__(
        self, values: StoredValues, quotas: DiskQuotas, usage: DiskUsage, per_day: int
    ) -> None:
        """`per_day`: bytes of stores without a promise; those of promises count and are not
        refused."""
        self._quotas, self._usage, self._per_day = quotas, usage, per_day
        self._day = int(values.meta(DAY, 0))
        self._total = int(values.meta(TOTAL, 0))
        kept = bytes(values.meta(BY_PAYER, b""))
        self._by_payer = Counter(
            msgspec.msgpack.decode(kept, type=dict[bytes, int]) if kept else {}
        )
        self._planned: Counter[Payer] = Counter()

    def written(self, now_ms: int) -> int:
        """Return the bytes that were written today. O(1)."""
        return self._total if self._day == now_ms // DAY_MS else 0

    def may_write(self, payer: Payer, size: int, now_ms: int) -> bool:
        """Return whether a payer may write so many bytes more without a promise. O(payers)."""
        self._begin_day(now_ms)
        free = self._per_day - self._total - self._planned.total() - size
        if free < 0:
            return False
        shares, newcomer = self._shares()
        mine = shares.pop(payer, newcomer)
        if self._of(payer) + size <= mine:
            return True
        held = sum(max(0.0, share - self._of(one)) for one, share in shares.items())
        return free >= held + newcomer

    def plan(self, payer: Payer, size: int) -> None:
        """Count bytes that are about to be written."""
        self._planned[payer] += size

    def count(self, payer: Payer, size: int, now_ms: int) -> None:
        """Count bytes that were written."""
        self._begin_day(now_ms)
        self._total += size
        self._by_payer[payer] += size

    def begin_batch(self) -> None:
        """Forget what was planned: no batch is under way."""
        self._planned.clear()

    def save(self, values: StoredValues) -> None:
        """Store the counts, in the caller's transaction."""
        values.set_meta(DAY, self._day)
        values.set_meta(TOTAL, self._total)
        values.set_meta(BY_PAYER, msgspec.msgpack.encode(dict(self._by_payer)))

    def _of(self, payer: Payer) -> int:
        return self._by_payer[payer] + self._planned[payer]

    def _begin_day(self, now_ms: int) -> None:
        day = now_ms // DAY_MS
        if day != self._day:
            self._day, self._total = day, 0
            self._by_payer.clear()

    def _shares(self) -> tuple[dict[Payer, float], float]:
        """Return the share of each payer that uses the disk, and that of all others together; 0
        where there are no others."""
        quotas = self._quotas
        users = {*self._usage.used, *self._by_payer, *(+self._planned)}
        users |= {one for one in quotas.payers if quotas.floor(one)}
        has_others = not users.issuperset(quotas.payers)
        weights = sum(map(quotas.weight, users)) + has_others
        most = HELD_PART * self._per_day
        by_weight = most / weights if weights else 0.0
        shares = {
            one: max(by_weight * quotas.weight(one), min(most, quotas.floor(one))) for one in users
        }
        newcomer = by_weight if has_others else 0.0
        scale = min(1.0, most / max(1.0, sum(shares.values()) + newcomer))
        return {one: share * scale for one, share in shares.items()}, newcomer * scale
