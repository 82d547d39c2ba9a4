"""Packed KV in Triton, in the interpreter or on a GPU: the reference's bytes."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from kernels import reference_kv
from kernels.gpu import kv_formats
from kernels.gpu.kv_formats import NOT_FINITE, PACKED, TOO_LARGE, pack_blocks, unpack_blocks
from kernels.reference_kv import PackedName
from tests.unit.kernels.kv_blocks import HARD_KINDS, hard_blocks

NAMES: tuple[PackedName, ...] = get_args(PackedName)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 16), (torch.float32, 5)])
def test_triton_writes_and_reads_the_references_bytes(
    name: PackedName, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that a GPU packed is read by a machine without one; `==`, without tolerance.

    Blocks are taken in another order than they lie in, and more units than programs.
    """
    monkeypatch.setattr(kv_formats, "PROGRAMS_MAX", 5)
    shape = (1, 2, 64)
    blocks = hard_blocks(HARD_KINDS, shape, dtype, seed=9)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(3))
    ids = order.int().to(DEVICE)
    expected = reference_kv.pack(blocks[order], name, tokens)
    unpacked = reference_kv.unpack(expected, name, shape, dtype, tokens)
    out = torch.full_like(expected, 7).to(DEVICE)
    filled = torch.full_like(blocks, 3).to(DEVICE)

    outcomes = pack_blocks(blocks.to(DEVICE), ids, name, out, tokens)
    unpack_blocks(expected.to(DEVICE), name, filled, ids, tokens)

    assert torch.equal(out.cpu(), expected)
    assert torch.equal(filled.cpu()[order], unpacked)
    assert outcomes.tolist() == [PACKED] * len(blocks)


@pytest.mark.parametrize("name", ["int8c", "int8t"])
def test_heads_that_are_no_power_of_two_take_8_bits(name: PackedName) -> None:
    """Vectors are padded with zeros, which change no scale and are not written."""
    shape = (1, 1, 24)
    blocks = hard_blocks(2, shape, torch.bfloat16, seed=2)
    expected = reference_kv.pack(blocks, name)
    ids = torch.arange(len(blocks), dtype=torch.int32, device=DEVICE)
    out = torch.full_like(expected, 7).to(DEVICE)
    filled = torch.zeros_like(blocks).to(DEVICE)

    pack_blocks(blocks.to(DEVICE), ids, name, out)
    unpack_blocks(out, name, filled, ids)

    assert torch.equal(out.cpu(), expected)
    assert torch.equal(filled.cpu(), reference_kv.unpack(expected, name, shape, torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_cannot_be_packed_fails_alone(name: PackedName) -> None:
    """One bad value, anywhere, is told for its block; the others are good."""
    blocks = hard_blocks(1, (1, 2, 16), torch.float32, seed=4).repeat(5, 1, 1, 1, 1, 1)
    for index, value in enumerate((math.nan, math.inf, -math.inf, 1e38)):
        blocks[index, 0, index % 2, 1, 15 - index, index] = value
    ids = torch.arange(5, dtype=torch.int32, device=DEVICE)
    size = reference_kv.packed_block_bytes(name, 1, 2, 16)
    out = torch.zeros(5, size, dtype=torch.uint8, device=DEVICE)

    outcomes = pack_blocks(blocks.to(DEVICE), ids, name, out).tolist()

    assert outcomes == [NOT_FINITE] * 3 + [TOO_LARGE, PACKED]
    assert torch.equal(out[4].cpu(), reference_kv.pack(blocks[4], name))
