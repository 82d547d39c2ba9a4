"""The eviction policy: which evictable leaf of a payer leaves the cache first.

Rule *Fair share* chooses the payer that gives a block; the policy chooses the block among that
payer's evictable leaves. `EvictionPolicy` is the interface, `LeastRecentlyUsed` the default, and
`EvictionOrder` keeps the leaves of one payer sorted by the policy's scores. Window blocks stand in
the same order by the time of their last resume (rule *Resume point*). `PrefixCache` takes the
policy as an argument. This module knows no pool, no payer and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from sortedcontainers import SortedList

from engine.cache.tree.prefix_tree import Node, TreeBlock, WindowBlock


class EvictionPolicy(Protocol):
    """Scores evictable leaves; the lowest score is evicted first.

    A leaf is neither pinned nor bound, and has no child on the device, so a policy can neither
    evict a block in use nor cut a prefix in the middle. Equal scores are evicted in the order in
    which the nodes were made.
    """

    def score(self, node: Node) -> float:
        """Return the score of a leaf that has become evictable. Changes nothing.

        The score may depend only on state that does not change while the leaf is evictable, such
        as `last_use_s`, `inserted_at_s`, `hits` and `run`: the cache asks once each time the leaf
        becomes evictable, and the checker compares later. Part of every release and eviction, so
        it should be O(1). For a model with window groups the score is a time, in the seconds that
        the cache is given: it is compared with the last resume of window blocks.
        """


class LeastRecentlyUsed:
    """Evict the leaf whose last use is the oldest."""

    def score(self, node: Node) -> float:
        """Return the time of the last use. O(1)."""
        return node.last_use_s


class EvictionOrder:
    """The evictable leaves and window blocks of one payer, the lowest score first."""

    __slots__ = ("_entries", "_policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: TreeBlock) -> None:
        """Add a leaf or a window block that has become evictable. O(log n)."""
        node.eviction_score = score = self._score(node)
        self._entries.add((score, node.serial, node))

    def remove(self, node: TreeBlock) -> None:
        """Remove a leaf or a window block that is no longer evictable. O(log n)."""
        self._entries.remove((node.eviction_score, node.serial, node))
        node.eviction_score = None

    def first(self) -> TreeBlock:
        """Return what to evict next; the order must not be empty. O(1)."""
        node: TreeBlock = self._entries[0][2]
        return node

    def take_first(self) -> TreeBlock:
        """Remove and return what is evicted next; the order must not be empty. O(log n)."""
        node: TreeBlock = self._entries.pop(0)[2]
        node.eviction_score = None
        return node

    def add_unless_first(self, node: TreeBlock) -> bool:
        """Add a block that has become evictable, unless it would be evicted next; return whether it
        was added. O(log n), O(1) where it was not.
        """
        score = self._score(node)
        if not self._entries or (score, node.serial) < self._entries[0]:
            return False
        node.eviction_score = score
        self._entries.add((score, node.serial, node))
        return True

    def entries(self, start: int, end: int) -> Iterator[tuple[float, int, TreeBlock]]:
        """Iterate over (score, serial, block) at positions [start, end), for the checker."""
        entries: Iterator[tuple[float, int, TreeBlock]] = self._entries.islice(start, end)
        return entries

    def holds(self, node: TreeBlock) -> bool:
        """Return whether the order has the block under the score that it has now. O(log n)."""
        score = self._score(node)
        return score == node.eviction_score and (score, node.serial, node) in self._entries

    def _score(self, node: TreeBlock) -> float:
        if isinstance(node, WindowBlock):
            return node.resumed_at_s
        return self._policy.score(node)
