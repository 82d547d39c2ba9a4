"""Products with weights of 4 bits (AWQ, GPTQ, GGUF's Q4): out.T = W @ x.T, W in registers.

A code minus 8 is an integer that bf16 holds exactly, so a group's product is exact but for the
order of its fp32 sum; the group's scale then multiplies the sum, and no weight is rounded. More
rows than the matrix unit takes at once pay for unpacking the matrix first: `unpack`, and the
library's product. `kernels.reference_weights.Packed` specifies the values;
`engine.models.gpu_layers` calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import gdc_wait
from kernels.gpu.fused_ops import dependent_rows
from kernels.gpu.products import (
    MULTIPROCESSORS,
    SPLIT_MAX,
    ProductTile,
    can_inline_ptx,
    eight,
    store_sums,
)
from kernels.reference_weights import Packed, Weight, words_of

PANEL = 128
"""Columns of a panel: a row's codes are 16 words."""
GROUPS = (32, 64)
"""Sizes of groups of which a panel has several; larger ones are multiples of a panel."""
MIDDLE = 8
"""The code that symmetric weights have for zero."""


class Int4(NamedTuple):
    """A matrix [N, K] of 4 bits as the kernels read it; a value is (code - zero) * scale, plus the
    shift.

    codes [K / 128, N, 16] int32: bits 4 i to 4 i + 3 of word w have column 16 i + w of the panel,
    so that a lane of the matrix unit finds its columns side by side. scales [G, N] fp32, G groups
    of a row. zeros [G, N] bf16: 128 more than the code for zero. shifts [G, N] fp32, or None where
    a code stands for zero in each group.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    shifts: torch.Tensor | None

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def columns(self) -> int:
        """K."""
        return PANEL * len(self.codes)

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.columns // len(self.scales)

    @property
    def is_plain(self) -> bool:
        """Whether a panel of a row has one scale, and no shift."""
        return self.group >= PANEL and self.shifts is None


def fits_int4(weight: Weight) -> bool:
    """Return whether a weight can lie in the panels of `Int4`."""
    if not isinstance(weight, Packed) or weight.kind != "int4" or weight.codes.dim() != 2:
        return False
    rows, columns = weight.shape
    group = min(weight.group, columns)
    is_group = group in GROUPS or group % PANEL == 0
    is_small = rows * columns < 1 << 31  # offsets have 32 bits
    return is_group and is_small and columns % group == 0 and columns % PANEL == 0


def int4_of(packed: Packed) -> Int4:
    """Return a matrix as the kernels read it; see `fits_int4`."""
    scales = packed.scales.float()
    minima = torch.zeros_like(scales) if packed.minima is None else packed.minima.float()
    zeros = (-minima / scales).round().clamp(0, 16).nan_to_num(MIDDLE)
    shifts = minima + zeros * scales
    # Files round a minimum as its scale: nothing is left where a code stands for zero.
    has_shifts = bool((shifts.abs() > 1e-6 * scales.abs()).any())
    if has_shifts:
        zeros.fill_(MIDDLE)
        shifts = minima + MIDDLE * scales
    return Int4(
        words_of(packed.codes),
        scales.T.contiguous(),
        (zeros + 128).T.to(torch.bfloat16).contiguous(),
        shifts.T.contiguous() if has_shifts else None,
    )


@triton.jit
def _unpack(words, z0, z1, z2, z3, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the eight codes of each word, exactly, each two less the next of the codes for zero.

    A code in the last bits of the bf16 of 128 adds to it, and `z` are 128 more than they stand for.
    Neighbouring words become a pair in a register by one permutation of their bytes.
    """
    if PTX:
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, code;
            prmt.b32 pair, $8, $9, 0x0400;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, code, $10;
            shr.u32 pair, pair, 4;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $1, code, $10;
            prmt.b32 pair, $8, $9, 0x0501;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $2, code, $11;
            shr.u32 pair, pair, 4;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $3, code, $11;
            prmt.b32 pair, $8, $9, 0x0602;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $4, code, $12;
            shr.u32 pair, pair, 4;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $5, code, $12;
            prmt.b32 pair, $8, $9, 0x0703;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $6, code, $13;
            shr.u32 pair, pair, 4;
            lop3.b32 code, pair, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $7, code, $13;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, z0, z1, z2, z3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        w0 = (words & 15).to(KIND) + (128 - z0.to(KIND))
        w1 = ((words >> 4) & 15).to(KIND) + (128 - z0.to(KIND))
        w2 = ((words >> 8) & 15).to(KIND) + (128 - z1.to(KIND))
        w3 = ((words >> 12) & 15).to(KIND) + (128 - z1.to(KIND))
        w4 = ((words >> 16) & 15).to(KIND) + (128 - z2.to(KIND))
        w5 = ((words >> 20) & 15).to(KIND) + (128 - z2.to(KIND))
        w6 = ((words >> 24) & 15).to(KIND) + (128 - z3.to(KIND))
        w7 = ((words >> 28) & 15).to(KIND) + (128 - z3.to(KIND))
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _two(a, b, BN: tl.constexpr):
    """Return [BN, 32]: the columns of a, then those of b."""
    return tl.permute(tl.join(a, b), (0, 2, 1)).reshape(BN, 32)


@triton.jit
def _four(a, b, c, d, BN: tl.constexpr):
    """Return [BN, 64]: the columns of a, b, c and d."""
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.permute(pairs, (0, 2, 3, 1)).reshape(BN, 64)


@triton.jit
def _group_of(pointers, group, n, N, there, BN: tl.constexpr):
    """Return a group's zeros for the words of BN rows, [BN, 16]."""
    zero = tl.load(pointers + group * N + n, mask=there, other=128.0)
    return tl.broadcast_to(zero[:, None], [BN, 16])


@triton.jit
def _add_group(
    acc, values, x_tile, alive, scales, shifts, group, n, N, there, HAS_SHIFTS: tl.constexpr,
):  # fmt: skip
    """Return acc plus a group's values times rows, scaled, and its shift times their sums."""
    rows = tl.load(x_tile, mask=alive, other=0.0)
    scale = tl.load(scales + group * N + n, mask=there, other=0.0)
    acc += tl.dot(values, tl.trans(rows)) * scale[:, None]
    if HAS_SHIFTS:
        shift = tl.load(shifts + group * N + n, mask=there, other=0.0)
        ones = tl.full(values.shape, 1.0, values.dtype)
        acc += tl.dot(ones, tl.trans(rows)) * shift[:, None]
    return acc


@triton.jit
def int4_linear_kernel(
    x, codes, scales, zeros, shifts, bias, out, parts, tickets, T, N, K, span,
    GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of the product, over `span` columns. Grid: as `store_sums`."""
    if WAITS:
        gdc_wait()
    KIND: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = 128 if GROUP >= 128 else GROUP
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    there, live = n < N, t < T
    row = tl.where(live, t, 0).to(tl.int64)
    tile = codes + n[:, None] * 16 + tl.arange(0, 16)[None, :]
    x_tile = x + row[:, None] * K + tl.arange(0, WIDTH)[None, :]
    alive = live[:, None]
    first = tl.program_id(2) * span
    acc = tl.zeros([BN, BT], tl.float32)
    for start in tl.range(first, tl.minimum(first + span, K), 128, num_stages=STAGES):
        words = tl.load(tile + start // 8 * N, mask=there[:, None], other=0)
        g = start // GROUP
        z0 = _group_of(zeros, g, n, N, there, BN)
        z1, z2, z3 = z0, z0, z0
        if GROUP == 64:
            z2 = _group_of(zeros, g + 1, n, N, there, BN)
            z3 = z2
        if GROUP == 32:
            z1 = _group_of(zeros, g + 1, n, N, there, BN)
            z2 = _group_of(zeros, g + 2, n, N, there, BN)
            z3 = _group_of(zeros, g + 3, n, N, there, BN)
        w0, w1, w2, w3, w4, w5, w6, w7 = _unpack(words, z0, z1, z2, z3, KIND, PTX)
        at = x_tile + start
        if GROUP >= 128:
            values = eight(w0, w1, w2, w3, w4, w5, w6, w7, BN)
            acc = _add_group(acc, values, at, alive, scales, shifts, g, n, N, there, HAS_SHIFTS)
        elif GROUP == 64:
            low, high = _four(w0, w1, w2, w3, BN), _four(w4, w5, w6, w7, BN)
            acc = _add_group(acc, low, at, alive, scales, shifts, g, n, N, there, HAS_SHIFTS)
            acc = _add_group(
                acc, high, at + 64, alive, scales, shifts, g + 1, n, N, there, HAS_SHIFTS
            )
        else:
            v0, v1, v2, v3 = _two(w0, w1, BN), _two(w2, w3, BN), _two(w4, w5, BN), _two(w6, w7, BN)
            acc = _add_group(acc, v0, at, alive, scales, shifts, g, n, N, there, HAS_SHIFTS)
            acc = _add_group(
                acc, v1, at + 32, alive, scales, shifts, g + 1, n, N, there, HAS_SHIFTS
            )
            acc = _add_group(
                acc, v2, at + 64, alive, scales, shifts, g + 2, n, N, there, HAS_SHIFTS
            )
            acc = _add_group(
                acc, v3, at + 96, alive, scales, shifts, g + 3, n, N, there, HAS_SHIFTS
            )
    store_sums(acc, out, bias, parts, tickets, n, there, row, live, N, SPLIT, HAS_BIAS, BT, BN)


def int4_tile(tokens: int, *, is_plain: bool) -> ProductTile:
    """Return the tile of a product: a function of only the step's padded number of rows, and of
    whether a panel has one scale and no shift (`is_plain`), which leaves registers for more."""
    if tokens <= 16:
        return ProductTile(16, 64, PANEL, 3, 4)
    if tokens <= 32:
        return ProductTile(32, 64, PANEL, 4, 4)
    return ProductTile(64, 128 if is_plain else 64, PANEL, 3, 4)


def int4_split(tokens: int, weight: Int4, tile: ProductTile) -> int:
    """Return in how many parts K is cut: so many that each multiprocessor has four programs of 64
    rows of weights, or two of 128, and none less than four turns."""
    tiles = triton.cdiv(weight.rows, tile.rows) * triton.cdiv(tokens, tile.pairs)
    programs = 4 * MULTIPROCESSORS * 64 // tile.rows
    parts: int = min(SPLIT_MAX, programs // tiles, len(weight.codes) // 4)
    return max(1, parts)


def int4_linear(
    x: torch.Tensor, weight: Int4, bias: torch.Tensor | None, tickets: torch.Tensor,
    tile: ProductTile, split: int,
) -> torch.Tensor:  # fmt: skip
    """Return x @ weight.T + bias, [T, N] in x's dtype; `tickets` and `split` as in `fp8_linear`."""
    (tokens, columns), count = x.shape, weight.rows
    out = x.new_empty(tokens, count)
    grid = (triton.cdiv(count, tile.rows), triton.cdiv(tokens, tile.pairs), split)
    parts = out
    if split > 1:
        sums = grid[0] * grid[1] * split * tile.rows * tile.pairs
        parts = x.new_empty(sums, dtype=torch.float32)
    span = triton.cdiv(columns // PANEL, split) * PANEL
    pdl = dependent_rows(out)
    int4_linear_kernel[grid](
        x, *weight[:3], weight.scales if weight.shifts is None else weight.shifts,
        out if bias is None else bias, out, parts, tickets, tokens, count, columns, span,
        GROUP=weight.group, HAS_SHIFTS=weight.shifts is not None, SPLIT=split,
        HAS_BIAS=bias is not None, BT=tile.pairs, BN=tile.rows, STAGES=tile.stages,
        PTX=can_inline_ptx(x), WAITS=bool(pdl), num_warps=tile.warps, **pdl,
    )  # fmt: skip
    return out


@triton.jit
def unpack_kernel(
    codes, scales, zeros, shifts, out, N, K, GROUP: tl.constexpr, HAS_SHIFTS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write the values of BN rows of a panel. Grid: (panels, tiles of N)."""
    panel = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    i, w = tl.arange(0, 8), tl.arange(0, 16)
    there = n < N
    mask = there[:, None, None]
    at = codes + panel * N * 16 + n[:, None] * 16 + w[None, :]
    words = tl.load(at, mask=there[:, None], other=0)
    code = (words[:, None, :] >> (i * 4)[None, :, None]) & 15
    group = (panel * 128 + i * 16) // GROUP * N
    of_group = group[None, :] + n[:, None]
    zero = tl.load(zeros + of_group, mask=there[:, None], other=0.0).to(tl.float32) - 128
    scale = tl.load(scales + of_group, mask=there[:, None], other=0.0)
    value = (code.to(tl.float32) - zero[:, :, None]) * scale[:, :, None]
    if HAS_SHIFTS:
        value += tl.load(shifts + of_group, mask=there[:, None], other=0.0)[:, :, None]
    column = panel * 128 + i[:, None] * 16 + w[None, :]
    target = out + n.to(tl.int64)[:, None, None] * K + column[None, :, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=mask)


def unpack(weight: Int4, out: torch.Tensor) -> torch.Tensor:
    """Write a matrix's values, computed in fp32 and rounded once, to `out` [N, K]; return it."""
    grid = (len(weight.codes), triton.cdiv(weight.rows, 32))
    unpack_kernel[grid](
        *weight[:3], weight.scales if weight.shifts is None else weight.shifts, out, weight.rows,
        weight.columns, GROUP=weight.group, HAS_SHIFTS=weight.shifts is not None, BN=32,
    )  # fmt: skip
    return out
