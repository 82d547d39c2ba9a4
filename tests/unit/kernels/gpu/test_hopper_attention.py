"""Hand-scheduled tiles against float64 attention; they run on a Hopper GPU only."""

from __future__ import annotations

import pytest
import torch

import kernels.gpu.tree_attention
from kernels.gpu import hopper_attention
from tests.unit.kernels.gpu.test_tree_attention import DEVICE, Case, attend, error, planner_for

HEADS, KV_HEADS = 8, 2

TREES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "a prefix of every row, wide": ([(1, 23)], [(3 * i % 29, 1) for i in range(64)]),
    "tiles that rows do not fill": ([(1, 9), (3, 6)], [(i, 1) for i in range(21)]),
    "one tile of keys": ([(1, 4)], [(3, 1) for _ in range(32)]),
    "fewer keys than a tile": ([(1, 3)], [(3, 1) for _ in range(32)]),
    "a prompt from nothing": ([], [(0, 333)]),
    "a prompt behind a prefix": ([(1, 70)], [(5, 40), (0, 1), (17, 100)]),
    "two prompts of few rows": ([], [(0, 17), (77, 5)]),
}


def case_of(tree: str, *, heads: int = HEADS, head_dim: int = 128) -> Case:
    levels, slices = TREES[tree]
    return Case(
        1, levels, slices, heads=heads, kv_heads=KV_HEADS, head_dim=head_dim,
        dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32,
    )  # fmt: skip


on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


each_head_dim = pytest.mark.parametrize("head_dim", hopper_attention.HEAD_DIMS)


@on_hopper
@each_head_dim
@pytest.mark.parametrize("heads", [2, 6, 8, 10, 14, 16, 32], ids=lambda heads: heads // KV_HEADS)
@pytest.mark.parametrize("tree", TREES)
def test_hand_scheduled_tiles_equal_float64_attention(tree: str, heads: int, head_dim: int) -> None:
    """For any rows and keys of a unit, with and without a mask, for any group size."""
    case = case_of(tree, heads=heads, head_dim=head_dim)

    got = attend(case, planner_for(case))

    assert error(got, case.expected()) < 8e-3


@on_hopper
@each_head_dim
@pytest.mark.parametrize("tree", ["fewer keys than a tile", "a prompt behind a prefix"])
def test_slots_behind_sequence_end_change_no_bit(tree: str, head_dim: int) -> None:
    """The copy engine copies whole blocks; slots behind the last key may be another sequence's."""
    case = case_of(tree, head_dim=head_dim)
    planner = planner_for(case)
    case.fill_unseen(0.0)
    expected = attend(case, planner)

    case.fill_unseen(torch.finfo(case.kv.dtype).max)
    got = attend(case, planner)

    assert torch.equal(expected, got)


@on_hopper
@each_head_dim
@pytest.mark.parametrize("start", [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("rows", [17, 32, 33, 65])
def test_prompt_may_begin_and_end_anywhere_in_a_tile(start: int, rows: int, head_dim: int) -> None:
    """Blocks have 16 slots, tiles 64 keys and 16 or 32 rows, so their edges differ."""
    case = Case(
        start, [], [(start, rows), (3, 1)], heads=HEADS, kv_heads=KV_HEADS, head_dim=head_dim,
        dtype=torch.bfloat16,
    )  # fmt: skip

    got = attend(case, planner_for(case))

    assert error(got, case.expected()) < 8e-3


@on_hopper
@each_head_dim
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_many_short_units_keep_barriers_in_step(multiprocessors: int, head_dim: int) -> None:
    """With short units the producer is two units ahead and barriers flip most often; every run must
    give the same bits."""
    case = Case(
        5, [], [(0, 17 + i % 15) for i in range(60)], heads=HEADS, kv_heads=KV_HEADS,
        head_dim=head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    planner = planner_for(case, multiprocessors=multiprocessors)

    first, *others = (attend(case, planner) for _ in range(20))

    assert error(first, case.expected()) < 8e-3
    assert all(torch.equal(first, other) for other in others)


@on_hopper
@pytest.mark.parametrize("hand_scheduled", [True, False])
def test_pool_may_exceed_int32_values(
    hand_scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight gigabytes of KV are 2**32 values: a block's offset takes 64 bits, or counts rows."""
    monkeypatch.setattr(kernels.gpu.tree_attention, "HAS_GLUON", hand_scheduled)
    case = case_of("a prompt behind a prefix")
    expected = attend(case, planner_for(case))
    far = 2**32 // case.kv.stride(0) - len(case.kv)
    small, case.kv = case.kv, case.kv.new_zeros(far + len(case.kv), *case.kv.shape[1:])
    case.kv[far:] = small
    case.block_ids += far

    got = attend(case, planner_for(case))

    assert torch.equal(expected, got)


@on_hopper
def test_queue_changes_no_bit() -> None:
    """A queue decides which program takes a unit, and when, not what the unit adds up."""
    case = case_of("tiles that rows do not fill")
    planner = planner_for(case)
    expected = attend(case, planner)

    first, second = (attend(case, planner, side_by_side=True) for _ in range(2))

    assert torch.equal(expected, first)
    assert torch.equal(expected, second)


@on_hopper
def test_both_kernels_agree_within_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by rounding of products only."""
    case = case_of("a prompt behind a prefix")
    hand_scheduled = attend(case, planner_for(case))

    monkeypatch.setattr(kernels.gpu.tree_attention, "HAS_GLUON", False)
    plain = attend(case, planner_for(case))

    assert error(hand_scheduled, plain.double()) < 8e-3


def test_other_devices_and_dtypes_use_plain_kernel() -> None:
    """The kernel supports one GPU architecture, one dtype and two head dimensions."""
    q, kv = torch.zeros(1, 8, 128), torch.zeros(2, 1, 2, 2, 16, 128)

    assert not hopper_attention.can_run(q, kv)
    assert not hopper_attention.can_run(q.bfloat16(), kv.bfloat16())
