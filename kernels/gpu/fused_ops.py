"""Fused kernels between the matrix products: norm, rotary embedding with KV write, activation,
block copy.

Each reads its input once and writes its output once; all are bound by memory. For few rows they are
dependent launches where the GPU supports these. `kernels.reference` specifies them;
`engine.models.gpu_layers`, `engine.attention.gpu_backend` and `engine.kv.storage` launch them.
Shapes: T rows, C channels, H query heads, K KV heads, D head_dim, S slots of a block, L layers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import dependent_options, gdc_wait
from kernels.gpu.kv_formats import over, rounded, scale_8

DEPENDENT_ROWS_MAX = 64
"""Most rows of a dependent launch.

With few rows a launch is mostly latency, which a dependent launch hides (1 % of a step at batch 1
to 32). With many, the waiting kernel takes multiprocessors that the product before it still needs
(1 % lost at 256).
"""


def dependent_rows(x: torch.Tensor) -> dict[str, Any]:
    """Return the options of a dependent launch for rows x, where they are few."""
    return dependent_options(x) if len(x) <= DEPENDENT_ROWS_MAX else {}


@triton.jit
def to_e4m3(groups):
    """Return groups [G, width] fp32 in e4m3, and the scale of each: its largest value becomes 448,
    the largest of e4m3. Rounded to its values first: the interpreter's conversion is exact only for
    these."""
    scales = over(tl.maximum(tl.max(tl.abs(groups), 1), 1e-12), 448.0)
    x = over(groups, scales[:, None])
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = tl.where(x - x == 0, bits.to(tl.float32, bitcast=True), x)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, whose neighbours are 2^-9 apart
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv), scales


@triton.jit
def store_normed(
    x, row, c, inside, weight_ptr, out_ptr, scales_ptr, eps, KIND: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store rms_norm(x) * weight of a row x [CP] fp32 whose values are of type KIND; with GROUPS in
    e4m3, and the scales."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the weight, as in the reference, so that the bits are equal.
    normed = ((x * scale).to(KIND).to(tl.float32) * weight).to(KIND)
    if GROUPS:
        groups: tl.constexpr = GROUPS if GROUPS == 1 else CP // 128
        table = tl.reshape(normed.to(tl.float32), [groups, CP // groups])
        codes, scales = to_e4m3(table)
        tl.store(out_ptr + row * C + c, tl.reshape(codes, [CP]), mask=inside)
        g = tl.arange(0, groups)
        tl.store(scales_ptr + row * GROUPS + g, scales, mask=g < GROUPS)
    else:
        tl.store(out_ptr + row * C + c, normed, mask=inside)


@triton.jit
def _residual_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, eps, C: tl.constexpr, CP: tl.constexpr,
    GROUPS: tl.constexpr, ADD: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CP)
    inside = c < C
    x = tl.load(x_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * C + c, rounded, mask=inside)
        x = rounded.to(tl.float32)
    store_normed(
        x, row, c, inside, weight_ptr, out_ptr, scales_ptr, eps, x_ptr.dtype.element_ty, C, CP,
        GROUPS,
    )  # fmt: skip


def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor,
    eps: float, scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """residual += x; out = rms_norm(residual) * weight. All [T, C]; residual and out written.

    With `residual` None: out = rms_norm(x) * weight. With `scales` [T, G] fp32, written too, out is
    e4m3 as `kernels.reference_weights.round_rows` rounds what it would be in x's dtype. One program
    a row, sums in fp32.
    """
    rows, channels = x.shape
    padded = triton.next_power_of_2(channels)
    pdl = dependent_rows(x)
    _residual_rms_norm[(rows,)](
        x, x if residual is None else residual, weight, out, x if scales is None else scales, eps,
        C=channels, CP=padded, GROUPS=0 if scales is None else scales.shape[1],
        ADD=residual is not None, WAITS=bool(pdl), num_warps=min(8, max(1, padded // 512)), **pdl,
    )  # fmt: skip


@triton.jit
def _norm_heads(
    qkv_ptr, q_weight, k_weight, eps, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, STEP: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * STEP + tl.arange(0, STEP)
    d = tl.arange(0, DP)
    real = d < D
    live = (head < H + K)[:, None] & real[None, :]
    place = qkv_ptr + row * (H + 2 * K) * D + head[:, None] * D + d[None, :]
    x = tl.load(place, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    queries = tl.load(q_weight + d, mask=real, other=0.0).to(tl.float32)[None, :]
    keys = tl.load(k_weight + d, mask=real, other=0.0).to(tl.float32)[None, :]
    kind = qkv_ptr.dtype.element_ty
    normed = (x * scale).to(kind).to(tl.float32)
    tl.store(place, (normed * tl.where((head < H)[:, None], queries, keys)).to(kind), mask=live)


def norm_heads(
    qkv: torch.Tensor, heads: int, queries: torch.Tensor, keys: torch.Tensor, eps: float
) -> None:
    """Norm each of the H query heads and K key heads of qkv [T, H + 2K, D] over its channels, in
    place, and multiply by the weights `queries` or `keys` [D]; sums in fp32. qkv written, but its
    values."""
    rows, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - heads) // 2
    step = min(16, triton.next_power_of_2(heads + kv_heads))
    pdl = dependent_rows(qkv)
    _norm_heads[(rows, triton.cdiv(heads + kv_heads, step))](
        qkv, queries, keys, eps, H=heads, K=kv_heads, D=head_dim,
        DP=triton.next_power_of_2(head_dim), STEP=step, WAITS=bool(pdl), num_warps=4, **pdl,
    )  # fmt: skip


@triton.jit
def _gated(x_ptr, c, C: tl.constexpr, GELU: tl.constexpr):
    """Return activation(x[c]) * x[C + c] in x's dtype, 0 behind the row's end."""
    gate = tl.load(x_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + C + c, mask=c < C, other=0.0).to(tl.float32)
    at = gate
    if GELU:  # by tanh, which is a sigmoid: gate * sigmoid(2 * sqrt(2 / pi) * (gate + ...))
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-at)) * up).to(x_ptr.dtype.element_ty)


@triton.jit
def _gated_mul(
    x_ptr, out_ptr, C: tl.constexpr, STEP: tl.constexpr, GELU: tl.constexpr, WAITS: tl.constexpr
):
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * STEP + tl.arange(0, STEP)
    out = _gated(x_ptr + row * 2 * C, c, C, GELU)
    tl.store(out_ptr + row * C + c, out, mask=c < C)


@triton.jit
def _gated_mul_e4m3(
    x_ptr, out_ptr, scales_ptr, C: tl.constexpr, CP: tl.constexpr, GROUPS: tl.constexpr,
    BG: tl.constexpr, GELU: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """BG groups of a row a program. Grid: (rows, groups / BG)."""
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    width: tl.constexpr = CP if GROUPS == 1 else 128
    c = g[:, None] * width + tl.arange(0, width)[None, :]
    codes, scales = to_e4m3(_gated(x_ptr + row * 2 * C, c, C, GELU).to(tl.float32))
    tl.store(out_ptr + row * C + c, codes, mask=c < C)
    tl.store(scales_ptr + row * GROUPS + g, scales, mask=g < GROUPS)


def gated_mul(
    x: torch.Tensor, out: torch.Tensor, *, gelu: bool = False, scales: torch.Tensor | None = None
) -> None:
    """out [T, C] = silu(x[:, :C]) * x[:, C:], x [T, 2C], or with GELU by tanh in place of SiLU. out
    written; arithmetic in fp32. `scales`: as in `residual_rms_norm`."""
    rows, channels = out.shape
    step = min(1024, triton.next_power_of_2(channels))
    pdl = dependent_rows(x)
    if scales is not None:
        groups, padded = scales.shape[1], triton.next_power_of_2(channels)
        at_once = min(8, groups)
        _gated_mul_e4m3[(rows, triton.cdiv(groups, at_once))](
            x, out, scales, C=channels, CP=padded, GROUPS=groups,
            BG=triton.next_power_of_2(at_once), GELU=gelu, WAITS=bool(pdl),
            num_warps=min(32, max(4, padded // 512)) if groups == 1 else 8, **pdl,
        )  # fmt: skip
        return
    _gated_mul[(rows, triton.cdiv(channels, step))](
        x, out, C=channels, STEP=step, GELU=gelu, WAITS=bool(pdl), num_warps=4, **pdl
    )


@triton.jit
def _finite(x):
    """Return x with NaN and infinities set to zero.

    A tile multiplies slots behind a sequence's end by zero, and these slots may belong to another
    sequence. The sequence that produced the NaN fails by its own logits.
    """
    return tl.where(x - x == 0, x, 0.0)


@triton.jit
def _storable(x):
    """Return x as 8 bits can hold it: finite, and no larger than a scale of fp16 reaches."""
    return tl.minimum(tl.maximum(_finite(x), -8319008.0), 8319008.0)


@triton.jit
def _scale_and_inverse(largest):
    """Return the fp16 bits of the scales for values up to `largest`, and the scales' inverses."""
    bits, scale = scale_8(largest)
    return bits.to(tl.int16), over(tl.zeros_like(scale) + 1.0, scale)[:, None]


@triton.jit
def _store_int8(target, place, x, live, head_live):
    """Write x [KP, width] to `target` in 8 bits, and the scales to `place`."""
    x = _storable(x)
    bits, inverse = _scale_and_inverse(tl.max(tl.abs(x), 1))
    tl.store(target, rounded(x * inverse).to(tl.int8), mask=live)
    tl.store(place.to(tl.pointer_type(tl.int16)), bits, mask=head_live)


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr, q_out, kv_ptr, cos_ptr, sin_ptr, positions, slots, growth_ptr,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, S: tl.constexpr,
    STEP: tl.constexpr, KP: tl.constexpr, BLOCK_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    GROWS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): STEP query heads per chunk, then all key heads, then all value
    heads."""
    INT8: tl.constexpr = kv_ptr.dtype.element_ty == tl.int8
    HEAD: tl.constexpr = S * (D + 2) if INT8 else S * D
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    query_chunks: tl.constexpr = (H + STEP - 1) // STEP
    half = tl.arange(0, HALF)
    real = half < D // 2
    source = qkv_ptr + row * (H + 2 * K) * D
    slot = tl.load(slots + row)
    scales = kv_ptr + (slot // S).to(tl.int64) * BLOCK_STRIDE
    block = scales + (slot % S) * D
    scales += S * D + slot % S * 2
    if chunk < query_chunks + 1:
        position = tl.load(positions + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * (D // 2) + half, mask=real, other=0.0)[None, :]
        sin = tl.load(sin_ptr + position * (D // 2) + half, mask=real, other=0.0)[None, :]
        if chunk < query_chunks:
            if GROWS:
                growth = tl.load(growth_ptr + position)
                cos *= growth
                sin *= growth
            head = chunk * STEP + tl.arange(0, STEP)
            at = head[:, None] * D + half[None, :]
            live = (head < H)[:, None] & real[None, :]
            first = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
            second = tl.load(source + at + D // 2, mask=live, other=0.0).to(tl.float32)
            target = q_out + row * H * D + at
            kind = q_out.dtype.element_ty
            tl.store(target, (first * cos - second * sin).to(kind), mask=live)
            tl.store(target + D // 2, (second * cos + first * sin).to(kind), mask=live)
        elif slot >= 0:
            head = tl.arange(0, KP)
            at = head[:, None] * D + half[None, :]
            live = (head < K)[:, None] & real[None, :]
            first = tl.load(source + H * D + at, mask=live, other=0.0).to(tl.float32)
            second = tl.load(source + H * D + at + D // 2, mask=live, other=0.0).to(tl.float32)
            target = block + head[:, None] * HEAD + half[None, :]
            kind = kv_ptr.dtype.element_ty
            if INT8:
                low = _storable(first * cos - second * sin)
                high = _storable(second * cos + first * sin)
                bits, inverse = _scale_and_inverse(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1))
                tl.store(target, rounded(low * inverse).to(tl.int8), mask=live)
                tl.store(target + D // 2, rounded(high * inverse).to(tl.int8), mask=live)
                place = (scales + head * HEAD).to(tl.pointer_type(tl.int16))
                tl.store(place, bits, mask=head < K)
            else:
                tl.store(target, _finite(first * cos - second * sin).to(kind), mask=live)
                tl.store(target + D // 2, _finite(second * cos + first * sin).to(kind), mask=live)
    elif slot >= 0:
        head = tl.arange(0, KP)
        d = tl.arange(0, 2 * HALF)
        live = (head < K)[:, None] & (d < D)[None, :]
        value = tl.load(source + (H + K) * D + head[:, None] * D + d[None, :], mask=live, other=0.0)
        target = block + VALUE_OFFSET + head[:, None] * HEAD + d[None, :]
        if INT8:
            place = scales + VALUE_OFFSET + head * HEAD
            _store_int8(target, place, value.to(tl.float32), live, head < K)
        else:
            tl.store(target, _finite(value).to(kv_ptr.dtype.element_ty), mask=live)


def rope_kv_write(
    qkv: torch.Tensor, q_out: torch.Tensor, kv: torch.Tensor, layer: int, cos: torch.Tensor,
    sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
    growth: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate q and k by halves; write q to q_out [T, H, D], k and v to their slots of kv.

    qkv [T, (H + 2K) * D]; kv [B, L, 2, K, S, D], or of int8 D + 2 with scales as
    `kernels.reference_int8` says, one layer written; cos, sin [context, D / 2] fp32;
    positions [T] int32; slots [T] int32, block id * S + offset, negative for a padding row (not
    written); growth [context] fp32: factor of the queries at each position. q_out and kv written;
    NaN and infinities are written to kv as zero.
    """
    rows, heads, head_dim = q_out.shape
    _, _, _, kv_heads, size, _ = kv.shape
    step = min(16, triton.next_power_of_2(heads))
    pdl = dependent_rows(qkv)
    # The bytes of int8 are the reference's, which fuses no product with a sum.
    more = {"enable_fp_fusion": False} if kv.dtype == torch.int8 else {}
    rope_kv_write_kernel[(rows, triton.cdiv(heads, step) + 2)](
        qkv, q_out, kv[:, layer], cos, sin, positions, slots, cos if growth is None else growth,
        H=heads, K=kv_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), S=size,
        STEP=step, KP=triton.next_power_of_2(kv_heads),
        BLOCK_STRIDE=kv.stride(0), VALUE_OFFSET=kv.stride(2),
        GROWS=growth is not None, WAITS=bool(pdl), num_warps=2, **pdl, **more,
    )  # fmt: skip


@triton.jit
def _copy_blocks(
    kv_ptr, copies, PLANE: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr
):
    copy = tl.program_id(0)
    source = tl.load(copies + copy * 3).to(tl.int64)
    target = tl.load(copies + copy * 3 + 1).to(tl.int64)
    filled = tl.load(copies + copy * 3 + 2) * D
    plane = tl.program_id(1) * PLANE
    for start in range(0, PLANE, STEP):
        at = start + tl.arange(0, STEP)
        inside = at < filled
        values = tl.load(kv_ptr + source * BLOCK + plane + at, mask=inside)
        tl.store(kv_ptr + target * BLOCK + plane + at, values, mask=inside)


def copy_blocks(kv: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy the first `tokens` slots of block `src` to block `dst`, all layers. kv written.

    kv [B, L, 2, K, S, D]; copies [n, 3] int32 (src, dst, tokens). No block may be both a source and
    a target, because all copies run at once. The cache pins sources until the plan is launched.
    """
    if len(copies) == 0:
        return
    _, layers, two, kv_heads, size, head_dim = kv.shape
    plane = size * head_dim
    _copy_blocks[(len(copies), layers * two * kv_heads)](
        kv, copies, PLANE=plane, BLOCK=kv.stride(0), D=head_dim,
        STEP=min(1024, triton.next_power_of_2(plane)), num_warps=4,
    )  # fmt: skip
