"""Attention over latents on a GPU: all heads of a token read one record of the cache.

A record is R rotated channels, then L of the latent, which are key and value both. Queries have
been taken into the latent's space, so keys are never expanded (DeepSeek-AI, "DeepSeek-V2", 2024,
section 2.1). The work list, its parts and their merge are those of `kernels.gpu.tree_attention`;
`kernels.gpu.work_list.latent_planner` deals heads into groups. A latent is loaded once and serves
scores, transposed, and values. `kernels.reference.paged_attention` with `latent` specifies it;
`engine.attention.gpu_backend` calls it. Shapes: T rows, H query heads, W = R + L channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import (
    dependent_options,
    gdc_launch_dependents,
    gdc_wait,
    prefer_max_shared_memory,
)
from kernels.gpu.fused_ops import DEPENDENT_ROWS_MAX
from kernels.gpu.tree_attention import (
    LOG2E,
    PartialOutputs,
    WorkList,
    class_launches,
    merge_parts,
    store_unit,
)

CHANNELS_MIN = 16
"""Fewest rotated channels, and fewest of a latent: both are powers of two."""


def can_run(rope: int, latent: int) -> bool:
    """Return whether records of so many rotated channels and channels of a latent fit."""
    return all(size >= CHANNELS_MIN and size & (size - 1) == 0 for size in (rope, latent))


@triton.jit
def _do_unit(
    q_ptr, kv, part_out, part_lse, out, count, tiles, u, block_ids, lengths_ptr, rows_total, scale,
    G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, SLOTS: tl.constexpr, KEYS: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Compute unit `u` of the work list: a tile's rows against its keys, for one group of heads."""
    W: tl.constexpr = R + L
    tile = tiles + (tl.load(count + 1) + u // (H // G)) * 8
    head = u % (H // G)
    m = tl.arange(0, M)
    r = m // GP
    g = m % GP
    row0 = tl.load(tile)
    rows = tl.load(tile + 1)
    ids = block_ids + tl.load(tile + 2)
    first_key = tl.load(tile + 3)
    keys = tl.load(tile + 4)
    part = tl.load(tile + 5)
    direct = tl.load(tile + 6)
    live = r < rows if GP == G else (r < rows) & (g < G)
    # keys >= 0: every row sees all keys of the run. keys < 0: consecutive tokens of one sequence,
    # each of which sees one key more than the token before.
    growth = tl.where(keys >= 0, 0, 1)
    shortest = tl.where(keys >= 0, keys, tl.load(lengths_ptr + row0) - first_key)
    end = shortest + growth * (rows - 1)
    rope = tl.arange(0, R)
    c = tl.arange(0, L)
    n = tl.arange(0, KEYS)
    query = q_ptr + ((row0 + r) * (H + 1) + head * G + g).to(tl.int64)[:, None] * W
    q_rope = tl.load(query + rope[None, :], mask=live[:, None], other=0.0)
    q_latent = tl.load(query + R + c[None, :], mask=live[:, None], other=0.0)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, L], tl.float32)
    inside = n % SLOTS * W
    # Block ids are loaded one tile ahead, so that the loop can be pipelined.
    block = tl.load(ids + n // SLOTS)
    for start in tl.range(0, end, KEYS, num_stages=STAGES):
        record = kv + block.to(tl.int64) * BLOCK_STRIDE + inside
        block = tl.load(ids + (start + KEYS) // SLOTS + n // SLOTS)
        latent = tl.load(record[:, None] + R + c[None, :])
        turned = tl.load(record[:, None] + rope[None, :])
        scores = tl.dot(q_latent, tl.trans(latent))
        scores = tl.dot(q_rope, tl.trans(turned), scores) * scale
        if CAUSAL:
            length = shortest + r * growth
            scores = tl.where((start + n)[None, :] < length[:, None], scores, float("-inf"))
        else:
            scores = tl.where((start + n < shortest)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        alpha = tl.exp2(row_max - new_max)
        p = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None])
        row_max = new_max
    row_head = (row0 + r) * H + head * G + g
    store_unit(
        part_out, part_lse, out, part_lse, row_head, head, g, live, live[:, None], part, direct,
        rows_total, row_max, row_sum, acc, G, H, L, L, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def latent_attention_kernel(
    q_ptr, kv, part_out, part_lse, out, count, tiles, queue, block_ids, lengths_ptr, rows_total,
    scale,
    G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    L: tl.constexpr, SLOTS: tl.constexpr, KEYS: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    STAGES: tl.constexpr, CAUSAL: tl.constexpr, WAITS: tl.constexpr, TRIGGERS: tl.constexpr,
    FOLLOWS: tl.constexpr, QUEUE: tl.constexpr,
):  # fmt: skip
    """Compute all units of a tile class, as `tree_attention_kernel` does.

    q [T, H + 1, W]: each row's queries, then its own record; out [T, H, L].
    """
    if WAITS:
        gdc_wait()
    if TRIGGERS:
        gdc_launch_dependents()
    total = tl.load(count) * (H // G)
    if QUEUE:
        u = tl.atomic_add(queue, 1, sem="relaxed")
        while u < total:
            _do_unit(
                q_ptr, kv, part_out, part_lse, out, count, tiles, u, block_ids, lengths_ptr,
                rows_total, scale, G, GP, M, H, R, L, SLOTS, KEYS, BLOCK_STRIDE, STAGES, CAUSAL,
            )  # fmt: skip
            u = tl.atomic_add(queue, 1, sem="relaxed")
    else:
        there = tl.program_id(0)
        back = 2 * tl.num_programs(0) - 1 - there
        turn = 2 * tl.num_programs(0)
        rest = total % turn
        mine = total // turn * 2 + (rest > there).to(tl.int32) + (rest > back).to(tl.int32)
        for k in range(mine):
            u = k // 2 * turn + tl.where(k % 2 == 0, there, back)
            _do_unit(
                q_ptr, kv, part_out, part_lse, out, count, tiles, u, block_ids, lengths_ptr,
                rows_total, scale, G, GP, M, H, R, L, SLOTS, KEYS, BLOCK_STRIDE, STAGES, CAUSAL,
            )  # fmt: skip
    if FOLLOWS:
        gdc_wait()


def latent_attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, work: WorkList, block_ids: torch.Tensor,
    lengths: torch.Tensor, out: torch.Tensor, parts: PartialOutputs, group: int, scale: float, *,
    classes: tuple[int, ...] = (1, 2), causal: bool = True, dependent: bool = False,
    merge: bool = True,
) -> None:  # fmt: skip
    """Write attention of q [T, H + 1, W] over one layer of kv [B, layers, 1, 1, S, W] to out
    [T, H, L].

    q: the queries of a row, then its own record, which is not read. `group`: heads of a unit, as
    the work was planned. Else as `tree_attention`; also here every block of the pool must hold
    finite values. Writes out and parts.
    """
    rows, heads, latent = out.shape
    pdl = dependent_options(q) if dependent else {}
    for launch in class_launches(work, classes, pdl, dependent=dependent):
        config = launch.config
        kernel = latent_attention_kernel[(launch.programs,)](
            q, kv[:, layer], parts.out, parts.lse, out, work.count(launch.class_index), work.tiles,
            parts.queue, block_ids, lengths, rows, scale * LOG2E,
            G=group, GP=1 << (group - 1).bit_length(), M=config.vectors, H=heads,
            R=kv.shape[-1] - latent, L=latent, SLOTS=kv.shape[4], KEYS=config.keys,
            BLOCK_STRIDE=kv.stride(0), STAGES=config.stages, CAUSAL=causal,
            num_warps=config.warps, **launch.flags,
        )  # fmt: skip
        if pdl and launch.is_beside:
            prefer_max_shared_memory(kernel.function)
    if merge:
        merge_parts(out, work, parts, None, pdl)


@triton.jit
def rope_latent_write_kernel(
    qk, kv, cos_ptr, sin_ptr, positions, slots,
    H: tl.constexpr, HALF: tl.constexpr, L: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): STEP query heads a chunk, then the record."""
    W: tl.constexpr = 2 * HALF + L
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    half = tl.arange(0, HALF)
    position = tl.load(positions + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + half)[None, :]
    sin = tl.load(sin_ptr + position * HALF + half)[None, :]
    kind = qk.dtype.element_ty
    if chunk < tl.num_programs(1) - 1:
        head = chunk * STEP + tl.arange(0, STEP)
        place = qk + (row * (H + 1) + head)[:, None] * W + half[None, :]
        live = (head < H)[:, None]
        first = tl.load(place, mask=live, other=0.0).to(tl.float32)
        second = tl.load(place + HALF, mask=live, other=0.0).to(tl.float32)
        tl.store(place, (first * cos - second * sin).to(kind), mask=live)
        tl.store(place + HALF, (second * cos + first * sin).to(kind), mask=live)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            one = tl.arange(0, 1)[:, None]
            place = qk + (row * (H + 1) + H) * W + one + half[None, :]
            first = tl.load(place).to(tl.float32)
            second = tl.load(place + HALF).to(tl.float32)
            target = kv + (slot // S).to(tl.int64) * BLOCK_STRIDE + slot % S * W
            low, high = first * cos - second * sin, second * cos + first * sin
            tl.store(target + one + half[None, :], _finite(low).to(kind))
            tl.store(target + one + HALF + half[None, :], _finite(high).to(kind))
            c = tl.arange(0, L)
            latent = tl.load(qk + (row * (H + 1) + H) * W + 2 * HALF + c)
            tl.store(target + 2 * HALF + c, _finite(latent))


@triton.jit
def _finite(x):
    """Return x with NaN and infinities set to zero: tiles read slots that they mask afterwards."""
    return tl.where(x - x == 0, x, 0.0)


def rope_latent_write(
    qk: torch.Tensor, kv: torch.Tensor, layer: int, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, latent: int,
) -> None:  # fmt: skip
    """Rotate the first channels of queries by halves in place, and write records to their slots.

    qk [T, H + 1, W]: queries, then the record, which is rotated on its way to kv
    [B, layers, 1, 1, S, W], one layer written; cos, sin [context, R / 2] fp32; positions, slots [T]
    int32 as in `fused_ops.rope_kv_write`. NaN and infinities are written to kv as zero.
    """
    rows, heads, width = qk.shape
    step = min(16, triton.next_power_of_2(heads - 1))
    pdl = dependent_options(qk) if rows <= DEPENDENT_ROWS_MAX else {}
    rope_latent_write_kernel[(rows, triton.cdiv(heads - 1, step) + 1)](
        qk, kv[:, layer], cos, sin, positions, slots, H=heads - 1, HALF=(width - latent) // 2,
        L=latent, S=kv.shape[4], STEP=step, BLOCK_STRIDE=kv.stride(0), WAITS=bool(pdl),
        num_warps=2, **pdl,
    )  # fmt: skip
