"""A source of drafts that knows the answers, and is right as often as it is told."""

from __future__ import annotations

import random
from collections import abc
from collections.abc import Callable

from engine.api import Namespace
from engine.scheduler.sequence import Sequence

Answer = Callable[[str, int], abc.Sequence[int]]
"""The output tokens of a sample of a request, by its id and index."""


class OracleSource:
    """Each draft is the answer's next token with probability `right`, else any of the vocabulary.

    So many drafts as asked for, also behind the answer's end.
    """

    name = "oracle"

    def __init__(self, answer: Answer, right: float, vocab_size: int, seed: int) -> None:
        self._answer, self._right, self._vocab_size = answer, right, vocab_size
        self._chance = random.Random(seed)
        self.live: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence."""
        assert sequence.sequence_id not in self.live
        self.live[sequence.sequence_id] = sequence

    def extend(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Check that the sequence has the tokens."""
        tokens = self.live[sequence_id].tokens
        assert tokens[len(tokens) - len(token_ids) :] == list(token_ids)

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return `limit` drafts."""
        sequence = self.live[sequence_id]
        request_id = sequence.parent.request.request_id
        known = self._answer(request_id, sequence.index)[sequence.output_tokens :]
        return [
            known[place]
            if place < len(known) and self._chance.random() < self._right
            else self._chance.randrange(self._vocab_size)
            for place in range(limit)
        ]

    def end(self, sequence_id: int) -> None:
        """Forget a sequence."""
        del self.live[sequence_id]

    def erase(self, namespace: Namespace) -> None:
        """Do nothing."""
