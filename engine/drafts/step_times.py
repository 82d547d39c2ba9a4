"""How long steps take by their tokens: measured at the start, corrected by the steps since.

Contexts grow, other programs come and go, and experts are touched that the first measurement did
not touch. Sizes are corrected in classes, and what all have in common at once, so that a size that
is not in use follows the others. It reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
        self._measured = measured
        classes = len(measured).bit_length() + 1
        self._of_all = 1.0
        self._of_class = [1.0] * classes
        self._least_s = [0.0] * classes

    def __len__(self) -> int:
        """Return the most tokens of a step that was measured."""
        return len(self._measured)

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a step. Beyond the measured ones each token costs what the last
        ones did. O(1).
        """
        last = len(self._measured)
        if tokens > last:
            half = last // 2
            slope = (self.seconds(last) - self.seconds(half)) / (last - half) if half else 0.0
            return self.seconds(last) + slope * (tokens - last)
        number = tokens.bit_length()
        factor = self._of_all * self._of_class[number]
        return max(self._least_s[number], factor * self._measured[tokens - 1])

    def record(self, tokens: int, seconds: float) -> None:
        """Learn what a step of so many tokens took. O(log tokens)."""
        if seconds <= 0 or not 0 < tokens <= len(self._measured):
            return
        found = min(seconds, OUTLIER * self.seconds(tokens)) / self._measured[tokens - 1]
        self._of_all += OF_ALL * (found - self._of_all)
        own = tokens.bit_length()
        for number, factor in enumerate(self._of_class):
            goal, weight = (found / self._of_all, OF_CLASS) if number == own else (1.0, FORGOTTEN)
            self._of_class[number] += weight * (goal - factor)
        for number in range(1, len(self._of_class)):
            ends = (1 << number - 1) - 1
            if ends:
                self._least_s[number] = 0.0
                self._least_s[number] = self.seconds(ends)

    def forget(self) -> None:
        """Near what was measured at the start, where no step is taken: what seemed too slow once is
        tried again. O(classes)."""
        self._of_all += FORGOTTEN * (1 - self._of_all)
        self._of_class = [factor + FORGOTTEN * (1 - factor) for factor in self._of_class]
        self._least_s = [0.0] * len(self._least_s)

    def record_exposed(self, seconds: float) -> None:
        """Learn how long a device waited for the host before a step."""
        seconds = min(seconds, OUTLIER * self.exposed_s)
        self.exposed_s += OF_ALL * (seconds - self.exposed_s)
