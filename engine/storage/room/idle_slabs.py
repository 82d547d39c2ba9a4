"""Chooses the slab that gives its room to records of another size.

Records of several sizes have slabs of their own: those of formats that this engine packs its copies
in, and those of a model that is not served any more. A search reads the rows of all other slabs, so
one that found nothing is not repeated for a while. `engine.storage.store` calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from engine.api import Payer
from engine.moves import RecordId
from engine.storage.index.index import RecordIndex
from engine.storage.room.quotas import DiskBooks, DiskQuotas
from engine.storage.slabs.slabs import SlabFiles

FOREIGN_MS = 7 * 86_400_000
"""Milliseconds without use after which a slab of another size goes."""
PAUSE_MS, SHORT_PAUSE_MS = 60_000, 1_000
"""Milliseconds until the next search after one that found nothing; the second where the wanted size
has no place at all."""


class IdleSlabs:
    """The slabs of one store that may give their room. `present_sizes`: of the places that this
    engine's records take."""

    def __init__(
        self,
        index: RecordIndex,
        slabs: SlabFiles,
        books: DiskBooks,
        quotas: DiskQuotas,
        present_sizes: Collection[int],
    ) -> None:
        self._index, self._slabs, self._books, self._quotas = index, slabs, books, quotas
        self._present_sizes = present_sizes
        self._next_ms: dict[int, int] = {}

    def is_due(self, size: int, now_ms: int) -> bool:
        """Return whether there is a slab of another size, and `find` may look for it now. O(slabs).

        `size` 0: for places of any size.
        """
        others = {other for other in self._slabs.place_sizes().values() if other != size}
        if not size:
            others -= set(self._present_sizes)
        return bool(others) and now_ms >= self._next_ms.get(size, 0)

    def find(
        self, size: int, taker: Payer, now_ms: int, is_pinned: Callable[[RecordId], bool]
    ) -> tuple[int, list[RecordId]] | None:
        """Return the slab of another size that was used longest ago, and its records; None if there
        is none. O(records of other slabs).

        It goes after 7 days without use; where there is no place of the wanted size; and where all
        of it was used before the first record of that size that would go otherwise. Nothing
        promised, nothing of a store under way (`is_pinned`), nothing inside the floor of another
        payer than `taker`, with all that hangs on it. A slab of no present size goes by its age
        alone.
        """
        has_none = size > 0 and self._slabs.places(size) == 0
        before_ms = now_ms - FOREIGN_MS
        if size and not has_none:
            before_ms = max(before_ms, self._index.oldest_leaf_ms(size, now_ms))
        best: tuple[int, int, list[RecordId]] | None = None
        for number, other in self._slabs.place_sizes().items():
            is_present = other in self._present_sizes
            if other == size or (is_present and not size):
                continue
            ids, used_ms, is_promised = self._index.of_slab(number, now_ms)
            is_old = has_none or used_ms < (before_ms if is_present else now_ms - FOREIGN_MS)
            if not is_old or is_promised or (best is not None and used_ms >= best[0]):
                continue
            if not is_present or self._may_all_go(ids, taker, now_ms, is_pinned):
                best = used_ms, number, ids
        if best is None:
            self._next_ms[size] = now_ms + (SHORT_PAUSE_MS if has_none else PAUSE_MS)
            return None
        return best[1:]

    def _may_all_go(
        self,
        tops: Sequence[RecordId],
        taker: Payer,
        now_ms: int,
        is_pinned: Callable[[RecordId], bool],
    ) -> bool:
        """Return whether these and all under them may be dropped at once. O(these)."""
        lost: Counter[Payer] = Counter()
        for row in self._index.under(tops).values():
            if row.promise_ms > now_ms or is_pinned(row.record_id):
                return False
            lost[self._index.names.payer_name(row.payer_id)] += row.place_bytes
        used, floor = self._books.used, self._quotas.floor
        return all(one == taker or used[one] - lost[one] >= floor(one) for one in lost)
