"""What each namespace has lost in all, and what came and went of late, as the news of it comes.

The gateway's side of `losses`: it explains misses and tells who took from whom. Bounded: of
namespaces beyond `most`, the one that nothing happened to for longest is forgotten. `client` keeps
one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from engine.api import CacheNews, LossCause, Namespace

NAMESPACES_MAX = 10_000


@dataclass(slots=True)
class BlockMoves:
    """Blocks of a namespace that came and went. `lived_s`: of those evicted, together."""

    gained: int = 0
    lost: Counter[LossCause] = field(default_factory=Counter)
    lived_s: float = 0.0

    @property
    def evicted(self) -> int:
        """For whomever."""
        return self.lost["evicted_own_quota"] + self.lost["evicted_pressure"]


class CacheEventTotals:
    """Blocks lost and gained since the connection began. Belongs to one thread."""

    def __init__(self, most: int = NAMESPACES_MAX) -> None:
        self._most = most
        self._lost: OrderedDict[Namespace, Counter[LossCause]] = OrderedDict()
        self._taken: OrderedDict[tuple[Namespace, Namespace], int] = OrderedDict()
        self._moves: dict[Namespace, BlockMoves] = {}

    def add(self, news: CacheNews) -> None:
        """More has been lost and gained. O(what is in it)."""
        for loss in news.losses:
            self._lost.setdefault(loss.namespace, Counter())[loss.cause] += loss.blocks
            self._lost.move_to_end(loss.namespace)
            if loss.cause == "evicted_pressure":
                pair = (loss.namespace, loss.taker)
                self._taken[pair] = self._taken.get(pair, 0) + loss.blocks
                self._taken.move_to_end(pair)
            moves = self._moves.setdefault(loss.namespace, BlockMoves())
            moves.lost[loss.cause] += loss.blocks
            moves.lived_s += loss.lived_s
        for gain in news.gains:
            self._moves.setdefault(gain.namespace, BlockMoves()).gained += gain.blocks
        _shorten(self._lost, self._most)
        _shorten(self._taken, self._most)

    def of(self, namespace: Namespace) -> dict[str, int]:
        """Blocks lost, by cause."""
        lost = self._lost.get(namespace)
        return {} if lost is None else {str(cause): blocks for cause, blocks in lost.items()}

    def take_moves(self) -> dict[Namespace, BlockMoves]:
        """What came and went since the last call. It has one caller."""
        moves, self._moves = self._moves, {}
        return moves

    def taken(self) -> dict[tuple[Namespace, Namespace], int]:
        """Blocks by (whose they were, who took them), for pairs that differ."""
        return dict(self._taken)


def _shorten(kept: OrderedDict[Any, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
