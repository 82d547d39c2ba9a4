"""Copies for models with window groups: which have the blocks of all groups, and where loads stand.

A place below the device has a run's block of group 0 alone, or the blocks of all groups. A query
reads no further back than a window in a window group, so a load brings it where the runs of the
last windows have them. Without window groups every copy is enough, and nothing is asked of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.api import LevelName
from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node, WindowBlock
from engine.levels.copy_formats import CopyFormats


class WindowCopies:
    """The geometry of window groups over places below the device."""

    def __init__(self, cache: PrefixCache, formats: CopyFormats) -> None:
        self._groups = cache.windows
        self.is_on = bool(self._groups.windows) and formats.whole is not None

    def standing(self, copies: Sequence[Node], first: int, count: int) -> int:
        """Return how many of the first `count` copies a load may bring behind `first` runs that the
        device has: as many as end where the last windows are whole. O(copies).
        """
        while self.is_on and count > 0:
            reads = self._first_read((first + count) * self._groups.block_size)
            behind = range(count - 1, max(0, reads - first) - 1, -1)
            gap = next((index for index in behind if not self.is_whole(copies[index])), None)
            if gap is None:
                break
            count = gap
        return count

    def is_whole(self, node: Node) -> bool:
        """Return whether the place that a load reads has the blocks of all groups. O(1)."""
        return node.is_copied and node.places[0].has_windows

    def keeps_whole(self, node: Node, level: LevelName | None = None) -> bool:
        """Return whether a level has the blocks of all groups of a run; None: any level. O(1)."""
        on_host = node.host is not None and node.host.has_windows
        on_disk = node.record is not None and node.record.has_windows
        return (on_host and level != "disk") or (on_disk and level != "host")

    def blocks_of(self, node: Node, index: int, ends: Sequence[int]) -> list[WindowBlock]:
        """Return the window blocks that go into the copy of a node, run `index` of its path: all,
        where resuming at one of `ends`, in tokens, or at a resume point of the tree needs them, or
        one is promised, and all are there; else none. O(groups, ends).
        """
        beside = [] if node.beside is None or not self.is_on else node.beside
        blocks = [block for block in beside if block is not None]
        if not blocks or len(blocks) < len(beside):
            return []
        size = self._groups.block_size
        if any(block.resumed_at_s > -math.inf or block.promised for block in blocks):
            return blocks
        is_read = any(self._first_read(end) <= index < -(-end // size) for end in ends)
        return blocks if is_read else []

    def lacks(self, node: Node) -> bool:
        """Return whether a copy of group 0 in host memory is to be exchanged for one of all groups:
        a resume point has come to its node since. O(groups)."""
        return (
            self.is_on
            and node.host is not None
            and not node.host.has_windows
            and bool(self.blocks_of(node, 0, ()))
        )

    def _first_read(self, tokens: int) -> int:
        """Return the first run that a query behind `tokens` reads in any window group."""
        groups = range(len(self._groups.windows))
        return min(self._groups.first_read(group, tokens) for group in groups)
