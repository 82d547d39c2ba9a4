"""What namespaces lost, from the cache's facts to whoever asks why."""

from __future__ import annotations

from engine.api import CacheNews, Gain, Loss
from engine.cache.events import Committed, Erased, Evicted, Expired, Matched
from engine.losses import LossCollector


def test_losses_are_told_once_by_cause_and_by_who_took_them() -> None:
    """News are differences: what was told is not told again."""
    collector = LossCollector()
    for fact in (
        Evicted(b"a", b"a", 1, 2.0),
        Evicted(b"a", b"b", 1, 3.0),
        Evicted(b"a", b"b", 1, 4.0),
        Committed(b"b", 3, 48, 2),
        Committed(b"b", 3, 48, 0),
        Committed(b"b", 1, 7, 1),
        Expired(b"a", 4),
        Erased(b"b", 5),
        Matched(b"a", 10, 5),
    ):
        collector.note(fact)

    news = collector.take()

    assert news == CacheNews(
        (
            Loss(b"a", "evicted_own_quota", b"a", 1, 2.0),
            Loss(b"a", "evicted_pressure", b"b", 2, 7.0),
            Loss(b"a", "expired", b"", 4),
            Loss(b"b", "erased", b"", 5),
        ),
        (Gain(b"b", 3),),
    )
    assert collector.take() is None
