"""Lives in which few payers have many namespaces, and their terms change during requests."""

from __future__ import annotations

import pytest

from tests.sim.crowd import Crowd

SEEDS = (
    1007,  # a promise lapsed in a block in use, above blocks whose promise continued
    1213,  # the same, after its payer's bound of promises had changed
    5006,  # a promise was over and used, before the promises that end with it lapsed
    5082,  # the last sequence of a namespace ended between two pieces of its recount
    4001,
    4002,
)


@pytest.mark.sim
@pytest.mark.parametrize("seed", SEEDS)
def test_counts_and_promises_hold_while_all_terms_change(seed: int) -> None:
    """Quotas and payers change, leases are erased one by one, requests are cancelled as they end;
    counts, promises and outputs hold, and the charged tokens are the sampled ones.
    """
    crowd = Crowd(seed)

    world = crowd.live(400)

    assert world.endings["done"] > 10
    crowd.count_outputs()
