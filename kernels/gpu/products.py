"""Products with the weights as left operand: out.T = W @ x.T, for few rows and packed weights.

Weights fill the 64 rows of Hopper's matrix unit at any number of tokens, and weights of four bits
are unpacked in registers, from which that unit reads its left operand. Weights in fp8 multiply rows
in fp8, which `round_rows` makes, or the norm and the activation before (`kernels.gpu.fused_ops`).
`kernels.gpu.experts` calls `product`, `engine.models.gpu_layers` the rest;
`kernels.reference_weights` specifies the packed layouts. T rows, N columns of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import gdc_wait
from kernels.gpu.fused_ops import dependent_rows, to_e4m3
from kernels.reference_weights import TURN, Packed

WIDE, MXFP4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of weights: tensors in the dtype of the rows, packed four-bit floats, and floats of 8 bits,
which multiply rows of the same."""

MULTIPROCESSORS = 132
"""Of an H200: a product of fewer tiles is cut along K, so that each has work."""

SPLIT_MAX = 8
"""Most parts of a product along K."""


class Fp8(NamedTuple):
    """A matrix [N, K] in fp8, or a stack of them: codes [..., N, K] e4m3, scales [..., G, N] fp32,
    G of a row: one, or one for each 128 columns."""

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Rows(NamedTuple):
    """Rows of activations in fp8: codes [T, K] e4m3, scales [T, G] fp32, G as the weights have."""

    codes: torch.Tensor
    scales: torch.Tensor


class ProductTile(NamedTuple):
    """A tile of a product: BT rows by BN of the weights', BK columns at a time; in how many parts
    K is cut at most."""

    pairs: int
    rows: int
    columns: int
    stages: int
    warps: int


def fp8_of(packed: Packed) -> Fp8:
    """Return packed fp8 as the kernels read it."""
    return Fp8(packed.codes.contiguous(), packed.scales.transpose(-1, -2).contiguous())


def can_inline_ptx(x: torch.Tensor) -> bool:
    """Return whether weights are unpacked by instructions of the GPU, and not in Triton's terms."""
    return x.is_cuda and x.dtype == torch.bfloat16


@triton.jit
def _as_float(bits, KIND: tl.constexpr):
    """Return 16 bits of a bf16 as a `KIND`; fp32 where the interpreter would flush subnormals."""
    if tl.float32 == KIND:
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def _factor(word, SHIFT: tl.constexpr, KIND: tl.constexpr):
    """Return 2^(s - 127 + 126) of the byte s at SHIFT; s is at most 128.

    The bits of a four-bit float are one exponent field lower than its value: 126 mends that, so
    that one exact multiplication does both.
    """
    return _as_float((((word >> SHIFT) & 0xFF) + 126) << 7, KIND)


@triton.jit
def eight(a, b, c, d, e, f, g, h, BN: tl.constexpr):
    """Return [BN, 128]: the columns of a to h, [BN, 16] each. It moves no value between lanes."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)).reshape(BN, 128)


@triton.jit
def _float_of(words, factor, SHIFT: tl.constexpr, KIND: tl.constexpr):
    """Return the four-bit floats at SHIFT of words, times their factors."""
    code = (words >> SHIFT) & 15
    return _as_float(((code & 7) << 6) | ((code & 8) << 12), KIND) * factor


@triton.jit
def _unpack_mxfp4(words, f0, f1, f2, f3, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the eight four-bit floats of each word, each two times the next of the factors.

    One multiplication of integers moves sign and magnitude to bf16's sign and bits 8 to 6, and the
    one by the factor must keep subnormal numbers. Neighbouring words become a pair in a register by
    one permutation of their bytes.
    """
    if PTX:
        v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, code;
            prmt.b32 pair, $8, $9, 0x0400;
            and.b32 code, pair, 0x000F000F;
            mul.lo.u32 code, code, 0x1040;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $0, code, $10;
            and.b32 code, pair, 0x00F000F0;
            mul.lo.u32 code, code, 0x0104;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $1, code, $10;
            prmt.b32 pair, $8, $9, 0x0501;
            and.b32 code, pair, 0x000F000F;
            mul.lo.u32 code, code, 0x1040;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $2, code, $11;
            and.b32 code, pair, 0x00F000F0;
            mul.lo.u32 code, code, 0x0104;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $3, code, $11;
            prmt.b32 pair, $8, $9, 0x0602;
            and.b32 code, pair, 0x000F000F;
            mul.lo.u32 code, code, 0x1040;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $4, code, $12;
            and.b32 code, pair, 0x00F000F0;
            mul.lo.u32 code, code, 0x0104;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $5, code, $12;
            prmt.b32 pair, $8, $9, 0x0703;
            and.b32 code, pair, 0x000F000F;
            mul.lo.u32 code, code, 0x1040;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $6, code, $13;
            and.b32 code, pair, 0x00F000F0;
            mul.lo.u32 code, code, 0x0104;
            and.b32 code, code, 0x81C081C0;
            mul.rn.bf16x2 $7, code, $13;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                   tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        v0, v1 = _float_of(words, f0, 0, KIND), _float_of(words, f0, 4, KIND)
        v2, v3 = _float_of(words, f1, 8, KIND), _float_of(words, f1, 12, KIND)
        v4, v5 = _float_of(words, f2, 16, KIND), _float_of(words, f2, 20, KIND)
        v6, v7 = _float_of(words, f3, 24, KIND), _float_of(words, f3, 28, KIND)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def product(
    x_rows, x_scales, live, w, scales, n, there, first, last, N, K,
    KIND: tl.constexpr, GROUPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return W[n] @ x.T over columns [first, last) in fp32, [BN, BT].

    x_rows [BT]: pointers to the rows' first columns; `live` [BT] masks rows, `there` [BN] those of
    W. `w`, `scales`: where the matrix begins; N x K of it, panels as `Mxfp4` says, or `Fp8`, whose
    rows have their scales at x_scales [BT], GROUPS each; with several, BK is 128. EVEN: K is a
    multiple of BK, which is 128 for MXFP4, and so is `first`. A masked row is loaded as zero and
    never multiplied by zero, so that a NaN stays in its row.
    """
    HALF: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros([BN, BT], tl.float32)
    if KIND != 1:
        k = tl.arange(0, BK)
        w_tile = w + n.to(tl.int64)[:, None] * K + k[None, :]
        x_tile = x_rows[:, None] + k[None, :]
        for start in tl.range(first, last, BK, num_stages=STAGES):
            w_mask, x_mask = there[:, None], live[:, None]
            if not EVEN:
                inside = (start + k < K)[None, :]
                w_mask, x_mask = w_mask & inside, x_mask & inside
            weights = tl.load(w_tile + start, mask=w_mask, other=0.0)
            x = tl.load(x_tile + start, mask=x_mask, other=0.0)
            if KIND == 2 and GROUPS > 1:
                turn = start // 128
                factor = tl.load(scales + turn * N + n, mask=there, other=0.0)
                x_factor = tl.load(x_scales + turn, mask=live, other=0.0)
                part = tl.dot(weights, tl.trans(x))
                acc += part * factor[:, None] * x_factor[None, :]
            else:
                acc = tl.dot(weights, tl.trans(x), acc)
        if KIND == 2 and GROUPS == 1:
            factor = tl.load(scales + n, mask=there, other=0.0)
            acc = acc * factor[:, None] * tl.load(x_scales, mask=live, other=0.0)[None, :]
    else:
        k = tl.arange(0, 128)
        w_tile = w + n[:, None] * 16 + tl.arange(0, 16)[None, :]
        x_tile = x_rows[:, None] + k[None, :]
        for start in tl.range(first, last, 128, num_stages=STAGES):
            turn = start // 128
            words = tl.load(w_tile + turn * N * 16, mask=there[:, None], other=0)
            word = tl.load(scales + turn * N + n, mask=there, other=0)
            x_mask = live[:, None]
            if not EVEN:
                x_mask = x_mask & (start + k < K)[None, :]
            x = tl.load(x_tile + start, mask=x_mask, other=0.0)
            # A factor multiplies a whole tile: so the tile stays in the matrix unit's layout.
            f0 = tl.broadcast_to(_factor(word, 0, HALF)[:, None], [BN, 16])
            f1 = tl.broadcast_to(_factor(word, 8, HALF)[:, None], [BN, 16])
            f2 = tl.broadcast_to(_factor(word, 16, HALF)[:, None], [BN, 16])
            f3 = tl.broadcast_to(_factor(word, 24, HALF)[:, None], [BN, 16])
            v0, v1, v2, v3, v4, v5, v6, v7 = _unpack_mxfp4(words, f0, f1, f2, f3, HALF, PTX)
            acc = tl.dot(eight(v0, v1, v2, v3, v4, v5, v6, v7, BN), tl.trans(x), acc)
    return acc


# --- fp8 ------------------------------------------------------------------------------------------


@triton.jit
def round_rows_kernel(
    x, codes, scales, K: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Round BG groups of a row. Grid: (rows, groups / BG)."""
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    k = tl.arange(0, BK)
    at = g[:, None] * GROUP + k[None, :]
    inside = (k < GROUP)[None, :] & (at < K)
    values = tl.load(x + row * K + at, mask=inside, other=0.0).to(tl.float32)
    rounded, factor = to_e4m3(values)
    tl.store(codes + row * K + at, rounded, mask=inside)
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    tl.store(scales + row * groups + g, factor, mask=g < groups)


def round_rows(x: torch.Tensor, groups: int) -> Fp8Rows:
    """Return rows [T, K] in fp8 with `groups` scales each; a launch."""
    tokens, columns = x.shape
    x = x.contiguous()
    rows = empty_rows(x, columns, groups)
    group = columns if groups == 1 else TURN
    at_once = 1 if groups == 1 else 8
    pdl = dependent_rows(x)
    round_rows_kernel[(tokens, triton.cdiv(groups, at_once))](
        x, *rows, K=columns, GROUP=group, BK=triton.next_power_of_2(group), BG=at_once,
        WAITS=bool(pdl), num_warps=_warps(group), **pdl,
    )  # fmt: skip
    return rows


def _warps(group: int) -> int:
    """Return the warps that round a group; 16 values a thread hide the loads of a lone row."""
    return 32 if group > 8192 else 16 if group > 4096 else 8 if group > 2048 else 4


def empty_rows(like: torch.Tensor, columns: int, groups: int) -> Fp8Rows:
    """Return room for the rows of `like` in fp8."""
    codes = like.new_empty(len(like), columns, dtype=torch.float8_e4m3fn)
    return Fp8Rows(codes, like.new_empty(len(like), groups, dtype=torch.float32))


@triton.jit
def store_sums(
    acc, out, bias, parts, tickets, n, there, row, live, N,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums over a part of K, acc [BN, BT], and of all parts those that come last.
    Grid: (tiles of N, tiles of T, SPLIT).

    Of the programs of a tile, the last to end adds the parts in the order of K, so that no bit
    depends on which it is.
    """
    is_last = True
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    at = parts + tile * (SPLIT * BN * BT)
    at += tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
    if SPLIT > 1:
        tl.store(at + tl.program_id(2) * (BN * BT), acc)
        tl.debug_barrier()
        is_last = tl.atomic_add(tickets + tile, 1) == SPLIT - 1
    if is_last:
        if SPLIT > 1:
            acc = tl.zeros([BN, BT], tl.float32)
            for part in range(SPLIT):
                acc += tl.load(at + part * (BN * BT), cache_modifier=".cg")
            tl.store(tickets + tile, 0)
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
        target = out + row[:, None] * N + n[None, :]
        value = tl.trans(acc).to(out.dtype.element_ty)
        tl.store(target, value, mask=live[:, None] & there[None, :])


@triton.jit
def fp8_linear_kernel(
    x, x_scales, w, scales, bias, out, parts, tickets, T, N, K, span,
    GROUPS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of the product, over `span` columns. Grid: as `store_sums`."""
    if WAITS:
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    there, live = n < N, t < T
    row = tl.where(live, t, 0).to(tl.int64)
    first = tl.program_id(2) * span
    acc = product(
        x + row * K, x_scales + row * GROUPS, live, w, scales, n, there, first,
        tl.minimum(first + span, K), N, K, 2, GROUPS, BT, BN, BK, EVEN, False, STAGES,
    )  # fmt: skip
    store_sums(acc, out, bias, parts, tickets, n, there, row, live, N, SPLIT, HAS_BIAS, BT, BN)


def fp8_tile(tokens: int) -> ProductTile:
    """Return the tile of a product in fp8: a function of only the step's padded number of rows, so
    that a row's bits depend on no other row of a step of that size."""
    if tokens <= 16:
        return ProductTile(16, 64, 128, 8, 4)
    if tokens <= 32:
        return ProductTile(32, 64, 128, 6, 4)
    return ProductTile(64, 64, 128, 5, 4) if tokens <= 64 else ProductTile(128, 128, 128, 4, 8)


def split_of(rows: int, columns: int, tile: ProductTile) -> int:
    """Return in how many parts K is cut: so many that each multiprocessor has a program or nearly,
    and none of less than four turns."""
    tiles, turns = -(-rows // tile.rows), -(-columns // tile.columns)
    return max(1, min(SPLIT_MAX, MULTIPROCESSORS // tiles, turns // 4))


def fp8_linear(
    rows: Fp8Rows, weight: Fp8, bias: torch.Tensor | None, tickets: torch.Tensor,
    out_dtype: torch.dtype, tile: ProductTile, split: int,
) -> torch.Tensor:  # fmt: skip
    """Return rows @ weight.T + bias, [T, N] in `out_dtype`.

    `tickets`: int32, as many as there are tiles, zero before and after; no other launch that may
    run at the same time has them. `split`: parts of K, see `split_of`.
    """
    x, x_scales = rows
    codes, scales = weight
    (tokens, columns), count = x.shape, len(codes)
    out = x.new_empty(tokens, count, dtype=out_dtype)
    grid = (triton.cdiv(count, tile.rows), triton.cdiv(tokens, tile.pairs), split)
    parts = out
    if split > 1:
        parts = x_scales.new_empty(grid[0] * grid[1] * split * tile.rows * tile.pairs)
    span = triton.cdiv(triton.cdiv(columns, split), tile.columns) * tile.columns
    pdl = dependent_rows(out)
    fp8_linear_kernel[grid](
        x, x_scales, codes, scales, out if bias is None else bias, out, parts, tickets, tokens,
        count, columns, span, GROUPS=len(scales), SPLIT=split, HAS_BIAS=bias is not None,
        BT=tile.pairs, BN=tile.rows, BK=tile.columns, EVEN=columns % tile.columns == 0,
        STAGES=tile.stages, WAITS=bool(pdl), num_warps=tile.warps, **pdl,
    )  # fmt: skip
    return out
