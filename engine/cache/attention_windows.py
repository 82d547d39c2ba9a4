"""The block tables of sequences with an attention window: what they find, promise and let go.

Such a sequence reads the first blocks of its table, its *sinks*, and those of its window (rule
*Attention window*). Up to its shared blocks it is a sequence like any other. What it computes
beyond them other requests would compute differently: that stays in its own table, and leaves with
the window. The module allocates nothing and reads no clock. Only `prefix_cache` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import BlockWindow, LeaseGrant, LeaseRequest
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.lease_manager import LeaseManager
from engine.cache.tree.prefix_tree import Node
from engine.cache.tree.window_groups import HOLE


class AttentionWindows:
    """Moves the blocks of tables with an attention window as their sequences move on."""

    def __init__(self, manager: BlockManager, leases: LeaseManager) -> None:
        self._manager = manager
        self._leases = leases
        self._size = manager.block_size

    def sharable(
        self, window: BlockWindow, tokens: Sequence[int], leases: Sequence[LeaseRequest]
    ) -> tuple[Sequence[int], Sequence[LeaseRequest]]:
        """Return the part of a prompt that is looked up, and the leases that end within it.

        The part is what the sequence shares and a token more, since a last token is always
        computed.
        """
        shared = window.shared_blocks * self._size
        return tokens[: shared + 1], [lease for lease in leases if lease.tokens <= shared]

    def refuse_others(self, table: BlockTable, leases: Sequence[LeaseRequest]) -> None:
        """Put a refusal for each of `leases` that was not grantable among the grants of a table."""
        assert table.attention is not None, "a table with a window"
        granted, bound = iter(table.leases), table.attention.shared_blocks * self._size
        table.leases = tuple(
            next(granted)
            if lease.tokens <= bound
            else LeaseGrant(lease.lease_id, lease.retention.name, "refused", 0, "attention")
            for lease in leases
        )

    def advance(self, table: BlockTable, window: BlockWindow, now_s: float) -> None:
        """Let the blocks go that no further query of a sequence reads. O(blocks that go).

        Blocks of the tree go together once the window has passed all of them: pins of a path are
        closed upwards, so none may go while the table pins one below it. From then on the table
        commits nothing and stands in the tree at its sinks.
        """
        sinks, first = window.sinks, window.first_read(table.kv_tokens // self._size)
        begin = sinks + table.holes
        if first <= begin or first < table.committed:
            return
        gone = table.blocks[begin:first]
        if table.committed > sinks:
            self._leave_tree(table, sinks, now_s)
        table.blocks[begin:first] = [HOLE] * len(gone)
        table.holes += len(gone)
        self._manager.unpin_all(table.account, reversed(gone))

    def _leave_tree(self, table: BlockTable, sinks: int, now_s: float) -> None:
        """End the use of the committed blocks behind the sinks."""
        self._leases.end_use(table, now_s)
        table.resumed = []
        top = self._manager.node_of[table.blocks[sinks - 1]] if sinks else None
        table.node = top if isinstance(top, Node) else table.account.tree.root
        table.committed, table.write = sinks, False
