"""Weights of MXFP4 in plain torch: how they lie on a GPU, packed and unpacked.

A value is one of 16 four-bit floats times a power of two that 32 values of a row share. The format
is the OCP Microscaling specification's; the layout is `kernels.gpu.products`'s. `kernels.cpu` has a
layout of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

GROUP = 32
"""Values of a row that share a scale."""

PANEL = 64
"""Columns of a panel, in which rows are contiguous."""

TURN = 128
"""Columns whose four scales are one word."""

EXPONENT_MAX = 128
"""Largest biased exponent of a scale that the kernels multiply exactly."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values by their low three bits; the fourth is the sign."""


class Mxfp4(NamedTuple):
    """A packed matrix of N rows and K columns, or a stack of them.

    values [..., K / 64, N, 32] uint8: byte j of a row's panel has column j in its low half and
    column 32 + j in its high half. scales [..., ceil(K / 128), N] int32: byte g is the biased
    exponent of columns 32 g to 32 g + 31.
    """

    values: torch.Tensor
    scales: torch.Tensor


def pack(weight: torch.Tensor) -> Mxfp4 | None:
    """Return weight [N, K] packed, or None where MXFP4 changes a value or the kernels do not fit.

    Waits for the device.
    """
    rows, columns = weight.shape
    if columns % PANEL:
        return None
    groups = weight.float().view(rows, -1, GROUP)
    # A group's largest value becomes 4 to 7: exact wherever any scale is, since every smaller scale
    # that still holds the largest value holds the others too.
    _, exponents = torch.frexp(groups.abs().amax(-1))
    biased = (exponents - 3 + 127).clamp(0, EXPONENT_MAX)
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    wanted = torch.ldexp(groups.abs(), (127 - biased)[..., None])
    codes = torch.searchsorted(magnitudes, wanted).clamp(max=len(MAGNITUDES) - 1)
    if not bool((magnitudes[codes] == wanted).all()):
        return None
    codes = (codes + 8 * torch.signbit(groups)).to(torch.uint8).view(rows, -1, 2, GROUP)
    values = (codes[:, :, 0] | codes[:, :, 1] << 4).transpose(0, 1).contiguous()
    padded = biased.new_zeros(rows, -(-columns // TURN) * (TURN // GROUP))
    padded[:, : biased.shape[1]] = biased
    words = padded.to(torch.uint8).view(torch.int32)
    return Mxfp4(values, words.T.contiguous())


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """Return weight [..., K] rounded to values that MXFP4 holds, in its dtype; K in whole groups.

    A group's scale is the largest that still holds its largest value to within rounding.
    """
    groups = weight.float().view(*weight.shape[:-1], -1, GROUP)
    _, exponents = torch.frexp(groups.abs().amax(-1, keepdim=True))
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(torch.ldexp(groups.abs(), 3 - exponents), middles)
    rounded = torch.ldexp(magnitudes[codes], exponents - 3)
    return rounded.copysign(groups).flatten(-2).to(weight.dtype)


def unpack(packed: Mxfp4, columns: int) -> torch.Tensor:
    """Return the matrix [N, columns] in fp32."""
    values, scales = packed
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=values.device)
    halves = torch.stack([table[(values & 15).long()], table[(values >> 4).long()]], 1)
    exponents = scales.T.contiguous().view(torch.uint8)[:, : columns // GROUP].int() - 127
    groups = halves.permute(2, 0, 1, 3).reshape(values.shape[1], -1, GROUP)
    return torch.ldexp(groups, exponents[..., None]).flatten(1)
