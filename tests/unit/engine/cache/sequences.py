"""A sequence's step over a cache alone, which computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache import BlockTable, PrefixCache


def compute(
    cache: PrefixCache,
    table: BlockTable,
    tokens: Sequence[int],
    now_s: float = 0.0,
    *,
    end: int | None = None,
) -> bool:
    """Run one step that computes all missing tokens, or those up to `end`; return whether there was
    room for them.
    """
    end = len(tokens) if end is None else end
    if not cache.grow(table, end, now_s):
        return False
    cache.take_copies()
    cache.commit(table, tokens, end, now_s)
    return True
