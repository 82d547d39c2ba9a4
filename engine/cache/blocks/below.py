"""What the cache asks and tells of the levels below the device.

One tree has the places of a run on every level, so that the levels keep no terms of their own. They
fill and empty places, and say whether a place keeps a promise; the cache does the rest.
`engine.levels.levels` is the one implementation; this module knows no slot, no disk and no clock.
"""

from __future__ import annotations

from typing import Protocol

from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.prefix_tree import Node, TreeBlock


class Below(Protocol):
    """The levels below one device pool. Each call is O(1) or O(log nodes) if it says nothing."""

    def may_leave(self, block: TreeBlock) -> bool:
        """Return whether a place below keeps the promise of a block, so that the device may evict
        it. O(runs of the windows) for a model with window groups.
        """

    def is_fixed(self, node: Node) -> bool:
        """Return whether the place of a node can never have its window blocks."""

    def promise_changed(self, node: Node) -> None:
        """Take note that the promise of a node, or of a window block of it, has begun, has ended,
        or is bound to the device otherwise than before.
        """

    def leases_changed(self, node: Node) -> None:
        """Take note that a lease has come to end at a node, or does so no more."""

    def evicting(self, node: Node) -> None:
        """Take note that the device is about to evict the block of a node."""

    def removed(self, node: Node, *, is_expired: bool) -> None:
        """Empty the places below of a node that leaves the tree."""

    def committed(self, table: BlockTable, last: Node, before: int) -> None:
        """Take note that a table has committed blocks, or its tail: `last` is the last node of
        these, `before` how many blocks it had committed until then.
        """
