"""Logprobs as clients see them: of the model's own distribution, before the sampler changes it.

It knows no sequence and no request. `engine.sampling.sampler` calls it for sampled tokens and for
prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.api import SampledToken, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Reported logprob of a token with probability 0, because JSON has no minus infinity."""

_ALTERNATIVES_MAX: Final = 20
"""Most alternatives that `engine.api.Sampling` allows."""


def logprob_entries(
    logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[SampledToken]:
    """Return each row's token with its logprob and its `tops[row]` best alternatives.

    logits: [rows, vocab] fp32, not written. The search always takes the same number of
    alternatives, so that ties do not depend on the other rows of the batch.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    picked = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own = logprobs.gather(1, picked[:, None])[:, 0].tolist()
    alternatives: list[tuple[TokenLogprob, ...]] = [()] * len(token_ids)
    if any(tops):
        best = logprobs.topk(min(_ALTERNATIVES_MAX, logprobs.shape[1]), dim=-1)
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        for i, (values, ids) in enumerate(rows):
            ranked = sorted(zip((-_floored(v) for v in values), ids, strict=True))
            alternatives[i] = tuple(TokenLogprob(token, -v) for v, token in ranked[: tops[i]])
    return [
        SampledToken(token_id, _floored(logprob), top)
        for token_id, logprob, top in zip(token_ids, own, alternatives, strict=True)
    ]


def _floored(logprob: float) -> float:
    """Return a finite logprob: minus infinity, and NaN of an all-NaN row, become the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
