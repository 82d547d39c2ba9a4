"""What is remembered of payers: the counters that fairness goes by."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.api import CacheGrant, Request
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import ActiveRequest, Sequence


def sequence(payer: bytes) -> Sequence:
    return Sequence(ActiveRequest(Request("r", (1,), 1, CacheGrant(payer)), 0, 0.0), 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_idle_payers_are_remembered_as_long_as_it_matters(seed: int) -> None:
    """Whoever had more than all that are active must not come back as if it had had nothing; of
    tens of thousands that have been here nobody else is kept, nor looked at when one goes."""
    chance, line = random.Random(seed), RequestQueue()
    live, expected = Counter[bytes](), dict[bytes, float]()
    for _ in range(400):
        payer = b"%d" % chance.randrange(12)
        if live[payer] and chance.random() < 0.4:
            tokens = chance.randrange(-3, 20)
            line.charge(sequence(payer), tokens)
            expected[payer] += tokens
        elif live[payer] and chance.random() < 0.6:
            line.count_departure(payer)
            live[payer] -= 1
            lowest = min((expected[p] for p in live if live[p]), default=float("inf"))
            if not live[payer]:
                kept = {p: n for p, n in expected.items() if live[p] or n > lowest}
                expected = kept
        else:
            line.count_arrival(payer)
            lowest = min((expected[p] for p in live if live[p]), default=0.0)
            if not live[payer]:
                expected[payer] = max(expected.get(payer, 0.0), lowest)
            live[payer] += 1

        assert line.served == expected


class Watched(dict[bytes, float]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, payer: bytes) -> float:
        self.reads += 1
        return super().__getitem__(payer)


def test_who_comes_and_goes_does_not_look_at_all_that_are_active() -> None:
    """Thousands of payers may wait; a request of one more costs what it cost before them, also
    after a step that served hundreds."""
    line, payers = RequestQueue(), [b"%d" % i for i in range(2000)]
    for payer in payers:
        line.count_arrival(payer)
    line.served = Watched(line.served)
    for payer in payers[:50]:
        line.charge(sequence(payer), 100)
    line.count_arrival(b"once")
    line.count_departure(b"once")
    line.served.reads = 0

    line.count_arrival(b"more")
    line.count_departure(b"more")

    assert line.served.reads < 10
