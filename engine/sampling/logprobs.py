"""Logprobs as clients see them: the model's own distribution, before any setting of the sampler.

It knows nothing of sequences or requests. `engine.sampling.sampler` calls it for drawn tokens and
for those of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.api import SampledToken, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Reported for a token that the model holds impossible: minus infinity has no JSON."""

_ALTERNATIVES_MAX: Final = 20


def logprob_entries(
    logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[SampledToken]:
    """Each token with its logprob and the best alternatives, by the model's own distribution.

    logits: [rows, vocab] fp32, not written. The same number of alternatives is searched whatever
    was asked, so that ties do not fall differently beside other rows.
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
    """A finite logprob: minus infinity and NaN (a row of nothing but these) become the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
