"""Packed weights in plain torch: their kinds, what their bytes are worth, how they lie on a GPU.

The specification of what `kernels.gpu.products` multiplies. `engine.weights` reads `Packed` from
files, and a device's operations bring it into the layout of their kernels. `kernels.cpu` has
layouts of its own. N rows, K columns; weights multiply rows of activations: x @ weight.T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from msgspec import Struct

Kind = Literal["fp8", "int8", "int4", "mxfp4"]

FP8_MAX = 448.0
"""Largest value of a float of 8 bits with 4 of exponent and 3 of mantissa (e4m3)."""

GROUP = 32
"""Values of MXFP4 that share a scale."""

TURN = 128
"""Columns of a panel, in which rows are contiguous, and whose four scales are one word."""

EXPONENT_MAX = 128
"""Largest biased exponent of a scale that the kernels multiply exactly."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of MXFP4 by their low three bits; the fourth is the sign."""


class Packed(Struct, frozen=True, eq=False):
    """A matrix [N, K] of few bits a value, or a stack of them [..., N, K].

    A value is its code times the scale of its group, which are `group` columns of a row, plus the
    group's minimum. `scales` [..., N, ceil(K / group)]: fp32; of mxfp4 uint8, exponents biased by
    127.
    """

    kind: Kind
    codes: torch.Tensor
    """Fp8: [..., N, K] e4m3; int8: [..., N, K] int8; int4 (0 to 15) and mxfp4: [..., N, K / 2]
    uint8, of two columns the first in the low half."""
    scales: torch.Tensor
    group: int
    minima: torch.Tensor | None = None
    """Like scales, or None."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        halves = 2 if self.kind in ("int4", "mxfp4") else 1
        return (*self.codes.shape[:-1], self.codes.shape[-1] * halves)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors of which it consists, all by rows."""
        return (self.codes, self.scales, *(() if self.minima is None else (self.minima,)))

    def with_parts(self, *parts: torch.Tensor) -> Packed:
        """Return a matrix of the same kind with other parts."""
        return Packed(self.kind, parts[0], parts[1], self.group, *parts[2:])

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Packed:
        """Return the matrix with `change` made to each part: one of rows, which does not touch the
        last dimension."""
        return self.with_parts(*map(change, self.parts))

    def at(self, index: int) -> Packed:
        """Return a matrix of the stack."""
        return self.with_parts(*(part[index] for part in self.parts))

    def columns(self, first: int, end: int) -> Packed | None:
        """Return columns `first` to `end`, or None where these cut a group or a byte."""
        whole = self.shape[-1]
        per_byte = whole // self.codes.shape[-1]
        if self.group >= whole and not (first % per_byte or end % per_byte):
            codes = self.codes[..., first // per_byte : end // per_byte]
            return Packed(self.kind, codes, self.scales, end - first, self.minima)
        if first % self.group or (end % self.group and end != whole):
            return None
        scales = slice(first // self.group, -(-end // self.group))
        return self.with_parts(
            self.codes[..., first // per_byte : end // per_byte],
            *(part[..., scales] for part in self.parts[1:]),
        )

    def as_int8(self, group: int) -> Packed:
        """Return the same values of int4 or int8 as int8 with minima, for each `group` columns, of
        which a group is a multiple."""
        codes = self.codes
        if self.kind == "int4":
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return Packed("int8", codes.view(torch.int8), *self._factors(group))

    def in_groups(self, group: int) -> Packed:
        """Return the same with minima, for each `group` columns, of which a group is a multiple."""
        return Packed(self.kind, self.codes, *self._factors(group))

    def _factors(self, group: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        minima = torch.zeros_like(self.scales) if self.minima is None else self.minima
        each = (part.repeat_interleave(self.group // group, -1) for part in (self.scales, minima))
        scales, minima = each
        return scales, group, minima

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, computed in fp32 and rounded once. A matrix of a stack at a time, so
        that scratch is one matrix."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for index in range(len(self.codes)) if self.codes.dim() > 2 else ():
            out[index] = self.at(index).dense(dtype)
        if self.codes.dim() > 2:
            return out
        columns = self.shape[-1]
        scales = self.scales
        if self.kind == "mxfp4":
            scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
        wide = decoded(self) * _by_column(scales, self.group, columns)
        if self.minima is not None:
            wide += _by_column(self.minima, self.group, columns)
        return out.copy_(wide)


Weight = torch.Tensor | Packed


def each(weight: Weight, change: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
    """Return a weight with `change` made to its rows; see `Packed.each`."""
    return weight.each(change) if isinstance(weight, Packed) else change(weight)


def as_dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight in `dtype`."""
    return weight.dense(dtype) if isinstance(weight, Packed) else weight.to(dtype)


def decoded(packed: Packed) -> torch.Tensor:
    """Return the codes as numbers, [N, K] fp32."""
    codes = packed.codes
    if packed.kind in ("fp8", "int8"):
        return codes.float()
    halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    if packed.kind == "int4":
        return halves.float()
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    return table[halves.int()]


def _by_column(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return values.float().repeat_interleave(group, -1)[..., :columns]


# --- fp8 ------------------------------------------------------------------------------------------


def round_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., K] in e4m3, and the scales [..., K / group] of their groups in fp32: the
    largest value of a group becomes the largest of e4m3."""
    groups = x.float().reshape(*x.shape[:-1], -1, group)
    scales = groups.abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    codes = (groups / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return codes, scales


def to_fp8(weight: torch.Tensor) -> Packed:
    """Return weight [..., N, K] in fp8 with a scale for each row; a matrix at a time."""
    columns = weight.shape[-1]
    if weight.dim() == 2:
        return Packed("fp8", *round_rows(weight, columns), columns)
    rounded = [to_fp8(matrix) for matrix in weight]
    return stack(rounded)


def stack(matrices: list[Packed]) -> Packed:
    """Return matrices of one kind and shape as a stack."""
    parts = zip(*(matrix.parts for matrix in matrices), strict=True)
    return matrices[0].with_parts(*map(torch.stack, parts))


def fp8_product(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Return x @ weight.T in fp32 as W8A8 computes it: rows of x in e4m3, with a scale for each
    group of the weight's."""
    group = min(weight.group, x.shape[-1])
    codes, scales = round_rows(x, group)
    wide = Packed("fp8", codes, scales, group).dense(torch.float32)
    return wide @ weight.dense(torch.float32).T


# --- int4 -----------------------------------------------------------------------------------------


def to_int4(weight: torch.Tensor, group: int) -> Packed:
    """Return weight [N, K] rounded to 4 bits, with a scale and a code for zero for each `group`
    columns, whose least and largest values nearly keep theirs."""
    groups = weight.float().reshape(len(weight), -1, group)
    minima, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((most - minima) / 15).clamp(min=1e-8)
    minima = (minima / scales).round() * scales
    codes = ((groups - minima[..., None]) / scales[..., None]).round().clamp(0, 15)
    codes = codes.to(torch.uint8).flatten(-2)
    return Packed("int4", codes[:, 0::2] | codes[:, 1::2] << 4, scales, group, minima)


# --- MXFP4 ----------------------------------------------------------------------------------------


class Mxfp4(NamedTuple):
    """A matrix of N rows and K columns as the GPU's kernels read it, or a stack of them.

    values [..., ceil(K / 128), N, 16] int32: bits 4 i to 4 i + 3 of word w have column 16 i + w of
    the panel, so that a lane of the matrix unit finds its columns side by side; columns from K on
    are zero. scales [..., ceil(K / 128), N] int32: byte g is the biased exponent of columns 32 g to
    32 g + 31.
    """

    values: torch.Tensor
    scales: torch.Tensor


def fits_panels(weight: Weight) -> bool:
    """Return whether a weight can lie in the panels of `Mxfp4`."""
    return (
        isinstance(weight, Packed)
        and weight.kind == "mxfp4"
        and weight.shape[-1] % GROUP == 0
        and int(weight.scales.max()) <= EXPONENT_MAX
    )


def panels(packed: Packed) -> Mxfp4:
    """Return a matrix [N, K] or a stack of MXFP4 in panels; see `fits_panels`."""
    if packed.codes.dim() > 2:
        each_one = [panels(packed.at(index)) for index in range(len(packed.codes))]
        return Mxfp4(*map(torch.stack, zip(*each_one, strict=True)))
    rows, columns = packed.shape
    whole = -(-columns // TURN) * TURN
    codes = packed.codes.new_zeros(rows, whole // 2)
    codes[:, : columns // 2] = packed.codes
    padded = packed.scales.new_zeros(rows, whole // GROUP)
    padded[:, : columns // GROUP] = packed.scales
    return Mxfp4(words_of(codes), padded.view(torch.int32).T.contiguous())


def words_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of four bits, of two columns a byte [N, K / 2], as words [K / 128, N, 16]."""
    single = torch.stack([codes & 15, codes >> 4], -1).view(len(codes), -1, 8, 16).int()
    words = torch.zeros_like(single[:, :, 0])
    for index in range(8):
        words |= single[:, :, index] << (4 * index)
    return words.transpose(0, 1).contiguous()


def to_mxfp4(weight: torch.Tensor) -> Packed:
    """Return weight [..., K] rounded to MXFP4, K in whole groups. A group's scale is the largest
    that still holds its largest value to within rounding."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    _, exponents = torch.frexp(groups.abs().amax(-1, keepdim=True))
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(torch.ldexp(groups.abs(), 3 - exponents), middles)
    codes = (codes + 8 * torch.signbit(groups)).to(torch.uint8).flatten(-2)
    scales = (exponents[..., 0] - 3 + 127).clamp(min=0).to(torch.uint8)
    return Packed("mxfp4", codes[..., 0::2] | codes[..., 1::2] << 4, scales, GROUP)
