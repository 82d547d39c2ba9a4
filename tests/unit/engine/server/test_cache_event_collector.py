"""`CacheEventCollector`: from the cache's events to the heartbeat."""

from __future__ import annotations

from engine.cache.events import BlocksErased, Committed, Evicted, Expired, Matched, PromiseLost
from engine.server.cache_event_collector import CacheEventCollector
from engine.statistics import CacheNews, Gain, Loss


def test_reports_losses_once_by_cause_and_taker() -> None:
    """News are differences to the last ones."""
    collector = CacheEventCollector()
    for fact in (
        Evicted(b"a", b"a", 1, 2.0),
        Evicted(b"a", b"b", 1, 3.0),
        Evicted(b"a", b"b", 1, 4.0),
        Committed(b"b", 3, 48, 2),
        Committed(b"b", 3, 48, 0),
        Committed(b"b", 1, 7, 1),
        Expired(b"a", 4),
        BlocksErased(b"b", 5),
        PromiseLost(b"b", 1),
        PromiseLost(b"b", 1),
        Matched(b"a", 10, 5),
    ):
        collector.note(fact)

    news = collector.take(9)

    assert news == CacheNews(
        (
            Loss(b"a", "evicted_own_quota", b"a", 1, 2.0),
            Loss(b"a", "evicted_pressure", b"b", 2, 7.0),
            Loss(b"a", "expired", b"", 4),
            Loss(b"b", "erased", b"", 5),
            Loss(b"b", "lost_below", b"", 2),
        ),
        (Gain(b"b", 3),),
    )
    assert collector.take(9) is None


def test_takes_oldest_losses_first_in_bounded_parts() -> None:
    """No step waits for all of them, and no loss waits for ever."""
    collector = CacheEventCollector()
    for taker in (b"a", b"b", b"c"):
        collector.note(Evicted(b"n", taker, 1, 1.0))
    collector.note(Committed(b"g", 1, 16, 1))

    first = collector.take(2)
    collector.note(Evicted(b"n", b"a", 1, 5.0))
    left = len(collector)
    second = collector.take(2)

    losses = [Loss(b"n", "evicted_pressure", taker, 1, 1.0) for taker in (b"a", b"b", b"c")]
    again = Loss(b"n", "evicted_pressure", b"a", 1, 5.0)
    assert first == CacheNews(tuple(losses[:2]), (Gain(b"g", 1),))
    assert left == 2
    assert second == CacheNews((losses[2], again))
    assert len(collector) == 0
