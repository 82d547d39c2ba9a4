"""Big tiles of tree attention scheduled by hand, for Hopper: copies, products and softmax at once.

The work list, the inputs and the outputs are those of `kernels.gpu.tree_attention`, which launches
this instead of its own kernel where `can_run` says so; what is computed is said there. A program is

    one producer warp            takes units, asks the copy engine for the blocks of K and V
    one group of four warps      for every 64 query vectors of the tile: products and softmax

so that nobody who computes spends instructions on addresses, and the producer is at the next unit's
keys while this one's result is stored. Inside a group the scores of tile i + 1 and the values'
product of tile i are both asked for before the softmax of tile i + 1, which hides the latter: the
second overlap of Shah et al., FlashAttention-3 (2024, arXiv 2407.08608); the first, groups in turn,
gained nothing here (docs/gpu.md). Two groups of a program have each key copied in once.

Written in Gluon, whose interface still moves between releases of Triton: whoever imports this must
be ready for an ImportError. Knows nothing of who shares what.
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

HEAD_DIM = 128
VECTORS = 64
"""Query vectors of a group of warps: the rows of one matrix instruction."""

PIECE = gl.constexpr(64)
"""Columns of K and V to a copy: the widest that the matrix units' order of bytes allows."""

LOWEST = gl.constexpr(-1e30)
"""A row's maximum before any key. Finite, so that a tile it sees no key of changes nothing."""

ORDER = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS, PRODUCER_REGISTERS = 240, 24

STAGES = 3
"""Tiles of K and V on their way: four to six are no faster."""

# Named differently across releases.
IS_OLD = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
copy_in = tma.async_copy_global_to_shared if IS_OLD.value else tma.async_load


@gluon.jit
def _place(block_id, at, BLOCK_ROWS: gl.constexpr):
    """A tuple, so that several can be one: the row of the pool that a block begins at."""
    return (gl.load(block_id) * BLOCK_ROWS + at,)


@gluon.jit
def _produce(
    inputs, k_pieces, v_pieces, barriers,
    D: gl.constexpr, SLOTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, VALUE_ROWS: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """Take units, tell the groups which, and keep STAGES tiles of K and V on their way."""
    pool, count, units, queue, block_ids, lengths_ptr, layer_row = inputs
    told, told_full, told_empty, k_full, k_empty, v_full, v_empty = barriers
    N: gl.constexpr = KEYS // SLOTS
    COLUMNS: gl.constexpr = D // PIECE
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    total = gl.load(count)
    there = gl.program_id(0)
    turn = 2 * gl.num_programs(0)
    taken = 0
    tile = 0
    u = there
    if QUEUE:
        u = gl.atomic_add(queue, 1, sem="relaxed")
    while u < total:
        mbarrier.wait(told_empty.index(taken % 2), (taken // 2 & 1) ^ 1)
        told.index(taken % 2).store(gl.full([1], u, gl.int32, scalar))
        mbarrier.arrive(told_full.index(taken % 2), count=1)
        unit = units + u * 8
        row0 = gl.load(unit)
        rows = gl.load(unit + 1)
        ids = block_ids + gl.load(unit + 2)
        first_key = gl.load(unit + 3)
        end = gl.load(unit + 4)
        at = layer_row + gl.load(unit + 7) * SLOTS
        if end < 0:
            end = gl.load(lengths_ptr + row0) - first_key + rows - 1
        for _ in range(gl.maximum((end + KEYS - 1) // KEYS, 1)):  # groups begin with a tile
            places = _place(ids, at, BLOCK_ROWS)
            for b in gl.static_range(1, N):
                places += _place(ids + b, at, BLOCK_ROWS)
            ids += N
            stage = tile % STAGES
            free = (tile // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), KEYS * D * 2)
            for c in gl.static_range(COLUMNS):
                for b in gl.static_range(N):
                    piece = k_pieces.index((stage * COLUMNS + c) * N + b)
                    copy_in(pool, [places[b], c * PIECE], k_full.index(stage), piece)
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), KEYS * D * 2)
            for c in gl.static_range(COLUMNS):
                for b in gl.static_range(N):
                    piece = v_pieces.index((stage * COLUMNS + c) * N + b)
                    row = places[b] + VALUE_ROWS
                    copy_in(pool, [row, c * PIECE], v_full.index(stage), piece)
            tile += 1
        taken += 1
        if QUEUE:
            u = gl.atomic_add(queue, 1, sem="relaxed")
        else:  # back and forth
            u = taken // 2 * turn + gl.where(taken % 2 == 0, there, turn - 1 - there)
    mbarrier.wait(told_empty.index(taken % 2), (taken // 2 & 1) ^ 1)
    told.index(taken % 2).store(gl.full([1], -1, gl.int32, scalar))
    mbarrier.arrive(told_full.index(taken % 2), count=1)


@gluon.jit
def _hear(told, told_full, told_empty, taken):
    """The next unit's number, or -1 when there is none."""
    scalar: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told_full.index(taken % 2), taken // 2 & 1)
    u = gl.max(told.index(taken % 2).load(scalar), 0)
    mbarrier.arrive(told_empty.index(taken % 2), count=1)
    return u


@gluon.jit
def _softmax(
    scores, row_max, row_sum, scale, start, shortest, growth, row,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """One tile's step of the online softmax: (p, row_max, row_sum, what older sums shrink by)."""
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
    """Tiles [first, end) of a unit. `p` belongs to the tile before, not yet multiplied by its V."""
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
    """Vectors [GROUP * M, GROUP * M + M) of every unit that the producer tells of."""
    q_ptr, part_out, part_lse, out, units, lengths_ptr, rows_total, scale = inputs
    told, told_full, told_empty, k_full, k_empty, v_full, v_empty = barriers
    scores_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_in: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_in: gl.constexpr = gl.DotOperandLayout(0, acc_in, 2)
    loaded_in: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    tile = 0
    taken = 0
    u = _hear(told, told_full, told_empty, taken)
    while u >= 0:
        unit = units + u * 8
        row0 = gl.load(unit)
        rows = gl.load(unit + 1)
        first_key = gl.load(unit + 3)
        keys = gl.load(unit + 4)
        part = gl.load(unit + 5)
        direct = gl.load(unit + 6)
        head = gl.load(unit + 7)
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
        # The first tile has no product before it to hide its softmax behind.
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
        whole = gl.maximum(shortest // KEYS, 1)
        p, acc, row_max, row_sum, tile = _accumulate(
            q, p, acc, row_max, row_sum, tile, 1, whole, scale, shortest, growth, row,
            k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, False, CAUSAL, KEYS, STAGES,
        )  # fmt: skip
        p, acc, row_max, row_sum, tile = _accumulate(
            q, p, acc, row_max, row_sum, tile, whole, (end + KEYS - 1) // KEYS, scale, shortest,
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
            answer = out + row_head[:, None] * D + d[None, :]
            gl.store(answer, acc.to(q.dtype), mask=live[:, None])
        else:
            slot = part * rows_total * H + row_head
            place = part_out + slot[:, None].to(gl.int64) * D + d[None, :]
            gl.store(place, acc, mask=live[:, None])
            lse = gl.where(row_sum > 0, row_max + gl.log2(divisor), float("-inf"))
            gl.store(part_lse + slot, lse, mask=live)
        taken += 1
        u = _hear(told, told_full, told_empty, taken)


@gluon.jit(do_not_specialize=["rows_total", "layer_row"])
def hopper_attention_kernel(
    pool, q_ptr, part_out, part_lse, out, count, units, queue, block_ids, lengths_ptr, rows_total,
    layer_row, scale,
    G: gl.constexpr, GP: gl.constexpr, M: gl.constexpr, GROUPS: gl.constexpr, H: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, VALUE_ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    WAITS: gl.constexpr, LETS_GO: gl.constexpr, FOLLOWS: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """`tree_attention_kernel` for tiles of GROUPS * M vectors, with keys taken from `pool`.

    `pool`: all blocks as rows of D, each block BLOCK_ROWS of them, the layer's first at
    `layer_row` and its values VALUE_ROWS further on.
    """
    if WAITS:
        gdc_wait()
    if LETS_GO:
        gdc_launch_dependents()
    N: gl.constexpr = STAGES * (KEYS // SLOTS) * (D // PIECE)
    order: gl.constexpr = pool.layout
    k_pieces = gl.allocate_shared_memory(pool.dtype, [N, SLOTS, PIECE], order)
    v_pieces = gl.allocate_shared_memory(pool.dtype, [N, SLOTS, PIECE], order)
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
    told = gl.allocate_shared_memory(gl.int32, [2, 1], barrier)
    told_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    told_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    for i in gl.static_range(2):
        mbarrier.init(told_full.index(i), count=1)
        mbarrier.init(told_empty.index(i), count=GROUPS)
    fence_async_shared()
    barriers = (told, told_full, told_empty, k_full, k_empty, v_full, v_empty)
    consume = (q_ptr, part_out, part_lse, out, units, lengths_ptr, rows_total, scale)
    produce = (pool, count, units, queue, block_ids, lengths_ptr, layer_row)
    # A constant given a name here would be one no longer.
    if GROUPS == 1:
        gl.warp_specialize([
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 0)),
            (_produce, (produce, k_pieces, v_pieces, barriers,
                        D, SLOTS, KEYS, STAGES, BLOCK_ROWS, VALUE_ROWS, QUEUE)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 0)),
            (_consume, (consume, k_tiles, v_tiles, barriers,
                        G, GP, M, H, D, KEYS, STAGES, CAUSAL, 1)),
            (_produce, (produce, k_pieces, v_pieces, barriers,
                        D, SLOTS, KEYS, STAGES, BLOCK_ROWS, VALUE_ROWS, QUEUE)),
        ], [4, 1], [REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    if FOLLOWS:
        gdc_wait()


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def can_run(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Is this the device, the type and the head these tiles are made for?"""
    if not q.is_cuda or not _is_hopper(q.device):
        return False
    slots, head_dim = kv.shape[-2:]
    is_shape = head_dim == HEAD_DIM and slots >= 8 and VECTORS % slots == 0
    return is_shape and q.dtype == kv.dtype == torch.bfloat16 and kv.is_contiguous()


class _Address:
    """Where a pool begins: what a descriptor asks of a tensor, without keeping its memory."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


@lru_cache(maxsize=8)
def _pool(pointer: int, dtype: torch.dtype, rows: int, columns: int, slots: int) -> Any:
    """A pool as the copy engine sees it. Kept: making one takes as long as half a launch."""
    base = _Address(pointer, dtype)
    return TensorDescriptor(base, [rows, columns], [columns, 1], [slots, PIECE.value], ORDER)


def launch(
    programs: int, vectors: int, q: torch.Tensor, kv: torch.Tensor, layer: int,
    work: tuple[object, ...], scale: float, **options: Any,
) -> Any:  # fmt: skip
    """Launch `programs` of the kernel for tiles of `vectors`, 64 or 128, and return it.

    `work`: the kernel's arguments from `part_out` to `rows_total`. Two programs of 64 vectors fit a
    multiprocessor, or one of 128.
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
