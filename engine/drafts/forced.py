"""The source that drafts what a sequence's grammar leaves no choice about: keys and quotes of JSON.

The text is certain and its cut into tokens is the usual one, which models nearly always take.
"""

from __future__ import annotations

from collections import abc

from engine.api import Namespace
from engine.scheduler.sequence import Sequence


class ForcedSource:
    """Drafts for sequences under a grammar."""

    name = "forced"

    def __init__(self) -> None:
        self._live: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence. O(1)."""
        if sequence.matcher is not None:
            self._live[sequence.sequence_id] = sequence

    def extend(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Do nothing: the matcher has consumed them."""

    def propose(self, sequence_id: int, limit: int) -> list[int]:
        """Return at most `limit` drafts for a sequence. Microseconds."""
        sequence = self._live.get(sequence_id)
        if sequence is None or sequence.matcher is None:
            return []
        return sequence.matcher.forced_tokens()[:limit]

    def end(self, sequence_id: int) -> None:
        """Forget a sequence."""
        self._live.pop(sequence_id, None)

    def erase(self, namespace: Namespace) -> None:
        """Do nothing: nothing is kept."""
