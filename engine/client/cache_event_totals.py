"""Totals of the blocks that each namespace has lost and gained, on the gateway's side.

The gateway explains cache misses by them and shows which namespace evicted whose blocks. Memory is
bounded: beyond `namespaces_max` namespaces, the group with the most of them forgets the one whose
blocks moved longest ago, so that a client with many namespaces pushes out its own. Each engine
connection has one; `engine.server.cache_event_collector` is the other end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from engine.api import Namespace
from engine.statistics import CacheNews, LossCause

NAMESPACES_MAX = 10_000
K = TypeVar("K")
V = TypeVar("V")
GroupOf = Callable[[Namespace], Hashable]
"""Groups namespaces, for example by their payer. The totals know no tenant."""


@dataclass(slots=True)
class BlockMoves:
    """Blocks of a namespace that were inserted and lost."""

    gained: int = 0
    lost: Counter[LossCause] = field(default_factory=Counter)
    lived_s: float = 0.0
    """Summed lifetime of those evicted."""

    def add(self, more: BlockMoves) -> None:
        """Add further moves of the same namespace."""
        self.gained += more.gained
        self.lost.update(more.lost)
        self.lived_s += more.lived_s

    @property
    def evicted(self) -> int:
        """Blocks evicted for any namespace."""
        return self.lost["evicted_own_quota"] + self.lost["evicted_pressure"]


class CacheEventTotals:
    """Blocks lost and gained since the connection began. Belongs to one thread."""

    def __init__(self, namespaces_max: int = NAMESPACES_MAX) -> None:
        self._lost: _Bounded[Namespace, Counter[LossCause]] = _Bounded(namespaces_max)
        self._evictions: _Bounded[tuple[Namespace, Namespace], int] = _Bounded(namespaces_max)
        self._group_of: GroupOf = _one_group
        self._block_moves: dict[Namespace, BlockMoves] = {}

    def group_by(self, group_of: GroupOf) -> None:
        """Bound each group of namespaces by its share from now on. Call it before `add`."""
        self._group_of = group_of

    def add(self, news: CacheNews) -> None:
        """Add a heartbeat's losses and gains. O(their number)."""
        for loss in news.losses:
            group = self._group_of(loss.namespace)
            lost = self._lost.get(loss.namespace) or Counter[LossCause]()
            lost[loss.cause] += loss.blocks
            self._lost.put(group, loss.namespace, lost)
            if loss.cause == "evicted_pressure":
                pair = (loss.namespace, loss.taker)
                evicted = (self._evictions.get(pair) or 0) + loss.blocks
                self._evictions.put(group, pair, evicted)
            moves = self._block_moves.setdefault(loss.namespace, BlockMoves())
            moves.lost[loss.cause] += loss.blocks
            moves.lived_s += loss.lived_s
        for gain in news.gains:
            self._block_moves.setdefault(gain.namespace, BlockMoves()).gained += gain.blocks

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
        return self._evictions.as_dict()


def _one_group(namespace: Namespace) -> Hashable:
    """Put all namespaces into one group."""
    return None


class _Bounded(Generic[K, V]):
    """At most `most` values by key; the largest group loses its oldest one first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[K, V] = {}
        self._by_group: dict[Hashable, OrderedDict[K, None]] = {}

    def get(self, key: K) -> V | None:
        """Return a key's value, or None. O(1)."""
        return self._values.get(key)

    def put(self, group: Hashable, key: K, value: V) -> None:
        """Set a key's value as its group's latest. O(1), or O(groups) when it is full."""
        self._values[key] = value
        keys = self._by_group.setdefault(group, OrderedDict())
        keys[key] = None
        keys.move_to_end(key)
        if len(self._values) > self._most:
            largest = max(self._by_group, key=lambda one: len(self._by_group[one]))
            oldest, _ = self._by_group[largest].popitem(last=False)
            del self._values[oldest]

    def as_dict(self) -> dict[K, V]:
        """Return all values by key."""
        return dict(self._values)
