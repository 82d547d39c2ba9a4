"""Short convolutions over the rows of a step, and their windows: `kernels.reference_convolution`.

In a decoding step one launch computes and updates; in a step with prompts a second one updates the
windows, which the rows of the first read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.recurrent.step import StepRuns, sigmoid

COLUMNS, ROWS, WARPS = 256, 8, 4
"""Channels of a program, its rows in a step with prompts, and its warps."""


@triton.jit
def _convolve(
    x_ptr, state_ptr, taps_ptr, bias_ptr, out_ptr, seats_ptr, firsts_ptr, rows, seats_max,
    x_stride, state_stride, C: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """BR rows a program, BC channels. Grid: (rows / BR, channels / BC)."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (c < C)[None, :]
    seat = tl.load(seats_ptr + r, mask=r < rows, other=seats_max)
    live = (seat < seats_max)[:, None] & inside
    row = r.to(tl.int64)[:, None]
    source = x_ptr + row * x_stride + c[None, :]
    window = state_ptr + seat.to(tl.int64)[:, None] * state_stride + c[None, :]
    total = tl.zeros([BR, BC], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c[None, :], mask=inside, other=0.0).to(tl.float32)
    before = r[:, None]  # rows of the run before each
    if LISTED:
        before -= tl.load(firsts_ptr + r, mask=r < rows, other=0)[:, None]
    own = tl.load(source, mask=live, other=0.0)
    for tap in tl.static_range(W - 1):
        if LISTED:  # from the step if the run reaches so far back, else from the window
            is_kept = before < W - 1 - tap
            kept = tl.load(window + (before + tap) * C, mask=live & is_kept, other=0.0)
            new = tl.load(source - (W - 1 - tap) * x_stride, mask=live & ~is_kept, other=0.0)
            x = tl.where(is_kept, kept, new)
        else:
            x = tl.load(window + tap * C, mask=live, other=0.0)
            if tap:
                tl.store(window + (tap - 1) * C, x, mask=live)
        weight = tl.load(taps_ptr + c[None, :] * W + tap, mask=inside, other=0.0)
        total += x.to(tl.float32) * weight.to(tl.float32)
    if not LISTED:
        tl.store(window + (W - 2) * C, own, mask=live)
    weight = tl.load(taps_ptr + c[None, :] * W + W - 1, mask=inside, other=0.0)
    kind = out_ptr.dtype.element_ty
    total = (total + own.to(tl.float32) * weight.to(tl.float32)).to(kind)
    if SILU:
        wide = total.to(tl.float32)
        total = (wide * sigmoid(wide)).to(kind)
    total = tl.where(live, total, 0.0)
    tl.store(out_ptr + row * C + c[None, :], total, mask=(r < rows)[:, None] & inside)


@triton.jit
def _keep_windows(
    x_ptr, state_ptr, seats_ptr, run_firsts, run_kept, x_stride, state_stride,
    C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Move a run's last inputs into its window, without its drafts. Grid: (runs, channels / BC)."""
    run = tl.program_id(0)
    count = tl.load(run_kept + run)
    if count == 0:
        return
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < C
    first = tl.load(run_firsts + run).to(tl.int64)
    seat = tl.load(seats_ptr + first).to(tl.int64)
    window = state_ptr + seat * state_stride + c
    for place in tl.static_range(W - 1):  # in order: each is read before it is written
        at = tl.zeros([BC], tl.int32) + (count - (W - 1) + place)
        kept = tl.load(window + (at + W - 1) * C, mask=inside & (at < 0), other=0.0)
        new = tl.load(x_ptr + (first + at) * x_stride + c, mask=inside & (at >= 0), other=0.0)
        tl.store(window + place * C, tl.where(at < 0, kept, new), mask=inside)


def convolve(
    x: torch.Tensor, windows: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None,
    runs: StepRuns, *, silu: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the convolution of a step's inputs x [T, C], with SiLU behind it if asked; moves the
    last inputs of each run before its drafts into its window.

    x: rows of any stride. windows [seats, W - 1, C], written; taps [C, W]; bias [C]. Sums in fp32,
    rounded to x's dtype before SiLU and after.
    """
    rows, channels = x.shape
    width = taps.shape[1]
    out = x.new_empty(rows, channels)
    is_listed = runs.firsts is not None
    columns = triton.cdiv(channels, COLUMNS)
    at_once = ROWS if is_listed else 1
    _convolve[(triton.cdiv(rows, at_once), columns)](
        x, windows, taps, taps if bias is None else bias, out, runs.seats,
        runs.seats if runs.firsts is None else runs.firsts, rows, runs.seats_max, x.stride(0),
        windows.stride(0), C=channels, W=width, BR=at_once, BC=COLUMNS,
        HAS_BIAS=bias is not None, SILU=silu, LISTED=is_listed, num_warps=WARPS,
    )  # fmt: skip
    if is_listed:
        firsts, _, kept, _ = runs.lists
        _keep_windows[(len(kept), columns)](
            x, windows, runs.seats, firsts, kept, x.stride(0), windows.stride(0),
            C=channels, W=width, BC=COLUMNS, num_warps=2,
        )  # fmt: skip
    return out
