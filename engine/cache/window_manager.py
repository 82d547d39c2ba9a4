"""The window manager: the blocks of window groups in block tables, and resume points.

It pins what a query reads, shares or fills the blocks of nodes, lets the blocks behind a window go,
and marks the blocks that a resume needs (rules *Window*, *Resume point*). It reads no clock and
allocates nothing. Without window groups every call does nothing. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Set

from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.prefix_tree import Node, TreeMatch, WindowBlock
from engine.cache.tree.window_groups import HOLE


class WindowManager:
    """Moves the window blocks of tables as their sequences move on."""

    def __init__(self, manager: BlockManager, promises: BlockPromises) -> None:
        self._manager = manager
        self._promises = promises
        self._groups = manager.windows

    def read_blocks(self, found: TreeMatch) -> list[WindowBlock]:
        """Return the window blocks of whole runs that the first query after a hit reads.

        O(blocks of the windows).
        """
        blocks = []
        for group in range(len(self._groups.windows)):
            for node in found.path[self._groups.first_read(group, found.cached_tokens) :]:
                block = None if node.beside is None else node.beside[group]
                assert block is not None, "a hit stands"
                blocks.append(block)
        return blocks

    def pin(self, table: BlockTable, found: TreeMatch, now_s: float) -> None:
        """Pin the window blocks of a hit in a new table, and note the resume. Cost: as
        `read_blocks`.
        """
        if not table.beside:
            return
        whole, tokens = len(found.path), found.cached_tokens
        groups = range(len(table.beside))
        table.first = [min(whole, self._groups.first_read(group, tokens)) for group in groups]
        table.beside = tuple([HOLE] * first for first in table.first)
        table.resumed = self.read_blocks(found)
        for block in table.resumed:
            self._manager.pin(block)
            block.resumed_at_s = now_s
            table.beside[block.group].append(block.block)
        self._promises.renew_on_read(table, table.resumed, now_s)

    def shorten(self, table: BlockTable, path: list[Node], now_s: float) -> list[Node]:
        """Give back the end of a match of whole blocks that does not stand without the partial
        block behind it, for which there was no room; return the rest. O(blocks).
        """
        size = self._groups.block_size
        stands = self._groups.standing(path, len(path) * size) // size
        self._manager.unpin_all(table.account, table.window_blocks)
        self._manager.unpin_all(table.account, reversed(table.blocks[stands:]))
        hit = TreeMatch(table.account.tree, path[:stands], None, 0)
        table.start_at(hit.path)
        self.pin(table, hit, now_s)
        return hit.path

    def commit(self, table: BlockTable, node: Node, index: int, now_s: float) -> int:
        """Share the window blocks that a node has, and fill its tombstones with the table's own
        (rule *Window*). Return how many were filled. O(groups).
        """
        filled = 0
        for group, row in enumerate(table.beside):
            assert node.beside is not None, "a model with window groups"
            block = node.beside[group]
            if row[index] == HOLE:
                continue  # it was loaded, and no query behind it reads this block
            if block is None:
                fresh = self._manager.fill(table.account, node, group, row[index], now_s)
                if fresh.promised:  # a level below has kept the promise: its use is a read
                    self._promises.renew_on_read(table, (fresh,), now_s)
                filled += 1
            elif block.block != row[index]:
                self._manager.pin(block)
                resumed_at_s = self._manager.resumed_at_s.pop(row[index], block.resumed_at_s)
                block.resumed_at_s = max(block.resumed_at_s, resumed_at_s)
                self._manager.unpin(row[index])
                row[index] = block.block
                table.version += 1
        return filled

    def add_marks(self, table: BlockTable, positions: Set[int]) -> None:
        """Note the positions at which there is a reason to resume, of those not computed yet.

        The blocks that resuming there needs are marked when a commit passes them.
        """
        ahead = {position for position in positions if position > table.kv_tokens}
        table.marks = sorted(ahead.union(table.marks))

    def advance(self, table: BlockTable, now_s: float) -> None:
        """Mark the resume points that the collected steps have passed, and let the blocks go that
        no further query reads (rule *Window*). O(groups), and O(blocks that go).
        """
        while table.marks and table.marks[0] <= table.kv_tokens:
            self.mark_resume(table, table.marks.pop(0), now_s)
        whole = table.kv_tokens // self._groups.block_size
        if whole == table.advanced:
            return  # what a sequence keeps changes with its whole blocks alone
        table.advanced = whole
        for group, row in enumerate(table.beside):
            first = self._groups.first_kept(group, table.kv_tokens)
            for index in range(table.first[group], first):
                self._manager.unpin(row[index])
                row[index] = HOLE
            table.first[group] = max(first, table.first[group])

    def mark_resume(self, table: BlockTable, tokens: int, now_s: float) -> None:
        """Mark the blocks that a hit of `tokens` tokens, or one within its last block, reads.

        O(blocks of the windows).
        """
        end = -(-tokens // self._groups.block_size)
        for group, row in enumerate(table.beside):
            first = max(table.first[group], self._groups.first_kept(group, tokens))
            for block in row[first:end]:
                self._manager.mark_resume(block, now_s)
