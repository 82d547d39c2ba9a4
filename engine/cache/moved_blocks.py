"""Blocks that moves between levels read or fill: their pins, and a table's room for a load.

A load of a model with window groups brings the blocks of group 0 for each run, and in a window
group those that the first query behind it reads: what lies before becomes holes, as behind any
window (rule *Window*). What the table had there is set aside until the load has ended, so that one
that fails leaves the table as it was. `PrefixCache.moves` is the only object of this class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.accounts import NamespaceAccount
from engine.cache.tree.prefix_tree import Node, WindowBlock
from engine.cache.tree.window_groups import HOLE
from engine.errors import InvariantViolation

VICTIMS_SEEN = 16
"""Next victims of each payer that are told at a time."""
WINDOW_VICTIMS = 4
"""Entries of the eviction order that are looked at for each next victim and KV group: some are of
window blocks that no resume point needs."""
Allocate = Callable[[NamespaceAccount, int, float], list[int] | None]


class MovedBlocks:
    """The pins of moves. `allocate`: `PrefixCache`'s."""

    def __init__(self, manager: BlockManager, allocate: Allocate) -> None:
        self._manager = manager
        self._allocate = allocate
        self._groups = manager.windows

    # -- pins ---------------------------------------------------------------------------------

    def hold(
        self,
        account: NamespaceAccount,
        path: Sequence[Node],
        now_s: float,
        beside: Iterable[WindowBlock] = (),
    ) -> BlockTable:
        """Pin a path from the root, and window blocks of it, for moves that read them, until
        `unhold`. O(blocks)."""
        self._manager.pin_all(account, path)
        blocks = [node.block for node in path]
        for block in beside:
            self._manager.pin(block)
            blocks.append(block.block)
        return self._hold_table(account, blocks, now_s)

    def hold_blocks(self, table: BlockTable, first: int, now_s: float) -> BlockTable:
        """Pin the blocks of a table from entry `first` on for moves that fill them, until
        `unhold`. The table may end before that. O(blocks).
        """
        table.writable_tokens, blocks = 0, table.blocks[first:]
        for row, start in zip(table.beside, table.first, strict=True):
            blocks += row[max(first, start) :]
        add_ref = self._manager.pool.add_ref
        for block in blocks:
            add_ref(block)
        return self._hold_table(table.account, blocks, now_s)

    def unhold(self, held: BlockTable) -> None:
        """Let go what `hold` or `hold_blocks` has pinned, once. O(blocks)."""
        if held not in self._manager.tables:
            raise InvariantViolation("blocks were let go twice")
        self.unhold_except(held, ())
        self._manager.remove_table(held)

    def unhold_except(self, held: BlockTable, kept: Collection[int]) -> None:
        """Let go the blocks of a hold that are not in `kept`. O(blocks)."""
        gone = [block for block in held.blocks if block not in kept]
        held.blocks = [block for block in held.blocks if block in kept]
        self._let_go(held.account, gone)

    def unhold_first(self, held: BlockTable, blocks: int) -> None:
        """Let go the first `blocks` of a hold: those of group 0 come first. O(blocks held)."""
        gone = held.blocks[:blocks]
        del held.blocks[:blocks]
        self._let_go(held.account, gone)

    def _let_go(self, account: NamespaceAccount, blocks: list[int]) -> None:
        moving = self._manager.moving
        for block in blocks:
            left = moving[block] - 1
            if left:
                moving[block] = left
            else:
                moving.pop(block)
        self._manager.unpin_all(account, reversed(blocks))
        self._manager.version += 1

    def _hold_table(self, account: NamespaceAccount, blocks: list[int], now_s: float) -> BlockTable:
        held = BlockTable(account, now_s, write=False)
        held.blocks = blocks
        self._manager.moving.update(blocks)
        self._manager.add_table(held)
        self._manager.version += 1
        return held

    # -- room ---------------------------------------------------------------------------------

    def account_of(self, node: Node) -> NamespaceAccount | None:
        """Return the account whose tree has this node; None once it has left. O(1)."""
        return self._manager.account_of(node)

    @property
    def free_blocks(self) -> int:
        """Return the blocks that nothing refers to. O(1)."""
        return len(self._manager.pool.free)

    @property
    def spare_blocks(self) -> int:
        """Return the blocks that are free or may be evicted for any payer, less those that unfilled
        floors may still claim: so many may be pinned without a request behind them. O(floors).
        """
        return self.free_blocks + self._manager.fair_share.spare_beyond_floors()

    @property
    def pinned_blocks(self) -> int:
        """Return the blocks that a block table or a move refers to. O(payers changed since the last
        query)."""
        manager = self._manager
        return manager.pool.blocks - self.free_blocks - manager.fair_share.cached()

    # -- victims ------------------------------------------------------------------------------

    def next_victims(self) -> Iterator[Node]:
        """Iterate over the leaves that may be evicted next, `VICTIMS_SEEN` of each payer at most:
        those of the payer that gives first come first; and over the ends of the resume points whose
        window blocks may. Nothing may change meanwhile.
        """
        share, most = self._manager.fair_share, VICTIMS_SEEN
        if self._groups.windows:
            most *= WINDOW_VICTIMS * self._groups.groups
        for payer_account in share.givers():
            found: dict[Node, None] = {}
            seen = set[Node]()
            for _, _, leaf in payer_account.eviction_order.entries(0, most):
                if isinstance(leaf, Node):
                    found[leaf] = None
                elif leaf.resumed_at_s > -math.inf and leaf.parent not in seen:
                    found[_end_of_point(leaf, seen)] = None
                if len(found) >= VICTIMS_SEEN:
                    break
            yield from found

    # -- loads --------------------------------------------------------------------------------

    def grow(self, table: BlockTable, runs: int, now_s: float) -> bool:
        """Let a table of whole blocks, all in place, hold `runs` runs, for a load that fills the
        new ones; return whether there was room. O(runs).

        In a window group the entries before what a query at the end of the load reads become holes.
        """
        whole, tokens = len(table.blocks), runs * self._groups.block_size
        keeps = [
            max(first, self._groups.first_read(group, tokens))
            for group, first in enumerate(table.first)
        ]
        counts = [runs - whole, *(runs - max(whole, keep) for keep in keeps)]
        new = self._allocate(table.account, sum(counts), now_s)
        if new is None:
            return False
        table.blocks += [new.pop() for _ in range(counts[0])]
        aside: list[tuple[int, list[int]]] = []
        for row, first, keep, count in zip(
            table.beside, table.first, keeps, counts[1:], strict=True
        ):
            aside.append((first, row[first:keep]))
            row[first:keep] = [HOLE] * (min(keep, whole) - first)
            row += [HOLE] * (keep - whole)
            row += [new.pop() for _ in range(count)]
        table.aside, table.first = tuple(aside), keeps
        table.version += 1
        return True

    def settle(self, table: BlockTable, whole: int, loaded: int) -> int:
        """End a load of a table that had `whole` runs before: return how many of the `loaded` ones
        it may keep. All of them, or none where a window group lacks what a query behind them reads:
        the table is then what it was. Without window groups it keeps them all. O(runs).
        """
        tokens = (whole + loaded) * self._groups.block_size
        if loaded and all(
            self._groups.first_read(group, tokens) >= first
            for group, first in enumerate(table.first)
        ):
            for _, blocks in table.aside:
                self._manager.unpin_all(table.account, reversed(blocks))
            table.aside = ()
            return loaded
        if not table.beside:
            return loaded
        for row, first, (before, blocks) in zip(
            table.beside, table.first, table.aside, strict=True
        ):
            self._manager.unpin_all(table.account, reversed(row[max(first, whole) :]))
            row[:] = [HOLE] * before + blocks + row[first:whole]
        self._manager.unpin_all(table.account, reversed(table.blocks[whole:]))
        del table.blocks[whole:]
        table.first = [before for before, _ in table.aside]
        table.aside, table.writable_tokens = (), 0
        table.version += 1
        return 0


def _end_of_point(block: WindowBlock, seen: set[Node]) -> Node:
    """Return the last node whose window blocks were resumed when this one was: a point that loses
    one of them is of no use, so that it is copied as a whole. Adds the nodes on the way to `seen`.
    """
    node = block.parent
    assert node is not None, "it is in a tree"
    below: Node | None = node
    while below is not None:
        node = below
        seen.add(node)
        below = next((one for one in node.children.values() if _is_of(one, block)), None)
    return node


def _is_of(node: Node, block: WindowBlock) -> bool:
    at_s = block.resumed_at_s
    return any(one is not None and one.resumed_at_s == at_s for one in node.beside or ())
