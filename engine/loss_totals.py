"""What each namespace has lost and gained in all, as the news of it comes.

The gateway's side of `losses`: it explains misses and tells who took from whom. Bounded: of
namespaces beyond `most`, the one that nothing happened to for longest is forgotten. `client` keeps
one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from engine.api import CacheNews, LossCause, Namespace

NAMESPACES_MAX = 10_000


@dataclass(slots=True)
class Moves:
    """Blocks of a namespace that came and went. `lived_s`: of those evicted, together."""

    gained: int = 0
    lost: Counter[LossCause] = field(default_factory=Counter)
    lived_s: float = 0.0

    @property
    def evicted(self) -> int:
        """For whomever."""
        return self.lost["evicted_own_quota"] + self.lost["evicted_pressure"]


class LossTotals:
    """Blocks lost and gained since the connection began. Belongs to one thread."""

    def __init__(self, most: int = NAMESPACES_MAX) -> None:
        self._most = most
        self._by_namespace: OrderedDict[Namespace, Moves] = OrderedDict()
        self._taken: OrderedDict[tuple[Namespace, Namespace], int] = OrderedDict()

    def add(self, news: CacheNews) -> None:
        """More has been lost and gained. O(what is in it)."""
        for loss in news.losses:
            moves = self._moves(loss.namespace)
            moves.lost[loss.cause] += loss.blocks
            moves.lived_s += loss.lived_s
            if loss.cause == "evicted_pressure":
                pair = (loss.namespace, loss.taker)
                self._taken[pair] = self._taken.get(pair, 0) + loss.blocks
                self._taken.move_to_end(pair)
        for gain in news.gains:
            self._moves(gain.namespace).gained += gain.blocks
        while len(self._by_namespace) > self._most:
            self._by_namespace.popitem(last=False)
        while len(self._taken) > self._most:
            self._taken.popitem(last=False)

    def of(self, namespace: Namespace) -> dict[str, int]:
        """Blocks lost, by cause."""
        moves = self._by_namespace.get(namespace)
        return {} if moves is None else {str(cause): n for cause, n in moves.lost.items()}

    def moves(self) -> dict[Namespace, Moves]:
        """All that came and went: to look at, not to change."""
        return dict(self._by_namespace)

    def taken(self) -> dict[tuple[Namespace, Namespace], int]:
        """Blocks by (whose they were, who took them), for pairs that differ."""
        return dict(self._taken)

    def _moves(self, namespace: Namespace) -> Moves:
        moves = self._by_namespace.get(namespace)
        if moves is None:
            moves = self._by_namespace[namespace] = Moves()
        self._by_namespace.move_to_end(namespace)
        return moves
