"""Top-k, top-p and min-p: a draw among the tokens that they keep.

Tokens are ordered by falling logit, then rising id. Each filter keeps a prefix of that order, so
the shortest prefix applies. Top-p's total is over the tokens that top-k keeps. The module knows no
sequence and no penalty. The draw goes row by row: a row fits the CPU's cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api import Sampling

NATS_MAX: Final = 80.0
"""Logits more than this many nats below the best one have weight 0."""

_WIDTHS: Final = (2.0, 4.0, 8.0, 16.0, 32.0)
"""Candidates lie within so many nats of the best token; tried in order."""

_MARGIN: Final = 1e-3
"""Candidates reach this much beyond what the filters keep, so that rounding excludes none."""


def has_filters(sampling: Sampling, vocab_size: int) -> bool:
    """Return whether top-k, top-p or min-p may exclude a token."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0


@dataclass(frozen=True, slots=True)
class Filter:
    """A sequence's filters. `top_k` 0: off."""

    inverse_temperature: float
    top_k: int
    top_p: float
    floor: float
    """Min-p, in nats below the best token."""

    @classmethod
    def of(cls, sampling: Sampling, inverse_temperature: float, vocab_size: int) -> Filter:
        """Return the filters of a sequence."""
        top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        return cls(inverse_temperature, top_k, sampling.top_p, floor)


def draw_filtered(row: Tensor, peak: float, given: Filter, uniform: float, scratch: Tensor) -> int:
    """Return one token. row: [vocab] fp32, not written; `peak`: its best logit, finite; `scratch`:
    [vocab] fp32, written.

    Cost: one pass per width tried, some over all weights for top-p, and a sort of the candidates.
    """
    token_ids, total = _candidates(row, peak, given, scratch)
    values = row.numpy()[token_ids]
    values = np.minimum(values - np.float32(peak), 0) * np.float32(given.inverse_temperature)
    # Sorting values and places as one integer is stable, and several times as fast as an argsort.
    keys = np.abs(values).view(np.uint32).astype(np.uint64) << 32
    keys = np.sort(keys | np.arange(len(values), dtype=np.uint64))
    if given.top_k:
        keys = keys[: given.top_k]
    values = -(keys >> 32).astype(np.uint32).view(np.float32).astype(np.float64)
    weights = torch.from_numpy(values).exp().numpy()
    sums = weights.cumsum()
    kept = len(values)
    if given.top_p < 1:
        share = given.top_p * (sums[-1] if total is None else total)
        kept = min(kept, int(np.count_nonzero(sums - weights < share)))
    if given.floor > -math.inf:
        kept = min(kept, int(np.count_nonzero(values >= given.floor)))
    kept = max(kept, 1)
    place = first_above(sums[:kept], uniform * sums[kept - 1])
    return int(token_ids[int(keys[place] & 0xFFFFFFFF)])


def _candidates(
    row: Tensor, peak: float, given: Filter, scratch: Tensor
) -> tuple[npt.NDArray[np.int64], float | None]:
    """Return the ids of all tokens above a threshold low enough for the filters, and the weight of
    all tokens, or None if top-p does not need it."""
    logits = row.numpy()
    scale = given.inverse_temperature
    total: float | None = None
    weights = logits
    if given.top_k == 0 and given.top_p < 1:
        torch.sub(row, peak, out=scratch)
        scaled = scratch.mul_(scale).clamp_(-NATS_MAX, 0.0).exp_()
        weights, total = scaled.numpy(), float(scaled.sum(dtype=torch.float64))
    for width in _WIDTHS:
        beyond = width * (1 + _MARGIN)
        if total is None:
            near = logits >= np.float32(peak - beyond / scale)
            enough = given.top_p == 1 and width >= -given.floor
            if given.top_k:
                inside = logits >= np.float32(peak - width / scale)
                enough = enough or int(np.count_nonzero(inside)) >= given.top_k
        else:
            near = weights >= np.float32(math.exp(-beyond))
            enough = width >= -given.floor
            share = given.top_p * total * (1 + _MARGIN)
            enough = enough or float(np.dot(weights, near)) > share
        if enough:
            return np.flatnonzero(near), total
    possible = np.flatnonzero(logits > -math.inf)  # few under a mask
    distances = (row[torch.from_numpy(possible)] - peak).mul_(scale).numpy()
    return possible[distances > -math.inf], total


def first_above(sums: npt.NDArray[np.float64], target: float) -> int:
    """Return the index of the first running sum above the target, at most that of the last sum
    that grew.

    sums: [n], ascending. The bound matters when rounding lifts the target to the total: later
    tokens have weight 0.
    """
    return int(min(np.searchsorted(sums, target, "right"), np.searchsorted(sums, sums[-1], "left")))
