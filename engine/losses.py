"""What namespaces have lost from the cache, by cause and by who took it, and what came into it.

The engine's thread notes facts as they happen and hands out what is new with each heartbeat;
`loss_totals` adds it up on the other side. Counts, never tokens. `service` calls it.
"""

from __future__ import annotations

from collections import Counter

from engine.api import CacheNews, Gain, Loss, LossCause, Namespace
from engine.cache import Fact
from engine.cache.events import Committed, Erased, Evicted, Expired

Key = tuple[Namespace, LossCause, Namespace]


class LossCollector:
    """Facts in, news out."""

    def __init__(self) -> None:
        self._lost: Counter[Key] = Counter()
        self._lived_s: dict[Key, float] = {}
        self._gained: Counter[Namespace] = Counter()

    def note(self, fact: Fact) -> None:
        """One fact of the cache. O(1)."""
        match fact:
            case Committed(namespace, _, _, new_blocks) if new_blocks:
                self._gained[namespace] += new_blocks
            case Evicted(namespace, taker, blocks, lived_s):
                cause: LossCause = "evicted_own_quota" if namespace == taker else "evicted_pressure"
                key = (namespace, cause, taker)
                self._lost[key] += blocks
                self._lived_s[key] = self._lived_s.get(key, 0.0) + lived_s
            case Expired(namespace, blocks):
                self._lost[namespace, "expired", b""] += blocks
            case Erased(namespace, blocks):
                self._lost[namespace, "erased", b""] += blocks
            case _:
                pass

    def take(self) -> CacheNews | None:
        """What is new since the last call; None if nothing is. O(what is new)."""
        if not self._lost and not self._gained:
            return None
        lost, lived_s, gained = self._lost, self._lived_s, self._gained
        self._lost, self._lived_s, self._gained = Counter(), {}, Counter()
        return CacheNews(
            tuple(Loss(*key, blocks, lived_s.get(key, 0.0)) for key, blocks in lost.items()),
            tuple(Gain(namespace, blocks) for namespace, blocks in gained.items()),
        )
