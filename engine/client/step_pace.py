"""How long an engine's steps take, as its gateway sees them: pure, told the time.

An engine that is stuck in a step still keeps its connection awake. Its keeper kills it only after
`engine.step_timeout_s`; until then it should get no further request.
"""

from __future__ import annotations

from typing import Final

STUCK_STEPS: Final = 5
"""A step is stuck that takes so many times as long as the longest of late."""
STUCK_S_MIN: Final = 2.0
"""Seconds. No step is stuck before; heartbeats come more often."""
KEPT: Final = 0.99
"""The part of the longest step that counts after another one."""


class StepPace:
    """The longest of the recent steps. Times are seconds of any one clock."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._longest_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that an idle engine got a request."""
        self._since_s = now_s

    def note(self, now_s: float) -> None:
        """Note that an engine with requests has told something, which it does between steps."""
        self._longest_s = max(now_s - self._since_s, KEPT * self._longest_s)
        self._since_s = now_s

    def is_stuck(self, now_s: float) -> bool:
        """Return whether an engine with requests has told nothing for too long."""
        return now_s - self._since_s > max(STUCK_S_MIN, STUCK_STEPS * self._longest_s)
