"""Promises over window groups: which window blocks the promise of a prompt covers, and their cost.

A promise of n tokens promises, in each window group, what resuming at n reads. A level below keeps
whole blocks alone, so with one it promises what a prompt of n tokens reads that resumes at the end
of its last whole block. There a window is kept as a whole, on the device or below: where the place
of one of its runs can never have all groups' blocks, none of them may be below alone. This module
changes a block table's promises and the room for them, and no block. Only `lease_manager` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.cache.blocks.below import Below
from engine.cache.blocks.block_table import BlockTable
from engine.cache.promise_room import PromiseRoom
from engine.cache.tree.prefix_tree import Node
from engine.cache.tree.window_groups import WindowGroups


def first_promised(groups: WindowGroups, group: int, tokens: int, *, has_level: bool) -> int:
    """Return the first block of a window group that a promise of `tokens` tokens covers; see above.
    O(1).
    """
    if has_level:
        tokens = max(0, tokens - 1) // groups.block_size * groups.block_size
    return groups.first_read(group, tokens)


class WindowPath(NamedTuple):
    """What the tree has of a prompt whose promises cover window blocks.

    `runs`: all that it has on any level, of which the table has matched the first `matched`;
    further ones up to `known` are promised below. `below`: the level that keeps promises.
    """

    groups: WindowGroups
    runs: Sequence[Node]
    matched: int
    known: int
    below: Below | None

    def node(self, index: int) -> Node | None:
        """Return the node of a run that is matched, or whose promise a level keeps. O(1)."""
        return self.runs[index] if index < self.known else None

    def is_promised(self, group: int, index: int) -> bool:
        """Return whether a window block is promised. O(1)."""
        block = self.runs[index].window_block(group) if index < len(self.runs) else None
        is_read = index < self.matched or (block is not None and block.promised_below)
        return is_read and block is not None and block.promised

    def is_here(self, group: int, index: int) -> bool:
        """Return whether the device has a window block of what was matched. O(1)."""
        beside = self.runs[index].beside if index < self.matched else None
        return beside is not None and beside[group] is not None


def cover_windows(
    path: WindowPath, table: BlockTable, covered_blocks: int, tokens: int, room: PromiseRoom
) -> tuple[int, bool]:
    """Cover a promise of `tokens` tokens, beyond the `covered_blocks` that earlier leases of the
    table cover, with the blocks of its last window in each window group, as far as `room` allows.

    Returns the blocks then covered, and whether a freed window block stood in the way. Reserves the
    blocks that are not computed yet, and takes the room. O(blocks of the windows) where the promise
    is covered whole.
    """
    size, has_gap = path.groups.block_size, False
    covered = -(-tokens // size)
    while covered > covered_blocks:
        wanted, gap = _missing(path, table, covered, min(tokens, covered * size))
        nodes = [path.node(index) for index in range(covered_blocks, covered)]
        below = sum(node is not None and node.promised_below for node in nodes)
        cost = sum(node is None or not node.promised for node in nodes)
        cost += sum(is_new for _, _, is_new in wanted)
        has_gap = gap is not None
        # What binds to the device binds what is above it, too.
        bound = room.waiting + below if cost else 0
        lacking = max(cost - max(0, room.total), cost + bound - max(0, room.device))
        if gap is not None:
            covered = gap
        elif cost and lacking > 0:  # a block less takes at most one block of each group less
            fewer = covered - max(1, lacking // path.groups.groups)
            fewer = max(fewer, min(covered - 1, path.known)) if bound else fewer
            covered = _last_promised(path, fewer, covered)
        else:
            _take(path, table, wanted, covered_blocks, covered)
            room.total -= cost
            room.device -= cost + bound
            room.waiting = 0 if cost else room.waiting + below
            return covered, False
    return covered_blocks, has_gap


def _take(
    path: WindowPath,
    table: BlockTable,
    wanted: Sequence[tuple[int, int, bool]],
    covered_blocks: int,
    covered: int,
) -> None:
    """Add window blocks to the table's promises, and reserve what is not computed yet."""
    kept = set(table.window_kept)
    for group, index, _ in wanted:
        table.window_promises[group].add(index)
        if path.is_promised(group, index) and not path.is_here(group, index):
            kept.add((group, index))
        else:
            table.reserved += index >= path.matched
    table.window_kept = kept
    table.reserved += max(0, covered - max(covered_blocks, path.known))


def _missing(
    path: WindowPath, table: BlockTable, covered: int, tokens: int
) -> tuple[list[tuple[int, int, bool]], int | None]:
    """Return the window blocks that a promise of `tokens` tokens in `covered` blocks adds to the
    table's promises: (group, index, whether it takes room); and the index of a block that has been
    freed, or None.
    """
    wanted, has_kept, fixed = list[tuple[int, int, bool]](), False, -1
    for group, promises in enumerate(table.window_promises):
        first = first_promised(path.groups, group, tokens, has_level=path.below is not None)
        for index in range(covered - 1, first - 1, -1):
            node = path.runs[index] if index < len(path.runs) else None
            block = None if node is None else node.window_block(group)
            is_kept = block is not None and block.promised_below
            has_kept = has_kept or is_kept
            if node is not None and path.below is not None and not is_kept:
                fixed = max(fixed, index if path.below.is_fixed(node) else -1)
            if index in promises:
                continue
            if index < path.matched and block is None:
                return [], index
            wanted.append((group, index, not path.is_promised(group, index)))
    return (wanted, None) if fixed < 0 or not has_kept else ([], fixed)


def _last_promised(path: WindowPath, fewer: int, covered: int) -> int:
    """Return the most blocks between `fewer` and `covered` whose last has all its window blocks
    promised already, so that a promise which ends there may take no room; else `fewer`.
    O(covered - fewer).
    """
    groups = range(len(path.groups.windows))
    for end in range(covered - 1, max(0, fewer), -1):
        if all(path.is_promised(group, end - 1) for group in groups):
            return end
    return fewer
