"""Sequences over a cache alone: their steps compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def computed(
    cache: PrefixCache,
    tokens: Sequence[int],
    now_s: float = 0.0,
    namespace: bytes = b"us",
    *,
    end: int | None = None,
    **wanted: Any,
) -> BlockTable:
    """Begin a sequence, and compute it, or its tokens up to `end`. `wanted`: what else `begin`
    takes.
    """
    table = cache.begin(namespace, tokens, now_s, **wanted)
    assert compute(cache, table, tokens, now_s, end=end)
    return table
