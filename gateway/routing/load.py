"""What is known of a replica's queue: its last report, and what was sent after it."""

from __future__ import annotations

from collections import deque

from engine.statistics import LoadReport

FIRST_RATE = 10_000.0
"""Prompt tokens a second of an engine that has computed none yet, where none has."""


class ReplicaLoad:
    """The last report of a replica, and the uncached tokens that were sent after it."""

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.first_rate = FIRST_RATE
        """Prompt tokens a second that are assumed until it has computed a prompt."""
        self._after: deque[tuple[int, int]] = deque()
        self._after_tokens = 0

    def add_sent(self, number: int, uncached_tokens: int) -> None:
        """Count the Submit of this number on its connection, unless the report does."""
        if number > self.report.accepted:
            self._after.append((number, uncached_tokens))
            self._after_tokens += uncached_tokens

    def take(self, report: LoadReport) -> None:
        """Take a newer report; what it counts is no longer added to it."""
        self.report = report
        while self._after and self._after[0][0] <= report.accepted:
            self._after_tokens -= self._after.popleft()[1]

    @property
    def prefill_tokens_per_s(self) -> float:
        """The rate at which it computes prompts."""
        return self.report.prefill_tokens_per_s or self.first_rate

    @property
    def wait_s(self) -> float:
        """Seconds until a request sent now would begin."""
        return (self.report.waiting_tokens + self._after_tokens) / self.prefill_tokens_per_s

    @property
    def rows(self) -> int:
        """Sequences that run there, and those that were sent and not yet counted."""
        return self.report.rows + len(self._after)
