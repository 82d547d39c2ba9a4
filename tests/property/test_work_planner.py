"""The GPU's work planner over random forests: every plan is right, and fits the memory it has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.attention.gpu_backend import REPLAN_EVERY
from engine.runner.gpu_runner import BUCKETS, DECODE_KINDS, MIXED_BUCKETS
from kernels.gpu.work_list import CLASSES, Slices, WorkPlanner
from tests.unit.kernels.gpu.plan_checker import Int32, check_plan, random_forest, seven_levels

PART_ROWS = 65_536


@st.composite
def planners(draw: st.DrawFn) -> WorkPlanner:
    """Planners of any GPU, and of models with 1 to 128 query heads in groups of 1 to 16."""
    group = draw(st.integers(1, 16))
    return WorkPlanner(
        kv_heads=draw(st.integers(1, 128 // group)),
        heads_per_group=group,
        block_size=16,
        multiprocessors=draw(st.sampled_from([4, 46, 132, 148])),
        part_rows=draw(st.sampled_from([PART_ROWS, 8_480])),
        window_group_keys_min=draw(st.sampled_from([16, 256])),
    )


@st.composite
def forests(draw: st.DrawFn) -> tuple[Slices, Int32]:
    """Forests of up to 512 sequences of up to 131,072 tokens, of few levels or hundreds."""
    return random_forest(
        np.random.default_rng(draw(st.integers(0, 2**32))),
        sequences=draw(st.sampled_from([1, 2, 7, 64, 192, 512])),
        context=draw(st.sampled_from([512, 4_096, 32_768, 131_072])),
        depth=draw(st.sampled_from([0, 1, 3, 7, 40, 1_000])),
        blocks=draw(st.sampled_from([1, 5, 40, 500])),
        prompts=draw(st.sampled_from([1, 2, 64, 300])),
    )


def prompt(start: int, rows: int) -> tuple[Slices, Int32]:
    one = [np.array([value], np.int32) for value in (rows, start, 0)]
    return Slices(*one), np.zeros((0, 4), np.int32)


def padded(rows: int, buckets: tuple[int, ...]) -> int:
    return next((bucket for bucket in buckets if bucket >= rows), rows)


@example(seven_levels(), WorkPlanner(8, 8, 16, 132), 0)
@example(seven_levels(), WorkPlanner(8, 5, 16, 132), 0)
@example(seven_levels(), WorkPlanner(8, 5, 16, 132), 2_000)
@example(prompt(2_643, 2), WorkPlanner(1, 9, 16, 4), 0)  # spans rounded: fewer have all keys
@settings(max_examples=300)
@given(forests(), planners(), st.sampled_from([0, 0, 1, 128, 4_096]))
def test_plan_of_any_forest_is_right_and_fits(
    forest: tuple[Slices, Int32], planner: WorkPlanner, window: int
) -> None:
    """No plan fails or allocates: tiles and parts fit the memory made at the start."""
    slices, groups = forest
    is_decoding = bool((slices.rows == 1).all())
    rows = padded(int(slices.rows.sum()), BUCKETS if is_decoding else MIXED_BUCKETS)

    plan = planner.plan(slices, groups, rows, window)

    check_plan(plan, slices, planner, groups, window)
    assert plan.tile_count <= planner.tiles_max(rows)
    assert plan.parts_max == 1 or plan.parts_max * rows <= planner.part_rows
    if window:  # a window's tiles are launched as big and small ones
        assert 0 not in plan.classes or not is_decoding
    else:
        assert not is_decoding or (plan.classes, plan.parts_max > 1) in DECODE_KINDS


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size_has_tiles_in_every_class(group: int) -> None:
    """A row's heads are padded to a power of two, and fill the smallest tile at most."""
    planner = WorkPlanner(1, group, 16, 132)

    assert all(planner.rows_per_tile(config) >= 1 for config in CLASSES)
    assert group <= planner.padded_heads < 2 * group


@settings(max_examples=150)
@given(forests(), planners(), st.integers(0, 2**32))
def test_plan_stays_right_while_its_slices_grow_little(
    forest: tuple[Slices, Int32], planner: WorkPlanner, seed: int
) -> None:
    """As `GpuAttention` keeps it: with as many rows of each slice, further back in its text."""
    slices, groups = forest
    plan = planner.plan(slices, groups)
    grown = np.random.default_rng(seed).integers(0, REPLAN_EVERY, len(slices.starts))
    starts = slices.starts + grown.astype(np.int32)

    check_plan(plan, Slices(slices.rows, starts, slices.table_offsets), planner, groups)
