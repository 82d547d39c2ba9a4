"""How long requests wait before they end unanswered: for their turn until their deadline, for the
rest until a drain is over, for memory until too many steps in a row could run nothing.

It ends nothing itself and reads no clock; `core` asks it in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.api import Ending
from engine.scheduler.sequence import ActiveRequest

STALLS_MAX = 3


class Unanswered(NamedTuple):
    """How a request ends for which nothing more is done."""

    work: ActiveRequest
    ending: Ending
    code: str
    message: str


class Timeouts:
    """Of one core: when its drain is over, and how many steps have stalled."""

    def __init__(self) -> None:
        self._drain_at_s: float | None = None
        self._stalls = 0

    @property
    def is_draining(self) -> bool:
        return self._drain_at_s is not None

    def drain(self, until_s: float) -> None:
        """What is here at that time ends as `shutdown`."""
        self._drain_at_s = until_s

    def overdue(self, works: Iterable[ActiveRequest], now_s: float) -> Iterator[Unanswered]:
        """Whoever has waited long enough. O(requests)."""
        is_over = self._drain_at_s is not None and self._drain_at_s <= now_s
        for work in works:
            due_s = work.deadline_at_s
            if work.started_at_s is None and due_s is not None and due_s <= now_s:
                message = "The request was not started before its deadline."
                yield Unanswered(work, "timeout", "timeout", message)
            elif is_over:
                yield Unanswered(work, "shutdown", "draining", "The engine is shutting down.")

    def moved(self) -> None:
        """A step could run something."""
        self._stalls = 0

    def stalled(self, works: Iterable[ActiveRequest]) -> Unanswered | None:
        """Work, and nothing that could run: after a few steps the first in line fails.

        Promises and floors of others may hold the memory that was there when it was idle.
        """
        waiting = [work for work in works if not work.is_compiling]
        self._stalls = self._stalls + 1 if waiting else 0
        if self._stalls < STALLS_MAX:
            return None
        self._stalls = 0
        first = min(waiting, key=lambda work: (-work.request.priority, work.arrival))
        message = "The cache memory this request needs is promised for now; try again later."
        return Unanswered(first, "failed", "kv_promised", message)
