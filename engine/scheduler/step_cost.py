"""The measured cost of steps: predicts a step's seconds from its work.

A step takes about `fixed + rows + prompt tokens + attended tokens`, each at its own price. The
prices are fitted to measured steps by least squares on relative errors; no price is negative. The
module reads no clock. Core feeds it, and the scheduler asks it how many prompt tokens fit a time.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.api import Payer

PRICES: Final = 5
KEPT_OF_CLASS: Final = 0.9
"""The part of a class's sums that stays when one more step of this class is recorded."""
KEPT_OF_OTHERS: Final = 0.98
"""The part of all sums that stays when a step with a prompt is recorded."""
OUTLIER_FACTOR: Final = 4.0
"""A step that takes more than this many times the mean of its class counts as one that takes so
long: the machine paused.
"""
SHORTEST_S: Final = 1e-5
"""Seconds. Shorter steps weigh as much as one of this length."""
REFIT_STEPS: Final = 4
"""Recorded steps after which the prices are fitted again."""
PRIOR_TOKENS, PRIOR_S, PRIOR_WEIGHT = 64, 0.032, 0.02
"""A step in place of measurements, before there are any: so a new engine begins with short
slices."""

KNOWN_STEPS: Final = 32
"""Recorded steps from which predictions are more than the prior."""

SLICE_TOKENS: Final = 16
SLICE_TOKENS_MIN: Final = 2 * SLICE_TOKENS
"""Prompt tokens of a step that time does not limit."""
GUEST_PART: Final = 1 / 4
"""The part of a step's prompt time that a guest takes at most, and of what it leaves, the part that
others may fill. Where a step of `SLICE_TOKENS_MIN` alone takes longer than the target, the same of
these."""
GUEST_TOKENS: Final = int(SLICE_TOKENS_MIN * GUEST_PART)
"""Prompt tokens that a guest may always have on such a machine."""


class StepWork(NamedTuple):
    """The work of one step."""

    rows: int
    """Sequences."""
    prompt_tokens: int = 0
    """Computed tokens of slices longer than one token."""
    row_context: int = 0
    """Tokens attended by the one-token rows."""
    prompt_context: int = 0
    """Tokens attended by each of the prompt tokens, summed."""


def attended(start: int, count: int) -> int:
    """Return the tokens that `count` tokens from position `start` attend, summed."""
    return count * start + count * count // 2


class StepCost:
    """The prices of steps, from the steps recorded so far.

    Steps are kept in classes of like size, and each class forgets its own past: ten thousand decode
    steps do not make the model forget what a prompt costs.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all recorded steps."""
        self._classes: dict[tuple[int, int], int] = {}
        self._means: list[float] = []
        self._sums = np.zeros((0, PRICES, PRICES + 1))
        self._prior = np.zeros((PRICES, PRICES + 1))
        self._add(self._prior, StepWork(0, PRIOR_TOKENS), PRIOR_S, PRIOR_WEIGHT, fixed=0.0)
        self._prices = [0.0] * PRICES
        self._new_steps = REFIT_STEPS
        self._recorded = 0
        self._fit()

    def record(self, work: StepWork, elapsed_s: float) -> None:
        """Record a measured step. About 10 µs."""
        if elapsed_s <= 0 or not work.rows:
            return
        size = (work.rows.bit_length(), work.prompt_tokens.bit_length())
        index = self._classes.setdefault(size, len(self._classes))
        if index == len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros((1, PRICES, PRICES + 1))])
            self._means.append(elapsed_s)
        mean_s = self._means[index]
        elapsed_s = min(elapsed_s, OUTLIER_FACTOR * mean_s)
        self._means[index] = mean_s + (1 - KEPT_OF_CLASS) * (elapsed_s - mean_s)
        if work.prompt_tokens:
            self._sums *= KEPT_OF_OTHERS
        self._sums[index] *= KEPT_OF_CLASS
        self._add(self._sums[index], work, elapsed_s, 1.0)
        self._recorded += 1
        self._new_steps += 1

    @property
    def is_measured(self) -> bool:
        """Return whether enough steps were recorded for predictions to rest on measurements."""
        return self._recorded >= KNOWN_STEPS

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step. O(1); now and then a fit of about 100 µs."""
        fixed, row, token, context, prompt_context = self._current_prices()
        return (
            fixed
            + row * work.rows
            + token * work.prompt_tokens
            + context * work.row_context
            + prompt_context * work.prompt_context
        )

    def seconds_of_slice(self, start: int, count: int) -> float:
        """Return the predicted seconds that a slice of a prompt adds to a step. O(1)."""
        _, row, token, _, prompt_context = self._current_prices()
        return row + token * count + prompt_context * attended(start, count)

    def seconds_of_row(self, context: float) -> float:
        """Return the predicted seconds by which a row that attends `context` tokens lengthens a
        step. O(1).
        """
        _, row, _, per_token, _ = self._current_prices()
        return row + per_token * context

    def tokens_within(self, seconds: float, start: int) -> float:
        """Return the longest slice from position `start` that adds at most `seconds` to a step;
        infinity if tokens are free. O(1).
        """
        _, row, token, _, prompt_context = self._current_prices()
        left, linear, square = seconds - row, token + prompt_context * start, prompt_context / 2
        if left <= 0:
            return 0.0
        if square <= 0:
            return left / linear if linear > 0 else inf
        return 2 * left / (linear + sqrt(linear * linear + 4 * square * left))

    # -- the fit ------------------------------------------------------------------------------

    def _current_prices(self) -> list[float]:
        if self._new_steps >= REFIT_STEPS or (self._recorded < REFIT_STEPS and self._new_steps):
            self._fit()
        return self._prices

    def _fit(self) -> None:
        """Fit the prices: least squares without those that would be negative."""
        self._new_steps = 0
        total = self._sums.sum(axis=0) + self._prior
        matrix, goal = total[:, :PRICES], total[:, PRICES]
        scale = np.sqrt(np.maximum(np.diag(matrix), 1e-30))
        matrix = matrix / np.outer(scale, scale) + 1e-7 * np.eye(PRICES)
        goal = goal / scale
        active = list(range(PRICES))
        prices = np.zeros(PRICES)
        while active:
            found = np.linalg.solve(matrix[np.ix_(active, active)], goal[active])
            lowest = int(found.argmin())
            if found[lowest] >= 0:
                prices[active] = found
                break
            del active[lowest]
        self._prices = (prices / scale).tolist()

    @staticmethod
    def _add(
        sums: npt.NDArray[np.float64],
        work: StepWork,
        elapsed_s: float,
        weight: float,
        *,
        fixed: float = 1.0,
    ) -> None:
        """Add a step to the sums of a class. Its error counts relative to its length."""
        features = np.array([fixed, *work], dtype=np.float64)
        relative = weight / max(SHORTEST_S, elapsed_s) ** 2
        sums[:, :PRICES] += relative * np.outer(features, features)
        sums[:, PRICES] += relative * elapsed_s * features


class PromptBudget:
    """The prompt tokens that one step may still compute.

    `tokens`: by the step's size. `seconds`: by the step's time, as `cost` predicts it. A *guest* is
    a payer whose short prompt begins and ends in the step: others hardly lengthen that.
    """

    __slots__ = (
        *("_cost", "_guest", "_guest_s", "_is_behind_guest", "_least", "_target_s"),
        *("seconds", "tokens"),
    )

    def __init__(self, cost: StepCost, tokens: int, seconds: float, target_s: float = inf) -> None:
        """`target_s`: of a step that payers share, its decodes included."""
        self._cost = cost
        self._target_s = target_s
        self._guest: Payer | None = None
        self._is_behind_guest = False
        self._least = SLICE_TOKENS_MIN
        self._guest_s = GUEST_PART * seconds
        self.tokens = tokens
        self.seconds = seconds

    @property
    def is_spent(self) -> bool:
        """Return whether no slice of a new prompt fits. O(1)."""
        is_late = self._least <= 0 and self._cost.tokens_within(self.seconds, 0) < SLICE_TOKENS
        return self.tokens <= 0 or is_late

    def fit(self, start: int, wanted: int) -> int:
        """Return how many of the `wanted` tokens from position `start` fit, perhaps none.

        Time never stops the first `SLICE_TOKENS_MIN` tokens of a step, behind a guest of a slow
        machine a part of these, so prompts always progress. A slice that time cuts ends after a
        multiple of `SLICE_TOKENS`. O(1).
        """
        if self._is_behind_guest and self._is_slow(start):
            self._least = int(self._least * GUEST_PART)
        self._is_behind_guest = False
        wanted = min(wanted, self.tokens)
        within = self._cost.tokens_within(self.seconds, start)
        if wanted <= within:
            return wanted
        return max(int(within) // SLICE_TOKENS * SLICE_TOKENS, min(wanted, self._least), 0)

    def spend(self, start: int, count: int, *, guest: Payer | None = None) -> None:
        """Take a slice of `count` tokens from position `start` out of the budget. O(1).

        `guest`: the payer, where the slice is all that its request has to compute.
        """
        slice_s = self._cost.seconds_of_slice(start, count)
        self.tokens -= count
        self._least -= count
        self.seconds -= slice_s
        if guest is None or self._guest is not None or self._guest_s == 0.0:
            return
        if slice_s < self._guest_s or (count <= GUEST_TOKENS and self._is_slow(start)):
            self._guest = guest

    def turn_to(self, payer: Payer) -> None:
        """Begin with the prompts of a payer. Behind a guest, the others' part is left. O(1)."""
        if self._guest is not None and payer != self._guest:
            self.seconds *= GUEST_PART
            self._guest, self._guest_s, self._is_behind_guest = None, 0.0, True

    def _is_slow(self, start: int) -> bool:
        """Return whether a step of the least slice from `start` on takes longer than the target."""
        context = attended(start, SLICE_TOKENS_MIN)
        work = StepWork(1, SLICE_TOKENS_MIN, prompt_context=context)
        return self._cost.seconds(work) > self._target_s
