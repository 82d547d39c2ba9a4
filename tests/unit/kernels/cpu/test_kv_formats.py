"""Packed KV in C: the reference's bytes, from and to slots and panels, in bf16 and fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from kernels import reference_kv
from kernels.cpu.kv_formats import CBlockPacker
from kernels.reference_kv import PackedName, UnpackableError
from tests.unit.kernels.kv_blocks import HARD_KINDS, hard_blocks

NAMES: tuple[PackedName, ...] = get_args(PackedName)
DTYPES = (torch.bfloat16, torch.float32)


def packer(
    library: Path,
    name: PackedName,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    is_panels: bool,
) -> CBlockPacker:
    """Return the packer of blocks of a shape."""
    return CBlockPacker(library, name, shape, is_bf16=dtype == torch.bfloat16, is_panels=is_panels)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_panels", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_c_writes_and_reads_the_references_bytes(
    library: Path, name: PackedName, dtype: torch.dtype, is_panels: bool, head_dim: int
) -> None:
    """1,080 blocks over all cases; `==`, without tolerance."""
    shape = (1, 2, head_dim)
    c = packer(library, name, shape, dtype, is_panels)
    blocks = hard_blocks(30, shape, dtype, seed=head_dim)
    stored = (reference_kv.to_panels(blocks) if is_panels else blocks).contiguous()
    for tokens in (16, 15 if is_panels else 6, 1):
        expected = reference_kv.pack(blocks, name, tokens)
        unpacked = reference_kv.unpack(expected, name, shape, dtype, tokens)
        if is_panels:
            unpacked = reference_kv.to_panels(unpacked)
        packed, found = torch.full_like(expected, 7), torch.full_like(stored, 3)
        for index in range(len(blocks)):
            c.pack(stored[index].data_ptr(), packed[index].data_ptr(), tokens)
            c.unpack(expected[index].data_ptr(), found[index].data_ptr(), tokens)

        assert torch.equal(packed, expected)
        assert torch.equal(found, unpacked.reshape(found.shape))


@pytest.mark.parametrize("name", NAMES)
def test_heads_that_are_no_power_of_two_take_8_bits(library: Path, name: PackedName) -> None:
    """80 and 96 are head sizes of models; only the rotation of `int4c` excludes them."""
    if name == "int4c":
        return
    for head_dim in (48, 80, 96):
        shape = (2, 1, head_dim)
        blocks = hard_blocks(HARD_KINDS, shape, torch.bfloat16, seed=head_dim)
        expected = reference_kv.pack(blocks, name)
        packed = torch.zeros_like(expected)
        c = packer(library, name, shape, torch.bfloat16, is_panels=False)
        for index in range(len(blocks)):
            c.pack(blocks[index].data_ptr(), packed[index].data_ptr())

        assert torch.equal(packed, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 1e38])
def test_c_refuses_what_the_reference_refuses(
    library: Path, name: PackedName, value: float
) -> None:
    """Wherever the value lies: the first and the last of a unit, in keys and in values."""
    shape = (2, 2, 16)
    c = packer(library, name, shape, torch.float32, is_panels=False)
    out = torch.zeros(reference_kv.packed_block_bytes(name, *shape), dtype=torch.uint8)
    for at in ((0, 0, 0, 0, 0), (1, 0, 1, 15, 15), (0, 1, 0, 0, 15), (1, 1, 1, 15, 0)):
        block = hard_blocks(1, shape, torch.float32, seed=6)[0]
        block[at] = value

        with pytest.raises(UnpackableError):
            c.pack(block.data_ptr(), out.data_ptr())


def test_head_sizes_that_c_does_not_take_are_refused(library: Path) -> None:
    """Vectors are of 16 channels, and tiles lie on the stack."""
    for head_dim in (24, 1024):
        with pytest.raises(ValueError, match=f"heads of {head_dim}; the C packer takes"):
            packer(library, "int8c", (1, 1, head_dim), torch.bfloat16, is_panels=False)
