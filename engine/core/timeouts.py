"""Timeouts: deadlines for the start, the end of a drain, and steps that could run nothing.

It ends no request itself and reads no clock; core asks it in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from engine.api import Ending
from engine.errors import DRAINING_MESSAGE
from engine.scheduler.sequence import ActiveRequest

STALLS_MAX = 3
"""Steps in a row that could run nothing, after which a waiting request fails."""


class ForcedEnding(NamedTuple):
    """The ending of a request that the engine gives up."""

    active: ActiveRequest
    ending: Ending
    code: str
    message: str


class Timeouts:
    """The drain deadline and the stalled steps of one core."""

    def __init__(self) -> None:
        self._drain_at_s: float | None = None
        self._stalls = 0

    @property
    def is_draining(self) -> bool:
        """Return whether a drain has begun."""
        return self._drain_at_s is not None

    def drain(self, until_s: float) -> None:
        """Set the time at which live requests end as `shutdown`."""
        self._drain_at_s = until_s

    def overdue(self, requests: Iterable[ActiveRequest], now_s: float) -> Iterator[ForcedEnding]:
        """Yield the requests that have reached their deadline or the end of the drain.
        O(requests).
        """
        is_over = self._drain_at_s is not None and self._drain_at_s <= now_s
        for active in requests:
            due_s = active.deadline_at_s
            if active.started_at_s is None and due_s is not None and due_s <= now_s:
                message = "The request did not start before its deadline."
                yield ForcedEnding(active, "timeout", "timeout", message)
            elif is_over:
                yield ForcedEnding(active, "shutdown", "draining", DRAINING_MESSAGE)

    def record_progress(self) -> None:
        """Record that a step could run something."""
        self._stalls = 0

    def find_stalled(
        self, requests: Iterable[ActiveRequest], is_inside_floor: Callable[[ActiveRequest], bool]
    ) -> ForcedEnding | None:
        """Return the first waiting request to fail after several steps that could run nothing, or
        None.

        Promises and floors of other payers may hold the memory that was free at admission. Payers
        inside their floors come last: what they lack is theirs, and others hold it.
        """
        waiting = [active for active in requests if not active.is_compiling]
        self._stalls = self._stalls + 1 if waiting else 0
        if self._stalls < STALLS_MAX:
            return None
        self._stalls = 0
        first = min(
            waiting,
            key=lambda one: (is_inside_floor(one), -one.request.priority, one.arrival),
        )
        message = "The cache memory this request needs is promised to others; try again later."
        return ForcedEnding(first, "failed", "kv_promised", message)
