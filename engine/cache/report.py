"""What the cache says of itself: frozen answers, no structure."""

from __future__ import annotations

from msgspec import Struct

from engine.api import Namespace


class Peek(Struct, frozen=True):
    """What a prompt would find. `expires_at_s`: when the hit ends by itself; None: never."""

    cached_tokens: int
    promised_tokens: int
    expires_at_s: float | None


class CacheStats(Struct, frozen=True):
    """blocks = free + cached (only the tree refers to them) + pinned. Totals never fall."""

    blocks: int
    free: int
    cached: int
    pinned: int
    evicted_blocks_total: int
    expired_blocks_total: int
    copied_blocks_total: int


class NamespaceUse(Struct, frozen=True):
    """Blocks allocated to a namespace; of them, that a table holds; and under a live promise, by
    its class."""

    namespace: Namespace
    blocks: int
    pinned: int
    promised: dict[str, int]
