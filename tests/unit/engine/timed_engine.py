"""A checked engine whose steps take the time of a synthetic machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.plan import StepPlan
from engine.scheduler.step_cost import StepWork, attended
from tests.unit.engine.recorded_engine import RecordedWorld

Machine = Callable[[StepWork], float]


def step_work(slices: Sequence[tuple[int, int]]) -> StepWork:
    """Return the work of slices, each a pair (first position, tokens)."""
    prompts = [(start, count) for start, count in slices if count > 1]
    return StepWork(
        rows=len(slices),
        prompt_tokens=sum(count for _, count in prompts),
        row_context=sum(start for start, count in slices if count == 1),
        prompt_context=sum(attended(start, count) for start, count in prompts),
    )


def slow(work: StepWork) -> float:
    """Take the time of a small model on two cores: 2,000 prompt tokens a second."""
    context = work.row_context + work.prompt_context
    return 3e-3 + 3e-4 * work.rows + 4.5e-4 * work.prompt_tokens + 1e-7 * context


def fast(work: StepWork) -> float:
    """Take the time of a large model on a device: 30,000 prompt tokens a second."""
    context = 4e-8 * work.row_context + 1e-9 * work.prompt_context
    return 5e-3 + 1e-5 * work.rows + 3e-5 * work.prompt_tokens + context


class TimedWorld(RecordedWorld):
    """A recorded world whose clock advances by `machine(work)` with each step. `took`: seconds of
    each step.
    """

    def __init__(self, machine: Machine, **config: Any) -> None:
        settings: dict[str, Any] = {
            "blocks": 4_000,
            "step_tokens_max": 2_048,
            "prefill_chunk_tokens_max": 0,
        }
        super().__init__(**(settings | config))
        self.took: list[float] = []
        launch = self.runner.launch

        def run(plan: StepPlan) -> None:
            launch(plan)
            self.took.append(machine(step_work([(row.start, row.count) for row in plan.rows])))
            self.clock.advance(self.took[-1])

        self.runner.launch = run  # type: ignore[method-assign]

    def check(self) -> None:
        """Skip the recounts: these worlds run thousands of tokens a step."""

    def first_token_s(self, name: str) -> float:
        """Return the time from the request's arrival to its first token."""
        first_s = self.final(name).usage.first_token_s
        assert first_s is not None
        return first_s
