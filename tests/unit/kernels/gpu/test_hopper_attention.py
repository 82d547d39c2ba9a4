"""Tiles scheduled by hand against float64 attention: on a Hopper device, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels.gpu.tree_attention
from kernels.gpu import hopper_attention
from tests.unit.kernels.gpu.test_tree_attention import DEVICE, Case, attend, error, planner_for

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128

TREES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "a prefix of every row, wide": ([(1, 23)], [(3 * i % 29, 1) for i in range(64)]),
    "tiles that rows do not fill": ([(1, 9), (3, 6)], [(i, 1) for i in range(21)]),
    "one tile of keys": ([(1, 4)], [(3, 1) for _ in range(32)]),
    "fewer keys than a tile": ([(1, 3)], [(3, 1) for _ in range(32)]),
    "a prompt from nothing": ([], [(0, 333)]),
    "a prompt behind a prefix": ([(1, 70)], [(5, 40), (0, 1), (17, 100)]),
    "two prompts of few rows": ([], [(0, 17), (77, 5)]),
}


def case_of(tree: str, *, heads: int = HEADS, seed: int = 1) -> Case:
    levels, slices = TREES[tree]
    return Case(
        seed, levels, slices, heads=heads, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float32,
    )  # fmt: skip


on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper device",
)


@on_hopper
@pytest.mark.parametrize("heads", [2, 6, 8, 10, 14, 16, 32], ids=lambda heads: heads // KV_HEADS)
@pytest.mark.parametrize("tree", TREES)
def test_tiles_scheduled_by_hand_are_attention(tree: str, heads: int) -> None:
    """Whatever rows and keys a unit has, with or without a mask, for any group of heads."""
    case = case_of(tree, heads=heads)

    got = attend(case, planner_for(case))

    assert error(got, case.expected(1)) < 8e-3


@on_hopper
@pytest.mark.parametrize("tree", ["fewer keys than a tile", "a prompt behind a prefix"])
def test_what_lies_behind_a_sequences_end_changes_no_bit(tree: str) -> None:
    """The copy engine brings whole blocks: what is behind the last key may be another's."""
    case = case_of(tree)
    planner = planner_for(case)
    case.fill_unseen(0.0)
    expected = attend(case, planner)

    case.fill_unseen(torch.finfo(case.kv.dtype).max)
    got = attend(case, planner)

    assert torch.equal(expected, got)


@on_hopper
@pytest.mark.parametrize("start", [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("rows", [17, 32, 33, 65])
def test_a_prompt_may_begin_and_end_anywhere_in_a_tile(start: int, rows: int) -> None:
    """Rows, keys and blocks have edges of their own: 16 slots, 64 keys, 16 or 32 rows."""
    case = Case(
        start, [], [(start, rows), (3, 1)], heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
    )  # fmt: skip

    got = attend(case, planner_for(case))

    assert error(got, case.expected(1)) < 8e-3


@on_hopper
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_many_units_of_one_tile_keep_their_turns(multiprocessors: int) -> None:
    """The producer is two units ahead where units are short: barriers turn over most often there,
    and every run has to add up the same."""
    case = Case(
        5, [], [(0, 17 + i % 15) for i in range(60)], heads=HEADS, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, dtype=torch.bfloat16,
    )  # fmt: skip
    planner = planner_for(case, multiprocessors=multiprocessors)

    first, *others = (attend(case, planner) for _ in range(20))

    assert error(first, case.expected(1)) < 8e-3
    assert all(torch.equal(first, other) for other in others)


@on_hopper
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pool_may_have_more_numbers_than_an_int32(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight gigabytes of KV are 2**32 of them: a block's place takes 64 bits, or is a row's."""
    monkeypatch.setattr(kernels.gpu.tree_attention, "HAS_GLUON", by_hand)
    case = case_of("a prompt behind a prefix")
    expected = attend(case, planner_for(case))
    far = 2**32 // case.kv.stride(0) - len(case.kv)
    small, case.kv = case.kv, case.kv.new_zeros(far + len(case.kv), *case.kv.shape[1:])
    case.kv[far:] = small
    case.block_ids += far

    got = attend(case, planner_for(case))

    assert torch.equal(expected, got)


@on_hopper
def test_a_queue_changes_no_bit() -> None:
    """Which program takes a unit, and when, is left to a queue; what a unit adds up is not."""
    case = case_of("tiles that rows do not fill")
    planner = planner_for(case)
    expected = attend(case, planner)

    first, again = (attend(case, planner, side_by_side=True) for _ in range(2))

    assert torch.equal(expected, first)
    assert torch.equal(expected, again)


@on_hopper
@pytest.mark.parametrize("seed", range(8))
def test_bits_do_not_depend_on_who_shares(seed: int) -> None:
    """Batch-invariant mode: a whole chunk is a tile of this kind whether one row sees it or all."""
    case = case_of("tiles that rows do not fill", seed=seed)
    planner = planner_for(case, chunk=64)
    together = attend(case, planner)

    case.groups = np.zeros((0, 4), np.int32)
    alone = attend(case, planner)

    assert torch.equal(together, alone)


@on_hopper
def test_both_kernels_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by the rounding of a product alone, not by what they add up."""
    case = case_of("a prompt behind a prefix")
    by_hand = attend(case, planner_for(case))

    monkeypatch.setattr(kernels.gpu.tree_attention, "HAS_GLUON", False)
    plain = attend(case, planner_for(case))

    assert error(by_hand, plain.double()) < 8e-3


def test_other_devices_and_types_are_left_to_the_plain_kernel() -> None:
    """The instructions are one architecture's, and the layouts one type's and one head's."""
    q, kv = torch.zeros(1, 8, 128), torch.zeros(2, 1, 2, 2, 16, 128)

    assert not hopper_attention.can_run(q, kv)
    assert not hopper_attention.can_run(q.bfloat16(), kv.bfloat16())
