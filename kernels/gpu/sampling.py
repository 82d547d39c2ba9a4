"""Sampling a token on a GPU: temperature, top-k, top-p and min-p, without sorting.

One kernel turns a row of logits into a token. Top-k and top-p keep every token at or above a
threshold. The kernel finds the threshold by bisecting the bit pattern of the weight: 30 passes over
a row that stays in L2, for any k or p. All ties with the threshold are kept, where a sort would
keep an arbitrary one. The draw is an inverse CDF in vocabulary order with one uniform number per
row from the caller, so the token does not depend on the batch. `engine.sampling.sampler` is the
specification; `engine.sampling.gpu_sampler` launches the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PEAK_MAX = tl.constexpr(3e38)
"""Nearly the largest fp32: an infinite best logit is taken to be this, as in the full sampler."""


@triton.jit
def _weights(logits, row, start, V: tl.constexpr, STEP: tl.constexpr, best, inverse_temperature):
    v = start + tl.arange(0, STEP)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    below = x - best
    # Plus infinity is above the finite best.
    below = tl.where(below > 0, 0.0, below)
    return v, tl.exp(below * inverse_temperature)


@triton.jit
def _mass_above(
    logits, row, threshold, best, inverse_temperature, V: tl.constexpr, STEP: tl.constexpr
):
    """Return (sum, count) of the weights at or above `threshold`."""
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
    best_id = tl.zeros([STEP], tl.int32)
    for start in range(0, V, STEP):
        v = start + tl.arange(0, STEP)
        x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
        better = (x > best) | (x != x)  # a NaN stays, because no comparison with it is true
        best = tl.where(better, x, best)
        best_id = tl.where(better, v, best_id)
    # Whether a maximum propagates NaN depends on the hardware, so NaNs are counted.
    nan_count = tl.sum((best != best).to(tl.int32), 0)
    top = tl.max(best, 0)
    has_token = (nan_count == 0) & (top > float("-inf"))
    # With an infinite best all weights would be NaN.
    peak = tl.minimum(top, PEAK_MAX)
    # The lowest id among equals, as in argmax.
    token = tl.min(tl.where(best == top, best_id, V), 0)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & has_token:
        inverse = 1.0 / tl.maximum(temperature, 1e-6)
        k = tl.load(top_ks + row).to(tl.int32)
        p = tl.load(top_ps + row)
        floor = tl.load(min_ps + row)
        threshold = floor
        if k > 0:
            # The largest threshold that keeps at least k tokens. Weights are in [0, 1], where bit
            # patterns are ordered like integers.
            low = 0
            high = 0x3F800000
            while low < high:
                middle = (low + high + 1) // 2
                at = tl.full([1], middle, tl.int32).to(tl.float32, bitcast=True)
                _m, count = _mass_above(logits, row, tl.sum(at, 0), peak, inverse, V, STEP)
                if count >= k:
                    low = middle
                else:
                    high = middle - 1
            cut = tl.full([1], low, tl.int32).to(tl.float32, bitcast=True)
            threshold = tl.maximum(threshold, tl.sum(cut, 0))
        if p < 1.0:
            kept_mass, _c = _mass_above(logits, row, threshold, peak, inverse, V, STEP)
            low = 0
            high = 0x3F800000
            while low < high:
                middle = (low + high + 1) // 2
                at = tl.full([1], middle, tl.int32).to(tl.float32, bitcast=True)
                edge = tl.maximum(tl.sum(at, 0), threshold)
                mass, _c = _mass_above(logits, row, edge, peak, inverse, V, STEP)
                if mass >= p * kept_mass:
                    low = middle
                else:
                    high = middle - 1
            cut = tl.full([1], low, tl.int32).to(tl.float32, bitcast=True)
            threshold = tl.maximum(threshold, tl.sum(cut, 0))
        total, _c = _mass_above(logits, row, threshold, peak, inverse, V, STEP)
        target = tl.load(uniforms + row) * total
        before = 0.0
        chosen = V
        last = 0
        for start in range(0, V, STEP):
            v, w = _weights(logits, row, start, V, STEP, peak, inverse)
            w = tl.where((w >= threshold) & (v < V), w, 0.0)
            running = before + tl.cumsum(w, 0)
            chosen = tl.minimum(chosen, tl.min(tl.where((running > target) & (w > 0), v, V), 0))
            last = tl.maximum(last, tl.max(tl.where(w > 0, v, 0), 0))
            before += tl.sum(w, 0)
        # By rounding, the target can be slightly above the last running sum.
        token = tl.where(chosen < V, chosen, last)
    token = tl.where(has_token, token, -1)
    tl.store(out + row, token.to(out.dtype.element_ty))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    min_ps: torch.Tensor, uniforms: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write one token per row of logits [R, V] (fp32 or bf16) to out [R] int32.

    temperatures, top_ps, min_ps, uniforms [R] fp32, top_ks [R] integers (0: off). Temperature 0 is
    argmax, lowest id on ties. A row that contains a NaN, or nothing above minus infinity, gives -1.
    If logits are plus infinity, the draw is among these tokens, equally likely. Cost: greedy rows
    one pass over V, plain temperature three, top-k and top-p about 30 more each, from L2.
    """
    rows, vocab = logits.shape
    _sample[(rows,)](
        logits, temperatures, top_ks, top_ps, min_ps, uniforms, out,
        V=vocab, STEP=min(4096, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
