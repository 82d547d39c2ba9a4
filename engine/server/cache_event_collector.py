"""What namespaces have lost from the cache, by cause and by who took it, and what came into it.

The engine's thread notes facts as they happen and hands out what is new with the heartbeat;
`loss_totals` adds it up on the other side. Counts, never tokens. `service` calls it.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from engine.api import CacheNews, Gain, Loss, LossCause, Namespace
from engine.cache import Fact
from engine.cache.events import BlocksErased, Committed, Evicted, Expired

Key = tuple[Namespace, LossCause, Namespace]


class CacheEventCollector:
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
            case BlocksErased(namespace, blocks):
                self._lost[namespace, "erased", b""] += blocks
            case _:
                pass

    def __len__(self) -> int:
        return len(self._lost) + len(self._gained)

    def take(self, most: int) -> CacheNews | None:
        """So many losses and gains at most of those not taken yet, the oldest first; None if there
        are none. O(most)."""
        lost, gained = list(islice(self._lost, most)), list(islice(self._gained, most))
        if not lost and not gained:
            return None
        return CacheNews(
            tuple(Loss(*key, self._lost.pop(key), self._lived_s.pop(key, 0.0)) for key in lost),
            tuple(Gain(name, self._gained.pop(name)) for name in gained),
        )
