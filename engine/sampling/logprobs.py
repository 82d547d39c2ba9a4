"""Logprobs as clients see them: of the model's own distribution, before the sampler changes it.

It knows no sequence and no request. The samplers call it for sampled tokens, the CPU runner for
prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api import SampledToken, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Reported logprob of a token with probability 0, because JSON has no minus infinity."""

ALTERNATIVES_MAX: Final = 20
"""Most alternatives that `engine.api.Sampling` allows."""

_PIECE: Final = 256
"""Tokens per piece of a row in the search for the likeliest."""


def logprob_entries(
    logits: Iterable[Tensor], token_ids: Sequence[int], tops: Sequence[int]
) -> list[SampledToken]:
    """Return each row's token with its logprob and its `tops[row]` best alternatives.

    logits: rows of [vocab] fp32 on the CPU, not written. Equal logprobs are ordered by id.
    """
    entries: list[SampledToken] = []
    for row, token_id, top in zip(logits, token_ids, tops, strict=True):
        logprobs = torch.log_softmax(row, dim=-1).numpy()
        likely = _likeliest(logprobs) if top else np.zeros(0, np.int64)
        own = float(logprobs[token_id])
        entries.append(
            sampled_token(token_id, own, logprobs[likely].tolist(), likely.tolist(), top)
        )
    return entries


def _likeliest(logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the ids of some tokens with the likeliest among them; of equal ones, the lowest ids.

    The best of each piece of the row give a limit that enough tokens reach.
    """
    if len(logprobs) <= ALTERNATIVES_MAX:
        return np.arange(len(logprobs))
    pieces = np.maximum.reduceat(logprobs, np.arange(0, len(logprobs), _PIECE))
    if len(pieces) < ALTERNATIVES_MAX:
        pieces = logprobs
    limit = np.partition(pieces, -ALTERNATIVES_MAX)[-ALTERNATIVES_MAX]
    equal = np.flatnonzero(logprobs == limit)[:ALTERNATIVES_MAX]
    return np.concatenate([np.flatnonzero(logprobs > limit), equal])


def sampled_token(
    token_id: int, logprob: float, best: Sequence[float], token_ids: Sequence[int], top: int
) -> SampledToken:
    """Return a token with its logprob and the `top` likeliest of the tokens given.

    best, token_ids: logprobs and ids of at least these tokens. Equal logprobs are ordered by id.
    """
    alternatives: tuple[TokenLogprob, ...] = ()
    if top:
        ranked = sorted(zip((-_floored(v) for v in best), token_ids, strict=True))
        alternatives = tuple(TokenLogprob(token, -v) for v, token in ranked[:top])
    return SampledToken(token_id, _floored(logprob), alternatives)


def _floored(logprob: float) -> float:
    """Return a finite logprob: minus infinity, and NaN of an all-NaN row, become the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
