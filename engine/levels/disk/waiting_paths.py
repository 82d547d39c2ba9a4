"""The paths that wait to be stored: payers in turn, and of one payer the oldest first."""

from __future__ import annotations

from collections import deque

from engine.api import Payer
from engine.cache.tree.prefix_tree import Node


class WaitingPaths:
    """The ends of waiting paths; at most `length_max`. The payer with most gives up its oldest."""

    def __init__(self, length_max: int) -> None:
        self._length_max = length_max
        self._by_payer: dict[Payer, deque[Node]] = {}  # whose turn is next first
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, payer: Payer, end: Node, *, is_next: bool = False) -> None:
        """Add a path of a payer; `is_next`: before its others. O(1), or O(payers) when full."""
        ends = self._by_payer.setdefault(payer, deque())
        if is_next:
            ends.appendleft(end)
        else:
            ends.append(end)
        self._length += 1
        if self._length > self._length_max:
            most = max(self._by_payer, key=lambda payer: len(self._by_payer[payer]))
            self._take(most)

    def take(self) -> Node:
        """Remove and return the path whose turn it is. Raises StopIteration on an empty queue."""
        payer = next(iter(self._by_payer))
        end = self._take(payer)
        if payer in self._by_payer:
            self._by_payer[payer] = self._by_payer.pop(payer)
        return end

    def _take(self, payer: Payer) -> Node:
        ends = self._by_payer[payer]
        end = ends.popleft()
        self._length -= 1
        if not ends:
            del self._by_payer[payer]
        return end
