"""A prediction: what a request's client expects as the answer, and where the answer stands in it.

The answer follows the prediction token by token. Where it parts, its last tokens are looked up near
that place, so drafts go on behind what was changed, put in or left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from engine.api import PREDICTION, Namespace
from engine.drafts.text_places import ORDERS, places_after
from engine.scheduler.sequence import Sequence

WINDOW_TOKENS = 2_048
"""How far from the last place they are looked for, to both sides: an edit moves text by less."""


class Prediction:
    """One prediction and one answer."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._tokens = array("i", token_ids)
        self._at = 0
        self._is_lost = False

    def extend(self, token_ids: Iterable[int]) -> None:
        """Follow further tokens of the answer. O(tokens)."""
        for token in token_ids:
            if self._is_lost or self._at == len(self._tokens) or self._tokens[self._at] != token:
                self._is_lost = True
            else:
                self._at += 1

    def propose(self, tail: list[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that follow the answer's place. O(window) if that is lost.

        `tail`: the last tokens before, of which `ORDERS` are read.
        """
        if self._is_lost:
            for order in ORDERS:
                place = self._find(tail[-order:]) if len(tail) >= order else None
                if place is not None:
                    self._at, self._is_lost = place, False
                    break
            else:
                return []
        return self._tokens[self._at : self._at + limit].tolist()

    def _find(self, context: list[int]) -> int | None:
        """Return the first place from here on that follows `context`, else the last one before."""
        start, end = max(0, self._at - WINDOW_TOKENS), self._at + WINDOW_TOKENS
        places = places_after(self._tokens, context, start, end)
        if not len(places):
            return None
        ahead = int(np.searchsorted(places, self._at))
        return int(places[min(ahead, len(places) - 1)])


class PredictionSource:
    """Drafts from the predictions of requests, each for the first of the request's samples."""

    name = PREDICTION

    def __init__(self) -> None:
        self._live: dict[int, tuple[Sequence, Prediction]] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence, with what it has of its answer. O(prediction)."""
        predicted = sequence.parent.request.prediction
        if predicted and not sequence.index:
            prediction = Prediction(predicted)
            prediction.extend(sequence.tokens[sequence.prompt_tokens :])
            self._live[sequence.sequence_id] = sequence, prediction

    def extend(self, sequence_id: int, token_ids: Iterable[int]) -> None:
        """Follow further tokens of the answer. O(tokens)."""
        if sequence_id in self._live:
            self._live[sequence_id][1].extend(token_ids)

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return at most `limit` drafts for a sequence."""
        if sequence_id not in self._live:
            return []
        sequence, prediction = self._live[sequence_id]
        return prediction.propose(sequence.tokens[-max(ORDERS) :], limit)

    def end(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._live.pop(sequence_id, None)

    def erase(self, namespace: Namespace) -> None:
        """Do nothing: a prediction is a part of its request, and ends with it."""
