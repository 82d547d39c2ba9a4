"""Packed KV in plain torch: sizes, errors, tails, and packing what was unpacked."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from kernels import reference_kv
from kernels.reference_kv import PackedName, UnpackableError
from tests.unit.kernels.kv_blocks import HARD_KINDS, hard_blocks

NAMES: tuple[PackedName, ...] = get_args(PackedName)
DTYPES = (torch.bfloat16, torch.float32)


def steps(kv: torch.Tensor, name: PackedName, tokens: int) -> torch.Tensor:
    """Return the largest error that a value may have: half a step, by the format's definition."""
    wide = kv.float()[..., :tokens, :]
    keys, values = wide.unbind(-4)
    if name == "int4c":
        rotated = reference_kv.hadamard(values * reference_kv.signs(values.shape[-1]))
        # An end of a range moves by half a unit, a unit is at most a sixteenth of the span, a
        # 1,024th of the largest value or 2^-14, and is doubled at most once.
        half = [
            (x.amax(dim) - x.amin(dim)).clamp(min=0) / 15
            + x.abs().amax(dim) / 512 + 2.0**-13
            for x, dim in ((keys, -2), (rotated, -1))
        ]  # fmt: skip
        spread = half[1] * math.sqrt(values.shape[-1])  # of one coordinate after rotating back
        return torch.stack(
            [half[0][..., None, :].expand_as(keys), spread[..., None].expand_as(values)], -4
        )
    by = -2 if name == "int8c" else -1
    half = [x.abs().amax(dim, keepdim=True) / 127 for x, dim in ((keys, by), (values, -1))]
    return torch.stack([part.expand_as(keys) * 0.51 + reference_kv.SMALLEST for part in half], -4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_packing_what_was_unpacked_gives_the_same_bytes(
    name: PackedName, dtype: torch.dtype, head_dim: int
) -> None:
    """A block that moves down and up many times must not drift: 1,134 blocks over all cases."""
    shape = (1, 1, head_dim)
    blocks = hard_blocks(7 * HARD_KINDS, shape, dtype, seed=head_dim)
    for tokens in (16, 7):
        packed = reference_kv.pack(blocks, name, tokens)
        again = reference_kv.pack(
            reference_kv.unpack(packed, name, shape, dtype, tokens), name, tokens
        )

        assert torch.equal(again, packed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_stay_within_half_a_step(name: PackedName, dtype: torch.dtype) -> None:
    """The bound is that of the format's definition, with bf16's own rounding on top."""
    shape = (1, 2, 64)
    blocks = hard_blocks(3 * HARD_KINDS, shape, dtype, seed=1)
    for tokens in (16, 3):
        packed = reference_kv.pack(blocks, name, tokens)
        found = reference_kv.unpack(packed, name, shape, dtype, tokens)[..., :tokens, :].float()

        kept = blocks.float()[..., :tokens, :]
        allowed = steps(blocks, name, tokens) + found.abs() / 256
        assert ((found - kept).abs() <= allowed).all()


def test_the_bound_on_errors_notices_a_wrong_scale() -> None:
    """Planted: a scale that is a step too small clips the largest values."""
    blocks = hard_blocks(HARD_KINDS, (1, 1, 16), torch.float32, seed=3)[:1]
    packed = reference_kv.pack(blocks, "int8c")
    scales = packed[0, :32].view(torch.float16)

    scales *= 0.9

    found = reference_kv.unpack(packed, "int8c", (1, 1, 16), torch.float32)
    assert not ((found - blocks).abs() <= steps(blocks, "int8c", 16)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_tail_packs_its_own_slots_only(name: PackedName) -> None:
    """What lies behind a tail belongs to another sequence: it changes no byte, even where it is no
    number, and comes back as zeros."""
    shape = (1, 2, 16)
    block = hard_blocks(1, shape, torch.bfloat16, seed=5)[0]
    for tokens in range(1, 16):
        other = block.clone()
        other[..., tokens:, :] = math.nan

        packed = reference_kv.pack(other, name, tokens)

        assert torch.equal(packed, reference_kv.pack(block, name, tokens))
        found = reference_kv.unpack(packed, name, shape, torch.bfloat16, tokens)
        assert not found[..., tokens:, :].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
def test_what_cannot_be_packed_fails(name: PackedName, value: float) -> None:
    """A pack that met a NaN would store a block of garbage as if it were good."""
    block = hard_blocks(1, (2, 2, 16), torch.float32, seed=6)[0]
    for part in (0, 1):
        damaged = block.clone()
        damaged[1, part, 1, 15, 7] = value

        with pytest.raises(UnpackableError):
            reference_kv.pack(damaged, name)


def test_sizes_are_those_of_the_specification() -> None:
    """Bytes of a block of an 8B model: 32 layers, 8 KV heads of 128; of bf16's 2,097,152."""
    sizes = {name: reference_kv.packed_block_bytes(name, 32, 8, 128) for name in NAMES}

    assert sizes == {"int8c": 1_122_304, "int4c": 671_744, "int8t": 1_064_960}


@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes_have_the_size_that_is_told(name: PackedName) -> None:
    """Slots of host memory are cut to this size."""
    for shape in ((1, 1, 16), (3, 2, 64), (2, 5, 128)):
        packed = reference_kv.pack(torch.ones(shape[0], 2, shape[1], 16, shape[2]), name)

        assert packed.shape == (reference_kv.packed_block_bytes(name, *shape),)


def test_the_layout_is_that_of_the_specification() -> None:
    """One head of 16 channels whose value says where it is: slot 3, channel 5."""
    block = torch.zeros(1, 2, 1, 16, 16)
    block[0, :, 0, 3, 5] = 127.0

    packed = reference_kv.pack(block, "int8c")
    by_token = reference_kv.pack(block, "int8t")

    assert packed[:32].view(torch.float16)[5] == 1.0  # the scale of channel 5
    assert packed[32 + 5 * 16 + 3] == 127  # keys by channel
    assert packed[288:320].view(torch.float16)[3] == 1.0  # the scale of slot 3
    assert packed[320 + 3 * 16 + 5] == 127  # values by slot
    assert by_token[3 * 16 + 5] == by_token[288 + 3 * 16 + 5] == 127
    assert by_token[256:288].view(torch.float16)[3] == 1.0


def test_the_rotation_is_orthogonal_and_its_signs_never_change() -> None:
    """The signs are part of the format: other signs read stored records wrongly."""
    for head_dim in (16, 64, 128, 256):
        x = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(2))
        assert torch.allclose(reference_kv.hadamard(reference_kv.hadamard(x)), x, atol=1e-5)

    signs = reference_kv.signs(64)
    assert "".join("-+"[int(sign > 0)] for sign in signs[:16]) == SIGNS_BEGIN
    assert torch.equal(reference_kv.signs(16), signs[:16])


SIGNS_BEGIN = "-+-------+---+--"


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_come_back(dtype: torch.dtype) -> None:
    """The two orders of a block in memory hold the same values."""
    block = hard_blocks(2, (2, 3, 32), dtype, seed=8)

    panels = reference_kv.to_panels(block)

    assert torch.equal(reference_kv.from_panels(panels, 3, 32), block)
    assert not torch.equal(panels.view_as(block), block)
