"""The gated delta rule over the rows of a step: `kernels.reference_delta`.

A run of a few rows is one read and one write of its states. A longer one is cut into chunks: their
triangular systems are solved side by side, then each head follows its chunks with the state in
registers. Shapes: T rows, KH key heads of D channels, H value heads of V, N chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.products import MULTIPROCESSORS
from kernels.gpu.recurrent.step import CHUNK, PRECISION, StepRuns, sigmoid, softplus

TOKEN_COLUMNS, TOKEN_WARPS = 64, 4
"""Value channels of a program, and its warps, in a run of a few rows."""
CHUNK_COLUMNS = 32
"""Value channels of a program that follows a run's chunks: 128 programs for 32 heads of 128."""
SYSTEM_WARPS, SOLVE_WARPS = 4, 4
"""Warps of a program that writes a chunk's system, and that solves it."""
MERGED = tl.constexpr("tf32")
"""Precision in which the inverses of blocks become a chunk's, which is then rounded further."""
NORM_EPS = tl.constexpr(1e-6)


class DeltaShape(NamedTuple):
    """Heads and channels of a layer."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


@triton.jit
def _unit(x, axis: tl.constexpr):
    """Return x with a length of about 1 along an axis of two, or x [D] itself."""
    scale = tl.rsqrt(tl.sum(x * x, axis) + NORM_EPS)
    if axis:
        scale = scale[:, None]
    return x * scale


@triton.jit
def _few(
    mixed_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, state_ptr, out_ptr, seats_ptr, run_firsts,
    run_counts, run_kept, run_chunks, seats_max, scale, mixed_stride, gate_stride, state_stride,
    KH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One run without chunks and value head a program, BV of its channels.
    Grid: (runs, H, V / BV)."""
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
    v = tl.program_id(2) * BV + tl.arange(0, BV)
    inside = v < V
    seat = tl.load(seats_ptr + row)
    if seat >= seats_max:
        out = out_ptr + (row * H + head) * V + v
        tl.store(out, tl.zeros([BV], out_ptr.dtype.element_ty), mask=inside)
        return
    d = tl.arange(0, DP)
    place = state_ptr + seat.to(tl.int64) * state_stride + head * (D * V)
    place += d[:, None] * V + v[None, :]
    live = (d < D)[:, None] & inside[None, :]
    state = tl.load(place, mask=live, other=0.0)
    own = mixed_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, out_ptr
    if LISTED:
        for _ in range(count):
            state = _row(
                *own, state, row, head, v, d, scale, mixed_stride, gate_stride, KH, H, D, V
            )
            row += 1
            kept -= 1
            if kept == 0:
                tl.store(place, state, mask=live)
    else:
        state = _row(*own, state, row, head, v, d, scale, mixed_stride, gate_stride, KH, H, D, V)
        tl.store(place, state, mask=live)


@triton.jit
def _row(
    mixed_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, out_ptr, state, row, head, v, d, scale,
    mixed_stride, gate_stride, KH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return the state [D, v] after a row, whose reading is written."""
    inside = v < V
    mixed = mixed_ptr + row * mixed_stride
    own = head // (H // KH) * D + d
    q = _unit(tl.load(mixed + own, mask=d < D, other=0.0).to(tl.float32), 0) * scale
    k = _unit(tl.load(mixed + KH * D + own, mask=d < D, other=0.0).to(tl.float32), 0)
    value = tl.load(mixed + 2 * KH * D + head * V + v, mask=inside, other=0.0).to(tl.float32)
    at = row * gate_stride + head
    beta = sigmoid(tl.load(beta_ptr + at).to(tl.float32))
    step = softplus(tl.load(decay_ptr + at).to(tl.float32) + tl.load(bias_ptr + head))
    fade = tl.exp(-tl.load(rate_ptr + head) * step)
    # Both sums are over the state as it was, so that they need not wait for each other.
    found = tl.sum(state * k[:, None], 0) * fade
    read = tl.sum(state * q[:, None], 0) * fade
    change = (value - found) * beta
    read += tl.sum(q * k, 0) * change
    out = out_ptr + (row * H + head) * V + v
    tl.store(out, read.to(out_ptr.dtype.element_ty), mask=inside)
    return state * fade + k[:, None] * change[None, :]


@triton.jit
def _gates(
    beta_ptr, decay_ptr, rate_ptr, bias_ptr, row, head, live, gate_stride,
):  # fmt: skip
    """Return beta of a chunk's rows, their decays added up to each, and the sum of all."""
    at = row * gate_stride + head
    beta = sigmoid(tl.load(beta_ptr + at, mask=live, other=0.0).to(tl.float32))
    beta = tl.where(live, beta, 0.0)
    step = tl.load(decay_ptr + at, mask=live, other=0.0).to(tl.float32) + tl.load(bias_ptr + head)
    decay = tl.where(live, -tl.load(rate_ptr + head) * softplus(step), 0.0)
    return beta, tl.cumsum(decay, 0), tl.sum(decay, 0)


@triton.jit
def _systems(
    mixed_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, system_ptr, q_ptr, k_ptr, own_ptr,
    fade_ptr, chunk_firsts, chunk_counts, scale, mixed_stride, gate_stride,
    KH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the system of a chunk and value head, C rows, and what needs no solution of it.
    Grid: (chunks, H)."""
    chunk = tl.program_id(0)
    count = tl.load(chunk_counts + chunk)
    if count == 0:
        return
    head = tl.program_id(1)
    kind = q_ptr.dtype.element_ty
    t, d = tl.arange(0, C), tl.arange(0, DP)
    live = t < count
    row = tl.load(chunk_firsts + chunk).to(tl.int64) + t
    beta, by, last = _gates(beta_ptr, decay_ptr, rate_ptr, bias_ptr, row, head, live, gate_stride)
    place = mixed_ptr + row[:, None] * mixed_stride + (head // (H // KH) * D + d)[None, :]
    there = live[:, None] & (d < D)[None, :]
    base = (chunk * H + head).to(tl.int64)
    square = base * C * C + t[:, None] * C + t[None, :]
    wide = base * C * DP + t[:, None] * DP + d[None, :]
    earlier = t[:, None] - t[None, :]
    ratio = tl.exp(tl.minimum(by[:, None] - by[None, :], 0.0))
    k = _unit(tl.load(place + KH * D, mask=there, other=0.0).to(tl.float32), 1)
    tl.store(k_ptr + wide, (k * tl.exp(last - by)[:, None]).to(kind))
    own_k = k.to(kind)
    system = tl.dot(own_k, tl.trans(own_k), input_precision=PRECISION) * ratio * beta[:, None]
    tl.store(system_ptr + square, tl.where(earlier > 0, system, 0.0))
    q = _unit(tl.load(place, mask=there, other=0.0).to(tl.float32), 1) * scale
    tl.store(q_ptr + wide, (q * tl.exp(by)[:, None]).to(kind))
    reads = tl.dot(q.to(kind), tl.trans(own_k), input_precision=PRECISION) * ratio
    tl.store(own_ptr + square, tl.where(earlier >= 0, reads, 0.0).to(kind))
    tl.store(fade_ptr + base, tl.exp(last))


@triton.jit
def _invert_blocks(system_ptr, chunk_counts, H: tl.constexpr, C: tl.constexpr):
    """Replace a block of 16 on the diagonal of a system by the inverse of 1 + block, row by row.

    One warp, so that no sum waits for another warp. Grid: (chunks, H, C / 16).
    """
    chunk = tl.program_id(0)
    if tl.load(chunk_counts + chunk) == 0:
        return
    base = (chunk * H + tl.program_id(1)).to(tl.int64)
    i = tl.arange(0, 16)
    place = system_ptr + base * C * C + tl.program_id(2) * 16 * (C + 1)
    place += i[:, None] * C + i[None, :]
    block = -tl.load(place)
    solved = block
    for own in range(1, 16):
        is_row = (i == own)[:, None]
        line = tl.sum(tl.where(is_row, block, 0.0), 0)
        line += tl.sum(line[:, None] * solved, 0)
        solved = tl.where(is_row, line[None, :], solved)
    tl.store(place, solved + tl.where(i[:, None] == i[None, :], 1.0, 0.0))


@triton.jit
def _solve(
    mixed_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, system_ptr, w_ptr, u_ptr, chunk_firsts,
    chunk_counts, mixed_stride, gate_stride,
    KH: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Solve the system of a chunk and value head, C rows, whose blocks on the diagonal are
    inverted. Grid: (chunks, H)."""
    chunk = tl.program_id(0)
    count = tl.load(chunk_counts + chunk)
    if count == 0:
        return
    head = tl.program_id(1)
    kind = w_ptr.dtype.element_ty
    t = tl.arange(0, C)
    base = (chunk * H + head).to(tl.int64)
    system = tl.load(system_ptr + base * C * C + t[:, None] * C + t[None, :])
    block, column = t[:, None] // 16, t[None, :] // 16
    solved = tl.where(block == column, system, 0.0)
    rest = tl.where(block > column, system, 0.0)
    # The fourth power of the blocks below the diagonal is zero.
    unit_matrix = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    below = tl.dot(solved, rest, input_precision=MERGED)
    twice = tl.dot(below, below, input_precision=MERGED) + unit_matrix
    whole = tl.dot(unit_matrix - below, twice, input_precision=MERGED)
    inverse = tl.dot(whole, solved, input_precision=MERGED)

    live = t < count
    row = tl.load(chunk_firsts + chunk).to(tl.int64) + t
    beta, by, _ = _gates(beta_ptr, decay_ptr, rate_ptr, bias_ptr, row, head, live, gate_stride)
    source = mixed_ptr + row[:, None] * mixed_stride
    d, v = tl.arange(0, DP), tl.arange(0, VP)
    place = source + (KH * D + head // (H // KH) * D + d)[None, :]
    there = live[:, None] & (d < D)[None, :]
    k = _unit(tl.load(place, mask=there, other=0.0).to(tl.float32), 1).to(kind)
    of_keys = (inverse * (beta * tl.exp(by))[None, :]).to(kind)
    w = tl.dot(of_keys, k, input_precision=PRECISION)
    tl.store(w_ptr + base * C * DP + t[:, None] * DP + d[None, :], w.to(kind))
    place = source + (2 * KH * D + head * V + v)[None, :]
    value = tl.load(place, mask=live[:, None] & (v < V)[None, :], other=0.0).to(kind)
    u = tl.dot((inverse * beta[None, :]).to(kind), value, input_precision=PRECISION)
    tl.store(u_ptr + base * C * VP + t[:, None] * VP + v[None, :], u.to(kind))


@triton.jit
def _follow(
    w_ptr, u_ptr, q_ptr, k_ptr, own_ptr, fade_ptr, state_ptr, out_ptr, seats_ptr, run_firsts,
    run_counts, run_chunks, runs, state_stride,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Follow the chunks of runs, one value head, BV channels. Grid: (H, V / BV, runs at once)."""
    head = tl.program_id(0)
    kind = w_ptr.dtype.element_ty
    t, d = tl.arange(0, C), tl.arange(0, DP)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = v < V
    live = (d < D)[:, None] & inside[None, :]
    wide = t[:, None] * DP + d[None, :]
    columns = t[:, None] * VP + v[None, :]
    square = t[:, None] * C + t[None, :]
    for run in range(tl.program_id(2), runs, tl.num_programs(2)):
        count, chunk = tl.load(run_counts + run), tl.load(run_chunks + run)
        if (count > 0) & (chunk >= 0):
            first = tl.load(run_firsts + run).to(tl.int64)
            seat = tl.load(seats_ptr + first).to(tl.int64)
            place = state_ptr + seat * state_stride + head * (D * V) + d[:, None] * V + v[None, :]
            state = tl.load(place, mask=live, other=0.0)
            base = chunk.to(tl.int64) * H + head
            for start in range(0, count, C):
                w = tl.load(w_ptr + base * C * DP + wide)
                q = tl.load(q_ptr + base * C * DP + wide)
                k = tl.load(k_ptr + base * C * DP + wide)
                own = tl.load(own_ptr + base * C * C + square)
                u = tl.load(u_ptr + base * C * VP + columns).to(tl.float32)
                fade = tl.load(fade_ptr + base)
                known = state.to(kind)
                change = (u - tl.dot(w, known, input_precision=PRECISION)).to(kind)
                read = tl.dot(q, known, input_precision=PRECISION)
                read += tl.dot(own, change, input_precision=PRECISION)
                state = state * fade + tl.dot(tl.trans(k), change, input_precision=PRECISION)
                row = first + start + t
                target = out_ptr + row[:, None] * (H * V) + (head * V + v)[None, :]
                is_real = (start + t < count)[:, None] & inside[None, :]
                tl.store(target, read.to(out_ptr.dtype.element_ty), mask=is_real)
                base += H
            tl.store(place, state, mask=live)


def delta(
    mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor,
    dt_bias: torch.Tensor, states: torch.Tensor, runs: StepRuns, shape: DeltaShape,
    columns: int = TOKEN_COLUMNS, warps: int = TOKEN_WARPS,
) -> torch.Tensor:  # fmt: skip
    """Return what the rows of a step read, [T, H, V] in mixed's dtype; updates the states of their
    sequences.

    mixed [T, 2 * KH * D + H * V], beta, decay [T, H] of one row stride, rate, dt_bias [H] fp32: as
    `kernels.reference_delta.delta_inputs` takes them. states [seats, H, D, V] fp32, written. Runs
    with chunks multiply in mixed's dtype, with sums in fp32; their scratch takes 88 KB a chunk and
    head of 128 channels in bf16. `columns`, `warps`: of a program of a run without.
    """
    key_heads, heads, key_dim, value_dim = shape
    assert beta.stride(0) == decay.stride(0), "both are columns of one matrix"
    is_listed = runs.firsts is not None
    # Padding rows of a step with prompts are in no run, and what they read is zero.
    made = mixed.new_zeros if is_listed else mixed.new_empty
    out = made(len(mixed), heads, value_dim)
    firsts, counts, kept, chunks = runs.lists
    padded, scale = triton.next_power_of_2(max(16, key_dim)), key_dim**-0.5
    width = triton.next_power_of_2(max(16, value_dim))
    sizes = {"H": heads, "D": key_dim, "DP": padded, "V": value_dim}
    columns = min(columns, width)
    _few[(len(counts), heads, triton.cdiv(value_dim, columns))](
        mixed, beta, decay, rate, dt_bias, states, out, runs.seats, firsts, counts, kept, chunks,
        runs.seats_max, scale, mixed.stride(0), beta.stride(0), states.stride(0),
        KH=key_heads, BV=columns, LISTED=is_listed, **sizes, num_warps=warps,
    )  # fmt: skip
    if runs.chunk_firsts is None or runs.chunk_counts is None or not len(runs.chunk_firsts):
        return out
    count = len(runs.chunk_firsts)
    w, q, k = (mixed.new_empty(count, heads, CHUNK, padded) for _ in range(3))
    u = mixed.new_empty(count, heads, CHUNK, width)
    own = mixed.new_empty(count, heads, CHUNK, CHUNK)
    fade = torch.empty(count, heads, dtype=torch.float32, device=mixed.device)
    system = own.new_empty(own.shape, dtype=torch.float32)
    grid = count, heads
    gates = mixed, beta, decay, rate, dt_bias, system
    strides = mixed.stride(0), beta.stride(0)
    lists = runs.chunk_firsts, runs.chunk_counts
    keys = {"KH": key_heads, "H": heads, "D": key_dim, "DP": padded, "C": CHUNK}
    _systems[grid](*gates, q, k, own, fade, *lists, scale, *strides, **keys, num_warps=SYSTEM_WARPS)
    _invert_blocks[(*grid, CHUNK // 16)](system, runs.chunk_counts, H=heads, C=CHUNK, num_warps=1)
    _solve[grid](
        *gates, w, u, *lists, *strides, **keys, V=value_dim, VP=width, num_warps=SOLVE_WARPS
    )
    columns = min(CHUNK_COLUMNS, width)
    programs = heads, triton.cdiv(value_dim, columns)
    # Most runs have few rows: a program for each of them would take long to end.
    at_once = min(len(counts), -(-MULTIPROCESSORS // (programs[0] * programs[1])))
    _follow[(*programs, at_once)](
        w, u, q, k, own, fade, states, out, runs.seats, firsts, counts, chunks, len(counts),
        states.stride(0), VP=width, BV=columns, C=CHUNK, **sizes, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
