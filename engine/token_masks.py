"""Masks on logits: what a grammar leaves out gets a weight of nothing, what it allows stays.

Plain tensor work on whatever device the logits are on; it knows no grammar and no sampler state.
`engine.sampler` calls it before every other change of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.plan import Mask

LEAST: Final = -1e30
"""Where an allowed token's logit is lower it is taken to be this, so that it beats what is left
out even where the model gives it nothing; a hundredfold penalty on it is still a number."""


def expand(masks: Tensor, vocab_size: int) -> Tensor:
    """Bits to bools. masks: [rows, words] int32. Gives [rows, vocab_size] bool, same device."""
    if masks.device.type == "cpu":
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, :vocab_size]).bool()
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits_there = (masks[:, :, None] >> places) & 1
    return bits_there.flatten(1)[:, :vocab_size].bool()


def restricted(logits: Tensor, sequence_ids: Sequence[int], masks: Mapping[int, Mask]) -> Tensor:
    """The logits under the masks of those sequences that have one; `logits` itself without any.

    logits: [rows, vocab] fp32, not written. A copy of them all, and O(vocab) per row masked. Waits
    for nothing.
    """
    rows = [row for row, sequence_id in enumerate(sequence_ids) if sequence_id in masks]
    if not rows:
        return logits
    packed = torch.from_numpy(np.stack([masks[sequence_ids[row]] for row in rows]))
    if logits.is_cuda:
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
    allowed = expand(packed, logits.shape[1])
    limited = logits.clone()
    limited[rows] = torch.where(allowed, limited[rows].clamp(min=LEAST), -torch.inf)
    return limited
