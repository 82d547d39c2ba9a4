"""Promises over window groups: which window blocks the promise of a prompt covers, and their cost.

A promise of n tokens promises, in each window group, what resuming at n reads (rule 19). A level
below keeps whole blocks alone, so with one it promises what a prompt of n tokens reads that resumes
at the end of its last whole block. There a window is kept as a whole, on the device or below: where
a copy of one of its runs can never have all groups' blocks, none of them may be below alone. This
module changes a block table's promises and the room for them, and no block. Only `lease_manager`
calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.blocks.block_table import BlockTable
from engine.cache.kept_below import KeptWindows
from engine.cache.promise_room import PromiseRoom
from engine.cache.tree.leases import BlockTerms
from engine.cache.tree.prefix_tree import Node
from engine.cache.tree.window_groups import WindowGroups


def first_promised(groups: WindowGroups, group: int, tokens: int, *, has_level: bool) -> int:
    """Return the first block of a window group that a promise of `tokens` tokens covers; see above.
    O(1).
    """
    if has_level:
        tokens = max(0, tokens - 1) // groups.block_size * groups.block_size
    return groups.first_read(group, tokens)


class WindowCover:
    """The window blocks that the promises of one table cover.

    `kept`: by group and index, the terms of those that the device does not have and whose promises
    a level below keeps.
    """

    def __init__(
        self,
        groups: WindowGroups,
        table: BlockTable,
        path: Sequence[Node],
        kept_blocks: int,
        below: Sequence[KeptWindows] | None,
    ) -> None:
        """`path`: what is cached; behind it a level below keeps the promises of `kept_blocks` runs.
        `below`: what it keeps of the window blocks of each run; None where no level keeps promises.
        """
        self.kept: dict[tuple[int, int], BlockTerms] = {}
        self._groups = groups
        self._table = table
        self._path = path
        self._kept_to = len(path) + kept_blocks
        self._below = below

    def cover(self, covered_blocks: int, tokens: int, room: PromiseRoom) -> tuple[int, bool]:
        """Cover a promise of `tokens` tokens, beyond the `covered_blocks` that earlier leases of
        the table cover, with the blocks of its last window in each window group, as far as `room`
        allows.

        Returns the blocks then covered, and whether a freed window block stood in the way. Reserves
        the blocks that are not computed yet, and takes the room. O(blocks of the windows) where the
        promise is covered whole.
        """
        size, has_gap = self._groups.block_size, False
        covered = -(-tokens // size)
        while covered > covered_blocks:
            wanted, gap = self._missing(covered, min(tokens, covered * size))
            cost, below = self._cost(covered_blocks, covered)
            cost += sum(is_new for _, _, is_new in wanted)
            has_gap = gap is not None
            # What is promised on the device brings promises above it back there.
            returning = room.waiting + below if cost else 0
            lacking = max(cost - max(0, room.total), cost + returning - max(0, room.device))
            if gap is not None:
                covered = gap
            elif cost and lacking > 0:  # a block less takes at most one block of each group less
                fewer = covered - max(1, lacking // self._groups.groups)
                fewer = max(fewer, min(covered - 1, self._kept_to)) if returning else fewer
                covered = self._last_promised(fewer, covered)
            else:
                self._take(wanted, covered_blocks, covered)
                room.total -= cost
                room.device -= cost + returning
                room.waiting = 0 if cost else room.waiting + below
                return covered, False
        return covered_blocks, has_gap

    def _take(
        self, wanted: Sequence[tuple[int, int, bool]], covered_blocks: int, covered: int
    ) -> None:
        """Add window blocks to the table's promises, and reserve what is not computed yet."""
        table = self._table
        for group, index, _ in wanted:
            table.window_promises[group].add(index)
            terms = self._terms_below(group, index)
            if terms is not None and not self._is_here(group, index):
                self.kept[group, index] = terms
            else:
                table.reserved += index >= len(self._path)
        table.reserved += max(0, covered - max(covered_blocks, self._kept_to))
        if table.reserved:  # what is kept behind the last covered block stays there
            table.held_up = max(table.held_up, min(covered, self._kept_to) - len(self._path))

    def _cost(self, covered_blocks: int, covered: int) -> tuple[int, int]:
        """Return how many blocks of group 0 from `covered_blocks` to `covered` take room, and of
        how many a level below keeps the promise. O(these).
        """
        cost = below = 0
        for index in range(covered_blocks, covered):
            node = self._path[index] if index < len(self._path) else None
            if index < self._kept_to if node is None else node.promised_below:
                below += 1
            elif node is None or not node.promised:
                cost += 1
        return cost, below

    def _missing(self, covered: int, tokens: int) -> tuple[list[tuple[int, int, bool]], int | None]:
        """Return the window blocks that a promise of `tokens` tokens in `covered` blocks adds to
        the table's promises: (group, index, whether it takes room); and the index of a block that
        has been freed, or None.
        """
        wanted, has_kept, fixed = list[tuple[int, int, bool]](), False, -1
        for group, promises in enumerate(self._table.window_promises):
            has_level = self._below is not None
            first = first_promised(self._groups, group, tokens, has_level=has_level)
            for index in range(covered - 1, first - 1, -1):
                is_new = self._terms_below(group, index) is None
                has_kept = has_kept or not is_new
                if is_new and self._is_fixed(index):
                    fixed = max(fixed, index)
                if index in promises:
                    continue
                if index < len(self._path):
                    beside = self._path[index].beside
                    block = None if beside is None else beside[group]
                    if block is None and is_new:
                        return [], index
                    is_new = is_new and block is not None and not block.promised
                wanted.append((group, index, is_new))
        return (wanted, None) if fixed < 0 or not has_kept else ([], fixed)

    def _last_promised(self, fewer: int, covered: int) -> int:
        """Return the most blocks between `fewer` and `covered` whose last has all its window blocks
        promised already, so that a promise which ends there may take no room; else `fewer`.
        O(covered - fewer).
        """
        for end in range(covered - 1, max(0, fewer), -1):
            beside = self._path[end - 1].beside if end <= len(self._path) else None
            if all(
                self._terms_below(group, end - 1) is not None
                or (beside is not None and (one := beside[group]) is not None and one.promised)
                for group in range(len(self._groups.windows))
            ):
                return end
        return fewer

    def _is_here(self, group: int, index: int) -> bool:
        """Return whether the device has a window block of the path."""
        beside = self._path[index].beside if index < len(self._path) else None
        return beside is not None and beside[group] is not None

    def _terms_below(self, group: int, index: int) -> BlockTerms | None:
        """Return the terms of a window block whose promise a level below keeps, or None."""
        if not self._below or index >= len(self._below) or not self._below[index].terms:
            return None
        terms = self._below[index].terms[group]
        return None if terms is None or terms.below_class is None else terms

    def _is_fixed(self, index: int) -> bool:
        """Return whether the copy of a run can never have its window blocks. O(1)."""
        below = self._below or ()
        return index < len(below) and below[index].is_fixed
