"""`CacheEventTotals`: losses added up on the gateway's side, in bounded memory."""

from __future__ import annotations

from engine.client.cache_event_totals import CacheEventTotals
from engine.statistics import CacheNews, Gain, Loss


def test_counts_losses_by_cause_and_taker() -> None:
    """Evictions by taker count only between different namespaces."""
    totals = CacheEventTotals()
    totals.add(CacheNews((Loss(b"a", "evicted_pressure", b"b", 2),)))
    totals.add(
        CacheNews(
            (Loss(b"a", "evicted_pressure", b"b", 3), Loss(b"a", "evicted_own_quota", b"a", 1))
        )
    )

    assert totals.losses_of(b"a") == {"evicted_pressure": 5, "evicted_own_quota": 1}
    assert totals.losses_of(b"b") == {}
    assert totals.evictions_by_taker() == {(b"a", b"b"): 5}


def test_counts_block_moves_with_lifetimes() -> None:
    """Churn: blocks inserted, blocks lost, and the seconds that evicted blocks had lived."""
    totals = CacheEventTotals()
    totals.add(CacheNews((Loss(b"a", "evicted_pressure", b"b", 2, 9.0),), (Gain(b"a", 5),)))
    totals.add(CacheNews((Loss(b"a", "expired", b"", 1),), (Gain(b"a", 1), Gain(b"b", 2))))

    moves = totals.take_moves()
    assert (moves[b"a"].gained, moves[b"a"].evicted, moves[b"a"].lived_s) == (6, 2, 9.0)
    assert moves[b"a"].lost["expired"] == 1
    assert (moves[b"b"].gained, moves[b"b"].evicted) == (2, 0)
    assert totals.take_moves() == {}
    assert totals.losses_of(b"a") == {"evicted_pressure": 2, "expired": 1}


def test_forgets_the_namespace_that_lost_blocks_longest_ago() -> None:
    """A million namespaces must not grow a gateway for ever."""
    totals = CacheEventTotals(namespaces_max=2)
    for name in (b"a", b"b", b"a", b"c"):
        totals.add(CacheNews((Loss(name, "expired", b"", 1),)))

    assert totals.losses_of(b"b") == {}
    assert totals.losses_of(b"a") == {"expired": 2}


def test_group_with_many_namespaces_forgets_its_own() -> None:
    """A client that invents partitions pushes out what explains its own misses, not others'."""
    totals = CacheEventTotals(namespaces_max=4)
    totals.group_by(lambda namespace: namespace[:1])
    totals.add(CacheNews((Loss(b"quiet", "evicted_pressure", b"x", 3),)))
    for number in range(100):
        totals.add(CacheNews((Loss(b"x%d" % number, "evicted_pressure", b"quiet", 1),)))

    assert totals.losses_of(b"quiet") == {"evicted_pressure": 3}
    assert totals.losses_of(b"x99") == {"evicted_pressure": 1}
    assert totals.losses_of(b"x0") == {}
    assert len(totals.evictions_by_taker()) == 4
    assert (b"quiet", b"x") in totals.evictions_by_taker()
