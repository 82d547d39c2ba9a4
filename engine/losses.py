"""What namespaces have lost from the cache, by cause and by who took it.

The engine's thread notes facts as they happen and hands out what is new with each heartbeat;
`loss_totals` adds it up on the other side. Counts, never tokens. `service` calls it.
"""

from __future__ import annotations

from collections import Counter

from engine.api import CacheNews, Loss, LossCause, Namespace
from engine.cache import Fact
from engine.cache.events import Erased, Evicted, Expired


class LossCollector:
    """Facts in, news out."""

    def __init__(self) -> None:
        self._new: Counter[tuple[Namespace, LossCause, Namespace]] = Counter()

    def note(self, fact: Fact) -> None:
        """One fact of the cache. O(1)."""
        match fact:
            case Evicted(namespace, taker, blocks):
                cause: LossCause = "evicted_own_quota" if namespace == taker else "evicted_pressure"
                self._new[namespace, cause, taker] += blocks
            case Expired(namespace, blocks):
                self._new[namespace, "expired", b""] += blocks
            case Erased(namespace, blocks):
                self._new[namespace, "erased", b""] += blocks
            case _:
                pass

    def take(self) -> CacheNews | None:
        """What is new since the last call; None if nothing is. O(what is new)."""
        if not self._new:
            return None
        items, self._new = self._new, Counter()
        return CacheNews(tuple(Loss(*key, blocks) for key, blocks in items.items()))
