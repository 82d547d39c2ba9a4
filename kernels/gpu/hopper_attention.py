"""Hand-scheduled big tiles of tree attention for Hopper: copies, products and softmax overlap.

Work list, inputs and outputs are those of `kernels.gpu.tree_attention`, which launches this kernel
instead of its own where `can_run` allows it, and which documents the computation. A program has

    one producer warp            takes units and starts copies of K and V blocks (TMA)
    one group of four warps      per 64 query vectors of the tile: products and softmax

so that the computing warps spend no instructions on addresses, and the producer loads the next
unit's keys while the groups store a result. Inside a group, the scores of tile i + 1 and the value
product of tile i are issued before the softmax of tile i + 1, which hides the softmax: the second
overlap of Shah et al., FlashAttention-3 (2024, arXiv 2407.08608). Their first overlap, groups in
turn, gained nothing here (docs/gpu-experiments.md). Two groups of a program share each copied key.

Gluon's interface still changes between Triton releases, so an importer must handle ImportError. The
module knows no prefix tree.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gpu.dependent_launch import gdc_launch_dependents, gdc_wait

HEAD_DIMS = (64, 128)
"""The supported head dimensions. 256 does not fit the registers."""

VECTORS = 64
"""Query vectors of a group of warps: the rows of one wgmma instruction."""

COPY_COLUMNS = gl.constexpr(64)
"""Columns of K and V per copy: the widest that the 128-byte swizzle of wgmma allows."""

LOWEST = gl.constexpr(-1e30)
"""A row's maximum before any key. Finite, so that a tile without visible keys changes nothing."""

ORDER = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS, PRODUCER_REGISTERS = 240, 24

STAGES = 3
"""Tiles of K and V in flight; four to six are no faster."""

# The names differ across Triton releases.
IS_OLD = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
copy_in = tma.async_copy_global_to_shared if IS_OLD.value else tma.async_load


@gluon.jit
def _block_row(block_id, at, BLOCK_ROWS: gl.constexpr):
    """Return the pool row at which a block begins, as a tuple, so that tuples can be
    concatenated."""
    return (gl.load(block_id) * BLOCK_ROWS + at,)


@gluon.jit
def _produce(
    inputs, k_pieces, v_pieces, barriers,
    G: gl.constexpr, H: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_ROWS: gl.constexpr, VALUE_ROWS: gl.constexpr,
    QUEUE: gl.constexpr,
):  # fmt: skip
    """Take units, announce them to the groups, and keep STAGES tiles of K and V in flight."""
    pool, count, tiles, queue, block_ids, lengths_ptr, layer_row = inputs
    unit_number, unit_full, unit_empty, k_full, k_empty, v_full, v_empty = barriers
    N: gl.constexpr = KEYS // SLOTS
    COLUMNS: gl.constexpr = D // COPY_COLUMNS
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    total = gl.load(count) * (H // G)
    there = gl.program_id(0)
    turn = 2 * gl.num_programs(0)
    taken = 0
    tile = 0
    u = there
    if QUEUE:
        u = gl.atomic_add(queue, 1, sem="relaxed")
    while u < total:
        mbarrier.wait(unit_empty.index(taken % 2), (taken // 2 & 1) ^ 1)
        unit_number.index(taken % 2).store(gl.full([1], u, gl.int32, scalar))
        mbarrier.arrive(unit_full.index(taken % 2), count=1)
        fields = tiles + (gl.load(count + 1) + u // (H // G)) * 8
        row0 = gl.load(fields)
        rows = gl.load(fields + 1)
        ids = block_ids + gl.load(fields + 2)
        first_key = gl.load(fields + 3)
        end = gl.load(fields + 4)
        at = layer_row + u % (H // G) * SLOTS
        if end < 0:
            end = gl.load(lengths_ptr + row0) - first_key + rows - 1
        for _ in range(
            gl.maximum((end + KEYS - 1) // KEYS, 1)
        ):  # a group always takes at least one tile
            block_rows = _block_row(ids, at, BLOCK_ROWS)
            for b in gl.static_range(1, N):
                block_rows += _block_row(ids + b, at, BLOCK_ROWS)
            ids += N
            stage = tile % STAGES
            free = (tile // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), KEYS * D * 2)
            for c in gl.static_range(COLUMNS):
                for b in gl.static_range(N):
                    piece = k_pieces.index((stage * COLUMNS + c) * N + b)
                    copy_in(pool, [block_rows[b], c * COPY_COLUMNS], k_full.index(stage), piece)
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), KEYS * D * 2)
            for c in gl.static_range(COLUMNS):
                for b in gl.static_range(N):
                    piece = v_pieces.index((stage * COLUMNS + c) * N + b)
                    row = block_rows[b] + VALUE_ROWS
                    copy_in(pool, [row, c * COPY_COLUMNS], v_full.index(stage), piece)
            tile += 1
        taken += 1
        if QUEUE:
            u = gl.atomic_add(queue, 1, sem="relaxed")
        else:  # back and forth
            u = taken // 2 * turn + gl.where(taken % 2 == 0, there, turn - 1 - there)
    mbarrier.wait(unit_empty.index(taken % 2), (taken // 2 & 1) ^ 1)
    unit_number.index(taken % 2).store(gl.full([1], -1, gl.int32, scalar))
    mbarrier.arrive(unit_full.index(taken % 2), count=1)


@gluon.jit
def _next_unit(unit_number, unit_full, unit_empty, taken):
    """Return the next unit's number, or -1 after the last."""
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(unit_full.index(taken % 2), taken // 2 & 1)
    u = gl.max(unit_number.index(taken % 2).load(scalar), 0)
    mbarrier.arrive(unit_empty.index(taken % 2), count=1)
    return u


@gluon.jit
def _softmax(
    scores, row_max, row_sum, scale, start, shortest, growth, row,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Return one tile's online softmax: (p, row_max, row_sum, rescaling of older sums)."""
    if MASKED:
        columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        n = start + gl.arange(0, scores.shape[1], layout=columns)
        if CAUSAL:
            length = shortest + row * growth
            scores = gl.where(n[None, :] < length[:, None], scores, float("-inf"))
        else:
            scores = gl.where((n < shortest)[None, :], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    alpha = gl.exp2(row_max - new_max)
    p = gl.exp2(scores * scale - new_max[:, None])
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _accumulate(
    q, p, acc, row_max, row_sum, tile, first, end, scale, shortest, growth, row,
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Take tiles [first, end) of a unit. `p`: the tile before, not yet multiplied by its V."""
    scores_in: gl.constexpr = q.type.layout.parent
    for t in range(first, end):
        now = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(k_full.index(now), tile // STAGES & 1)
        k = k_tiles.index(now).permute((1, 0))
        zero = gl.full([q.shape[0], KEYS], 0.0, gl.float32, scores_in)
        scores = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (tile - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(k_empty.index(now), count=1)
        wide, row_max, row_sum, alpha = _softmax(
            scores, row_max, row_sum, scale, t * KEYS, shortest, growth, row, MASKED, CAUSAL
        )
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(wide.to(q.dtype), p.type.layout)
        tile += 1
    return p, acc, row_max, row_sum, tile


@gluon.jit
def _consume(
    inputs, k_tiles, v_tiles, barriers,
    G: gl.constexpr, GP: gl.constexpr, M: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Compute vectors [GROUP * M, GROUP * M + M) of every unit that the producer announces."""
    q_ptr, part_out, part_lse, out, count, tiles, lengths_ptr, rows_total, scale = inputs
    unit_number, unit_full, unit_empty, k_full, k_empty, v_full, v_empty = barriers
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_in: gl.constexpr = gl.DotOperandLayout(0, acc_in, 2)
    loaded_in: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile = 0
    taken = 0
    u = _next_unit(unit_number, unit_full, unit_empty, taken)
    while u >= 0:
        fields = tiles + (gl.load(count + 1) + u // (H // G)) * 8
        row0 = gl.load(fields)
        rows = gl.load(fields + 1)
        first_key = gl.load(fields + 3)
        keys = gl.load(fields + 4)
        part = gl.load(fields + 5)
        direct = gl.load(fields + 6)
        head = u % (H // G)
        growth = gl.where(keys >= 0, 0, 1)
        shortest = keys
        if keys < 0:
            shortest = gl.load(lengths_ptr + row0) - first_key
        end = shortest + growth * (rows - 1)
        m = GROUP * M + gl.arange(0, M, layout=gl.SliceLayout(1, loaded_in))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, loaded_in))
        row_head = (row0 + m // GP) * H + head * G + m % GP
        live = (m // GP < rows) & (m % GP < G)
        q = gl.load(q_ptr + row_head[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
        q = gl.convert_layout(q, gl.DotOperandLayout(0, scores_in, 2))
        row = (GROUP * M + gl.arange(0, M, layout=gl.SliceLayout(1, scores_in))) // GP
        row_max = gl.full([M], LOWEST, gl.float32, gl.SliceLayout(1, scores_in))
        row_sum = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, scores_in))
        acc = gl.full([M, D], 0.0, gl.float32, acc_in)
        # The first tile has no earlier product to hide its softmax behind.
        mbarrier.wait(k_full.index(tile % STAGES), tile // STAGES & 1)
        k = k_tiles.index(tile % STAGES).permute((1, 0))
        zero = gl.full([M, KEYS], 0.0, gl.float32, scores_in)
        scores = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(tile % STAGES), count=1)
        wide, row_max, row_sum, _ = _softmax(
            scores, row_max, row_sum, scale, 0, shortest, growth, row, True, CAUSAL
        )
        p = gl.convert_layout(wide.to(q.dtype), p_in)
        tile += 1
        unmasked = gl.maximum(shortest // KEYS, 1)
        p, acc, row_max, row_sum, tile = _accumulate(
            q, p, acc, row_max, row_sum, tile, 1, unmasked, scale, shortest, growth, row,
            k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, False, CAUSAL, KEYS, STAGES,
        )  # fmt: skip
        p, acc, row_max, row_sum, tile = _accumulate(
            q, p, acc, row_max, row_sum, tile, unmasked, (end + KEYS - 1) // KEYS, scale, shortest,
            growth, row,
            k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, True, CAUSAL, KEYS, STAGES,
        )  # fmt: skip
        before = (tile - 1) % STAGES
        mbarrier.wait(v_full.index(before), (tile - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        m = GROUP * M + gl.arange(0, M, layout=gl.SliceLayout(1, acc_in))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, acc_in))
        row_head = (row0 + m // GP) * H + head * G + m % GP
        live = (m // GP < rows) & (m % GP < G)
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, acc_in))
        row_max = gl.convert_layout(row_max, gl.SliceLayout(1, acc_in))
        divisor = gl.where(row_sum > 0, row_sum, 1.0)
        acc = acc * (1.0 / divisor)[:, None]
        if direct != 0:
            target = out + row_head[:, None] * D + d[None, :]
            gl.store(target, acc.to(q.dtype), mask=live[:, None])
        else:
            slot = part * rows_total * H + row_head
            place = part_out + slot[:, None].to(gl.int64) * D + d[None, :]
            gl.store(place, acc, mask=live[:, None])
            lse = gl.where(row_sum > 0, row_max + gl.log2(divisor), float("-inf"))
            gl.store(part_lse + slot, lse, mask=live)
        taken += 1
        u = _next_unit(unit_number, unit_full, unit_empty, taken)


@gluon.jit(do_not_specialize=["rows_total", "layer_row"])
def hopper_attention_kernel(
    pool, q_ptr, part_out, part_lse, out, count, tiles, queue, block_ids, lengths_ptr, rows_total,
    layer_row, scale,
    G: gl.constexpr, GP: gl.constexpr, M: gl.constexpr, GROUPS: gl.constexpr, H: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, VALUE_ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    WAITS: gl.constexpr, TRIGGERS: gl.constexpr, FOLLOWS: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """Compute `tree_attention_kernel`'s result for tiles of GROUPS * M vectors, keys from `pool`.

    `pool`: all blocks as rows of D values, BLOCK_ROWS rows per block; the layer's keys begin at row
    `layer_row` of a block, its values VALUE_ROWS rows further.
    """
    if WAITS:
        gdc_wait()
    if TRIGGERS:
        gdc_launch_dependents()
    N: gl.constexpr = STAGES * (KEYS // SLOTS) * (D // COPY_COLUMNS)
    order: gl.constexpr = pool.layout
    k_pieces = gl.allocate_shared_memory(pool.dtype, [N, SLOTS, COPY_COLUMNS], order)
    v_pieces = gl.allocate_shared_memory(pool.dtype, [N, SLOTS, COPY_COLUMNS], order)
    if IS_OLD:
        k_tiles = k_pieces._reinterpret(pool.dtype, [STAGES, KEYS, D], order)
        v_tiles = v_pieces._reinterpret(pool.dtype, [STAGES, KEYS, D], order)
    else:
        k_tiles = k_pieces.reinterpret(pool.dtype, [STAGES, KEYS, D], order)
        v_tiles = v_pieces.reinterpret(pool.dtype, [STAGES, KEYS, D], order)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    unit_number = gl.allocate_shared_memory(gl.int32, [2, 1], barrier)
    unit_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    unit_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(unit_full.index(i), count=1)
        mbarrier.init(unit_empty.index(i), count=GROUPS)
    fence_async_shared()
    barriers = (unit_number, unit_full, unit_empty, k_full, k_empty, v_full, v_empty)
    consume = (q_ptr, part_out, part_lse, out, count, tiles, lengths_ptr, rows_total, scale)
    produce = (pool, count, tiles, queue, block_ids, lengths_ptr, layer_row)
    # A constexpr assigned to a name here would no longer be a constexpr.
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 0)),
            (_produce, (produce, k_pieces, v_pieces, barriers,
                        G, H, D, SLOTS, KEYS, STAGES, BLOCK_ROWS, VALUE_ROWS, QUEUE)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 0)),
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 1)),
            (_produce, (produce, k_pieces, v_pieces, barriers,
                        G, H, D, SLOTS, KEYS, STAGES, BLOCK_ROWS, VALUE_ROWS, QUEUE)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    if FOLLOWS:
        gdc_wait()


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def can_run(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Return whether the kernel supports the GPU, the dtype, the head dimension and the layout."""
    if not q.is_cuda or not _is_hopper(q.device):
        return False
    slots, head_dim = kv.shape[-2:]
    is_shape = head_dim in HEAD_DIMS and slots >= 8 and VECTORS % slots == 0
    return is_shape and q.dtype == kv.dtype == torch.bfloat16 and kv.is_contiguous()


class _Address:
    """The part of a tensor that a descriptor reads, without a reference to its memory."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


@lru_cache(maxsize=8)
def _pool(pointer: int, dtype: torch.dtype, rows: int, columns: int, slots: int) -> Any:
    """Return the TMA descriptor of a pool. Cached: making one takes half as long as a launch."""
    base = _Address(pointer, dtype)
    return TensorDescriptor(base, [rows, columns], [columns, 1], [slots, COPY_COLUMNS.value], ORDER)


def launch(
    programs: int, vectors: int, q: torch.Tensor, kv: torch.Tensor, layer: int,
    work: tuple[object, ...], scale: float, **options: Any,
) -> Any:  # fmt: skip
    """Launch `programs` of the kernel for tiles of `vectors`, 64 or 128, and return it.

    `work`: the kernel's arguments from `part_out` to `rows_total`. A multiprocessor holds two
    programs of 64 vectors, or one of 128.
    """
    _, _, both, heads, slots, head_dim = kv.shape
    pool = _pool(kv.data_ptr(), kv.dtype, kv.numel() // head_dim, head_dim, slots)
    groups = vectors // VECTORS
    if groups == 1:
        options["maxnreg"] = 128
    return hopper_attention_kernel[(programs,)](
        pool, q, *work, layer * both * heads * slots, scale,
        M=VECTORS, GROUPS=groups, STAGES=STAGES,
        BLOCK_ROWS=kv.stride(0) // head_dim, VALUE_ROWS=heads * slots,
        REGISTERS=REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=4, **options,
    )  # fmt: skip
