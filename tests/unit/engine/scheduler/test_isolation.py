"""Isolation: an isolated request shares no step, and takes turns with the others."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.plan import StepPlan
from tests.unit.engine.recorded_engine import RecordedWorld, tokens


class OverlapWorld(RecordedWorld):
    """A recorded world that knows which requests are in flight together."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth, blocks=128)
        self.together: list[set[str]] = []
        self._in_flight: list[set[str]] = []
        launch, collect = self.runner.launch, self.runner.collect

        def watch_launch(plan: StepPlan) -> None:
            launch(plan)
            self._in_flight.append(set(self.rows[-1]))
            self.together.append(set().union(*self._in_flight))

        def watch_collect() -> object:
            self._in_flight.pop(0)
            return collect()

        self.runner.launch = watch_launch  # type: ignore[method-assign]
        self.runner.collect = watch_collect  # type: ignore[method-assign, assignment]


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> OverlapWorld:
    """Return an engine with one step at a time, and with one step in flight."""
    return OverlapWorld(request.param)


def test_an_isolated_request_shares_no_step(world: OverlapWorld) -> None:
    """Nor is another's step in flight beside its own; the outputs are as ever."""
    for name in "ab":
        world.ask(name, tokens(20, ord(name)), max_tokens=10)
    for name in "xy":
        world.ask(name, tokens(20, ord(name)), max_tokens=10, isolated_tokens=99, samples=2)
    world.settle()

    for names in world.together:
        assert names in ({"x"}, {"y"}) or names <= {"a", "b"}
    assert {"a", "b"} in world.together


def test_isolated_requests_take_turns_with_all_others(world: OverlapWorld) -> None:
    """Suspects, however many, take at most every second step."""
    for name in "ab":
        world.ask(name, tokens(8, ord(name)), max_tokens=20)
    for name in "xyz":
        world.ask(name, tokens(8, ord(name)), max_tokens=20, isolated_tokens=99)
    world.settle()

    others = [index for index, row in enumerate(world.rows) if "a" in row or "b" in row]
    assert max(after - before for before, after in pairwise(others)) <= 2
    assert [sorted(row) for row in world.rows[1:12:2]] == [[name] for name in "xyzxyz"]


def test_a_request_joins_the_others_after_its_isolated_tokens(world: OverlapWorld) -> None:
    """It has come further than at the deaths that made it a suspect."""
    world.ask("a", tokens(8), max_tokens=30)
    world.ask("x", tokens(8, 5), max_tokens=20, isolated_tokens=4)
    world.settle()

    alone = [row for row in world.rows if set(row) == {"x"}]
    assert sum(row["x"] for row in alone) == 8 + 4 - 1
    assert {"a", "x"} in world.together


def test_an_isolated_request_that_waits_for_blocks_delays_no_other(world: OverlapWorld) -> None:
    """Its turn passes to the others while it can run nothing."""
    world.ask("a", tokens(400), max_tokens=60)
    world.ask("x", tokens(400, 3), max_tokens=60, isolated_tokens=99)
    world.settle()

    assert world.first_step_of("x") > world.first_step_of("a")
