"""Lives in which few payers have many namespaces, and their terms change while requests run."""

from __future__ import annotations

import pytest

from tests.sim.crowd import Crowd

SEEDS = (
    1007,  # a promise lapsed in a block in use, above others whose promise went on
    1213,  # the same, after its payer's bound of promises had changed
    5006,  # a promise was over and used, before those that end with it were let go
    5082,  # the last sequence of a namespace ended between two pieces of its recount
    4001,
    4002,
)


@pytest.mark.sim
@pytest.mark.parametrize("seed", SEEDS)
def test_a_crowd_of_namespaces_may_change_all_its_terms(seed: int) -> None:
    """Quotas and payers change, leases are erased one by one, requests are cancelled as they end:
    counts, promises and answers hold all the same, and what was drawn is what was charged."""
    crowd = Crowd(seed)

    world = crowd.live(400)

    assert world.endings["done"] > 10
    crowd.count_outputs()
