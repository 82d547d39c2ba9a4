"""Chooses the slab that gives its room to records of another size. Pure but for the index.

Records of several sizes have slabs of their own: those of formats that this engine packs its copies
in, and those of a model that is not served any more. `engine.storage.store` calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine.moves import RecordId
from engine.storage.index import RecordIndex
from engine.storage.slabs import SlabFiles

FOREIGN_MS = 7 * 86_400_000
"""Milliseconds without use after which a slab of another size goes."""


def idle_slab(
    index: RecordIndex,
    slabs: SlabFiles,
    size: int,
    present_sizes: Collection[int],
    now_ms: int,
    may_go: Callable[[Sequence[RecordId]], bool],
) -> tuple[int, list[RecordId]] | None:
    """Return the slab of another size than `size` that was used longest ago, and its records: after
    7 days without use, or where there is no place of that size at all. None if there is none.

    `size` 0: for any size; then only slabs of no present size go. `may_go`: whether the records of
    a slab of a present size, and all under them, may be dropped at once. Promised ones never go.
    """
    has_none = size > 0 and slabs.places(size) == 0
    best: tuple[int, int, list[RecordId]] | None = None
    for number, other in slabs.place_sizes().items():
        is_present = other in present_sizes
        if other == size or (is_present and not size):
            continue
        ids, used_ms, is_promised = index.of_slab(number, now_ms)
        is_old = has_none or used_ms < now_ms - FOREIGN_MS
        if not is_old or is_promised or (best is not None and used_ms >= best[0]):
            continue
        if not is_present or may_go(ids):
            best = used_ms, number, ids
    return None if best is None else best[1:]
