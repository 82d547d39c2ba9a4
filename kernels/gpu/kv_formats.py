"""Packs and unpacks KV blocks on a GPU, byte for byte as `kernels/reference_kv.py` says.

A unit is one head of one layer of one block, K and V: 2 x 16 x D values in registers. Units are
dealt to a grid of at most `PROGRAMS_MAX` programs. Sums are never fused with products, and
quotients are rounded once: C and torch give the same bytes. Blocks are in slots,
[B, L, 2, K, 16, D].
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels import reference_kv
from kernels.reference_kv import PackedName

PROGRAMS_MAX = 2048
"""Many small programs: on an H200 2,048 of one warp pack 219 GB/s of bf16 as int8c (16 of four: 26)
and 261 as int4c (20). A step beside packing without a pause takes 1.11 times as long; beside 16
programs, which pack a tenth as much, 1.20. As many of four unpack 412 and 317 (16: 111 and 83)."""
WARPS = {"_pack_blocks": 1, "_unpack_blocks": 4}
"""One warp would unpack int4c at 422 GB/s, and spill."""
NUMBERS: dict[PackedName, int] = {"int8c": 0, "int4c": 1, "int8t": 2}
PACKED, NOT_FINITE, TOO_LARGE = 0, 1, 2
"""Outcomes of a block."""


@triton.jit
def rounded(x):
    """Round to the nearest integer, halves to even; |x| < 2^22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def over(a, b):
    """Return a / b, rounded once."""
    return tl.div_rn(a, tl.zeros_like(a) + b)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _read(kv_ptr, offsets, inside, IS_BF16: tl.constexpr):
    """Load values as fp32; kv_ptr points to int16 where they are bf16."""
    if IS_BF16:
        x = _float(tl.load(kv_ptr + offsets, mask=inside, other=0).to(tl.int32) << 16)
    else:
        x = tl.load(kv_ptr + offsets, mask=inside, other=0.0)
    return x


@triton.jit
def _write(kv_ptr, offsets, x, inside, IS_BF16: tl.constexpr):
    if IS_BF16:
        bits = _bits(x)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(kv_ptr + offsets, bits.to(tl.int16), mask=inside)
    else:
        tl.store(kv_ptr + offsets, x, mask=inside)


@triton.jit
def _hadamard(x, norm, D: tl.constexpr, STEPS: tl.constexpr):
    """Return x [16, D] times the Hadamard matrix and `norm`."""
    for step in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(x, (16, D // (2 << step), 2, 1 << step)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        joined = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), (16, D))
    return x * norm


@triton.jit
def scale_8(largest):
    """Return a scale's fp16 bits and its value."""
    bits = tl.maximum(_bits(over(largest, 127.0)), 113 << 23)
    bits = (bits + 0x1FFF) >> 13
    return bits - (112 << 10), _float(bits << 13)


@triton.jit
def _snap(low, high, BITS: tl.constexpr):
    """Return minimum and span, multiples of a power of two: `_snapped` of the reference."""
    largest = tl.maximum(tl.abs(low), tl.abs(high))
    exponent = tl.maximum((_bits(high - low) >> 23) - BITS, (_bits(largest) >> 23) - 10)
    exponent = tl.minimum(tl.maximum(exponent, 127 - 14), 250)
    fine = _float((254 - exponent) << 23)
    first, last = rounded(low * fine), rounded(high * fine)
    far = tl.maximum(tl.abs(first), tl.abs(last))
    exponent += ((last - first >= 2 << BITS) | (far > 2047)).to(tl.int32)
    coarse, unit = _float((254 - exponent) << 23), _float(exponent << 23)
    first, last = rounded(low * coarse), rounded(high * coarse)
    minimum = first.to(tl.float32) * unit
    span = tl.maximum(last - first, 15).to(tl.float32) * unit
    return minimum, span


@triton.jit
def _exact_half(x):
    """Return the fp16 bits of multiples of 2^-14 of at most 11 bits."""
    bits = _bits(x) & 0x7FFFFFFF
    half = tl.where(bits != 0, (bits >> 13) - (112 << 10), 0)
    return half | ((_bits(x) >> 16) & 0x8000)


@triton.jit
def _wide_half(words):
    """Return the values of such bits, loaded as int16."""
    bits = words.to(tl.int32) & 0x7FFF
    return _float(
        tl.where(bits != 0, (bits << 13) + (112 << 23), 0)
        | (words.to(tl.int32) << 16 & (-0x7FFFFFFF - 1))
    )


@triton.jit
def _pack_8(
    x, out_ptr, out16_ptr, scales_at, values_at, AXIS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """Pack x [16, DP] with a scale for each channel (AXIS 0) or slot (AXIS 1). Returns whether a
    scale is beyond fp16."""
    s, d = tl.arange(0, 16), tl.arange(0, DP)
    bits, scale = scale_8(tl.max(tl.abs(x), AXIS))
    whole = rounded(x * tl.expand_dims(over(tl.zeros_like(scale) + 1.0, scale), AXIS))
    inside = (d < D)[None, :] & (s < 16)[:, None]
    if AXIS == 0:
        tl.store(out16_ptr + scales_at // 2 + d, bits.to(tl.int16), mask=d < D)
        at = values_at + d[None, :] * 16 + s[:, None]
    else:
        tl.store(out16_ptr + scales_at // 2 + s, bits.to(tl.int16))
        at = values_at + s[:, None] * D + d[None, :]
    tl.store(out_ptr + at, whole.to(tl.int8), mask=inside)
    return tl.max(bits, 0) > 0x7BFF


@triton.jit
def _unpack_8(
    in_ptr, in16_ptr, scales_at, values_at, AXIS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    s, d = tl.arange(0, 16), tl.arange(0, DP)
    inside = (d < D)[None, :] & (s < 16)[:, None]
    if AXIS == 0:
        words = tl.load(in16_ptr + scales_at // 2 + d, mask=d < D, other=0x400)
        at = values_at + d[None, :] * 16 + s[:, None]
    else:
        words = tl.load(in16_ptr + scales_at // 2 + s)
        at = values_at + s[:, None] * D + d[None, :]
    scale = _float((words.to(tl.int32) << 13) + (112 << 23))
    values = tl.load(in_ptr + at, mask=inside, other=0).to(tl.float32)
    return values * tl.expand_dims(scale, AXIS)


@triton.jit
def _pack_4(
    x, tokens, out_ptr, out16_ptr, spans_at, minima_at, values_at, AXIS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Pack x [16, D] with a range for each channel (AXIS 0) or slot (AXIS 1). Returns whether a
    range is beyond fp16."""
    s, d = tl.arange(0, 16), tl.arange(0, D)
    counted = (s < tokens)[:, None] & (d >= 0)[None, :]
    if AXIS == 0:
        low = tl.min(tl.where(counted, x, float("inf")), 0)
        high = tl.max(tl.where(counted, x, float("-inf")), 0)
    else:
        low, high = tl.min(x, 1), tl.max(x, 1)
    minimum, span = _snap(low, high, 5 if AXIS == 0 else 4)
    inverse = over(tl.zeros_like(span) + 15.0, span)
    whole = rounded((x - tl.expand_dims(minimum, AXIS)) * tl.expand_dims(inverse, AXIS))
    whole = tl.where(counted, tl.minimum(tl.maximum(whole, 0), 15), 0)
    if AXIS == 0:
        tl.store(out16_ptr + spans_at // 2 + d, _exact_half(span).to(tl.int16))
        tl.store(out16_ptr + minima_at // 2 + d, _exact_half(minimum).to(tl.int16))
        even, odd = tl.split(tl.reshape(tl.trans(whole), (D, 8, 2)))
        at = values_at + d[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        kept = s < tokens
        tl.store(out16_ptr + spans_at // 2 + s, tl.where(kept, _exact_half(span), 0).to(tl.int16))
        halves = tl.where(kept, _exact_half(minimum), 0)
        tl.store(out16_ptr + minima_at // 2 + s, halves.to(tl.int16))
        even, odd = tl.split(tl.reshape(whole, (16, D // 2, 2)))
        at = values_at + s[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    tl.store(out_ptr + at, (even | (odd << 4)).to(tl.int8))
    return tl.max(tl.maximum(tl.abs(minimum), span), 0) > 65504.0


@triton.jit
def _unpack_4(
    in_ptr, in16_ptr, spans_at, minima_at, values_at, AXIS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    s, d = tl.arange(0, 16), tl.arange(0, D)
    if AXIS == 0:
        span = _wide_half(tl.load(in16_ptr + spans_at // 2 + d))
        minimum = _wide_half(tl.load(in16_ptr + minima_at // 2 + d))
        at = values_at + d[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        span = _wide_half(tl.load(in16_ptr + spans_at // 2 + s))
        minimum = _wide_half(tl.load(in16_ptr + minima_at // 2 + s))
        at = values_at + s[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    both = tl.load(in_ptr + at).to(tl.int32) & 0xFF
    if AXIS == 0:
        whole = tl.trans(tl.reshape(tl.join(both & 15, both >> 4), (D, 16)))
    else:
        whole = tl.reshape(tl.join(both & 15, both >> 4), (16, D))
    step = _float(_bits(over(span, 15.0)) & -16)
    return whole.to(tl.float32) * tl.expand_dims(step, AXIS) + tl.expand_dims(minimum, AXIS)


@triton.jit
def _places(
    layer, head, IS_VALUE: tl.constexpr, FORMAT: tl.constexpr, K: tl.constexpr, D: tl.constexpr
):
    """Return where a unit's scales (or spans), minima and values begin in a packed block."""
    ENDS: tl.constexpr = 4 if FORMAT == 1 else 2
    BYTES: tl.constexpr = D * 8 if FORMAT == 1 else D * 16
    KEYS: tl.constexpr = K * (D * ENDS + BYTES)
    LAYER: tl.constexpr = KEYS + K * (16 * ENDS + BYTES)
    ROWS: tl.constexpr = 16 if IS_VALUE else D
    if FORMAT == 2:
        values = ((layer * 2 + IS_VALUE) * K + head) * (D + 2) * 16
        scales = values + D * 16
        minima = values
    else:
        start = layer * LAYER + IS_VALUE * KEYS
        values = start + K * ROWS * ENDS + head * BYTES
        scales = start + head * ROWS * 2
        minima = scales + K * ROWS * 2
    return scales, minima, values


@triton.jit
def _pack_unit(
    kv_ptr, out_ptr, out16_ptr, signs_ptr, index, block, layer, head, tokens, norm,
    L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Pack K or V of one head. Returns the outcome."""
    AXIS: tl.constexpr = 1 if IS_VALUE == 1 or FORMAT == 2 else 0
    s, d = tl.arange(0, 16), tl.arange(0, DP)
    inside = (s < tokens)[:, None] & (d < D)[None, :]
    at = ((block * L + layer) * 2 + IS_VALUE) * K + head
    x = _read(kv_ptr, at * 16 * D + s[:, None] * D + d[None, :], inside, IS_BF16)
    worst = tl.max(tl.max(_bits(x) & 0x7FFFFFFF, 1), 0)
    x = tl.where((_bits(x) & 0x7FFFFFFF) < 0x7F800000, x, 0.0)
    scales, minima, values = _places(layer, head, IS_VALUE, FORMAT, K, D)
    start = index * SIZE
    if FORMAT == 1:
        if IS_VALUE == 1:
            x = _hadamard(x * tl.load(signs_ptr + d)[None, :], norm, DP, STEPS)
        is_large = _pack_4(
            x, tokens, out_ptr, out16_ptr, start + scales, start + minima, start + values, AXIS, DP
        )
    else:
        is_large = _pack_8(x, out_ptr, out16_ptr, start + scales, start + values, AXIS, D, DP)
    return tl.where(worst >= 0x7F800000, 1, tl.where(is_large, 2, 0))


@triton.jit(
    do_not_specialize=["units", "tokens"], do_not_specialize_on_alignment=["ids_ptr", "failed_ptr"]
)
def _pack_blocks(
    kv_ptr, ids_ptr, out_ptr, out16_ptr, signs_ptr, failed_ptr, units, tokens, norm,
    L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    while unit < units:
        index = unit // (L * K)
        layer, head = unit // K % L, unit % K
        block = tl.load(ids_ptr + index).to(tl.int64)
        for part in tl.static_range(2):
            outcome = _pack_unit(
                kv_ptr, out_ptr, out16_ptr, signs_ptr, index, block, layer, head, tokens, norm,
                L, K, D, DP, STEPS, FORMAT, IS_BF16, SIZE, part,
            )  # fmt: skip
            tl.atomic_max(failed_ptr + index, outcome)
        unit += tl.num_programs(0)


@triton.jit
def _unpack_unit(
    in_ptr, in16_ptr, kv_ptr, signs_ptr, index, block, layer, head, tokens, norm,
    L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Fill K or V of one head."""
    AXIS: tl.constexpr = 1 if IS_VALUE == 1 or FORMAT == 2 else 0
    s, d = tl.arange(0, 16), tl.arange(0, DP)
    inside = (s < 16)[:, None] & (d < D)[None, :]
    scales, minima, values = _places(layer, head, IS_VALUE, FORMAT, K, D)
    start = index * SIZE
    if FORMAT == 1:
        x = _unpack_4(in_ptr, in16_ptr, start + scales, start + minima, start + values, AXIS, DP)
        if IS_VALUE == 1:
            x = _hadamard(x, norm, DP, STEPS) * tl.load(signs_ptr + d)[None, :]
    else:
        x = _unpack_8(in_ptr, in16_ptr, start + scales, start + values, AXIS, D, DP)
    x = tl.where((s < tokens)[:, None], x, 0.0)
    at = ((block * L + layer) * 2 + IS_VALUE) * K + head
    _write(kv_ptr, at * 16 * D + s[:, None] * D + d[None, :], x, inside, IS_BF16)


@triton.jit(do_not_specialize=["units", "tokens"], do_not_specialize_on_alignment=["ids_ptr"])
def _unpack_blocks(
    in_ptr, in16_ptr, kv_ptr, ids_ptr, signs_ptr, units, tokens, norm,
    L: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr,
    FORMAT: tl.constexpr, IS_BF16: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    while unit < units:
        index = unit // (L * K)
        layer, head = unit // K % L, unit % K
        block = tl.load(ids_ptr + index).to(tl.int64)
        for part in tl.static_range(2):
            _unpack_unit(
                in_ptr, in16_ptr, kv_ptr, signs_ptr, index, block, layer, head, tokens, norm,
                L, K, D, DP, STEPS, FORMAT, IS_BF16, SIZE, part,
            )  # fmt: skip
        unit += tl.num_programs(0)


KERNELS = (_pack_blocks, _unpack_blocks)


def pack_blocks(
    kv: torch.Tensor, ids: torch.Tensor, name: PackedName, out: torch.Tensor,
    tokens: int = reference_kv.SLOTS,
) -> torch.Tensor:  # fmt: skip
    """Pack the first `tokens` slots of blocks `ids` int32 [n] of kv [B, L, 2, K, 16, D] to `out`
    uint8 [n, bytes].

    Returns outcomes int32 [n] on the device: `PACKED`, or why a block's bytes mean nothing.
    """
    failed = torch.zeros(len(ids), dtype=torch.int32, device=kv.device)
    words, signs, units, constants = _launch(kv, len(ids), name, out)
    grid = (min(PROGRAMS_MAX, units),)
    norm = reference_kv.hadamard_norm(kv.shape[-1])
    _pack_blocks[grid](
        words, ids, out.view(torch.int8), out.view(torch.int16), signs, failed, units, tokens,
        norm, **constants, num_warps=WARPS["_pack_blocks"], enable_fp_fusion=False,
    )  # fmt: skip
    return failed


def unpack_blocks(
    packed: torch.Tensor, name: PackedName, kv: torch.Tensor, ids: torch.Tensor,
    tokens: int = reference_kv.SLOTS,
) -> None:  # fmt: skip
    """Fill blocks `ids` int32 [n] of kv from `packed` uint8 [n, bytes]; slots from `tokens` on
    become zero."""
    words, signs, units, constants = _launch(kv, len(ids), name, packed)
    grid = (min(PROGRAMS_MAX, units),)
    norm = reference_kv.hadamard_norm(kv.shape[-1])
    _unpack_blocks[grid](
        packed.view(torch.int8), packed.view(torch.int16), words, ids, signs, units, tokens, norm,
        **constants, num_warps=WARPS["_unpack_blocks"], enable_fp_fusion=False,
    )  # fmt: skip


def constants_of(
    name: PackedName, shape: tuple[int, int, int], *, is_bf16: bool
) -> dict[str, int | bool]:
    """Return what the kernels are compiled for: a pool of `shape` (L, K, D) and a format."""
    layers, kv_heads, head_dim = shape
    padded = triton.next_power_of_2(head_dim)
    assert name != "int4c" or padded == head_dim, "int4c takes heads that are a power of two"
    size = reference_kv.packed_block_bytes(name, layers, kv_heads, head_dim)
    return {
        "L": layers, "K": kv_heads, "D": head_dim, "DP": padded,
        "STEPS": padded.bit_length() - 1, "FORMAT": NUMBERS[name], "IS_BF16": is_bf16, "SIZE": size,
    }  # fmt: skip


@functools.cache
def _signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """Return the rotation's signs on a device: made once, since the copy waits for its stream."""
    return reference_kv.signs(head_dim).to(device)


def _launch(
    kv: torch.Tensor, count: int, name: PackedName, packed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, dict[str, int | bool]]:
    """Return the pool as the kernels read it, the rotation's signs, units and constants."""
    _, layers, _, kv_heads, _, head_dim = kv.shape
    is_bf16 = kv.dtype == torch.bfloat16
    constants = constants_of(name, (layers, kv_heads, head_dim), is_bf16=is_bf16)
    size = constants["SIZE"]
    assert packed.shape == (count, size), f"packed {tuple(packed.shape)}; expected {count}, {size}"
    words = kv.view(torch.int16) if is_bf16 else kv
    signs = _signs(head_dim, kv.device)
    return words, signs, count * layers * kv_heads, constants
