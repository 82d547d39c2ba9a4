"""What each namespace has lost in all, as the news of it comes.

The gateway's side of `losses`: it explains misses and tells who took from whom. Bounded: of
namespaces beyond `most`, the one that lost nothing for longest is forgotten. `client` keeps one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from engine.api import CacheNews, LossCause, Namespace

NAMESPACES_MAX = 10_000


class LossTotals:
    """Blocks lost since the connection began. Belongs to one thread."""

    def __init__(self, most: int = NAMESPACES_MAX) -> None:
        self._most = most
        self._by_namespace: OrderedDict[Namespace, Counter[LossCause]] = OrderedDict()
        self._taken: OrderedDict[tuple[Namespace, Namespace], int] = OrderedDict()

    def add(self, news: CacheNews) -> None:
        """More has been lost. O(losses in it)."""
        for loss in news.losses:
            totals = self._by_namespace.setdefault(loss.namespace, Counter())
            totals[loss.cause] += loss.blocks
            self._by_namespace.move_to_end(loss.namespace)
            if loss.cause == "evicted_pressure":
                pair = (loss.namespace, loss.taker)
                self._taken[pair] = self._taken.get(pair, 0) + loss.blocks
                self._taken.move_to_end(pair)
        while len(self._by_namespace) > self._most:
            self._by_namespace.popitem(last=False)
        while len(self._taken) > self._most:
            self._taken.popitem(last=False)

    def of(self, namespace: Namespace) -> dict[str, int]:
        """Blocks by cause."""
        return {str(cause): n for cause, n in self._by_namespace.get(namespace, Counter()).items()}

    def taken(self) -> dict[tuple[Namespace, Namespace], int]:
        """Blocks by (whose they were, who took them), for pairs that differ."""
        return dict(self._taken)
