"""Sums over the GPUs of one engine: each reads its peers' parts, adds the residual, and norms.

One kernel and one meeting a sum, over plain peer addresses. Parts lie in buffers that all lanes
address; a lane that has written its part raises its flag at every peer, and waits for theirs. No
buffer is used by two meetings in a row, so that one meeting a sum is enough: a peer that has come
to a meeting has read all that it wanted of the one before. A flag is the number of meetings so far,
so nothing is taken back, and a CUDA graph may hold the launch. `kernels.reference_lanes` specifies
the sums, `tests/unit/kernels/test_meetings.py` the protocol. Multicast is never used.

A wait ends after `limit` polls: then `failed` is set, on the device and on the host, and no later
wait of the lane polls. What the launch computed means nothing.
T rows, C channels, N columns of a lane, V of all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from msgspec import Struct

from kernels.gpu.dependent_launch import gdc_wait
from kernels.gpu.fused_ops import dependent_rows, store_normed

GATHER_PROGRAMS = 16
"""Programs that gather one row: each waits for its own flags."""

GATHER_STEP = 1024
"""Columns that a program copies at once."""


class Meeting(Struct, frozen=True, eq=False):
    """What a lane needs to meet its peers, on its device.

    Slots: programs of a launch that meet at once.
    """

    lane: int
    lanes: int
    flags: torch.Tensor
    """[lanes] int64: the address of each lane's flags [slots, lanes] int32. Flag (slot, peer) is
    the number of meetings to which the peer has come there. Written by peers."""
    counts: torch.Tensor
    """[slots] int32: meetings of this lane; written."""
    failed: torch.Tensor
    """[1] int32: not zero once a wait has ended without its peer; written."""
    told: torch.Tensor
    """[1] int32 in pinned host memory: the same; written."""


@triton.jit
def _meet(flags, counts, failed, told, slot, lane, limit, LANES: tl.constexpr):
    """Tell every peer that this program has come, and wait until all have."""
    number = tl.atomic_add(counts + slot, 1, sem="relaxed", scope="gpu") + 1
    budget = tl.where(tl.load(failed) == 0, limit, 0)
    for peer in tl.static_range(LANES):
        if peer != lane:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            # Behind all that earlier launches have written: the part.
            tl.atomic_xchg(theirs + slot * LANES + lane, number, sem="release", scope="sys")
    own = tl.load(flags + lane).to(tl.pointer_type(tl.int32)) + slot * LANES
    for peer in tl.static_range(LANES):
        if peer != lane:
            polls = 0
            seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
            while (number - seen > 0) & (polls < budget):  # also where both have wrapped around
                seen = tl.atomic_add(own + peer, 0, sem="acquire", scope="sys")
                polls += 1
            if number - seen > 0:
                tl.store(failed, 1)
                tl.store(told, 1)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["lane", "limit"])
def _sum_parts(
    parts, residual_ptr, weight_ptr, out_ptr, scales_ptr, eps, flags, counts, failed, told, lane,
    limit, C: tl.constexpr, CP: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    ADD: tl.constexpr, NORM: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    if WAITS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if limit > 0:
        _meet(flags, counts, failed, told, tl.program_id(0), lane, limit, LANES)
    kind = residual_ptr.dtype.element_ty
    c = tl.arange(0, CP)
    inside = c < C
    x = tl.zeros([CP], tl.float32)
    for peer in tl.static_range(LANES):
        part = tl.load(parts + peer).to(tl.pointer_type(kind))
        part = tl.multiple_of(part, 16)
        x += tl.load(part + row * C + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * C + c, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(kind)
    tl.store(residual_ptr + row * C + c, rounded, mask=inside)
    if NORM:
        store_normed(
            rounded.to(tl.float32), row, c, inside, weight_ptr, out_ptr, scales_ptr, eps, kind, C,
            CP, GROUPS,
        )  # fmt: skip


def sum_parts(
    parts: torch.Tensor, meeting: Meeting, limit: int, total: torch.Tensor, *, add: bool,
    weight: torch.Tensor | None = None, out: torch.Tensor | None = None, eps: float = 0.0,
    scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """total [T, C] = the sum of all lanes' parts, and of `total` with `add`; out [T, C] =
    rms_norm(total) * weight, if given. total and out written.

    parts [lanes] int64: the address of each lane's part [T, C], of total's dtype. `limit`: polls
    until a wait fails; 0: nothing meets, the caller has ordered the launches. `scales`: as of
    `residual_rms_norm`. One program a row, T at most the meeting's slots.
    """
    rows, channels = total.shape
    assert rows <= len(meeting.counts), "more rows than slots"
    padded = triton.next_power_of_2(channels)
    pdl = dependent_rows(total)
    _sum_parts[(rows,)](
        parts, total, total if weight is None else weight, total if out is None else out,
        total if scales is None else scales, eps, meeting.flags, meeting.counts, meeting.failed,
        meeting.told, meeting.lane, limit, C=channels, CP=padded, LANES=meeting.lanes,
        GROUPS=0 if scales is None else scales.shape[1], ADD=add, NORM=weight is not None,
        WAITS=bool(pdl), num_warps=warps_of(padded), **pdl,
    )  # fmt: skip


def warps_of(padded: int) -> int:
    """Return the warps of a program that sums a row of so many channels."""
    return 16 if padded >= 8192 else min(8, max(1, padded // 512))


@triton.jit(do_not_specialize=["lane", "limit"])
def _gather_parts(
    parts, out_ptr, flags, counts, failed, told, lane, limit, N: tl.constexpr, LANES: tl.constexpr,
    PROGRAMS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if limit > 0:
        slot = tl.program_id(0) * PROGRAMS + program
        _meet(flags, counts, failed, told, slot, lane, limit, LANES)
    for peer in tl.static_range(LANES):
        part = tl.load(parts + peer).to(tl.pointer_type(out_ptr.dtype.element_ty))
        for start in range(program * STEP, N, PROGRAMS * STEP):
            c = start + tl.arange(0, STEP)
            x = tl.load(part + row * N + c, mask=c < N)
            tl.store(out_ptr + (row * LANES + peer) * N + c, x, mask=c < N)


def gather_parts(parts: torch.Tensor, meeting: Meeting, limit: int, out: torch.Tensor) -> None:
    """out [T, V] = all lanes' parts [T, N] side by side, written. Arguments as of `sum_parts`; T
    times `GATHER_PROGRAMS` at most the meeting's slots."""
    rows, columns = out.shape
    assert rows * GATHER_PROGRAMS <= len(meeting.counts), "more programs than slots"
    options: dict[str, Any] = {"num_warps": 4}
    _gather_parts[(rows, GATHER_PROGRAMS)](
        parts, out, meeting.flags, meeting.counts, meeting.failed, meeting.told, meeting.lane,
        limit, N=columns // meeting.lanes, LANES=meeting.lanes, PROGRAMS=GATHER_PROGRAMS,
        STEP=GATHER_STEP, **options,
    )  # fmt: skip


KERNELS = {"sum": _sum_parts, "gather": _gather_parts}
"""The kernels by what they do, to be compiled without a device."""
