"""Blocks that are filled from another engine's device, and become findable once they are.

A fill is no request: it promises, reads and counts nothing, takes what may be evicted beyond all
floors alone, and gives each block the limit that it has where it comes from. `PrefixCache.fills` is
the only object of this class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine.api import Namespace, Quota
from engine.cache.block_promises import BlockPromises
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import Committed, Fact
from engine.cache.moved_blocks import Allocate
from engine.cache.tree.prefix_tree import whole_runs

KEPT_PART: Final = 1 / 16
"""The part of the pool that no fill takes: running sequences grow while it waits."""


class FilledBlocks:
    """The fills of one cache, without window groups or states. `allocate`: `PrefixCache`'s."""

    def __init__(
        self,
        manager: BlockManager,
        promises: BlockPromises,
        allocate: Allocate,
        emit: Callable[[Fact], None],
    ) -> None:
        self._manager, self._promises = manager, promises
        self._allocate, self._emit = allocate, emit

    def begin(
        self, namespace: Namespace, quota: Quota, tokens: Sequence[int], now_s: float
    ) -> BlockTable | None:
        """Return a table that pins the leading runs of `tokens` which the device has, and has new
        blocks for the other ones; None where there are none, or no room: a block stays for each
        running sequence, and `KEPT_PART` of the pool. The pins are those of a move, and no use of
        what they pin. `end` ends it. O(blocks)."""
        manager, size = self._manager, self._manager.windows.block_size
        account = manager.account(namespace, quota)
        path = whole_runs(account.tree.root, tokens, size)
        path = path[: next((i for i, node in enumerate(path) if node.block < 0), len(path))]
        wanted = len(tokens) // size - len(path)
        table = BlockTable(account, now_s, write=True, renews=False)
        manager.add_table(table)
        manager.pin_all(account, path)
        table.start_at(path)
        manager.moving.update(table.blocks)
        spare = len(manager.pool.free) + manager.fair_share.spare_beyond_floors()
        spare -= len(manager.tables) + int(KEPT_PART * manager.pool.blocks)
        blocks = self._allocate(account, wanted, now_s) if 0 < wanted <= spare else None
        if blocks is None:
            self.end(table)
            manager.forget_if_idle(account)
            return None
        table.blocks += blocks
        manager.moving.update(blocks)
        manager.version += 1
        return table

    def end(self, table: BlockTable) -> None:
        """Let the blocks of a fill go that did not become findable; the others may be evicted from
        now on. O(blocks)."""
        manager = self._manager
        manager.moving.subtract(table.blocks)
        for block in table.blocks:
            if not manager.moving[block]:
                del manager.moving[block]
        manager.unpin_all(table.account, reversed(table.blocks))
        table.blocks = []
        manager.version += 1
        manager.remove_table(table)

    def commit(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        limits_at_s: Sequence[float],
        now_s: float,
    ) -> None:
        """Make the first runs of a fill findable, one for each limit; nothing after an erasure, or
        where what comes before them has left the tree. O(these)."""
        account, size, added = table.account, self._manager.windows.block_size, 0
        if table.is_erased or not account.tree.contains(table.node):
            return
        first = table.committed
        for index, limit_at_s in enumerate(limits_at_s, start=first):
            run = tuple(tokens[index * size : (index + 1) * size])
            node = known = table.node.children.get(run)
            if node is None or node.block < 0:
                what = table.node, run, table.blocks[index], now_s, (), known
                node, count = self._manager.insert(account, *what)
                added += count
            self._promises.extend_limit(node, limit_at_s, now_s, is_new=known is None)
            table.node = node
        table.committed = first + len(limits_at_s)
        table.kv_tokens = table.committed * size
        if limits_at_s:
            done = len(limits_at_s)
            self._emit(Committed(account.namespace, done, done * size, added))
