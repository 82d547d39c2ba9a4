"""Totals of the blocks that each namespace has lost and gained, on the gateway's side.

The gateway explains cache misses by them and shows which namespace evicted whose blocks. Memory is
bounded: beyond `namespaces_max` namespaces, the one whose blocks moved longest ago is forgotten.
Each engine connection has one; `engine.server.cache_event_collector` is the other end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from engine.api import CacheNews, LossCause, Namespace

NAMESPACES_MAX = 10_000


@dataclass(slots=True)
class BlockMoves:
    """Blocks of a namespace that were inserted and lost. `lived_s`: summed lifetime of those
    evicted."""

    gained: int = 0
    lost: Counter[LossCause] = field(default_factory=Counter)
    lived_s: float = 0.0

    @property
    def evicted(self) -> int:
        """Blocks evicted for any namespace."""
        return self.lost["evicted_own_quota"] + self.lost["evicted_pressure"]


class CacheEventTotals:
    """Blocks lost and gained since the connection began. Belongs to one thread."""

    def __init__(self, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._namespaces_max = namespaces_max
        self._lost: OrderedDict[Namespace, Counter[LossCause]] = OrderedDict()
        self._evictions: OrderedDict[tuple[Namespace, Namespace], int] = OrderedDict()
        self._block_moves: dict[Namespace, BlockMoves] = {}

    def add(self, news: CacheNews) -> None:
        """Add a heartbeat's losses and gains. O(their number)."""
        for loss in news.losses:
            self._lost.setdefault(loss.namespace, Counter())[loss.cause] += loss.blocks
            self._lost.move_to_end(loss.namespace)
            if loss.cause == "evicted_pressure":
                pair = (loss.namespace, loss.taker)
                self._evictions[pair] = self._evictions.get(pair, 0) + loss.blocks
                self._evictions.move_to_end(pair)
            moves = self._block_moves.setdefault(loss.namespace, BlockMoves())
            moves.lost[loss.cause] += loss.blocks
            moves.lived_s += loss.lived_s
        for gain in news.gains:
            self._block_moves.setdefault(gain.namespace, BlockMoves()).gained += gain.blocks
        _evict_oldest(self._lost, self._namespaces_max)
        _evict_oldest(self._evictions, self._namespaces_max)

    def losses_of(self, namespace: Namespace) -> dict[str, int]:
        """Return the blocks that a namespace has lost, by cause."""
        lost = self._lost.get(namespace)
        return {} if lost is None else {str(cause): blocks for cause, blocks in lost.items()}

    def take_moves(self) -> dict[Namespace, BlockMoves]:
        """Return the moves since the last call. Has one caller."""
        moves, self._block_moves = self._block_moves, {}
        return moves

    def evictions_by_taker(self) -> dict[tuple[Namespace, Namespace], int]:
        """Return evicted blocks by (owner, taker), for pairs of different namespaces."""
        return dict(self._evictions)


def _evict_oldest(kept: OrderedDict[Any, Any], namespaces_max: int) -> None:
    while len(kept) > namespaces_max:
        kept.popitem(last=False)
