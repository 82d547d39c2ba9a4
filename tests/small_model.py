"""A fake draft model: a runner that remembers of which text each slot of its pool is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from engine.api import SampledToken
from engine.config import DRAFT_PLACE_TOKENS
from engine.drafts.model import ModelSource
from engine.drafts.step_times import StepTimes
from engine.errors import InvariantViolation
from engine.plan import Row, StepPlan, StepResult, TokensBySequence
from tests.fakes import FakeClock

Text = tuple[int, ...]
IN_FLIGHT_MAX = 2


class SmallModel:
    """`answer(text)` returns the token that follows a text: it is drawn with probability `right`.

    Raises InvariantViolation where a row reads a slot that does not hold its own text. Each step
    takes `token_s` for each of its tokens, and `step_s`. `nan_steps`: of whose rows none draws;
    `broken_steps`: that raise. `read_tokens` counts tokens of rows that the plan names, and
    `texts` has what was drawn from in them.
    """

    def __init__(
        self,
        answer: Callable[[Text], int],
        *,
        right: float = 1.0,
        vocab_size: int = 50,
        places: int = 4,
        block_size: int = 16,
        groups: int = 1,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        self.clock = FakeClock()
        self.nan_steps: set[int] = set()
        self.broken_steps: set[int] = set()
        self.steps = self.read_tokens = 0
        self.texts: list[Text] = []
        self._answer, self._right, self._vocab_size = answer, right, vocab_size
        self.chance = random.Random(3)
        self._block_size, self._groups = block_size, groups
        self._step_s, self._token_s = step_s, token_s
        self._slots: dict[int, Text] = {}
        self._room = places * groups * DRAFT_PLACE_TOKENS
        self._last: dict[int, int] = {}
        self._results: deque[StepResult] = deque()
        times = tuple(step_s + token_s * tokens or 1e-9 for tokens in range(1, 65))
        self.source = ModelSource(
            self, StepTimes(times), self.clock,
            places=places, vocab_size=vocab_size, block_size=block_size, kv_groups=groups,
        )  # fmt: skip

    def launch(self, plan: StepPlan) -> None:
        """Compute a step."""
        self.steps += 1
        if self.steps in self.broken_steps:
            raise RuntimeError("planted")
        if len(self._results) == IN_FLIGHT_MAX:
            raise InvariantViolation(f"more than {IN_FLIGHT_MAX} steps are in flight")
        for begun in plan.begun:
            if begun.sequence_id in self._last:
                raise InvariantViolation(f"{begun.sequence_id} was begun twice")
            self._last[begun.sequence_id] = begun.token_ids[-1]
        sampled: TokensBySequence = {}
        for row in plan.rows:
            text = self._compute(row)
            if row.samples and self.steps not in self.nan_steps:
                if row.token_ids is not None:
                    self.texts.append(text)
                token = self._draw(text)
                self._last[row.sequence_id] = token
                sampled[row.sequence_id] = (SampledToken(token),)
        tokens = sum(row.count for row in plan.rows)
        self.clock.advance(self._step_s + self._token_s * tokens)
        self._results.append(StepResult(plan.step, sampled))

    def collect(self) -> StepResult:
        """Return the oldest step's result."""
        return self._results.popleft()

    def _draw(self, text: Text) -> int:
        right = self._answer(text)
        if self.chance.random() < self._right:
            return right
        return (right + self.chance.randrange(1, self._vocab_size)) % self._vocab_size

    def _compute(self, row: Row) -> Text:
        tables = (row.block_ids, *row.beside)
        if len(tables) != self._groups:
            raise InvariantViolation(f"{len(tables)} tables; expected {self._groups}")
        fed = row.token_ids
        if fed is None:
            fed = (self._last[row.sequence_id],)
        else:
            self.read_tokens += len(fed)
        text: Text = ()
        for table in tables:
            slots = [
                table[at // self._block_size] * self._block_size + at % self._block_size
                for at in range(row.start + row.count)
            ]
            if max(slots) >= self._room:
                raise InvariantViolation(f"slot {max(slots)} of {self._room}")
            text = self._slots[slots[row.start - 1]] if row.start else ()
            for at in range(row.start):
                if self._slots[slots[at]] != text[: at + 1]:
                    raise InvariantViolation(f"position {at} holds another text")
            for at, token in zip(slots[row.start :], fed, strict=True):
                text = (*text, token)
                self._slots[at] = text
        return text
