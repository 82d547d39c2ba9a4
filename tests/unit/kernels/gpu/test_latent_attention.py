"""Attention over latents against float64 attention over gathered records, in the interpreter or on
a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels.gpu.tree_attention
from kernels.gpu.latent_attention import can_run, latent_attention, rope_latent_write
from kernels.gpu.tree_attention import PartialOutputs, WorkList
from kernels.gpu.work_list import WorkPlanner, latent_planner
from kernels.reference import rotate
from tests.unit.kernels.gpu.plan_checker import check_plan
from tests.unit.kernels.gpu.test_tree_attention import DEVICE, MIXED, SIZE, TREES, Case, error

ROPE, LATENT = 16, 32
SCALE = 24**-0.5
ERROR_MAX = 1e-5 if DEVICE.type == "cpu" else 5e-3


@pytest.fixture(autouse=True)
def _merge_many_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge several heads per program: one head at a time takes minutes in the interpreter."""
    torch.set_num_threads(1)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels.gpu.tree_attention, "FEW_ROW_HEADS", 0)


def case_of(tree: str, heads: int, rope: int = ROPE, latent: int = LATENT) -> Case:
    """Return a tree whose blocks hold records."""
    levels, slices = TREES[tree]
    width = rope + latent
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    case = Case(0, levels, slices, heads=heads, kv_heads=1, head_dim=width, dtype=dtype)
    case.kv = case.kv[:, :, :1].contiguous()
    return case


def planner_of(heads: int) -> WorkPlanner:
    """Return a planner that cuts short runs of keys too."""
    return replace(
        latent_planner(heads, SIZE, 2, 65_536),
        group_rows_min=2, group_keys_min=32, span_keys_min=64,
        own_span_keys_min=64, own_span_keys_target=128,
    )  # fmt: skip


def attend(case: Case, *, side_by_side: bool = False, latent: int = LATENT) -> torch.Tensor:
    """Plan, check and run a case; `side_by_side` as decoding steps do."""
    rows, heads, _ = case.q.shape
    planner = planner_of(heads)
    plan = planner.plan(case.slices, case.groups)
    check_plan(plan, case.slices, planner, case.groups, 0)
    work = WorkList(planner.classes, planner.multiprocessors, rows, 4096, DEVICE)
    work.load(plan)
    out = case.q.new_full((rows, heads, latent), float("nan"))
    parts = PartialOutputs(plan.parts_max, rows, heads, latent, DEVICE)
    parts.out.fill_(float("nan"))
    own = torch.full_like(case.q[:, :1], float("nan"))  # a row's own record is read from the cache
    latent_attention(
        torch.cat([case.q, own], 1), case.kv, 1, work, case.block_ids, case.lengths, out, parts,
        planner.heads_per_group, SCALE, classes=(2, 1) if side_by_side else (1, 2),
        causal=not side_by_side, dependent=side_by_side,
    )  # fmt: skip
    assert int(parts.queue) == 0, "the queue is not reset for the next layer"
    return out


@pytest.mark.parametrize(
    ("tree", "heads"),
    [(MIXED, 16), ("three levels", 16), ("one prefix", 20), ("no sharing, ragged", 4),
     pytest.param("a long prompt from nothing", 16, marks=pytest.mark.slow),
     pytest.param("short suffixes on a shared prefix", 32, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_latents_equal_float64_attention(tree: str, heads: int) -> None:
    """For any sharing, any cut of the keys, and heads of one or several groups."""
    case = case_of(tree, heads)

    found = attend(case)

    expected = case.expected(latent=LATENT, scale=SCALE)
    assert error(found, expected) <= ERROR_MAX


def test_decoding_rows_beside_each_other_equal_float64_attention() -> None:
    """Own keys first, shared keys beside them from a queue."""
    case = case_of("three levels", 16)

    found = attend(case, side_by_side=True)

    assert error(found, case.expected(latent=LATENT, scale=SCALE)) <= ERROR_MAX


def test_latents_of_published_size_equal_float64_attention() -> None:
    """64 rotated channels and 512 of the latent, which is one tile of a row's 16 heads."""
    case = case_of("one row", 16, 64, 512)

    found = attend(case, latent=512)

    assert error(found, case.expected(latent=512, scale=SCALE)) <= ERROR_MAX


def test_slots_that_no_row_sees_change_nothing() -> None:
    """They are of other sequences, or old."""
    case = case_of("one prefix", 16)
    whole = attend(case)

    case.fill_unseen(7.0)

    assert torch.equal(attend(case), whole)


@pytest.mark.parametrize("heads", [3, 16, 20])
def test_queries_and_records_are_rotated_and_written(heads: int) -> None:
    """Queries in place; records to their slots, but for padding rows."""
    width = ROPE + LATENT
    generator = torch.Generator().manual_seed(0)
    qk = torch.randn(5, heads + 1, width, generator=generator).to(DEVICE)
    kv = torch.zeros(3, 2, 1, 1, SIZE, width, device=DEVICE)
    angles = torch.rand(40, ROPE // 2, generator=generator).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([3, 39, 0, 7, 7], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 17, 47, 16, -1], dtype=torch.int32, device=DEVICE)
    expected = rotate(qk, cos[positions.long()], sin[positions.long()])
    record = qk[:, -1].clone()

    rope_latent_write(qk, kv, 1, cos, sin, positions, slots, LATENT)

    torch.testing.assert_close(qk[:, :-1], expected[:, :-1])
    torch.testing.assert_close(qk[:, -1], record)
    written = kv[:, 1, 0, 0].flatten(0, 1)
    torch.testing.assert_close(written[slots[:4].long()], expected[:4, -1])
    assert int((written != 0).any(1).sum()) == 4
    assert not kv[:, 0].any()


def test_broken_records_are_written_as_zero() -> None:
    """A tile reads slots behind a sequence's end, and zero times NaN is NaN."""
    qk = torch.full((1, 2, ROPE + LATENT), float("nan"), device=DEVICE)
    kv = torch.ones(1, 1, 1, 1, SIZE, ROPE + LATENT, device=DEVICE)
    one: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    turn = torch.ones(1, ROPE // 2, device=DEVICE)

    rope_latent_write(qk, kv, 0, turn, turn, torch.zeros(1, **one), torch.zeros(1, **one), LATENT)

    assert kv[0, 0, 0, 0, 0].tolist() == [0.0] * (ROPE + LATENT)


def test_few_rows_read_shared_records_themselves() -> None:
    """Reading them together takes a few tiles of a big class, and most multiprocessors idle."""
    case = case_of("three levels", 16)
    planner = latent_planner(16, SIZE, 132, 65_536)

    few = planner.plan(case.slices, case.groups)

    assert [len(work.tiles) for work in few.work[:2]] == [0, 0]


@pytest.mark.parametrize(("rope", "latent"), [(64, 512), (16, 32)])
def test_powers_of_two_run(rope: int, latent: int) -> None:
    """All published models have 64 rotated channels and 512 of the latent."""
    assert can_run(rope, latent)
    assert not can_run(rope, latent + 16)
    assert not can_run(8, latent)
