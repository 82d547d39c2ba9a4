"""`RecordedRunner` writes the requests of the steps in flight before it launches one."""

from __future__ import annotations

import pytest

from engine.client.step_record import StepRecord
from engine.plan import StepPlan
from engine.server.recorded_runner import RecordedRunner
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_records_the_requests_of_the_steps_in_flight(depth: int) -> None:
    """Not those that wait: a death is no fault of theirs."""
    world = RecordedWorld(depth=depth, sequences_max=2, step_tokens_max=8)
    record = StepRecord.create()
    seen: list[frozenset[str]] = []
    launch = world.runner.launch

    def watch(plan: StepPlan) -> None:
        seen.append(record.read())
        launch(plan)

    world.runner.launch = watch  # type: ignore[method-assign]
    world.core.runner = RecordedRunner(world.core.runner, world.core.requests, record)
    for name in "abc":
        world.ask(name, tokens(8, ord(name)), max_tokens=6)
    world.settle()

    steps = [frozenset(row) for row in world.rows]
    for at, names in enumerate(seen):
        assert steps[at] <= names <= steps[at].union(*steps[max(0, at + 1 - depth) : at])
    assert any("c" not in names for names in seen)
    assert seen[-1] == {"c"}
    record.close()
