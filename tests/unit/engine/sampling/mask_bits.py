"""Token masks of tests."""

from __future__ import annotations

import numpy as np

from engine.plan import Mask


def mask_of(vocab: int, *token_ids: int) -> Mask:
    """Return the mask over `vocab` tokens that allows the given ones."""
    mask = np.zeros(-(-vocab // 32), np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)
