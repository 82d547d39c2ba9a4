"""Choosing a token on the device: bias, temperature, top-k, top-p, min-p, without sorting.

One kernel turns a row of logits into a token. The kept set of top-k and top-p is "every token at
or above a threshold"; the threshold is found by bisecting the bit pattern of the weight, which
takes 30 passes over a row that stays in L2, no matter what k or p is. Ties with the threshold are
all kept, where a sort would keep an arbitrary one of them. The draw is an inverse CDF in vocabulary
order with one uniform number per row, given by the caller: the same number gives the same token
whatever else is in the batch. Twin: `engine.sampling.sampler`'s torch path. Called from
`engine.sampling.sampler`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PEAK_MAX = tl.constexpr(3e38)
"""Nearly the greatest fp32: what plus infinity counts as, in `engine.sampling.sampler` too."""


@triton.jit
def _weights(logits, row, start, V: tl.constexpr, STEP: tl.constexpr, best, inverse_temperature):
    v = start + tl.arange(0, STEP)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    below = x - best
    # Plus infinity lies above the finite best.
    below = tl.where(below > 0, 0.0, below)
    return v, tl.exp(below * inverse_temperature)


@triton.jit
def _mass(logits, row, threshold, best, inverse_temperature, V: tl.constexpr, STEP: tl.constexpr):
    """(sum, count) of weights at or above `threshold`."""
    total = tl.zeros([STEP], tl.float32)
    count = tl.zeros([STEP], tl.int32)
    for start in range(0, V, STEP):
        _v, w = _weights(logits, row, start, V, STEP, best, inverse_temperature)
        keep = w >= threshold
        total += tl.where(keep, w, 0.0)
        count += keep.to(tl.int32)
    return tl.sum(total, 0), tl.sum(count, 0)


@triton.jit
def _sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, out,
    V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([STEP], float("-inf"), tl.float32)
    which = tl.zeros([STEP], tl.int32)
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        better = (x > best) | (x != x)  # what is no number stays, since nothing is above it
        best = tl.where(better, x, best)
        which = tl.where(better, v, which)
    # Whether a maximum sees what is no number depends on the hardware, so they are counted.
    broken = tl.sum((best != best).to(tl.int32), 0)
    top = tl.max(best, 0)
    has_token = (broken == 0) & (top > float("-inf"))
    # Beside an infinite best all weights would be no numbers.
    peak = tl.minimum(top, PEAK_MAX)
    # The lowest id among equals, as argmax gives.
    token = tl.min(tl.where(best == top, which, V), 0)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & has_token:
        inverse = 1.0 / tl.maximum(temperature, 1e-6)
        k = tl.load(top_ks + row).to(tl.int32)
        p = tl.load(top_ps + row)
        floor = tl.load(min_ps + row)
        threshold = floor
        if k > 0:
            # The largest threshold that keeps at least k: weights are in [0, 1], whose bit
            # patterns order as integers.
            low = 0
            high = 0x3F800000
            while low < high:
                middle = (low + high + 1) // 2
                at = tl.full([1], middle, tl.int32).to(tl.float32, bitcast=True)
                _m, count = _mass(logits, row, tl.sum(at, 0), peak, inverse, V, STEP)
                if count >= k:
                    low = middle
                else:
                    high = middle - 1
            cut = tl.full([1], low, tl.int32).to(tl.float32, bitcast=True)
            threshold = tl.maximum(threshold, tl.sum(cut, 0))
        if p < 1.0:
            whole, _c = _mass(logits, row, threshold, peak, inverse, V, STEP)
            low = 0
            high = 0x3F800000
            while low < high:
                middle = (low + high + 1) // 2
                at = tl.full([1], middle, tl.int32).to(tl.float32, bitcast=True)
                edge = tl.maximum(tl.sum(at, 0), threshold)
                mass, _c = _mass(logits, row, edge, peak, inverse, V, STEP)
                if mass >= p * whole:
                    low = middle
                else:
                    high = middle - 1
            cut = tl.full([1], low, tl.int32).to(tl.float32, bitcast=True)
            threshold = tl.maximum(threshold, tl.sum(cut, 0))
        total, _c = _mass(logits, row, threshold, peak, inverse, V, STEP)
        target = tl.load(uniforms + row) * total
        before = 0.0
        drawn = V
        last = 0
        for start in range(0, V, STEP):
            v, w = _weights(logits, row, start, V, STEP, peak, inverse)
            w = tl.where((w >= threshold) & (v < V), w, 0.0)
            running = before + tl.cumsum(w, 0)
            drawn = tl.minimum(drawn, tl.min(tl.where((running > target) & (w > 0), v, V), 0))
            last = tl.maximum(last, tl.max(tl.where(w > 0, v, 0), 0))
            before += tl.sum(w, 0)
        # Rounding can leave the target a hair above the last running sum.
        token = tl.where(drawn < V, drawn, last)
    token = tl.where(has_token, token, -1)
    tl.store(out + row, token.to(out.dtype.element_ty))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, uniforms: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """out [R] int32 written: one token per row of logits [R, V] (fp32 or bf16).

    temperatures, top_ps, min_ps, uniforms [R] fp32, top_ks [R] whole numbers (0: off). Temperature
    0 is argmax, lowest id on ties. A row with a NaN in it, or with nothing above minus infinity,
    gives -1. Tokens whose logits are plus infinity share the draw among themselves. Greedy rows
    cost one pass over V, plain temperature three, top-k and top-p about 30 more each, out of L2.
    """
    rows, vocab = logits.shape
    _sample[(rows,)](
        logits, temperatures, top_ks, top_ps, min_ps, uniforms, out,
        V=vocab, STEP=min(4096, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
