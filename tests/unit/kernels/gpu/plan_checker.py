"""Random forests for the work planner, and a checker of its invariant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.gpu.work_list import HostPlan, Slices, WorkPlanner

Int32 = npt.NDArray[np.int32]


def check_plan(
    plan: HostPlan, slices: Slices, planner: WorkPlanner, groups: Int32, window: int = 0
) -> None:
    """Assert that every (row, key) is in one tile, that rows read keys by tables that have them,
    that parts are numbered 0..n-1, and that a tile is direct exactly if its row has one part.

    With a window: that no key of it is missing, and that no tile begins a block before the first
    key that the slice sees whose table it reads by.

    O(rows x parts). Raises AssertionError with the first wrong tile or row.
    """
    tiles = np.concatenate([work.tiles for work in plan.work])
    for work in plan.work:
        rows = work.tiles[:, 1]
        assert (rows > 0).all()
        assert (rows <= planner.rows_per_tile(work.config)).all(), work.config.name
    assert (tiles[:, 3] % planner.block_size == 0).all(), "a tile begins inside a block"
    _check_tables(tiles, slices, planner, groups, window)
    ends = np.cumsum(slices.rows)
    within = np.arange(ends[-1]) - np.repeat(ends - slices.rows, slices.rows)
    lengths = np.repeat(slices.starts, slices.rows) + 1 + within
    which = np.repeat(np.arange(len(tiles)), tiles[:, 1])
    first_of = np.cumsum(tiles[:, 1]) - tiles[:, 1]
    row = tiles[which, 0] + np.arange(len(which)) - first_of[which]
    begin, part = tiles[which, 3], tiles[which, 5]
    end = np.where(tiles[which, 4] < 0, lengths[row], begin + tiles[which, 4])
    wrong = np.flatnonzero((tiles[which, 6] != 0) != (plan.parts_of_row[row] == 1))
    assert len(wrong) == 0, f"row {row[wrong[0]]} direct"
    order = np.lexsort((begin, row))
    row, begin, end, part = row[order], begin[order], end[order], part[order]
    is_first = np.r_[True, row[1:] != row[:-1]]
    assert np.array_equal(row[is_first], np.arange(len(lengths))), "a row is in no tile"
    expected = np.where(is_first, 0, np.r_[0, end[:-1]])
    if window:
        expected[is_first] = begin[is_first]
        lowest = np.maximum(lengths - window, 0)
        assert (begin[is_first] <= lowest).all(), "a key of a row's window is in no tile"
        # A row may be in a tile of keys that all lie before its window, and not in the next.
        expected = np.where(begin <= lowest[row], np.maximum(expected, begin), expected)
    wrong = np.flatnonzero(begin != expected)
    assert len(wrong) == 0, f"row {row[wrong[0]]}: keys from {begin[wrong[0]]} follow no others"
    assert np.array_equal(end[np.r_[is_first[1:], True]], lengths), "a row's last keys are unread"
    count = np.diff(np.r_[np.flatnonzero(is_first), len(row)])
    assert np.array_equal(count, plan.parts_of_row), "a row's parts are not its tiles"
    part = part[np.lexsort((part, row))]
    assert np.array_equal(part, np.arange(len(row)) - np.repeat(np.flatnonzero(is_first), count))
    assert plan.parts_max == count.max()


def _check_tables(
    tiles: Int32, slices: Slices, planner: WorkPlanner, groups: Int32, window: int
) -> None:
    """Assert that the slices of a tile have the blocks that it reads by one slice's table, and that
    this one has not let them go."""
    shared = np.zeros(len(slices.rows), np.int64)  # blocks shared with the next slice
    for first, last, _, end_block in groups.tolist():
        np.maximum(shared[first : last - 1], end_block, out=shared[first : last - 1])
    ends = np.cumsum(slices.rows)
    table = tiles[:, 2] - tiles[:, 3] // planner.block_size
    owner = np.searchsorted(slices.table_offsets, table)
    assert np.array_equal(slices.table_offsets[owner], table), "a tile reads from no table's start"
    first = np.searchsorted(ends, tiles[:, 0], "right")
    last = np.searchsorted(ends, tiles[:, 0] + tiles[:, 1] - 1, "right")
    if window:
        seen = np.maximum(slices.starts + 1 - window, 0)[owner]
        low = seen - planner.block_size
        assert (tiles[:, 3] > low).all(), "a tile reads blocks that were let go"
    low, high = np.minimum(owner, first), np.maximum(owner, last)
    for i in np.flatnonzero(low != high).tolist():
        have = int(shared[low[i] : high[i]].min()) * planner.block_size
        _row, _rows, _offset, begin, keys, *_ = tiles[i].tolist()
        assert keys >= 0, f"slices {low[i]} and {high[i]} read each other's own keys"
        assert begin + keys <= have, f"slices {low[i]} to {high[i]} read blocks that differ"


def random_forest(
    rng: np.random.Generator, sequences: int, context: int, depth: int, *, blocks: int, prompts: int
) -> tuple[Slices, Int32]:
    """Return random nested groups of up to `blocks` blocks and their slices, each shorter than
    `context`, of one row or up to `prompts`."""
    groups: list[tuple[int, int, int, int]] = []
    own = np.zeros(sequences, np.int64)
    spread = rng.random()
    waiting = [(0, sequences, 0, 0)]
    while waiting and len(groups) < 8 * sequences:
        a, b, block, level = waiting.pop(0)
        end = min(block + int(rng.integers(1, blocks + 1)), (context - prompts) // 16 - 1)
        if b - a < 2 or level == depth or end <= block:
            continue
        groups.append((a, b, block, end))
        own[a:b] = end
        # A chain of turns in one conversation, or branches.
        middle = int(rng.integers(a, b + 1)) if rng.random() < spread else a
        waiting += [(a, middle, end, level + 1), (middle, b, end, level + 1)]
    drawn = rng.integers(1, prompts + 1, sequences)
    rows = np.where(rng.random(sequences) < rng.random(), 1, drawn)
    left = context - prompts - own * 16
    starts = own * 16 + (rng.random(sequences) * rng.random() * left).astype(np.int64)
    offsets = np.arange(sequences) * (context // 16 + 8)
    slices = Slices(rows.astype(np.int32), starts.astype(np.int32), offsets.astype(np.int32))
    return slices, np.array(groups, np.int32).reshape(-1, 4)


def seven_levels() -> tuple[Slices, Int32]:
    """Return 192 decoding rows of a tree with six shared levels, none a multiple of a block."""
    levels = ((1, 300), (3, 700), (6, 333), (12, 517), (24, 129), (48, 250))
    groups, depth, tokens, sequences = [], 0, 0, 192
    for nodes, keys in levels:
        tokens += keys
        end, per = tokens // 16, sequences // nodes
        groups += [(i * per, (i + 1) * per, depth, end) for i in range(nodes)]
        depth = end
    starts = np.full(sequences, tokens + 45, np.int32)
    offsets = np.arange(sequences, dtype=np.int32) * 160
    slices = Slices(np.ones(sequences, np.int32), starts, offsets)
    return slices, np.array(groups, np.int32)
