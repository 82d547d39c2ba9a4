"""Collects cache events for the heartbeat: blocks lost, by cause and taker, and blocks inserted.

The engine's thread records events as they happen and sends the new ones with each heartbeat;
`engine.client.cache_event_totals` adds them up on the other side. Counts, never tokens.
`engine.server.service` calls it.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from engine.api import Namespace
from engine.cache import Fact
from engine.cache.events import BlocksErased, Committed, Evicted, Expired, PromiseLost
from engine.statistics import CacheNews, Gain, Loss, LossCause

_LossKey = tuple[Namespace, LossCause, Namespace]


class CacheEventCollector:
    """Sums of cache events that have not been sent."""

    def __init__(self) -> None:
        self._lost: Counter[_LossKey] = Counter()
        self._lived_s: dict[_LossKey, float] = {}
        self._gained: Counter[Namespace] = Counter()

    def note(self, fact: Fact) -> None:
        """Record one event. O(1)."""
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
            case PromiseLost(namespace, blocks):
                self._lost[namespace, "lost_below", b""] += blocks
            case BlocksErased(namespace, blocks):
                self._lost[namespace, "erased", b""] += blocks
            case _:
                pass

    def __len__(self) -> int:
        return len(self._lost) + len(self._gained)

    def take(self, items_max: int) -> CacheNews | None:
        """Return and remove up to `items_max` losses and as many gains, oldest first; None without
        any.

        O(items_max).
        """
        lost, gained = list(islice(self._lost, items_max)), list(islice(self._gained, items_max))
        if not lost and not gained:
            return None
        return CacheNews(
            tuple(Loss(*key, self._lost.pop(key), self._lived_s.pop(key, 0.0)) for key in lost),
            tuple(Gain(name, self._gained.pop(name)) for name in gained),
        )
