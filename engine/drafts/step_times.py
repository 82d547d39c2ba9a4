"""How long steps take by their tokens: measured at the start, corrected by the steps since.

Contexts grow, other programs come and go, and experts are touched that the first measurement did
not touch. Sizes are corrected in classes, and what all have in common at once, so that a size that
is not in use follows the others. It reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

OF_ALL: Final = 0.05
"""The weight of the latest step in the factor of all sizes."""
OF_CLASS: Final = 0.15
"""Its weight in the factor of its own class of sizes."""
FORGOTTEN: Final = 0.005
"""By how much the factor of a class nears 1 with each step of another: one that seemed too slow is
tried again."""
OUTLIER: Final = 4.0
"""A step that takes more than this many times what was expected counts as one that takes so long:
the machine paused."""


class StepTimes:
    """Seconds of steps of 1, 2, 3… tokens, `measured` at the start. More tokens are never faster.

    `exposed_s`: seconds that a device waits for the host where a step is planned only after the one
    before was collected; 0 if that is so for every step.
    """

    def __init__(self, measured: Sequence[float], exposed_s: float = 0.0) -> None:
        self.exposed_s = exposed_s
        self._measured = np.array(measured, np.float64)
        self._classes = np.array(
            [tokens.bit_length() for tokens in range(1, len(measured) + 1)], int
        )
        self._of_all = 1.0
        self._of_class = np.ones(len(measured).bit_length() + 1)
        self._waits = 1
        self._update()

    def __len__(self) -> int:
        """Return the most tokens of a step that was measured."""
        return len(self._seconds)

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a step. Beyond the measured ones each token costs what the last
        ones did. O(1).
        """
        last = len(self._seconds)
        if tokens <= last:
            return self._seconds[tokens - 1]
        half = last // 2
        slope = (self._seconds[-1] - self._seconds[half - 1]) / (last - half) if half else 0.0
        return self._seconds[-1] + slope * (tokens - last)

    def record(self, tokens: int, seconds: float) -> None:
        """Learn what a step of so many tokens took. O(measured), in a few numpy calls."""
        if seconds <= 0 or not 0 < tokens <= len(self):
            return
        measured = float(self._measured[tokens - 1])
        found = min(seconds, OUTLIER * self.seconds(tokens)) / measured
        self._of_all += OF_ALL * (found - self._of_all)
        own = tokens.bit_length()
        factor = float(self._of_class[own])
        self._of_class += FORGOTTEN * (1 - self._of_class)
        self._of_class[own] = factor + OF_CLASS * (found / self._of_all - factor)
        self._update()

    def forget(self) -> None:
        """Near what was measured at the start, where no step is taken: what seemed too slow once is
        tried again. O(measured), in a few numpy calls."""
        self._of_all += FORGOTTEN * (1 - self._of_all)
        self._of_class += FORGOTTEN * (1 - self._of_class)
        self._update()

    def _update(self) -> None:
        """Correct the table. More tokens never take less time."""
        found = self._of_all * self._of_class[self._classes] * self._measured
        self._seconds: list[float] = np.maximum.accumulate(found).tolist()

    def record_exposed(self, seconds: float) -> None:
        """Learn how long a device waited for the host before a step: the mean of all so far with
        what was assumed, and later of the latest."""
        seconds = min(max(0.0, seconds), OUTLIER * self.exposed_s)
        self._waits += 1
        self.exposed_s += max(OF_ALL, 1 / self._waits) * (seconds - self.exposed_s)
