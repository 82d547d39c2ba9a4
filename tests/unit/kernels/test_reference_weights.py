"""What packed weights are worth, against values computed one by one."""

from __future__ import annotations

import pytest
import torch

from kernels.reference_weights import (
    GROUP,
    MAGNITUDES,
    Packed,
    decoded,
    fits_panels,
    panels,
    round_rows,
    to_fp8,
    to_mxfp4,
)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_mxfp4_has_two_values_a_byte_the_low_one_first() -> None:
    """A scale is a power of two, biased by 127."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0] = 1 | 15 << 4  # 0.5 and -6
    codes[0, 16] = 5 | 11 << 4  # 3 and -1.5
    packed = Packed("mxfp4", codes, torch.tensor([[127, 130]], dtype=torch.uint8), GROUP)

    found = packed.dense(torch.float32)

    assert packed.shape == (1, 64)
    assert found[0, :3].tolist() == [0.5, -6.0, 0.0]
    assert found[0, 32:35].tolist() == [24.0, -12.0, 0.0]


def test_integers_have_a_scale_and_a_minimum() -> None:
    """The last group may be cut short."""
    packed = Packed(
        "int4", torch.tensor([[0x10, 0x32, 0x54]], dtype=torch.uint8),
        torch.tensor([[2.0, 10.0]]), 4, torch.tensor([[-1.0, 0.5]]),
    )  # fmt: skip

    assert packed.dense(torch.float32).tolist() == [[-1.0, 1.0, 3.0, 5.0, 40.5, 50.5]]


def test_a_stack_is_unpacked_as_its_matrices_are() -> None:
    """One at a time, so that scratch stays small."""
    stack = to_fp8(rand(3, 8, 32))

    whole = stack.dense(torch.bfloat16)

    assert torch.equal(whole[1], stack.at(1).dense(torch.bfloat16))


@pytest.mark.parametrize("group", [32, 128])
def test_rows_in_fp8_are_within_half_a_step(group: int) -> None:
    """Three bits of mantissa: 2^-4 of a value, or of the smallest normal one."""
    x = rand(5, 128)

    codes, scales = round_rows(x, group)

    wide = Packed("fp8", codes, scales, group).dense(torch.float32)
    limit = x.abs() * 2**-4 + scales.repeat_interleave(group, -1) * 2**-10
    assert bool(((wide - x).abs() <= limit).all())


def test_a_row_of_zeros_stays_zero() -> None:
    """Its scale is not."""
    codes, scales = round_rows(torch.zeros(1, 32), 32)

    assert not codes.float().any()
    assert float(scales) > 0


def test_values_of_mxfp4_are_packed_exactly() -> None:
    """Under any scale, zeros and negative zeros too."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    row = torch.cat([torch.ldexp(table.repeat(2), torch.tensor(e)) for e in (-20, 0, 30)])

    packed = to_mxfp4(row[None])

    assert torch.equal(packed.dense(torch.float32), row[None])


def test_panels_hold_the_same_codes() -> None:
    """A word has one column of each of eight sixteens; what the last panel lacks is zero."""
    packed = to_mxfp4(rand(4, 192))
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).flatten(-2)

    values, scales = panels(packed)

    assert fits_panels(packed)
    for row, column in ((0, 0), (3, 31), (1, 40), (2, 100), (3, 191)):
        found = int(values[column // 128, row, column % 16]) >> 4 * (column % 128 // 16) & 15
        assert found == int(codes[row, column])
        word = int(scales[column // 128, row])
        assert word >> 8 * (column % 128 // 32) & 255 == int(packed.scales[row, column // 32])
    assert values.shape == (2, 4, 16)
    assert not (values[1] >> 16).any()
    assert decoded(packed).shape == (4, 192)


def test_scales_beyond_the_kernels_do_not_fit() -> None:
    """Such weights are unpacked instead."""
    packed = to_mxfp4(rand(2, 64))
    assert fits_panels(packed)

    assert not fits_panels(Packed("mxfp4", packed.codes, packed.scales + 10, GROUP))
    assert fits_panels(to_mxfp4(rand(2, 32)))
