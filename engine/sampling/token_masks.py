"""Token masks on logits: minus infinity for tokens that a grammar forbids.

It knows no grammar and no sampler state. `engine.sampling.sampler` applies masks after biases and
penalties: a forbidden token is minus infinity under any penalties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.plan import Mask

ALLOWED_LOGIT_MIN: Final = -1e30
"""Lower logits of allowed tokens become this, so that an allowed token beats forbidden ones even
if the model gives it probability 0."""

ALLOWED_LOGIT_MAX: Final = 3e38
"""Infinite logits of allowed tokens become this, because infinity minus infinity is NaN."""

_BYTE_BIAS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0),
    np.float32(-np.inf),
).astype(np.float32)
"""[256, 8] fp32: the bias of eight logits by the value of a mask's byte."""


def mask_bias(masks: Tensor, vocab_size: int) -> Tensor:
    """Return the bias of each logit: 0 for an allowed token, minus infinity for a forbidden one.

    masks: [rows, words] int32 on the CPU. Returns [rows, vocab_size] fp32. A look-up of bytes takes
    a twelfth of the time of a masked fill.
    """
    bias = np.take(_BYTE_BIAS, masks.numpy().view(np.uint8), axis=0)
    return torch.from_numpy(bias.reshape(len(masks), -1)[:, :vocab_size])


def apply_masks(logits: Tensor, sequence_ids: Sequence[int], masks: Mapping[int, Mask]) -> Tensor:
    """Return the logits with the masks of their sequences applied, or `logits` itself if no
    sequence has a mask.

    logits: [rows, vocab] fp32 on the CPU, not written. Cost: a copy of all rows, and O(vocab) per
    masked row.
    """
    rows = [row for row, sequence_id in enumerate(sequence_ids) if sequence_id in masks]
    if not rows:
        return logits
    packed = torch.from_numpy(np.stack([masks[sequence_ids[row]] for row in rows]))
    bias = mask_bias(packed, logits.shape[1])
    if len(rows) == len(sequence_ids):
        return logits.clamp(min=ALLOWED_LOGIT_MIN, max=ALLOWED_LOGIT_MAX).add_(bias)
    masked = logits.clone()
    masked[rows] = logits[rows].clamp_(min=ALLOWED_LOGIT_MIN, max=ALLOWED_LOGIT_MAX).add_(bias)
    return masked
