"""The protocol of a source of drafts: what guesses the next tokens of sequences."""

from __future__ import annotations

from collections import abc
from typing import Protocol

from engine.api import Namespace
from engine.scheduler.sequence import Sequence


class DraftSource(Protocol):
    """Guesses for the sequences that were begun and have not ended.

    A guess costs microseconds, and a bounded number of them whatever clients send.
    """

    @property
    def name(self) -> str:
        """Its name in metrics."""

    def begin(self, sequence: Sequence) -> None:
        """Take a sequence whose prompt is computed, with what it has of its answer."""

    def extend(self, sequence_id: int, token_ids: abc.Sequence[int]) -> None:
        """Learn the tokens that a sequence has sampled; it has them already."""

    def propose(self, sequence_id: int, limit: int) -> abc.Sequence[int]:
        """Return at most `limit` drafts, none for a sequence that it has not begun."""

    def end(self, sequence_id: int) -> None:
        """Forget a sequence, or keep what later ones may be drafted from."""

    def erase(self, namespace: Namespace) -> None:
        """Forget what was kept of a namespace."""
