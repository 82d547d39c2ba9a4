"""The source that drafts what followed the last tokens earlier in a sequence: prompt and answer."""

from __future__ import annotations

from array import array
from collections import abc

from engine.api import Namespace
from engine.drafts.text_places import ORDERS, places_after
from engine.scheduler.sequence import Sequence

WINDOW_TOKENS = 16_384
"""How far back earlier places are looked for: 20 us at most."""


class OwnText:
    """The tokens of one sequence, and the earlier place that its end repeats. 4 bytes a token."""

    def __init__(self, token_ids: abc.Iterable[int]) -> None:
        self._tokens = array("i", token_ids)
        self._at: int | None = None

    def extend(self, token_ids: abc.Iterable[int]) -> None:
        """Append sampled tokens; the place moves on while they repeat it. O(tokens)."""
        for token in token_ids:
            if self._at is not None:
                self._at = self._at + 1 if self._tokens[self._at] == token else None
            self._tokens.append(token)

    def propose(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that followed the same tokens. O(window) without a place.

        The latest place is taken. What would follow the end itself repeats the tokens from there.
        """
        end = len(self._tokens)
        if self._at is None:
            for order in ORDERS:
                context = self._tokens[-order:] if end > order else ()
                found = places_after(self._tokens, context, max(0, end - WINDOW_TOKENS), end - 1)
                if len(found):
                    self._at = int(found[-1])
                    break
            else:
                return []
        return self._tokens[self._at : self._at + limit].tolist()


class NgramSource:
    """Drafts for every sequence from its own text."""

    name = "ngram"

    def __init__(self) -> None:
        self._live: dict[int, OwnText] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence. O(tokens), some 20 ns each."""
        self._live[sequence.sequence_id] = OwnText(sequence.tokens)

    def extend(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Append sampled tokens. O(tokens)."""
        if sequence_id in self._live:
            self._live[sequence_id].extend(token_ids)

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return at most `limit` drafts for a sequence."""
        own = self._live.get(sequence_id)
        return [] if own is None else own.propose(limit)

    def end(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._live.pop(sequence_id, None)

    def erase(self, namespace: Namespace) -> None:
        """Do nothing: a sequence's text ends with it."""
