"""The reference of packed KV: `int8c`, `int4c` and `int8t` in plain torch, byte for byte.

A packed block is what `pack` writes for one block of keys and values; C and Triton write the same
bytes (`kernels/cpu/cpu_kv_formats.c`, `kernels/gpu/kv_formats.py`). Shapes: L layers, K KV heads,
S = 16 slots of a block, D head_dim. Arithmetic is fp32, rounded to nearest even after each
operation and never fused; a division is rounded once.

Layout, for each layer, without gaps:

    int8c   K scales fp16 [K][D], K values int8 [K][D][S], V scales fp16 [K][S], V values [K][S][D]
    int4c   K spans, K minima fp16 [K][D] each, K values 4 bits [K][D][S],
            V spans, V minima fp16 [K][S] each, V values 4 bits [K][S][D]
    int8t   for K, then V, for each head: values int8 [S][D], scales fp16 [S]

Values of 4 bits lie two to a byte, the low half first.

Packing what was unpacked gives the same bytes again, so a block that moves down and up loses
nothing more. For 8 bits the scale is rounded up: 127 scales, rounded to bf16, are the largest value
again. For 4 bits both ends of a range are multiples of a power of two (`_snapped`), which the pool
holds exactly. Values of 4 bits are rotated, which moves the ends by the pool's rounding: less than
half of that power but for heads of 16 channels with one value 10,000 times as large as the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch

PackedName = Literal["int8c", "int4c", "int8t"]
SLOTS = 16
SMALLEST = 2.0**-14
"""Smallest scale, and smallest unit of a range: the smallest normal number of fp16."""
FP16_MAX = 65504.0
KEY_UNITS, VALUE_UNITS = 5, 4
"""Bits of a range's span in units: fine for keys, whose ends the pool holds exactly; coarser for
values, whose ends the rotation moves a little."""
LEVELS = 15
"""Steps of a range of 4 bits."""


class UnpackableError(ValueError):
    """A block holds a value that the packed format cannot hold."""


def packed_block_bytes(name: PackedName, layers: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes of one packed block."""
    channels, slots, values = kv_heads * head_dim, kv_heads * SLOTS, kv_heads * head_dim * SLOTS
    if name == "int8t":
        return layers * 2 * (values + 2 * slots)
    if name == "int8c":
        return layers * (2 * values + 2 * channels + 2 * slots)
    return layers * (values + 4 * channels + 4 * slots)


def signs(head_dim: int) -> torch.Tensor:
    """Return the signs [D] fp32 of the rotation of `int4c`: bits of a digest of the name, a set bit
    for -1."""
    digest = hashlib.shake_256(b"trunkline int4c").digest(-(-head_dim // 8))
    bits = [digest[channel // 8] >> channel % 8 & 1 for channel in range(head_dim)]
    return 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32)


def hadamard_norm(head_dim: int) -> float:
    """Return 1 / sqrt(D), rounded to fp32."""
    return float(torch.tensor(1 / math.sqrt(head_dim), dtype=torch.float32))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] fp32 times the Hadamard matrix and 1 / sqrt(D), D a power of two.

    Sums and differences of pairs 1, 2, 4, ... D / 2 channels apart, in this order.
    """
    head_dim, half = x.shape[-1], 1
    while half < head_dim:
        pairs = cut_dimension(x, -1, (-1, 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return x * hadamard_norm(head_dim)


def pack(kv: torch.Tensor, name: PackedName, tokens: int = SLOTS) -> torch.Tensor:
    """Return the packed bytes [..., n] of blocks kv [..., L, 2, K, S, D] in fp32 or bf16.

    Only the first `tokens` slots count; the others' bytes are those of zeros. Raises
    UnpackableError for what is no number or is too large.
    """
    kept = torch.arange(SLOTS, device=kv.device)[:, None] < tokens
    wide = torch.where(kept, kv.float(), 0.0)
    if not wide.isfinite().all():
        raise UnpackableError("the block holds a value that is no number")
    keys, values = wide.unbind(-4)
    if name == "int8t":
        parts = [_bytes_8t(x) for x in (keys, values)]
    elif name == "int8c":
        parts = [*_bytes_8(keys.mT), *_bytes_8(values)]
    else:
        rotated = hadamard(values * signs(values.shape[-1]).to(kv.device))
        parts = [
            *_bytes_4(keys.mT, keys[..., :tokens, :].mT, KEY_UNITS),
            *_bytes_4(rotated, rotated, VALUE_UNITS, tokens),
        ]
    return torch.cat(parts, -1).flatten(-2)


def unpack(
    packed: torch.Tensor, name: PackedName, shape: tuple[int, int, int], dtype: torch.dtype,
    tokens: int = SLOTS,
) -> torch.Tensor:  # fmt: skip
    """Return blocks [..., L, 2, K, S, D] in `dtype` from packed bytes [..., n] of `shape` (L, K,
    D). Slots from `tokens` on are zero."""
    layers, kv_heads, head_dim = shape
    lead = packed.shape[:-1]
    rows = packed.reshape(*lead, layers, -1)
    values, channels, slots = kv_heads * SLOTS * head_dim, kv_heads * head_dim, kv_heads * SLOTS
    by_channel, by_slot = (kv_heads, head_dim), (kv_heads, SLOTS)
    if name == "int8t":
        heads = rows.reshape(*lead, layers, 2, kv_heads, SLOTS * (head_dim + 2))
        whole = heads[..., : SLOTS * head_dim].contiguous().view(torch.int8)
        scales = heads[..., SLOTS * head_dim :].contiguous().view(torch.float16)
        kv = cut_dimension(whole, -1, (SLOTS, head_dim)).float() * scales.float()[..., None]
    elif name == "int8c":
        sizes = [2 * channels, values, 2 * slots, values]
        k_scale, k, v_scale, v = _cut(rows, sizes)
        keys = _wide_8(k, (*by_channel, SLOTS)) * _halves(k_scale, by_channel)[..., None]
        kv = torch.stack(
            [keys.mT, _wide_8(v, (*by_slot, head_dim)) * _halves(v_scale, by_slot)[..., None]], -4
        )
    else:
        half = values // 2
        sizes = [2 * channels, 2 * channels, half, 2 * slots, 2 * slots, half]
        k_span, k_min, k, v_span, v_min, v = _cut(rows, sizes)
        keys = _wide_4(k, (*by_channel, SLOTS), k_span, k_min)
        rotated = _wide_4(v, (*by_slot, head_dim), v_span, v_min)
        kv = torch.stack([keys.mT, hadamard(rotated) * signs(head_dim).to(packed.device)], -4)
    kept = torch.arange(SLOTS, device=packed.device)[:, None] < tokens
    return torch.where(kept, kv, 0.0).to(dtype)


def to_panels(kv: torch.Tensor) -> torch.Tensor:
    """Return blocks [..., 2, K, S, D] in the order of the C kernels' panels, flat over K, S, D: see
    `kernels/cpu/cpu_attention.c`."""
    keys, values = kv.unbind(-4)
    if kv.dtype == torch.float32:
        return torch.stack([keys.mT.flatten(-3), values.flatten(-3)], -2)
    pairs = cut_dimension(values, -2, (-1, 2)).movedim(-2, -1)
    channels = cut_dimension(keys.mT, -2, (-1, 2)).movedim(-2, -1)
    return torch.stack([channels.flatten(-4), pairs.flatten(-4)], -2)


def from_panels(panels: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Return blocks [..., 2, K, S, D] from panels [..., 2, K * S * D]; undoes `to_panels`."""
    keys, values = panels.unbind(-2)
    if panels.dtype == torch.float32:
        return torch.stack(
            [cut_dimension(keys, -1, (kv_heads, head_dim, SLOTS)).mT,
             cut_dimension(values, -1, (kv_heads, SLOTS, head_dim))], -4
        )  # fmt: skip
    channels = cut_dimension(keys, -1, (kv_heads, head_dim // 2, SLOTS, 2)).movedim(-1, -2)
    pairs = cut_dimension(values, -1, (kv_heads, SLOTS // 2, head_dim, 2)).movedim(-1, -2)
    return torch.stack([channels.flatten(-3, -2).mT, pairs.flatten(-3, -2)], -4)


def cut_dimension(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return x with one dimension cut into several."""
    at = dim % x.ndim
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def _cut(x: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return parts of these sizes along the last dimension."""
    ends = list(accumulate(sizes))
    return [x[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a / b, rounded once: with a plain number torch may multiply by its inverse."""
    return a / b


# -- 8 bits -------------------------------------------------------------------------------------


def scale_8(largest: torch.Tensor) -> torch.Tensor:
    """Return the fp16 scale of each largest absolute value [...] fp32: 1/127 of it, rounded up, and
    at least `SMALLEST`. Raises UnpackableError if one is beyond fp16."""
    exact = torch.clamp(_ratio(largest, torch.full_like(largest, 127)), min=SMALLEST)
    bits = ((exact.view(torch.int32) + 0x1FFF) >> 13) - (112 << 10)
    if (bits > 0x7BFF).any():
        raise UnpackableError(f"a value of {float(largest.max()):.3g} is too large for 8 bits")
    return bits.to(torch.int16).view(torch.float16)


def quantise_8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales [...] and values int8 [..., n] of rows x [..., n]."""
    scale = scale_8(x.abs().amax(-1))
    return scale, torch.round(x * scale.float().reciprocal()[..., None]).to(torch.int8)


def _bytes_8(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the bytes of the scales and of the values of x [..., L, K, rows, n], flat from K."""
    scale, values = quantise_8(x)
    return [scale.flatten(-2).view(torch.uint8), values.flatten(-3).view(torch.uint8)]


def _bytes_8t(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of x [..., L, K, S, D], each head's values before its scales."""
    scale, values = quantise_8(x)
    heads = torch.cat([values.flatten(-2).view(torch.uint8), scale.view(torch.uint8)], -1)
    return heads.flatten(-2)


def _wide_8(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return cut_dimension(x.contiguous().view(torch.int8), -1, shape).float()


def _halves(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return cut_dimension(x.contiguous().view(torch.float16), -1, shape).float()


# -- 4 bits -------------------------------------------------------------------------------------


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """Return floor(log2 x) of x >= 0 fp32, at least -127."""
    return (x.view(torch.int32) >> 23) - 127


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 to the exponents, which are in the range of fp32's normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def _snapped(
    least: torch.Tensor, most: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of ranges as multiples of a power of two: minimum and span, both fp32.

    The unit makes the span 2^bits to 2^(bits + 1) - 1 units long, or as short as fp16 allows: each
    end has fewer than 2,048 units, and a unit is at least `SMALLEST`. The span is at least 15
    units, so that no step is shorter than a unit. Packing again finds the same ends as long as they
    have moved by less than half a unit: a finer unit divides them too, and the unit becomes coarser
    only if a multiple of the coarser one was stored.
    """
    largest = torch.maximum(least.abs(), most.abs())
    exponent = torch.maximum(_exponent(most - least) - bits, _exponent(largest) - 10).clamp(min=-14)
    low, high = (torch.round(end * _power(-exponent)) for end in (least, most))
    is_too_fine = (high - low >= 2 << bits) | (torch.maximum(low.abs(), high.abs()) > 2047)
    exponent = exponent + is_too_fine
    unit = _power(exponent)
    low, high = (torch.round(end * _power(-exponent)) for end in (least, most))
    minimum, span = low * unit + 0.0, torch.clamp(high - low, min=LEVELS) * unit
    if not (torch.maximum(minimum.abs(), span) <= FP16_MAX).all():
        raise UnpackableError(f"a value of {float(largest.max()):.3g} is too large for 4 bits")
    return minimum, span


def _bytes_4(
    x: torch.Tensor, counted: torch.Tensor, bits: int, rows: int | None = None
) -> list[torch.Tensor]:
    """Return the bytes of spans, minima and values of x [..., L, K, rows, n], flat from K.

    The range of a row is that of `counted`, the part of x that counts; values beyond it are 0, and
    so are all bytes of rows from `rows` on.
    """
    minimum, span = _snapped(counted.amin(-1), counted.amax(-1), bits)
    values = torch.round(
        (x - minimum[..., None]) * _ratio(torch.full_like(span, LEVELS), span)[..., None]
    ).clamp(0, LEVELS)
    values = values.to(torch.uint8)
    values[..., counted.shape[-1] :] = 0
    if rows is not None:
        minimum[..., rows:], span[..., rows:], values[..., rows:, :] = 0.0, 0.0, 0
    packed = values[..., ::2] | values[..., 1::2] << 4
    ends = [end.half().flatten(-2).view(torch.uint8) for end in (span, minimum)]
    return [*ends, packed.flatten(-3)]


def _wide_4(
    x: torch.Tensor, shape: tuple[int, ...], span: torch.Tensor, minimum: torch.Tensor
) -> torch.Tensor:
    """Return values [..., *shape] fp32: minimum + value * span / 15. The step loses its last four
    bits, so that the product is exact and a fused sum gives the same bits."""
    pairs = cut_dimension(x, -1, (*shape[:-1], shape[-1] // 2))
    values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).float()
    spans = _halves(span, shape[:-1])
    step = _ratio(spans, torch.full_like(spans, LEVELS)).view(torch.int32) & -16
    step = step.view(torch.float32)
    return _halves(minimum, shape[:-1])[..., None] + values * step[..., None]
