"""Warm-up steps: within the limits, and of every kind that clients' steps have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Sampling
from engine.plan import StepPlan
from engine.runner.warmup import PREFIX_TOKENS, WarmupLimits, warmup_plans
from kernels.gpu.fused_ops import DEPENDENT_ROWS_MAX
from kernels.gpu.work_list import HostPlan, Slices, WorkPlanner
from tests.examples import examples

LIMITS = WarmupLimits(
    block_size=16, blocks=900, context=8_192, sequences=64, step_tokens=4_096, vocab=99
)
HEADS = {"mha": (8, 1), "gqa": (8, 4), "mqa": (1, 8)}


@settings(max_examples=examples(60), deadline=None)
@given(
    st.builds(
        WarmupLimits,
        block_size=st.sampled_from([1, 16, 64]),
        blocks=st.integers(1, 5),
        context=st.integers(1, 300),
        sequences=st.integers(1, 12),
        step_tokens=st.integers(1, 200),
        vocab=st.integers(1, 99),
    )
)
def test_plans_stay_within_limits(limits: WarmupLimits) -> None:
    """Warm-up must not fail the start of a very small engine."""
    for plan in warmup_plans(limits):
        ids = {begun.sequence_id for begun in plan.begun}
        assert len(ids) == len(plan.begun) <= limits.sequences
        assert sum(row.count for row in plan.rows) <= limits.step_tokens
        assert {s for row in plan.rows for s in row.samples} == ids
        assert set(plan.masks) <= ids
        for row in plan.rows:
            assert row.count == len(row.token_ids or ()) > 0
            assert row.start + row.count <= min(
                limits.context, len(row.block_ids) * limits.block_size
            )
            assert set(row.block_ids) == {0}
        for group in plan.groups:
            assert group.end_block * limits.block_size <= plan.rows[0].start
        assert all(copy.dst < limits.blocks for copy in plan.copies)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_prompts_use_and_merge_every_tile_class(heads: tuple[int, int]) -> None:
    """A missing tile class would be compiled while a client waits."""
    kv_heads, per_group = heads
    planner = WorkPlanner(
        kv_heads=kv_heads, heads_per_group=per_group, block_size=16, multiprocessors=132
    )
    assert planner.group_keys_min <= PREFIX_TOKENS

    made = [(plan, _work_list(planner, plan)) for plan in warmup_plans(LIMITS)]

    prompts = [work for plan, work in made if max(row.count for row in plan.rows) > 1]
    assert {c for work in prompts for c in work.classes} == {0, 1, 2}
    merged = {len(work.parts_of_row) for work in prompts if work.parts_max > 1}
    assert min(merged) <= 4
    assert max(merged) == LIMITS.step_tokens


def test_plans_use_every_way_of_sampling() -> None:
    """Alone, in a batch, one row masked, all rows masked, with prompt logprobs."""
    plans = [plan for plan in warmup_plans(LIMITS) if plan.copies]

    assert {0, 1} < {len(plan.masks) for plan in plans}
    assert any(len(plan.masks) == len(plan.begun) > 1 for plan in plans)
    scored = [row.count for plan in plans for row in plan.rows if row.prompt_logprobs is not None]
    assert max(scored) > DEPENDENT_ROWS_MAX
    samplings = [begun.sampling for plan in plans for begun in plan.begun]
    for name in Sampling.__struct_fields__:
        assert any(getattr(s, name) != getattr(Sampling(), name) for s in samplings), name


def _work_list(planner: WorkPlanner, plan: StepPlan) -> HostPlan:
    rows = np.array([row.count for row in plan.rows], np.int32)
    starts = np.array([row.start for row in plan.rows], np.int32)
    flat = [(g.first_row, g.end_row, g.first_block, g.end_block) for g in plan.groups]
    offsets = np.arange(len(rows), dtype=np.int32) * 1_000
    groups = np.array(flat, np.int32).reshape(-1, 4)
    return planner.plan(Slices(rows, starts, offsets), groups)
