"""How long the runs of a state machine are."""

from __future__ import annotations

from unittest import TestCase

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine


def case(machine: type[RuleBasedStateMachine], steps: int = 40) -> type[TestCase]:
    """Return a machine's test, whose runs have up to so many steps."""
    found = machine.TestCase
    found.settings = settings(stateful_step_count=steps)
    return found
