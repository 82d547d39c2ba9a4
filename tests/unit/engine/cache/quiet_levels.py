"""Levels below the device that keep what a test says, and do nothing."""

from __future__ import annotations

from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.prefix_tree import Node, TreeBlock


class QuietLevels:
    """Implements `engine.cache.blocks.below.Below`. `keeps`: its places keep promises."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps

    def may_leave(self, block: TreeBlock) -> bool:
        """See `Below`."""
        return self.keeps

    def is_fixed(self, node: Node) -> bool:
        """See `Below`."""
        return False

    def promise_changed(self, node: Node) -> None:
        """See `Below`."""

    def leases_changed(self, node: Node) -> None:
        """See `Below`."""

    def evicting(self, node: Node) -> None:
        """See `Below`."""

    def removed(self, node: Node, *, is_expired: bool) -> None:
        """See `Below`."""
        node.host = node.record = None
        if node.parent is not None:
            node.parent.copied_children -= 1

    def committed(self, table: BlockTable, last: Node, before: int) -> None:
        """See `Below`."""
