"""Tree attention: paged attention over a work list that reads each shared prefix once.

Rows (query tokens) are in the prefix tree's depth-first order, so the rows below any node are one
contiguous range. A *unit* of work is (row range x key range x KV head). Three tile classes and a
merge run inside one CUDA graph, BIG and SMALL side by side:

    WIDE    32 rows x G heads = 128 query vectors  keys shared by many rows; long prompts
    BIG     16 rows x G heads = 64                 keys shared by several rows; short prompts
    SMALL   one sequence's rows x G heads = 16     a sequence's own keys
    merge   rows with several parts                combined by log-sum-exp

The same kernel computes chunked prefill: a slice of n tokens is n rows of one sequence whose
lengths grow by one, so the causal mask is "keys below this row's length". `kernels.gpu.work_list`
plans the units; lengths live on the GPU, so a plan stays valid while tokens are appended. On
Hopper, `kernels.gpu.hopper_attention` runs BIG and WIDE. `kernels.reference` is the specification;
`engine.attention.gpu_backend` launches the kernels.

Shapes: T rows, H query heads, K KV heads, G = H / K, D head_dim, B blocks, S = 16 slots.
KV is one tensor [B, layers, 2, K, S, D], in which a block is contiguous. KV in int8 is
[B, layers, 2, K, S, D + 2] as `kernels.reference_int8` orders it: keys and values become the
queries' dtype, which holds them exactly, a key's scale multiplies its scores, and a value's its
probabilities; so no product is in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.dependent_launch import (
    dependent_options,
    gdc_launch_dependents,
    gdc_wait,
    prefer_max_shared_memory,
)
from kernels.gpu.work_list import HostPlan, TileConfig

try:  # Gluon is experimental; without it this file's kernel runs every tile class
    from kernels.gpu import hopper_attention

    HAS_GLUON = True
except ImportError:
    HAS_GLUON = False

LOG2E = 1.4426950408889634

FEW_ROW_HEADS = 1024
"""Most rows times heads for which the merge launches one program per head."""


@triton.jit
def _accumulate(
    q, kv, block_ids, first, end, shortest, growth, low, head_offset, value_offset,
    row_max, row_sum, acc, scale,
    GP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, BLOCK_STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SLOTS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, DP] over keys [first, end), `first` a multiple of KEYS.

    Row r sees keys below `shortest + r * growth`, with WINDOW from `low[r]` on; low [M]. Block ids
    are loaded one tile ahead: if the address of a KV load depended on a load of the same iteration,
    the loop could not be pipelined.
    """
    INT8: tl.constexpr = kv.dtype.element_ty == tl.int8
    halves = kv.to(tl.pointer_type(tl.float16))
    d = tl.arange(0, DP)
    n = tl.arange(0, KEYS)
    inside = (n % SLOTS) * D + head_offset
    which = n // SLOTS
    ids = tl.load(block_ids + first // SLOTS + which)
    for start in tl.range(first, end, KEYS, num_stages=STAGES):
        base = ids.to(tl.int64) * BLOCK_STRIDE + inside
        # With int8, where the scales of the keys lie, in halves.
        scales = (base - inside + head_offset + SLOTS * D) // 2 + n % SLOTS
        ids = tl.load(block_ids + (start + KEYS) // SLOTS + which)
        if D == DP:
            k = tl.load(kv + base[None, :] + d[:, None]).to(q.dtype)
            v = tl.load(kv + value_offset + base[:, None] + d[None, :]).to(q.dtype)
        else:
            real = d < D
            k = tl.load(kv + base[None, :] + d[:, None], mask=real[:, None], other=0.0).to(q.dtype)
            v = tl.load(
                kv + value_offset + base[:, None] + d[None, :], mask=real[None, :], other=0.0
            ).to(q.dtype)
        scores = tl.dot(q, k)
        if INT8:
            scores *= tl.load(halves + scales).to(tl.float32)[None, :]
        factor = scale
        if CAP > 0:
            # cap * tanh(s / cap) of s = scores * scale, all in base 2.
            turned = tl.exp2(scores * (scale * (2 * 1.4426950408889634 / CAP)))
            scores = CAP - 2 * CAP / (turned + 1)
            factor = 1.0
        if MASKED:
            if CAUSAL:
                length = shortest + tl.arange(0, q.shape[0]) // GP * growth
                scores = tl.where((start + n)[None, :] < length[:, None], scores, float("-inf"))
            else:
                scores = tl.where((start + n < shortest)[None, :], scores, float("-inf"))
        if WINDOW:
            scores = tl.where((start + n)[None, :] >= low[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        # Without a window a live row sees a key in its first tile, so its maximum is finite. Lanes
        # without a row compute NaN and are never stored.
        base_max = new_max
        if WINDOW:
            base_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - base_max)
        p = tl.exp2(scores * factor - base_max[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if INT8:
            p *= tl.load(halves + value_offset // 2 + scales).to(tl.float32)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def store_unit(
    part_out, part_lse, out, sinks, row_head, head, g, live, there, part, direct, rows_total,
    row_max, row_sum, acc,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write a unit's rows to `out`, where it is `direct`, with their sinks; else as a part."""
    d = tl.arange(0, DP)
    if direct != 0:
        if SINKS:
            # A sink takes its share of the softmax and adds nothing.
            sink = tl.load(sinks + head * G + g, mask=live, other=0.0).to(tl.float32)
            sink = sink * 1.4426950408889634
            top = tl.maximum(row_max, sink)
            share = tl.exp2(row_max - top)
            acc = acc * share[:, None]
            row_sum = row_sum * share + tl.exp2(sink - top)
        divisor = tl.where(row_sum > 0, row_sum, 1.0)
        tl.store(
            out + row_head[:, None] * D + d[None, :],
            (acc / divisor[:, None]).to(out.dtype.element_ty),
            mask=there,
        )
    else:
        divisor = tl.where(row_sum > 0, row_sum, 1.0)
        slot = part * rows_total * H + row_head
        tl.store(
            part_out + slot[:, None].to(tl.int64) * D + d[None, :],
            acc / divisor[:, None],
            mask=there,
        )
        lse = tl.where(row_sum > 0, row_max + tl.log2(divisor), float("-inf"))
        tl.store(part_lse + slot, lse, mask=live)


@triton.jit
def _do_unit(
    q_ptr, kv, part_out, part_lse, out, count, tiles, u, block_ids, lengths_ptr, rows_total, scale,
    sinks,
    G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, KEYS: tl.constexpr, BLOCK_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr, PEEL: tl.constexpr, CAUSAL: tl.constexpr, DP: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute unit `u` of the work list: a tile's rows against its keys, for one KV head."""
    HEAD: tl.constexpr = SLOTS * (D + 2) if kv.dtype.element_ty == tl.int8 else SLOTS * D
    tile = tiles + (tl.load(count + 1) + u // (H // G)) * 8
    head = u % (H // G)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
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
    row_head = (row0 + r) * H + head * G + g
    there = live[:, None] if D == DP else live[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row_head[:, None] * D + d[None, :], mask=there, other=0.0)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    begin = 0
    low = 0
    if WINDOW > 0:
        # Tiles of keys that no row sees any more are skipped, so a plan stays right while its rows
        # move on.
        low = tl.load(lengths_ptr + row0 + r, mask=r < rows, other=1 << 30) - first_key - WINDOW
        begin = tl.maximum(tl.min(low, 0), 0) // KEYS * KEYS
    if PEEL and WINDOW == 0:
        begin = shortest // KEYS * KEYS
        row_max, row_sum, acc = _accumulate(
            q, kv, ids, 0, begin, shortest, growth, low, head * HEAD, VALUE_OFFSET,
            row_max, row_sum, acc, scale, GP, False, CAUSAL, False, CAP,
            BLOCK_STRIDE, D, DP, SLOTS, KEYS, STAGES,
        )  # fmt: skip
    row_max, row_sum, acc = _accumulate(
        q, kv, ids, begin, end, shortest, growth, low, head * HEAD, VALUE_OFFSET,
        row_max, row_sum, acc, scale, GP, True, CAUSAL, WINDOW > 0, CAP,
        BLOCK_STRIDE, D, DP, SLOTS, KEYS, 1 if PEEL and WINDOW == 0 else STAGES,
    )  # fmt: skip
    store_unit(
        part_out, part_lse, out, sinks, row_head, head, g, live, there, part, direct, rows_total,
        row_max, row_sum, acc, G, H, D, DP, SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_total"])
def tree_attention_kernel(
    q_ptr, kv, part_out, part_lse, out, count, tiles, queue, block_ids, lengths_ptr, rows_total,
    scale, sinks,
    G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    SLOTS: tl.constexpr, KEYS: tl.constexpr, BLOCK_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr, PEEL: tl.constexpr, CAUSAL: tl.constexpr, DP: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    WAITS: tl.constexpr, TRIGGERS: tl.constexpr, FOLLOWS: tl.constexpr, QUEUE: tl.constexpr,
):  # fmt: skip
    """Compute all units of a tile class, dealt to programs back and forth or from a queue.

    `count`: the class's number of tiles, and the index of its first in `tiles`, longest first.

    q, out: [T, H, D] bf16 or fp32, out written where a unit is direct. part_out: [parts, T, H, D]
    fp32, part_lse: [parts, T, H] fp32 base 2, written otherwise. lengths: [T] int32, keys up to and
    with each row's own, of which it sees the last WINDOW, or all with 0. CAP > 0: scores s become
    CAP * tanh(s / CAP). sinks: [H], read with SINKS. DP: D, rounded up to a power of two. Dependent
    launches: the kernel WAITS for its predecessor, then TRIGGERS its
    successor; or it FOLLOWS a kernel that has waited, runs beside it and ends after it. QUEUE:
    programs take units from `queue`, so that programs that start late do less; it is 0 before, and
    the merge resets it.
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
                rows_total, scale, sinks, G, GP, M, H, D, SLOTS, KEYS, BLOCK_STRIDE, VALUE_OFFSET,
                STAGES, PEEL, CAUSAL, DP, WINDOW, CAP, SINKS,
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
                rows_total, scale, sinks, G, GP, M, H, D, SLOTS, KEYS, BLOCK_STRIDE, VALUE_OFFSET,
                STAGES, PEEL, CAUSAL, DP, WINDOW, CAP, SINKS,
            )  # fmt: skip
    if FOLLOWS:
        gdc_wait()


@triton.jit(do_not_specialize=["rows_total"])
def merge_parts_kernel(
    part_out, part_lse, out, parts_of_row, queue, rows_total, sinks,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over parts of softmax(lse) * part, over the sink too. Grid (T, H / HEADS).

    Log-sum-exps first, then the parts, with PARTS loads unrolled so that they are in flight
    together. A row with fewer than two parts was written directly and is skipped. Resets `queue` to
    0 for the next layer.
    """
    if WAITS:
        gdc_wait()
    row = tl.program_id(0)
    if row + tl.program_id(1) == 0:
        tl.store(queue, 0)
    parts = tl.load(parts_of_row + row)
    if parts > 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        row_head = row * H + head
        d = tl.arange(0, DP)
        real = (d < D)[None, :]
        stride = rows_total * H
        best = tl.full([HEADS], float("-inf"), tl.float32)
        sink = best
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            best = sink
        for first in range(0, parts, PARTS):
            for k in tl.static_range(PARTS):
                there = row_head * 0 + (first + k) < parts
                place = part_lse + (first + k) * stride + row_head
                best = tl.maximum(best, tl.load(place, mask=there, other=float("-inf")))
        total = tl.zeros([HEADS], tl.float32)
        if SINKS:
            total = tl.exp2(sink - best)
        acc = tl.zeros([HEADS, DP], tl.float32)
        for first in range(0, parts, PARTS):
            for k in tl.static_range(PARTS):
                there = row_head * 0 + (first + k) < parts
                slot = (first + k) * stride + row_head
                lse = tl.load(part_lse + slot, mask=there, other=float("-inf"))
                weight = tl.exp2(lse - best)
                values = tl.load(
                    part_out + slot[:, None].to(tl.int64) * D + d[None, :],
                    mask=there[:, None] if D == DP else there[:, None] & real,
                    other=0.0,
                )
                total += weight
                acc += values * weight[:, None]
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        if D == DP:
            tl.store(out + row_head[:, None] * D + d[None, :], result)
        else:
            tl.store(out + row_head[:, None] * D + d[None, :], result, mask=real)


class WorkList:
    """A `HostPlan` on the GPU, at fixed addresses and for a fixed grid, as CUDA graphs need.

    One pinned host buffer, and one copy per plan of the part in use: per class its number of tiles
    and the index of its first; parts per row; the tiles of all classes, one class after the other.
    `capacity_tiles`: most tiles of a plan.
    """

    def __init__(
        self,
        configs: tuple[TileConfig, ...],
        multiprocessors: int,
        rows_max: int,
        capacity_tiles: int,
        device: torch.device,
    ) -> None:
        self.configs = configs
        self.multiprocessors = multiprocessors
        self.capacity_tiles = capacity_tiles
        self.rows_max = rows_max
        # Each section starts at a multiple of 16 bytes, so that loads are vectorised.
        self._rows_at = 4 * len(configs)
        self._tiles_at = self._rows_at + -(-rows_max // 4) * 4
        total = self._tiles_at + capacity_tiles * 8
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._view = self._host.numpy()
        is_cuda = device.type == "cuda"
        self._copied = torch.cuda.Event() if is_cuda else None
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    def load(self, plan: HostPlan) -> None:
        """Write a plan to the host buffer and copy it without a wait, on its device's stream.

        Waits until the copy before has read the host buffer, which in practice it has. Raises
        ValueError for a plan with more than `capacity_tiles` tiles.
        """
        total = plan.tile_count
        if total > self.capacity_tiles:
            raise ValueError(f"too many tiles: {total}; limit {self.capacity_tiles}")
        if self._copied is not None:
            self._copied.synchronize()
        parts = self._view[self._rows_at : self._tiles_at]
        rows = len(plan.parts_of_row)
        parts[:rows] = plan.parts_of_row
        parts[rows:] = 1  # padding rows have one part, so nothing to merge
        first, end = 0, self._tiles_at
        for i, work in enumerate(plan.work):
            assert work.config is self.configs[i]
            self._view[4 * i : 4 * i + 2] = (len(work.tiles), first)
            first += len(work.tiles)
            begin, end = end, end + work.tiles.size
            self._view[begin:end] = work.tiles.reshape(-1)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)

    @property
    def parts_of_row(self) -> torch.Tensor:
        """[rows_max] int32 on the GPU; see `HostPlan`."""
        return self._device[self._rows_at : self._tiles_at]

    @property
    def tiles(self) -> torch.Tensor:
        """The tiles of all classes on the GPU, flat."""
        return self._device[self._tiles_at :]

    def count(self, i: int) -> torch.Tensor:
        """Return class i's number of tiles, and the index of its first, on the GPU."""
        return self._device[4 * i : 4 * i + 2]


class PartialOutputs:
    """Scratch for rows with several parts: outputs [parts_max, rows_max, H, D] fp32 and their
    log-sum-exps, and the counter of the unit queue."""

    def __init__(
        self, parts_max: int, rows_max: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.out = torch.zeros(parts_max * rows_max * heads * head_dim, device=device)
        self.lse = torch.zeros(parts_max * rows_max * heads, device=device)
        self.queue = torch.zeros(1, dtype=torch.int32, device=device)


def tree_attention(
    q: torch.Tensor, kv: torch.Tensor, layer: int, work: WorkList, block_ids: torch.Tensor,
    lengths: torch.Tensor, out: torch.Tensor, parts: PartialOutputs, *,
    classes: tuple[int, ...] = (0, 1, 2), causal: bool = True, dependent: bool = False,
    merge: bool = True, scale: float = 0.0, window: int = 0, cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write attention of q [T, H, D] over one layer of kv [B, layers, 2, K, S, D] to out [T, H, D];
    of int8, D + 2.

    `block_ids` int32: the flat table that units index, padded by 8 entries, each a valid block.
    `lengths` [T] int32: keys that each row sees. Launches the tile `classes` and the merge, each
    with its full grid, so that the same launches fit every plan. Every block of the pool must hold
    finite values: tiles read whole runs of slots and mask afterwards. `causal` may be False when
    every slice has one row, `merge` when no row has two parts. `dependent`: launches overlap
    (Hopper), in the order of `classes`: with big tiles first, each class starts while the class
    before ends; with small tiles first (2, 1), which are bound by memory, big tiles run beside them
    from a queue. `scale` of the scores, 1 / sqrt(D) where it is 0; `window`, `cap` and `sinks` [H]
    as in `kernels.reference.paged_attention`; the work of a layer with a window is planned with it.
    Writes out and parts.
    """
    rows, heads, head_dim = q.shape
    group, scale = heads // kv.shape[3], LOG2E * (scale or 1 / math.sqrt(head_dim))
    rule = _rule(head_dim, window, cap, sinks)
    hand_scheduled = _can_run_by_hand(q, kv, rule)
    pdl = dependent_options(q) if dependent else {}
    launches = class_launches(work, classes, pdl, dependent=dependent)
    for config, index, programs, flags, is_beside in launches:
        given = (
            parts.out, parts.lse, out, work.count(index), work.tiles, parts.queue, block_ids,
            lengths, rows,
        )  # fmt: skip
        options: dict[str, Any] = {
            "G": group, "GP": 1 << (group - 1).bit_length(), "H": heads, "D": head_dim,
            "SLOTS": kv.shape[4], "KEYS": config.keys, "CAUSAL": causal, **flags,
        }  # fmt: skip
        if hand_scheduled and config.vectors >= hopper_attention.VECTORS:
            kernel = hopper_attention.launch(
                programs, config.vectors, q, kv, layer, given, scale, **options
            )
        else:
            kernel = tree_attention_kernel[(programs,)](
                q, kv[:, layer], *given, scale, lengths if sinks is None else sinks, **rule,
                M=config.vectors, BLOCK_STRIDE=kv.stride(0), VALUE_OFFSET=kv.stride(2),
                STAGES=config.stages, PEEL=config.peel, num_warps=config.warps, **options,
            )  # fmt: skip
        if pdl and is_beside:
            prefer_max_shared_memory(kernel.function)
    if merge:
        merge_parts(out, work, parts, sinks, pdl)


class ClassLaunch(NamedTuple):
    """How a tile class is launched: its place in the work list, programs, and flags of the
    kernel."""

    config: TileConfig
    class_index: int
    programs: int
    flags: dict[str, Any]
    is_beside: bool


def class_launches(
    work: WorkList, classes: tuple[int, ...], pdl: dict[str, Any], *, dependent: bool
) -> Iterator[ClassLaunch]:
    """Yield the launches of tile `classes` in order; see `tree_attention` for what overlaps."""
    last = len(classes) - 1
    overlap = dependent and last > 0
    beside = overlap and classes[0] > classes[1]
    for order, index in enumerate(classes):
        config = work.configs[index]
        flags: dict[str, Any] = {
            "WAITS": bool(pdl) and order == 0, "TRIGGERS": bool(pdl) and order < last,
            "FOLLOWS": bool(pdl) and order > 0, "QUEUE": beside and order == 1,
            **(pdl if order == 0 or overlap else {}),
        }  # fmt: skip
        per_sm = config.programs_beside if beside else config.programs_per_sm
        yield ClassLaunch(config, index, work.multiprocessors * per_sm, flags, beside)


def _rule(head_dim: int, window: int, cap: float, sinks: torch.Tensor | None) -> dict[str, Any]:
    """Return what a layer's attention adds to the kernel's compiled shape."""
    return {
        "DP": triton.next_power_of_2(head_dim),
        "WINDOW": window,
        "CAP": cap * LOG2E,
        "SINKS": sinks is not None,
    }


def _can_run_by_hand(q: torch.Tensor, kv: torch.Tensor, rule: dict[str, Any]) -> bool:
    """Return whether Hopper's kernel computes the layer: it has no rule but a scale."""
    is_plain = not (rule["WINDOW"] or rule["CAP"] or rule["SINKS"])
    return is_plain and HAS_GLUON and hopper_attention.can_run(q, kv)


def merge_parts(
    out: torch.Tensor,
    work: WorkList,
    parts: PartialOutputs,
    sinks: torch.Tensor | None,
    pdl: dict[str, Any],
) -> None:
    """Launch the merge of out [T, H, D]. With few rows: one head per program and many parts in
    flight; else up to 8 heads per program."""
    rows, heads, head_dim = out.shape
    few = rows * heads <= FEW_ROW_HEADS
    heads_step = 1 if few else min(8, heads & -heads)
    merge_parts_kernel[(rows, heads // heads_step)](
        parts.out, parts.lse, out, work.parts_of_row, parts.queue, rows,
        work.parts_of_row if sinks is None else sinks,
        H=heads, D=head_dim, DP=triton.next_power_of_2(head_dim), HEADS=heads_step,
        PARTS=8 if few else 4, SINKS=sinks is not None, WAITS=bool(pdl),
        num_warps=1 if few else 4, **pdl,
    )  # fmt: skip
