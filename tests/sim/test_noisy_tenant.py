"""A tenant that streams unique prompts evicts its own blocks and no other tenant's."""

from __future__ import annotations

from tests.bench.noisy_tenant import FLOOR, QUIET, hit_ratio, jain, served

TURNS, NOISE = 240, 25


def test_a_floor_keeps_a_quiet_tenants_hits_within_a_point_of_alone() -> None:
    """Rule *Isolation*: one tenant's requests never change another's hits inside its floor."""
    alone = hit_ratio(TURNS, FLOOR, 0)
    mixed = hit_ratio(TURNS, 0, NOISE, by=QUIET)

    crowded = hit_ratio(TURNS, FLOOR, NOISE)

    assert alone > 0.5
    assert mixed < alone / 2
    assert abs(alone - crowded) < 0.01


def test_service_is_shared_by_weight_under_any_load() -> None:
    """Eight times the requests is not eight times the service."""
    even = jain(served())
    weighed = jain(served(weights=(1.0,) * 4 + (3.0,) * 4))

    assert even > 0.97
    assert weighed > 0.9
