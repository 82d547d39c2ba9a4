"""A request that has two tokens to compute does not wait for the prompts of twenty tenants."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.tenants import Tenants
from tests.unit.engine.timed_engine import Machine, fast, slow


def test_a_quiet_tenants_first_token_waits_for_few_steps() -> None:
    """By counters alone it waited until each of the others, served a few tokens less, had had a
    prompt of 300: for twenty steps.
    """
    observed = Tenants(slow, 24, sequences_max=64).observe(14)

    assert max(observed.waits) < 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "wanted", "steps"),
    [
        (slow, {"sequences_max": 64}, 3),
        (slow, {"sequences_max": 16}, 6),
        (slow, {"sequences_max": 64, "each": 1, "samples": 16}, 8),
        (slow, {"sequences_max": 64, "prompt": 900, "answer": 8}, 3),
        (slow, {"sequences_max": 64, "tenants": 60, "each": 1}, 3),
        (fast, {"sequences_max": 64, "gap_target_shared_ms": 12.0}, 3),
    ],
    ids=["slots", "few slots", "n = 16", "long prompts", "60 tenants", "device"],
)
def test_no_kind_of_busy_tenants_makes_a_quiet_one_wait(
    machine: Machine, wanted: dict[str, Any], steps: float
) -> None:
    """Whether slots are scarce, samples hold them, or prompts are long."""
    settings = {"tenants": 24} | wanted
    observed = Tenants(machine, **settings).observe(80)

    assert max(observed.waits) < steps


@pytest.mark.slow
def test_busy_tenants_lose_no_throughput_to_a_quiet_one() -> None:
    """Its few tokens are computed in steps that others need as well."""
    alone = Tenants(slow, 24, sequences_max=64).run_alone(300)
    beside = Tenants(slow, 24, sequences_max=64).observe(400).busy_rate

    assert beside > 0.9 * alone
