"""When to launch the next step while one runs on the device.

With `pipeline_depth` 2 the host launches step N+1 while the device runs step N. A step that is
launched as soon as N begins is fixed a whole step before it runs: a request that arrives a moment
later waits for the rest of N and for all of N+1. `LaunchPacing` holds the launch back until shortly
before N is expected to end, so that the request is part of N+1. How long before is learned from how
long each collect had to wait: a collect that does not wait means that the device may have idled.

The module reads no clock. Core feeds it, and `engine.server.service` waits as it says.
"""

from __future__ import annotations

from typing import Final

from engine.errors import InvariantViolation

SLACK_S: Final = 0.0003
"""The wait of a collect that pacing aims at, in seconds: what the device still has to do after the
launch of the next step."""

LATE_S: Final = 0.0001
"""A collect that waits less than this was late: the device may have idled."""

LEAD_S, LEAD_S_MIN, LEAD_S_MAX = 0.003, 0.0005, 0.02
"""Seconds from the launch to the expected end of the running step: at the start, least, most."""

HOLD_S_MAX: Final = 0.05
"""The longest hold in seconds: a wrong prediction delays tokens that are ready."""

LATE_STEP_S: Final = 0.001
"""Seconds by which the lead grows after a late launch."""

LEARNED: Final = 0.02
"""The part of a wait beyond the slack by which the lead shrinks."""

ROWS_MAX: Final = 96
"""Sequences of a step during which launches are held. The launch of a larger batch takes the host
longer and varies more, so it would often be late: at 150 requests/s a held launch cost 8 % of the
throughput and saved nothing."""

SURE: Final = 0.97
"""The part of a step's predicted time that pacing relies on."""


class LaunchPacing:
    """Holds back the launch of the next step until shortly before the running step ends.

    `lead_s`: seconds from a launch to the expected end of the running step.
    """

    def __init__(self) -> None:
        self.lead_s = LEAD_S
        self._due_at_s: float | None = None
        self._was_held = False

    def running_alone(self, now_s: float, predicted_s: float) -> None:
        """Note that a step of `predicted_s` seconds begins now and that no other is in flight."""
        hold_s = min(HOLD_S_MAX, SURE * predicted_s - self.lead_s)
        self._due_at_s = now_s + hold_s

    def hold_s(self, now_s: float) -> float:
        """Return the seconds for which the next launch should wait. O(1)."""
        if self._due_at_s is None or now_s >= self._due_at_s:
            return 0.0
        self._was_held = True
        return self._due_at_s - now_s

    def collected(self, waited_s: float) -> None:
        """Learn from a collect that waited `waited_s` seconds for the device, after a launch."""
        if self._was_held:
            if waited_s < LATE_S:
                self.lead_s = min(LEAD_S_MAX, self.lead_s + LATE_STEP_S)
            else:
                shorter_s = self.lead_s - LEARNED * (waited_s - SLACK_S)
                self.lead_s = max(LEAD_S_MIN, min(LEAD_S_MAX, shorter_s))
        self.forget_step()

    def forget_step(self) -> None:
        """Hold no launch for the running step any longer: it was collected, or has failed."""
        self._due_at_s, self._was_held = None, False

    def check(self) -> None:
        """Raises InvariantViolation if the lead is out of bounds. O(1)."""
        if not LEAD_S_MIN <= self.lead_s <= LEAD_S_MAX:
            raise InvariantViolation(
                f"the lead of launches is {self.lead_s} s; expected {LEAD_S_MIN} to {LEAD_S_MAX}"
            )
