"""Isolated requests: their steps contain no other request.

The gateway asks for isolation where it suspects a request of ending the engine's process: the next
death then shows whether it was the cause. Steps of the isolated requests, one request at a time,
take turns with steps of all others. Only the scheduler calls it.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.scheduler.sequence import ActiveRequest, Sequence

Turn = ActiveRequest | None
"""The isolated request of a step; None: all requests that are not isolated."""


class Isolation:
    """The live isolated requests, and whose turn is next."""

    def __init__(self) -> None:
        self._isolated: dict[int, ActiveRequest] = {}  # by arrival, the next in turn first
        self._is_turn_of_others = True

    def __bool__(self) -> bool:
        return bool(self._isolated)

    def add(self, active: ActiveRequest) -> None:
        """Isolate a new request if it asks for that."""
        if active.request.isolated_tokens:
            self._isolated[active.arrival] = active

    def remove(self, active: ActiveRequest) -> None:
        """Forget a request that has ended."""
        self._isolated.pop(active.arrival, None)

    def turns(self) -> Iterator[Turn]:
        """Yield whose step may come next, in the order in which the scheduler should try them.

        The caller stops at the first with work, and calls `took`. O(isolated requests).
        """
        for active in [a for a in self._isolated.values() if _is_past(a)]:
            self.remove(active)
        waiting = list(self._isolated.values())
        if self._is_turn_of_others or not waiting:
            yield None
            yield from waiting
        else:
            yield from waiting
            yield None

    def took(self, turn: Turn) -> None:
        """Record whose step was scheduled."""
        self._is_turn_of_others = turn is not None
        if turn is not None:
            self._isolated[turn.arrival] = self._isolated.pop(turn.arrival)

    def allows(self, sequence: Sequence, turn: Turn) -> bool:
        """Return whether a sequence may be in the step of `turn`."""
        if turn is not None:
            return sequence.parent is turn
        return sequence.parent.arrival not in self._isolated


def _is_past(active: ActiveRequest) -> bool:
    """Return whether each sample has the tokens up to which the request is isolated."""
    needed = active.request.isolated_tokens
    return active.started_at_s is not None and all(
        sequence.is_ended or sequence.output_tokens >= needed for sequence in active.sequences
    )
