"""The disk's writes of a day: how many there were, whose, and who may write more.

What is written cannot be given back, so a share of the day's bytes is held for each payer
(`held_shares`), those that use the disk and have not written today included.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Protocol

import msgspec

from engine.api import Payer
from engine.storage.space.held_shares import HeldShares
from engine.storage.space.quotas import DiskQuotas, DiskUsage

DAY_MS: Final = 86_400_000
BY_PAYER, DAY, PROMISED = "written_by_payer", "written_day", "written_promised"


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
        self._shares, self._usage = HeldShares(quotas, per_day), usage
        self._day = int(values.meta(DAY, 0))
        self._promised = int(values.meta(PROMISED, 0))
        kept = bytes(values.meta(BY_PAYER, b""))
        self._by_payer = Counter(
            msgspec.msgpack.decode(kept, type=dict[bytes, int]) if kept else {}
        )
        self._planned: Counter[Payer] = Counter()
        self._planned_promised = 0

    def written(self, now_ms: int) -> int:
        """Return the bytes that were written today. O(1)."""
        return self._by_payer.total() if self._day == now_ms // DAY_MS else 0

    def may_write(self, payer: Payer, size: int, now_ms: int) -> bool:
        """Return whether a payer may write so many bytes more without a promise. O(payers)."""
        self._begin_day(now_ms)
        taken = self._by_payer + self._planned
        promised = self._promised + self._planned_promised
        return self._shares.may_take(payer, size, taken, self._usage.used, promised)

    def plan(self, payer: Payer, size: int, *, is_promised: bool) -> None:
        """Count bytes that are about to be written."""
        self._planned[payer] += size
        self._planned_promised += size if is_promised else 0

    def count(self, payer: Payer, size: int, now_ms: int, *, is_promised: bool) -> None:
        """Count bytes that were written."""
        self._begin_day(now_ms)
        self._promised += size if is_promised else 0
        self._by_payer[payer] += size

    def begin_batch(self) -> None:
        """Forget what was planned: no batch is under way."""
        self._planned.clear()
        self._planned_promised = 0

    def save(self, values: StoredValues) -> None:
        """Store the counts, in the caller's transaction."""
        values.set_meta(DAY, self._day)
        values.set_meta(PROMISED, self._promised)
        values.set_meta(BY_PAYER, msgspec.msgpack.encode(dict(self._by_payer)))

    def _begin_day(self, now_ms: int) -> None:
        day = now_ms // DAY_MS
        if day != self._day:
            self._day, self._promised = day, 0
            self._by_payer.clear()
