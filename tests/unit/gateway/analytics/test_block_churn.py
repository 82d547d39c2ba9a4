"""`BlockChurn`: blocks in and out by tenant and minute, over restarts of the engine."""

from __future__ import annotations

from collections import Counter

from engine.client.cache_event_totals import BlockMoves, CacheEventTotals
from engine.statistics import CacheNews, Gain, Loss
from gateway.analytics import block_churn
from gateway.analytics.block_churn import BlockChurn


def owner_of(namespace: bytes) -> int | None:
    """Return the tenant of a namespace: b"7/x" is tenant 7's."""
    return int(namespace[:1]) if namespace[:1].isdigit() else None


def test_counts_new_moves_in_the_minute_of_the_update() -> None:
    """Two updates in a minute are one row; no move is counted twice."""
    totals, churn = CacheEventTotals(), BlockChurn()
    totals.add(CacheNews((), (Gain(b"1/a", 5), Gain(b"1/b", 2), Gain(b"2/a", 1))))
    churn.update(totals.take_moves(), owner_of, 10)
    totals.add(CacheNews((Loss(b"1/a", "evicted_pressure", b"2/a", 2, 9.0),), (Gain(b"1/a", 1),)))
    churn.update(totals.take_moves(), owner_of, 10)
    totals.add(CacheNews((Loss(b"1/b", "expired", b"", 1), Loss(b"1/b", "erased", b"", 1)), ()))
    churn.update(totals.take_moves(), owner_of, 11)
    churn.update(totals.take_moves(), owner_of, 12)

    assert churn.tenant(1).details() == {
        "inserted_blocks": 8,
        "evicted_blocks": 2,
        "expired_blocks": 1,
        "erased_blocks": 1,
        "evicted_after_s": 4.5,
        "minutes": [[10, 8, 2, 0, 4.5], [11, 0, 0, 2, None]],
    }
    assert churn.all.details()["inserted_blocks"] == 9
    assert [tenant for tenant, _ in churn.latest(2)] == [1, 2]


def test_restarted_engine_adds_to_earlier_counts() -> None:
    churn = BlockChurn()
    for minute, gained in ((1, 5), (2, 2)):
        totals = CacheEventTotals()
        totals.add(CacheNews((), (Gain(b"1/a", gained),)))
        churn.update(totals.take_moves(), owner_of, minute)

    assert churn.tenant(1).details()["minutes"] == [[1, 5, 0, 0, None], [2, 2, 0, 0, None]]


def test_minutes_are_in_order_when_the_clock_is_set_back() -> None:
    """A chart draws them from left to right."""
    churn = BlockChurn()
    for minute in (60, 1, 2, 61):
        churn.update({b"1/a": BlockMoves(1, Counter())}, owner_of, minute)

    minutes = churn.tenant(1).details()["minutes"]
    assert [(minute, inserted) for minute, inserted, *_ in minutes] == [(60, 3), (61, 1)]


def test_skips_namespaces_without_a_tenant() -> None:
    """The engine may serve other clients, too."""
    churn = BlockChurn()
    churn.update({b"x": BlockMoves(3, Counter({"expired": 1}))}, owner_of, 1)

    assert churn.latest(9) == []
    assert churn.all.details()["inserted_blocks"] == 0


def test_history_is_bounded_by_minutes_and_tenants() -> None:
    """The tenants that changed last stay; the total does not fall."""
    churn = BlockChurn()
    for minute in range(200):
        churn.update({b"1/a": BlockMoves(gained=1)}, owner_of, minute)
    many = {b"%d" % n: BlockMoves(gained=1) for n in range(block_churn.TENANTS_MAX + 5)}
    churn.update(many, lambda namespace: int(namespace), 300)

    assert len(churn.all.details()["minutes"]) == block_churn.MINUTES
    assert len(churn.latest(10**9)) == block_churn.TENANTS_MAX
    assert churn.all.details()["inserted_blocks"] == 200 + len(many)
