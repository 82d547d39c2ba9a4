"""The rule of Mamba-2 over the rows of a step: `kernels.reference_mamba2`.

A run of a few rows is one read and one write of its states; a longer one is followed in chunks,
with the state in registers. Shapes: T rows, H heads of P channels with N states each, in G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.recurrent.step import CHUNK, PRECISION, StepRuns, softplus

CHANNELS = 32
"""Channels of a head in a program."""


class MambaShape(NamedTuple):
    """Heads, channels, states to a channel, and groups of a layer."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int


@triton.jit
def _few(
    mixed_ptr, step_ptr, rate_ptr, bias_ptr, through_ptr, state_ptr, out_ptr, seats_ptr,
    run_firsts, run_counts, run_kept, run_chunks, seats_max, mixed_stride, step_stride,
    state_stride, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    G: tl.constexpr, BP: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One run without chunks and head a program, BP of its channels. Grid: (runs, H, P / BP)."""
    first = tl.program_id(0)
    count = 1
    kept = 1
    if LISTED:
        count = tl.load(run_counts + first)
        if (count == 0) | (tl.load(run_chunks + first) >= 0):
            return
        kept = tl.load(run_kept + first)
        first = tl.load(run_firsts + first)
    row = first.to(tl.int64)
    head = tl.program_id(1)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    inside = p < P
    seat = tl.load(seats_ptr + row)
    if seat >= seats_max:
        out = out_ptr + (row * H + head) * P + p
        tl.store(out, tl.zeros([BP], out_ptr.dtype.element_ty), mask=inside)
        return
    n = tl.arange(0, NP)
    place = state_ptr + seat.to(tl.int64) * state_stride + head * (P * N)
    place += p[:, None] * N + n[None, :]
    live = inside[:, None] & (n < N)[None, :]
    state = tl.load(place, mask=live, other=0.0)
    own = mixed_ptr, step_ptr, rate_ptr, bias_ptr, through_ptr, out_ptr
    if LISTED:
        for _ in range(count):
            state = _row(*own, state, row, head, p, n, mixed_stride, step_stride, H, P, N, G)
            row += 1
            kept -= 1
            if kept == 0:
                tl.store(place, state, mask=live)
    else:
        state = _row(*own, state, row, head, p, n, mixed_stride, step_stride, H, P, N, G)
        tl.store(place, state, mask=live)


@triton.jit
def _row(
    mixed_ptr, step_ptr, rate_ptr, bias_ptr, through_ptr, out_ptr, state, row, head, p, n,
    mixed_stride, step_stride, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return the state [p, N] after a row, whose reading is written."""
    inside = p < P
    mixed = mixed_ptr + row * mixed_stride
    group = H * P + head // (H // G) * N + n
    b = tl.load(mixed + group, mask=n < N, other=0.0).to(tl.float32)
    c = tl.load(mixed + G * N + group, mask=n < N, other=0.0).to(tl.float32)
    x = tl.load(mixed + head * P + p, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(step_ptr + row * step_stride + head).to(tl.float32) + tl.load(bias_ptr + head)
    step = softplus(step)
    fade = tl.exp(-tl.load(rate_ptr + head) * step)
    state = state * fade + (x * step)[:, None] * b[None, :]
    read = tl.sum(state * c[None, :], 1) + x * tl.load(through_ptr + head)
    out = out_ptr + (row * H + head) * P + p
    tl.store(out, read.to(out_ptr.dtype.element_ty), mask=inside)
    return state


@triton.jit
def _follow(
    mixed_ptr, step_ptr, rate_ptr, bias_ptr, through_ptr, state_ptr, out_ptr, seats_ptr,
    run_firsts, run_counts, run_chunks, mixed_stride, step_stride, state_stride,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, G: tl.constexpr,
    BP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Follow the chunks of a run, one head, BP channels. Grid: (runs, H, P / BP)."""
    run = tl.program_id(0)
    count = tl.load(run_counts + run)
    if (count == 0) | (tl.load(run_chunks + run) < 0):
        return
    head = tl.program_id(1)
    kind = mixed_ptr.dtype.element_ty
    first = tl.load(run_firsts + run).to(tl.int64)
    seat = tl.load(seats_ptr + first).to(tl.int64)
    t, n = tl.arange(0, C), tl.arange(0, NP)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    inside = p < P
    place = state_ptr + seat * state_stride + head * (P * N) + p[None, :] * N + n[:, None]
    there = inside[None, :] & (n < N)[:, None]
    state = tl.load(place, mask=there, other=0.0)  # [N, P], as products take it
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    through = tl.load(through_ptr + head)
    group = (H * P + head // (H // G) * N + n)[None, :]
    is_own = t[:, None] >= t[None, :]
    for start in range(0, count, C):
        live = start + t < count
        row = first + start + t
        source = mixed_ptr + row[:, None] * mixed_stride
        known = live[:, None] & (n < N)[None, :]
        b = tl.load(source + group, mask=known, other=0.0)
        c = tl.load(source + G * N + group, mask=known, other=0.0)
        is_real = live[:, None] & inside[None, :]
        x = tl.load(source + (head * P + p)[None, :], mask=is_real, other=0.0).to(tl.float32)
        step = tl.load(step_ptr + row * step_stride + head, mask=live, other=0.0).to(tl.float32)
        step = tl.where(live, softplus(step + bias), 0.0)
        by, last = tl.cumsum(-rate * step, 0), tl.sum(-rate * step, 0)
        ratio = tl.exp(tl.minimum(by[:, None] - by[None, :], 0.0))
        own = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        own = tl.where(is_own, own * ratio, 0.0).to(kind)
        written = x * step[:, None]
        read = tl.dot(c, state.to(kind), input_precision=PRECISION) * tl.exp(by)[:, None]
        read += tl.dot(own, written.to(kind), input_precision=PRECISION) + x * through
        left = (written * tl.exp(last - by)[:, None]).to(kind)
        state = state * tl.exp(last) + tl.dot(tl.trans(b), left, input_precision=PRECISION)
        target = out_ptr + row[:, None] * (H * P) + (head * P + p)[None, :]
        tl.store(target, read.to(out_ptr.dtype.element_ty), mask=is_real)
    tl.store(place, state, mask=there)


def mamba2(
    mixed: torch.Tensor, step: torch.Tensor, rate: torch.Tensor, dt_bias: torch.Tensor,
    through: torch.Tensor, states: torch.Tensor, runs: StepRuns, shape: MambaShape,
) -> torch.Tensor:  # fmt: skip
    """Return what the rows of a step read, and their inputs times `through` [H], [T, H, P] in
    mixed's dtype; updates the states of their sequences.

    mixed [T, H * P + 2 * G * N], step [T, H] of any row stride, rate, dt_bias [H] fp32: as
    `kernels.reference_mamba2.mamba2_inputs` takes them. states [seats, H, P, N] fp32, written. Runs
    with chunks multiply in mixed's dtype, with sums in fp32.
    """
    heads, head_dim, state_dim, groups = shape
    is_listed = runs.firsts is not None
    made = mixed.new_zeros if is_listed else mixed.new_empty
    out = made(len(mixed), heads, head_dim)
    firsts, counts, kept, chunks = runs.lists
    channels = min(CHANNELS, triton.next_power_of_2(max(16, head_dim)))
    sizes = {
        "H": heads, "P": head_dim, "N": state_dim, "G": groups, "BP": channels,
        "NP": triton.next_power_of_2(max(16, state_dim)),
    }  # fmt: skip
    grid = (len(counts), heads, triton.cdiv(head_dim, channels))
    given = mixed, step, rate, dt_bias, through, states, out, runs.seats, firsts, counts
    strides = mixed.stride(0), step.stride(0), states.stride(0)
    _few[grid](
        *given, kept, chunks, runs.seats_max, *strides, LISTED=is_listed, **sizes, num_warps=4
    )
    if runs.chunk_firsts is not None and len(runs.chunk_firsts):
        # 8 warps read beyond their shared memory at 16 states in fp32 (Triton 3.6).
        warps = 8 if state_dim >= 128 else 4
        _follow[grid](*given, chunks, *strides, C=CHUNK, **sizes, num_warps=warps, num_stages=2)
    return out
