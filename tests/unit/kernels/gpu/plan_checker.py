"""A checker of the work planner's invariant, by counting."""

from __future__ import annotations

import numpy as np

from kernels.gpu.work_list import HostPlan, Slices, WorkPlanner


def check_plan(plan: HostPlan, slices: Slices, planner: WorkPlanner) -> None:
    """Assert that every (row, key) is in one tile, that parts are numbered 0..n-1, and that a tile
    is direct exactly if its row has one part.

    O(rows x keys). Raises AssertionError with the first wrong row.
    """
    first_row = np.concatenate([[0], np.cumsum(slices.rows)])
    lengths = np.concatenate(
        [s + 1 + np.arange(n) for s, n in zip(slices.starts, slices.rows, strict=True)]
    )
    offset_of_row = np.repeat(slices.table_offsets, slices.rows)
    seen = [np.zeros(int(n), np.int32) for n in lengths]
    parts: list[set[int]] = [set() for _ in lengths]
    for work in plan.work:
        for row, rows, offset, first, keys, part, direct, _cost in work.tiles.tolist():
            assert 0 < rows <= planner.rows_per_tile(work.config)
            for r in range(row, row + rows):
                end = int(lengths[r]) if keys < 0 else first + keys
                assert end <= lengths[r], f"row {r} reads key {end} of {lengths[r]}"
                owner = int(np.searchsorted(first_row, r, "right")) - 1
                own = offset - int(offset_of_row[r]) == first // planner.block_size
                assert own or keys >= 0, f"row {r} of slice {owner} reads own keys of another"
                assert first % planner.block_size == 0
                seen[r][first:end] += 1
                parts[r].add(part)
                assert bool(direct) == (plan.parts_of_row[r] == 1), f"row {r} direct"
    for r, counts in enumerate(seen):
        assert (counts == 1).all(), (
            f"row {r}: keys seen {sorted(set(counts.ravel().tolist()))} times"
        )
        assert parts[r] == set(range(plan.parts_of_row[r])), f"row {r}: parts {parts[r]}"
