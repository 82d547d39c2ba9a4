"""Planted faults: a state machine that misses one proves nothing when it passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from engine.errors import InvariantViolation

Fault = Callable[[Any], Any]
"""Makes a faulty function of the right one."""


class Plant(NamedTuple):
    """A fault in a function of `owner`, and the machine that must find it."""

    machine: type[RuleBasedStateMachine]
    owner: Any
    name: str
    fault: Fault

    def check(self, monkeypatch: pytest.MonkeyPatch, examples: int = 300) -> None:
        """Plant the fault, and assert that the machine finds it."""
        monkeypatch.setattr(self.owner, self.name, self.fault(getattr(self.owner, self.name)))
        check_caught(self.machine, examples)


def planted(*plants: Plant) -> pytest.MarkDecorator:
    """Run a test with each `plant`, by its fault and machine."""
    ids = [f"{plant.fault.__name__}-{plant.machine.__name__}" for plant in plants]
    return pytest.mark.parametrize("plant", plants, ids=ids)


def check_caught(machine: type[RuleBasedStateMachine], examples: int = 300) -> None:
    """Assert that one of so many runs of a machine ends by a failed check. The runs are always the
    same, and are not shrunk.
    """
    quick = settings(
        max_examples=examples,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    with pytest.raises((AssertionError, InvariantViolation)):
        run_state_machine_as_test(machine, settings=quick)


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
