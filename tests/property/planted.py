"""Planted faults: a state machine that misses one proves nothing when it passes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from engine.errors import InvariantViolation


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
