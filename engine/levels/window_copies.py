"""Copies for models with window groups: which have the blocks of all groups, and where loads stand.

A run's copy has group 0's block alone, or, in the format `WHOLE` or a packed one like it, the
blocks of all groups. A query reads no further back than a window in a window group, so a load
brings it where the runs of the last windows are whole. Without window groups
every copy is enough, and nothing is asked of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.api import LevelName
from engine.cache import PrefixCache
from engine.cache.blocks.block_manager import PROMISABLE
from engine.cache.tree.prefix_tree import Node, WindowBlock
from engine.levels.copies import CopyBook
from engine.levels.stored_prefixes import Copy


class WindowCopies:
    """The geometry of window groups over the copies of one book."""

    def __init__(self, cache: PrefixCache, book: CopyBook) -> None:
        self._groups = cache.windows
        self._book = book
        self.is_on = bool(self._groups.windows) and book.formats.whole is not None

    def standing(self, copies: Sequence[Copy], first: int, count: int) -> int:
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

    def is_whole(self, copy: Copy) -> bool:
        """Return whether a copy has the blocks of all groups. O(1)."""
        form = copy.record_format
        if copy.slot >= 0:
            form = self._book.accounts.pool.format_of(copy.slot)
        return self._book.formats.is_whole(form)

    def keeps_whole(self, copy: Copy, level: LevelName | None = None) -> bool:
        """Return whether a level has the blocks of all groups of a copy; None: any level. O(1)."""
        formats, pool = self._book.formats, self._book.accounts.pool
        if level != "disk" and copy.slot >= 0 and formats.is_whole(pool.format_of(copy.slot)):
            return True
        return level != "host" and copy.record_id != 0 and formats.is_whole(copy.record_format)

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

    def lacks(self, copy: Copy, node: Node) -> bool:
        """Return whether a copy of group 0 in host memory is to be exchanged for a whole one: a
        resume point has come to its node since. O(groups)."""
        return (
            self.is_on
            and copy.slot >= 0
            and not self.is_whole(copy)
            and bool(self.blocks_of(node, 0, ()))
        )

    def _first_read(self, tokens: int) -> int:
        """Return the first run that a query behind `tokens` reads in any window group."""
        groups = range(len(self._groups.windows))
        return min(self._groups.first_read(group, tokens) for group in groups)


class WholeCopies:
    """The bytes of copies in host memory that keep promises.

    Promises are counted in blocks: of a window group those that resuming reads. A copy of all
    groups takes a block's room in each, until the promise of its run ends. So that floors of others
    keep their bytes, a copy keeps a promise only while all that do take no more room, beside the
    floors, than promises may.
    """

    def __init__(self, book: CopyBook, windows: WindowCopies, level: LevelName) -> None:
        self._book = book
        self._is_on = windows.is_on and level == "host"
        self._kept: dict[Copy, int] = {}
        self._total = 0

    def may_keep(self, copy: Copy) -> bool:
        """Return whether there is room for a copy to keep a promise. O(payers) where more than half
        is taken, else O(1).
        """
        if not self._is_on or copy in self._kept:
            return True
        accounts = self._book.accounts
        most, total = PROMISABLE * accounts.capacity_bytes, self._total + self._bytes_of(copy)
        if 2 * total <= most:
            return True
        floors = sum(one.floor for one in accounts.shares() if one.payer != copy.payer)
        return total + floors <= most

    def keep(self, copy: Copy) -> None:
        """Note that a copy keeps a promise. O(1)."""
        if self._is_on:
            self.forget(copy)
            self._kept[copy] = size = self._bytes_of(copy)
            self._total += size

    def forget(self, copy: Copy) -> None:
        """Note that a copy keeps no promise any more. O(1)."""
        self._total -= self._kept.pop(copy, 0)

    def _bytes_of(self, copy: Copy) -> int:
        return 0 if copy.slot < 0 else self._book.format_of(copy.slot).slot_bytes
