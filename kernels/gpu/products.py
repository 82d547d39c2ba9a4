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
def _unpack_mxfp4(b, low_factor, high_factor, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the low and the high four-bit floats of bytes, times their factors.

    Sign and magnitude move into bf16's sign and bits 8 to 6: two integer operations a value, and
    half a multiplication, which must keep subnormal numbers.
    """
    if PTX:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, sign, part;
            prmt.b32 first, $4, 0, 0x1404;
            prmt.b32 second, $4, 0, 0x3424;
            shr.u32 part, first, 6;
            and.b32 part, part, 0x01C001C0;
            and.b32 sign, first, 0x80008000;
            or.b32 sign, sign, part;
            mul.rn.bf16x2 $2, sign, $7;
            shr.u32 part, first, 2;
            and.b32 part, part, 0x01C001C0;
            shl.b32 sign, first, 4;
            and.b32 sign, sign, 0x80008000;
            or.b32 sign, sign, part;
            mul.rn.bf16x2 $0, sign, $5;
            shr.u32 part, second, 6;
            and.b32 part, part, 0x01C001C0;
            and.b32 sign, second, 0x80008000;
            or.b32 sign, sign, part;
            mul.rn.bf16x2 $3, sign, $8;
            shr.u32 part, second, 2;
            and.b32 part, part, 0x01C001C0;
            shl.b32 sign, second, 4;
            and.b32 sign, sign, 0x80008000;
            or.b32 sign, sign, part;
            mul.rn.bf16x2 $1, sign, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r", [b, low_factor, high_factor],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = b.to(tl.uint16)
        low = _as_float(((wide & 7) << 6) | ((wide & 8) << 12), KIND) * low_factor
        high = _as_float(((wide & 0x70) << 2) | ((wide & 0x80) << 8), KIND) * high_factor
    return low, high


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
        j = tl.arange(0, 32)
        w_tile = w + n[:, None] * 32 + j[None, :]
        x_tile = x_rows[:, None] + j[None, :]
        for start in tl.range(first, last, 128, num_stages=STAGES):
            turn = start // 128
            word = tl.load(scales + turn * N + n, mask=there, other=0)
            for half in tl.static_range(2):
                w_mask, x_mask = there[:, None], live[:, None]
                if not EVEN:
                    inside = (start + half * 64 + j < K)[None, :]
                    w_mask, x_mask = w_mask & inside, x_mask & inside
                panel = w_tile + (turn * 2 + half).to(tl.int64) * N * 32
                packed = tl.load(panel, mask=w_mask, other=0)
                x_low = tl.load(x_tile + start + half * 64, mask=x_mask, other=0.0)
                x_high = tl.load(x_tile + start + half * 64 + 32, mask=x_mask, other=0.0)
                # A factor multiplies a whole tile: so the tile stays in the matrix unit's layout.
                low_factor = _factor(word, half * 16, HALF)[:, None]
                high_factor = _factor(word, half * 16 + 8, HALF)[:, None]
                low, high = _unpack_mxfp4(
                    packed, tl.broadcast_to(low_factor, [BN, 32]),
                    tl.broadcast_to(high_factor, [BN, 32]), HALF, PTX,
                )  # fmt: skip
                acc = tl.dot(low, tl.trans(x_low), acc)
                acc = tl.dot(high, tl.trans(x_high), acc)
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
def fp8_linear_kernel(
    x, x_scales, w, scales, bias, out, parts, tickets, T, N, K, span,
    GROUPS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """A tile of the product, over `span` columns. Grid: (tiles of N, tiles of T, SPLIT).

    Of the programs of a tile, the last to end adds the parts in the order of K, so that no bit
    depends on which it is.
    """
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
