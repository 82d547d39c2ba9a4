"""Planted faults: a state machine that misses one proves nothing when it passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from engine.errors import InvariantViolation

Fault = Callable[[Any], Any]
"""Makes a faulty function of the right one."""
RUNS_OF_A_SEED = 3


class Plant(NamedTuple):
    """A fault in a function of `owner`, and the machine that must find it: at once with `seed`,
    and with others later."""

    machine: type[RuleBasedStateMachine]
    owner: Any
    name: str
    fault: Fault
    seed: int = 0

    def check(self, monkeypatch: pytest.MonkeyPatch, examples: int = 300) -> None:
        """Plant the fault, and assert that the machine finds it."""
        monkeypatch.setattr(self.owner, self.name, self.fault(getattr(self.owner, self.name)))
        check_caught(self.machine, examples, self.seed)


def planted(*plants: Plant) -> pytest.MarkDecorator:
    """Run a test with each `plant`, by its fault and machine."""
    ids = [f"{plant.fault.__name__}-{plant.machine.__name__}" for plant in plants]
    return pytest.mark.parametrize("plant", plants, ids=ids)


def check_caught(
    machine: type[RuleBasedStateMachine], examples: int = 300, first_seed: int = 0
) -> None:
    """Assert that one of so many runs of a machine ends by a failed check. The runs are always the
    same, and are not shrunk. A few runs each of many seeds find a fault sooner than many of one.
    """
    with pytest.raises((AssertionError, InvariantViolation)):
        _run_seeds(machine, range(first_seed, first_seed + examples // RUNS_OF_A_SEED))


def _run_seeds(machine: type[RuleBasedStateMachine], seeds: range) -> None:
    quick = settings(
        max_examples=RUNS_OF_A_SEED,
        stateful_step_count=40,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for number in seeds:
        seeded = seed(number)(type(machine.__name__, (machine,), {}))
        run_state_machine_as_test(seeded, settings=quick)


class RarePlant(NamedTuple):
    """A fault that a machine meets too seldom, and a test that always meets it."""

    owner: Any
    name: str
    fault: Fault
    test: Callable[[], None]

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Assert that the test passes without the fault, and fails with it."""
        self.test()
        monkeypatch.setattr(self.owner, self.name, self.fault(getattr(self.owner, self.name)))

        with pytest.raises((AssertionError, InvariantViolation, IndexError)):  # what was not sent
            self.test()
