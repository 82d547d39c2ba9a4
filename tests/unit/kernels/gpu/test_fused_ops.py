"""The fused kernels against torch, in the interpreter or on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import reference, reference_int8
from kernels.gpu.fused_ops import (
    copy_blocks,
    gated_mul,
    norm_heads,
    residual_rms_norm,
    rope_kv_write,
)
from tests.unit.kernels.kv_blocks import hard_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("channels", [64, 96, 576])
@pytest.mark.parametrize("add", [True, False])
def test_residual_rms_norm_adds_then_normalises(channels: int, add: bool) -> None:
    """The residual is updated in place, and the norm is of the updated residual."""
    x, residual, weight = rand(5, channels), rand(5, channels, seed=1), rand(channels, seed=2)
    total = x + residual if add else x
    expected = reference.rms_norm(total, weight, 1e-5)
    out = torch.full_like(x, float("nan"))
    updated = residual.clone()

    residual_rms_norm(x, updated if add else None, weight, out, 1e-5)

    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(updated, total if add else residual)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(3, 1, 24), (16, 2, 16), (40, 8, 8)])
def test_norm_heads_norms_queries_and_keys_and_leaves_values(
    heads: int, kv_heads: int, d: int
) -> None:
    """Each head by its own scale, queries and keys by their own weights."""
    qkv = rand(5, heads + 2 * kv_heads, d) * 7
    queries, keys = rand(d, seed=1), rand(d, seed=2)
    expected = qkv.clone()
    expected[:, :heads] = reference.rms_norm(qkv[:, :heads], queries, 1e-5)
    end = heads + kv_heads
    expected[:, heads:end] = reference.rms_norm(qkv[:, heads:end], keys, 1e-5)

    norm_heads(qkv, heads, queries, keys, 1e-5)

    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)


def test_gated_mul_multiplies_gate_and_up() -> None:
    """Gate is the first half, up the second, as in the fused projection."""
    x = rand(3, 2 * 1500)
    out = torch.full((3, 1500), float("nan"), device=DEVICE)

    gated_mul(x, out)

    torch.testing.assert_close(out, reference.gated_mul(x, "silu"))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gelu_is_the_one_by_tanh() -> None:
    """Gemma's; far from zero it is the gate itself, or nothing."""
    x = rand(3, 2 * 70) * 8
    out = torch.full((3, 70), float("nan"), device=DEVICE)

    gated_mul(x, out, gelu=True)

    expected = torch.nn.functional.gelu(x[:, :70], approximate="tanh") * x[:, 70:]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d", "grows"), [(16, False), (24, True), (80, False)])
def test_rope_kv_write_rotates_and_writes_slots(d: int, grows: bool) -> None:
    """Rotation by halves; padding rows (negative slot) write no KV; queries may grow."""
    heads, kv_heads, size = 3, 1, 4
    growth = rand(32, seed=4) if grows else None
    qkv = rand(4, (heads + 2 * kv_heads) * d)
    kv = torch.zeros(5, 2, 2, kv_heads, size, d, device=DEVICE)
    angle = rand(32, d // 2, seed=3)
    positions = torch.tensor([0, 7, 8, 31], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([9, 4 * size + 3, -1, 0], dtype=torch.int32, device=DEVICE)
    q_out = torch.full((4, heads, d), float("nan"), device=DEVICE)

    rope_kv_write(qkv, q_out, kv, 1, angle.cos(), angle.sin(), positions, slots, growth)

    x = qkv.view(4, heads + 2 * kv_heads, d)
    cos = angle.cos()[positions.long()][:, None].repeat(1, 1, 2)
    sin = angle.sin()[positions.long()][:, None].repeat(1, 1, 2)
    rotated = x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
    factor = 1.0 if growth is None else growth[positions.long()][:, None, None]
    torch.testing.assert_close(q_out, rotated[:, :heads] * factor)
    expected = torch.zeros_like(kv)
    for row, slot in ((0, 9), (1, 19), (3, 0)):
        expected[slot // size, 1, 0, :, slot % size] = rotated[row, heads : heads + kv_heads]
        expected[slot // size, 1, 1, :, slot % size] = x[row, heads + kv_heads :]
    torch.testing.assert_close(kv, expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize("d", [16, 24, 64])
def test_rope_kv_write_writes_the_references_int8(d: int) -> None:
    """Without a rotation, so that keys are what they were: outliers, zeros, what is no number and
    what no scale reaches. Padding rows write nothing."""
    heads, kv_heads, size, rows = 3, 2, 16, 18
    hard = hard_blocks(rows, (1, heads + 2 * kv_heads, d), torch.float32, seed=d)
    qkv = hard[:, 0, 0, :, 3].contiguous()
    qkv[:6, heads, 1] = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e38, 7.0])
    qkv[6:9, heads + kv_heads, 0] = torch.tensor([math.nan, -math.inf, 3e38])
    shape = (5, 2, 2, kv_heads, size, d + 2)
    kv = torch.zeros(shape, dtype=torch.int8, device=DEVICE)
    slots = torch.randperm(5 * size, generator=torch.Generator().manual_seed(1))[:rows].int()
    slots[7] = -1
    at = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    q_out = torch.empty(rows, heads, d, device=DEVICE)
    no_rotation = torch.ones(1, d // 2, device=DEVICE)

    rope_kv_write(
        qkv.flatten(1).to(DEVICE), q_out, kv, 1, no_rotation, 0 * no_rotation, at, slots.to(DEVICE)
    )

    # A rotation by nothing still makes its neighbour of what is no number: infinity times zero.
    half = torch.cat([-qkv[..., d // 2 :], qkv[..., : d // 2]], -1)
    keys = (qkv + half * 0)[:, heads : heads + kv_heads]
    values = qkv[:, heads + kv_heads :]
    expected = torch.zeros(shape, dtype=torch.int8)
    live = slots >= 0
    block, slot = slots[live].long() // size, slots[live].long() % size
    for part, x in enumerate((keys, values)):
        reference_int8.write(expected.flatten(-2)[:, 1, part], block, slot, x[live])
    assert torch.equal(kv.cpu(), expected)


def test_copy_blocks_copies_filled_slots_of_all_layers() -> None:
    """The other slots of the target stay unchanged; its new owner writes them."""
    kv = rand(6, 3, 2, 2, 16, 8)
    before = kv.clone()
    copies = torch.tensor([[0, 4, 5], [1, 5, 16]], dtype=torch.int32, device=DEVICE)

    copy_blocks(kv, copies)

    before[4, :, :, :, :5] = before[0, :, :, :, :5]
    before[5] = before[1]
    assert torch.equal(before, kv)


@pytest.mark.gpu
def test_kv_addresses_exceed_int32() -> None:
    """In pools of many gigabytes a block's offset takes 64 bits."""
    kv = torch.zeros(2**32 // 4096 + 2, 1, 2, 2, 16, 64, dtype=torch.bfloat16, device=DEVICE)
    last = len(kv) - 1
    qkv = rand(1, (4 + 2 * 2) * 64).bfloat16()
    no_rotation = torch.ones(1, 32, device=DEVICE)
    q_out = torch.empty(1, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    at = torch.tensor([0], dtype=torch.int32, device=DEVICE)

    rope_kv_write(qkv, q_out, kv, 0, no_rotation, 0 * no_rotation, at, at + last * 16 + 3)
    copies = torch.tensor([[last, last - 1, 16]], dtype=torch.int32, device=DEVICE)
    copy_blocks(kv, copies)

    written = qkv.view(8, 64)[4:].view(2, 2, 64)
    assert torch.equal(kv[last, 0, :, :, 3], written)
    assert torch.equal(kv[last - 1, 0, :, :, 3], written)
    assert int(kv[: last - 1].count_nonzero()) == 0
