"""The order in which records give their places to others (rule 7).

Records of several sizes have slabs of their own: those of formats that this engine packs its copies
in, and those of a model that is not served any more. So a whole slab of another size may go, or
single records of the wanted one.

It chooses; the store deletes, and its remote copies say which records are demoted instead. Only
`disk_space` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Final

from engine.api import Payer
from engine.moves import RecordId
from engine.storage.index.index import RecordIndex
from engine.storage.slabs.slabs import SlabFiles
from engine.storage.space.quotas import DiskQuotas, DiskUsage

DROP_BATCH: Final = 16
"""Records that are dropped at once for room, at most."""
DROP_PART: Final = 1 / 128
"""The part of the places that is dropped at once, at most."""
FOREIGN_MS: Final = 7 * 86_400_000
"""Milliseconds without use after which a slab of another size goes."""
PAUSE_MS: Final = 60_000
SHORT_PAUSE_MS: Final = 1_000
"""Milliseconds until the next search for a slab of another size after one that found nothing, since
it reads the rows of all of them; the second where the wanted size has no place at all."""


class DiskEvictionOrder:
    """What goes first for room. `sizes`: of the places that this engine's records take, the largest
    first; `pinned`: records that a store under way needs. `dropped_total`: records that went.
    """

    def __init__(
        self,
        index: RecordIndex,
        slabs: SlabFiles,
        usage: DiskUsage,
        quotas: DiskQuotas,
        sizes: Sequence[int],
        *,
        pinned: Set[RecordId],
        now_ms: Callable[[], int],
        drop: Callable[[Sequence[RecordId]], int],
        demote: Callable[[RecordId], bool],
    ) -> None:
        """`drop` deletes records with all under them, and returns how many. `demote` gives up a
        record's place if it has an object, and returns whether it did."""
        self._index, self._slabs, self._usage, self._quotas = index, slabs, usage, quotas
        self._sizes = sizes
        self._pinned, self._now_ms = pinned, now_ms
        self._drop, self._demote = drop, demote
        self._search_at_ms: dict[int, int] = {}  # by wanted size
        self.dropped_total = 0

    def make_room(self, taker: Payer, size: int = 0) -> bool:
        """Drop what goes first for a place of a size, 0 for any; return whether anything went."""
        if self._drop_idle_slab(taker, size):
            return True
        sizes = [size] if size else self._sizes
        places = sum(map(self._slabs.places, sizes))
        batch = max(1, min(DROP_BATCH, int(places * DROP_PART)))
        without: set[Payer] = set()
        while (victim := self._quotas.victim(self._usage.used, taker, without)) is not None:
            over = self._usage.used[victim] - self._quotas.floor(victim)
            most = batch if victim == taker else -(-over // self._sizes[0])
            if self.drop_leaves(victim, max(1, min(batch, most)), sizes):
                return True
            without.add(victim)
        return False

    def drop_leaves(self, payer: Payer, count: int, sizes: Sequence[int]) -> int:
        """Drop records of a payer that nothing depends on, in places of the first of these sizes in
        which it has any, or let them down; return how many places that freed."""
        kept, dropped = list[RecordId](), 0
        for size in sizes:
            first = self._leaves(payer, size, count)
            kept = [one for one in first if self._demote(one)]
            dropped = self._drop([one for one in first if one not in kept])
            if kept or dropped:
                break
        self.dropped_total += dropped
        return dropped + len(kept)

    def next_dropped(self, count: int) -> list[RecordId]:
        """Return records that go next for room, of the payer that gives next."""
        payer = self._quotas.victim(self._usage.used, b"", ())
        if payer is None:
            return []
        return next(filter(None, (self._leaves(payer, size, count) for size in self._sizes)), [])

    def _leaves(self, payer: Payer, size: int, count: int) -> list[RecordId]:
        self._index.write_uses()
        most = count + len(self._pinned)
        found = self._index.leaves(self._index.names.payer_id(payer), size, self._now_ms(), most)
        return [one for one in found if one not in self._pinned][:count]

    # -- slabs of another size ------------------------------------------------------------------

    def _drop_idle_slab(self, taker: Payer, size: int) -> bool:
        """Remove a slab of another size, 0 for any that this engine takes; return whether it went.
        O(slabs), and O(records of other slabs) where one is searched for."""
        now_ms = self._now_ms()
        others = set(self._slabs.place_sizes().values()).difference([size] if size else self._sizes)
        if not others or now_ms < self._search_at_ms.get(size, 0):
            return False
        self._index.write_uses()
        found = self._idle_slab(taker, size, now_ms)
        if found is None:
            has_none = size > 0 and self._slabs.places(size) == 0
            self._search_at_ms[size] = now_ms + (SHORT_PAUSE_MS if has_none else PAUSE_MS)
            return False
        number, ids = found
        self.dropped_total += self._drop(ids)
        return self._slabs.remove_if_empty(number)

    def _idle_slab(self, taker: Payer, size: int, now_ms: int) -> tuple[int, list[RecordId]] | None:
        """Return the slab of another size that was used longest ago, and its records; None if there
        is none.

        It goes after 7 days without use; where there is no place of the wanted size; and where all
        of it was used before the first record of that size that would go otherwise. Nothing
        promised, nothing of a store under way, nothing inside the floor of another payer than
        `taker`, with all that depends on it. A slab of a size that this engine does not take goes
        only by its age.
        """
        has_none = size > 0 and self._slabs.places(size) == 0
        foreign_ms = before_ms = now_ms - FOREIGN_MS
        if size and not has_none:
            before_ms = max(before_ms, self._index.oldest_leaf_ms(size, now_ms))
        best: tuple[int, int, list[RecordId]] | None = None
        for number, other in self._slabs.place_sizes().items():
            is_present = other in self._sizes
            if other == size or (is_present and not size):
                continue
            ids, used_ms, is_promised = self._index.of_slab(number, now_ms)
            is_old = has_none or used_ms < (before_ms if is_present else foreign_ms)
            if not is_old or is_promised or (best is not None and used_ms >= best[0]):
                continue
            if not is_present or self._may_all_go(ids, taker, now_ms):
                best = used_ms, number, ids
        return None if best is None else best[1:]

    def _may_all_go(self, tops: Sequence[RecordId], taker: Payer, now_ms: int) -> bool:
        """Return whether these and all under them may be dropped at once. O(these)."""
        lost: Counter[Payer] = Counter()
        for row in self._index.under(tops).values():
            if row.promise_ms > now_ms or row.record_id in self._pinned:
                return False
            lost[self._index.names.payer_name(row.payer_id)] += row.place_bytes
        used, floor = self._usage.used, self._quotas.floor
        return all(one == taker or used[one] - lost[one] >= floor(one) for one in lost)
