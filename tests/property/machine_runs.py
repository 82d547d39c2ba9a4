"""How many runs a state machine has, and how long they are."""

from __future__ import annotations

from unittest import TestCase

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

from tests.examples import FULL

LONG = ("long", "deep")
"""The profiles in which machines have as many runs as properties have examples."""


def case(machine: type[RuleBasedStateMachine], steps: int = 40) -> type[TestCase]:
    """Return a machine's test, whose runs have up to so many steps. A run is some hundred times an
    example of a property, so there are a quarter as many but in the profiles of `LONG`."""
    is_long = settings.get_current_profile_name() in LONG
    runs = settings().max_examples if is_long else FULL // 4
    found = machine.TestCase
    found.settings = settings(max_examples=runs, stateful_step_count=steps)
    return found
