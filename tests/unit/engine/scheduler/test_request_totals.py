"""Request totals: the counts equal a walk over the requests."""

from __future__ import annotations

import random

import pytest

from engine.api import CacheGrant, Request
from engine.errors import InvariantViolation
from engine.scheduler.request_table import RequestTotals


def request(chance: random.Random) -> Request:
    tokens = (1,) * chance.randrange(1, 9)
    return Request("r", tokens, 1, CacheGrant(b"%d" % chance.randrange(4)))


@pytest.mark.parametrize("seed", range(10))
def test_totals_equal_a_walk_over_the_requests(seed: int) -> None:
    """A reader of the changed namespaces alone misses nothing."""
    chance, tally = random.Random(seed), RequestTotals()
    here: list[Request] = []
    known: dict[bytes, int] = {}
    for _ in range(200):
        if here and chance.random() < 0.5:
            tally.remove(here.pop(chance.randrange(len(here))))
        else:
            here.append(request(chance))
            tally.add(here[-1])
        tally.check(here)
        if chance.random() < 0.3:
            known |= {name: tally.requests_of(name) for name in tally.take_changed()}
            counts = [one.grant.namespace for one in here]
            assert all(counts.count(name) == known[name] for name in known)
            assert set(counts) == set(tally) <= set(known)

    assert tally.requests == len(here)
    assert tally.tokens == sum(len(one.tokens) for one in here)


def test_the_check_finds_an_uncounted_request() -> None:
    """The check recounts each namespace too."""
    tally, (one, other) = (
        RequestTotals(),
        (Request("r", (1,), 1, CacheGrant(name)) for name in (b"a", b"b")),
    )
    tally.add(one)

    with pytest.raises(InvariantViolation, match="recounted"):
        tally.check([other])
