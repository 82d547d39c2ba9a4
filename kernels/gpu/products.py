"""Products whose left operand are the weights: out.T = W @ x.T, for few rows and packed weights.

Weights fill the 64 rows of Hopper's matrix unit at any number of tokens, and packed weights are
unpacked in registers, from which that unit reads its left operand. `kernels.gpu.experts` calls
`product`. `kernels.reference_mxfp4` specifies the packed layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE, MXFP4 = tl.constexpr(0), tl.constexpr(1)
"""Kinds of weights: tensors in the dtype of the rows, and packed four-bit floats."""


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

    The bits of a four-bit float stand one exponent field lower than its value: 126 mends that, so
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
    x_rows, live, w, scales, n, there, N, K,
    KIND: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return W[n] @ x.T in fp32, [BN, BT].

    x_rows [BT]: pointers to the rows' first columns; `live` [BT] masks rows, `there` [BN] those of
    W. `w`, `scales`: where the matrix begins; N x K of it, or panels as `Mxfp4` says. EVEN: K is a
    multiple of BK, which is 128 for MXFP4. A masked row is loaded as zero and never multiplied by
    zero, so that a NaN stays in its row.
    """
    HALF: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros([BN, BT], tl.float32)
    if KIND == 0:
        k = tl.arange(0, BK)
        w_tile = w + n.to(tl.int64)[:, None] * K + k[None, :]
        x_tile = x_rows[:, None] + k[None, :]
        for start in tl.range(0, K, BK, num_stages=STAGES):
            w_mask, x_mask = there[:, None], live[:, None]
            if not EVEN:
                inside = (start + k < K)[None, :]
                w_mask, x_mask = w_mask & inside, x_mask & inside
            weights = tl.load(w_tile + start, mask=w_mask, other=0.0)
            x = tl.load(x_tile + start, mask=x_mask, other=0.0)
            acc = tl.dot(weights, tl.trans(x), acc)
    else:
        j = tl.arange(0, 32)
        w_tile = w + n[:, None] * 32 + j[None, :]
        x_tile = x_rows[:, None] + j[None, :]
        for start in tl.range(0, K, 128, num_stages=STAGES):
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
