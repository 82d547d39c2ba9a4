"""What stands around the rules: the gated norm of what heads read, and copies of kept states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.recurrent.step import sigmoid

MOVED_WORDS = 4096
"""Words of 4 bytes that a program copies."""


@triton.jit
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, eps, G: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, STEP: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """STEP groups of a row a program. Grid: (rows, G / STEP)."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * STEP + tl.arange(0, STEP)
    d = tl.arange(0, DP)
    live = (g < G)[:, None] & (d < D)[None, :]
    at = g[:, None] * D + d[None, :]
    x = tl.load(x_ptr + row * (G * D) + at, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=live, other=0.0).to(tl.float32)
    gate *= sigmoid(gate)
    if GATE_FIRST:
        x *= gate
        weight = tl.load(weight_ptr + at, mask=live, other=0.0).to(tl.float32)
    else:
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    x *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight
    if not GATE_FIRST:
        x *= gate
    tl.store(out_ptr + row * (G * D) + at, x.to(out_ptr.dtype.element_ty), mask=live)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gate_first: bool
) -> torch.Tensor:
    """Return `kernels.reference.gated_norm` of x [T, G, D] in gate's dtype, [T, G * D].

    gate [T, G * D]: rows of any stride. Arithmetic in fp32.
    """
    rows, groups, channels = x.shape
    out = gate.new_empty(rows, groups * channels)
    padded = triton.next_power_of_2(channels)
    step = max(1, min(triton.next_power_of_2(groups), 1024 // padded))
    _gated_norm[(rows, triton.cdiv(groups, step))](
        x, gate, weight, out, gate.stride(0), eps, G=groups, D=channels, DP=padded, STEP=step,
        GATE_FIRST=gate_first, num_warps=min(8, max(4, padded // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _move(
    pool_ptr, states_ptr, moves_ptr, words, block_words, state_stride, TO_POOL: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Copy a part of a state. Grid: (moves, block_words / STEP)."""
    move = moves_ptr + tl.program_id(0) * 3
    block = tl.load(move).to(tl.int64)
    seat = tl.load(move + 1).to(tl.int64)
    start = tl.load(move + 2)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    live = (at < block_words) & (start + at < words)
    in_pool = pool_ptr + block * block_words + at
    in_states = states_ptr + seat * state_stride + start + at
    if TO_POOL:
        tl.store(in_pool, tl.load(in_states, mask=live), mask=live)
    else:
        tl.store(in_states, tl.load(in_pool, mask=live), mask=live)


def move_states(
    pool: torch.Tensor, states: torch.Tensor, moves: torch.Tensor, *, to_pool: bool
) -> None:
    """Copy states to blocks of the pool, or from them.

    pool [B, block words], states [seats, words], int32, one of them written. moves [M, 3] int32:
    block, seat, and the first word of the state that the block has.
    """
    words, block_words = states.shape[1], pool.shape[1]
    _move[(len(moves), triton.cdiv(block_words, MOVED_WORDS))](
        pool, states, moves, words, block_words, states.stride(0), TO_POOL=to_pool,
        STEP=MOVED_WORDS, num_warps=8,
    )  # fmt: skip
