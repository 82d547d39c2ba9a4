"""The order in which records give their places to others (rule 7).

It chooses; the store deletes, and its remote copies say which records are demoted instead. Only
`disk_room` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

from engine.api import Payer
from engine.moves import RecordId
from engine.storage.index.index import RecordIndex
from engine.storage.room.idle_slabs import IdleSlabs
from engine.storage.room.quotas import DiskBooks, DiskQuotas
from engine.storage.slabs.slabs import SlabFiles

DROP_BATCH: Final = 16
"""Records that are dropped at once for room, at most."""
DROP_PART: Final = 1 / 128
"""The part of the places that is dropped at once, at most."""


class DropOrder:
    """What goes first for room. `sizes`: of the places that this engine's records take, the largest
    first; `pinned`: records that a store under way needs. `dropped_total`: records that went.
    """

    def __init__(
        self,
        index: RecordIndex,
        slabs: SlabFiles,
        books: DiskBooks,
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
        self._index, self._slabs, self._books, self._quotas = index, slabs, books, quotas
        self._sizes = sizes
        self._idle = IdleSlabs(index, slabs, books, quotas, sizes)
        self._pinned, self._now_ms = pinned, now_ms
        self._drop, self._demote = drop, demote
        self.dropped_total = 0

    def make_room(self, taker: Payer, size: int = 0) -> bool:
        """Drop what goes first for a place of a size, 0 for any; return whether anything went."""
        if self._drop_idle_slab(taker, size):
            return True
        sizes = [size] if size else self._sizes
        places = sum(map(self._slabs.places, sizes))
        batch = max(1, min(DROP_BATCH, int(places * DROP_PART)))
        without: set[Payer] = set()
        while (victim := self._quotas.victim(self._books.used, taker, without)) is not None:
            over = self._books.used[victim] - self._quotas.floor(victim)
            most = batch if victim == taker else -(-over // self._sizes[0])
            if self.drop_leaves(victim, max(1, min(batch, most)), sizes):
                return True
            without.add(victim)
        return False

    def drop_leaves(self, payer: Payer, count: int, sizes: Sequence[int]) -> int:
        """Drop records of a payer that nothing hangs on, in places of the first of these sizes in
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
        payer = self._quotas.victim(self._books.used, b"", ())
        if payer is None:
            return []
        return next(filter(None, (self._leaves(payer, size, count) for size in self._sizes)), [])

    def _leaves(self, payer: Payer, size: int, count: int) -> list[RecordId]:
        self._index.uses.flush()
        most = count + len(self._pinned)
        found = self._index.leaves(self._index.names.payer_id(payer), size, self._now_ms(), most)
        return [one for one in found if one not in self._pinned][:count]

    def _drop_idle_slab(self, taker: Payer, size: int) -> bool:
        """Remove a slab of another size; see `IdleSlabs`. Return whether it went."""
        now_ms = self._now_ms()
        if not self._idle.is_due(size, now_ms):
            return False
        self._index.uses.flush()
        found = self._idle.find(size, taker, now_ms, self._pinned.__contains__)
        if found is None:
            return False
        self.dropped_total += self._drop(found[1])
        return self._slabs.remove_if_empty(found[0])
