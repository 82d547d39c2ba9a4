"""The request queue: the payers' counters that fairness uses."""

from __future__ import annotations

import random
from collections import Counter

from engine.api import CacheGrant, Request
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import ActiveRequest, Sequence
from tests.tables import each_row


def sequence(payer: bytes, weight: float = 1.0) -> Sequence:
    request = Request("r", (1,), 1, CacheGrant(payer), weight=weight)
    return Sequence(ActiveRequest(request, 0, 0.0), 0, 0)


@each_row("seed", range(20))
def test_an_idle_payers_counter_is_kept_while_above_the_active_ones(seed: int) -> None:
    """A payer with more service than all active ones must not return with a clean counter. The
    counters of other idle payers are deleted, without a scan of them.
    """
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
            line.count_arrival(payer, 1.0)
            lowest = min((expected[p] for p in live if live[p]), default=0.0)
            if not live[payer]:
                expected[payer] = max(expected.get(payer, 0.0), lowest)
            live[payer] += 1

        assert line.served == expected


class CountedCounters(dict[bytes, float]):
    """Counts how often a payer's counter is read."""

    reads = 0

    def __getitem__(self, payer: bytes) -> float:
        self.reads += 1
        return super().__getitem__(payer)


def test_arrivals_and_departures_do_not_scan_active_payers() -> None:
    """With thousands of waiting payers, a further request costs the same, also after a step that
    served hundreds.
    """
    line, payers = RequestQueue(), [b"%d" % i for i in range(2000)]
    for payer in payers:
        line.count_arrival(payer, 1.0)
    line.served = CountedCounters(line.served)
    for payer in payers[:50]:
        line.charge(sequence(payer), 100)
    line.count_arrival(b"once", 1.0)
    line.count_departure(b"once")
    line.served.reads = 0

    line.count_arrival(b"more", 1.0)
    line.count_departure(b"more")

    assert line.served.reads < 10


def test_a_token_of_each_sequence_is_charged_at_once() -> None:
    """As `charge` does it for each; payers differ in weight."""
    together, alone = RequestQueue(), RequestQueue()
    sequences = [sequence(b"%d" % (number % 3), weight=1.0 + number % 3) for number in range(8)]
    for queue in (together, alone):
        for payer in (b"0", b"1", b"2"):
            queue.count_arrival(payer, 1.0)

    together.charge_each(sequences)
    for each in sequences:
        alone.charge(each, 1)

    assert together.served == alone.served == {b"0": 3.0, b"1": 1.5, b"2": 2 / 3}
