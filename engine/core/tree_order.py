"""The depth-first prefix-tree order of a batch, computed from block tables alone.

Tables that share blocks share a leading run of them (a child's path contains its parent's), so
sorting tables as sequences of block ids puts the rows of every tree node side by side. Pure
functions; `engine.core.planner` calls them when the batch or a table has changed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.plan import Group


def order_key(block_ids: Sequence[int]) -> bytes:
    """Return bytes that compare like the list of block ids: big-endian, so that memcmp does the
    work.

    O(blocks); comparing the keys of two tables of 512 blocks costs about 50 ns.
    """
    return struct.pack(f">{len(block_ids)}I", *block_ids)


def shared_blocks(a: bytes, b: bytes, limit: int) -> int:
    """Return how many leading blocks two order keys share, at most `limit`. O(log limit)."""
    if a[: 4 * limit] == b[: 4 * limit]:
        return min(limit, len(a) // 4, len(b) // 4)
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low


def find_groups(runs: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups of rows that stand in depth-first order, shallower before deeper.

    `runs[i]`: how many leading blocks rows i and i + 1 share, all of them whole before the start of
    both. A group is a run of at least two rows over a run of at least one block: every level of the
    tree where rows part. O(rows).
    """
    groups: list[tuple[int, int, int, int]] = []
    open_nodes: list[tuple[int, int]] = []  # (first row, depth in blocks), deeper last
    for first, shared in enumerate((*runs, 0)):
        row = first + 1
        while open_nodes and open_nodes[-1][1] > shared:
            first, depth = open_nodes.pop()
            above = max(shared, open_nodes[-1][1] if open_nodes else 0)
            groups.append((first, row, above, depth))
        if shared and (not open_nodes or open_nodes[-1][1] < shared):
            open_nodes.append((first, shared))
    groups.sort(key=lambda group: (group[2], group[0]))
    return tuple(Group(*group) for group in groups)
