"""Blocks in and out, by tenant and minute, from totals that grow and sometimes begin again."""

from __future__ import annotations

from collections import Counter

from engine.api import CacheNews, Gain, Loss
from engine.client.cache_event_totals import BlockMoves, CacheEventTotals
from gateway.analytics import block_churn
from gateway.analytics.block_churn import BlockChurn


def owner_of(namespace: bytes) -> int | None:
    """b"7/x" is tenant 7's."""
    return int(namespace[:1]) if namespace[:1].isdigit() else None


def test_what_is_new_counts_for_the_minute_in_which_it_is_seen() -> None:
    """Two looks in a minute are one row; nothing is counted twice."""
    totals, seen = CacheEventTotals(), BlockChurn()
    totals.add(CacheNews((), (Gain(b"1/a", 5), Gain(b"1/b", 2), Gain(b"2/a", 1))))
    seen.look(totals.take_moves(), owner_of, 10)
    totals.add(CacheNews((Loss(b"1/a", "evicted_pressure", b"2/a", 2, 9.0),), (Gain(b"1/a", 1),)))
    seen.look(totals.take_moves(), owner_of, 10)
    totals.add(CacheNews((Loss(b"1/b", "expired", b"", 1), Loss(b"1/b", "erased", b"", 1)), ()))
    seen.look(totals.take_moves(), owner_of, 11)
    seen.look(totals.take_moves(), owner_of, 12)

    assert seen.tenant(1).shown() == {
        "inserted_blocks": 8,
        "evicted_blocks": 2,
        "expired_blocks": 1,
        "erased_blocks": 1,
        "evicted_after_s": 4.5,
        "minutes": [[10, 8, 2, 0, 4.5], [11, 0, 0, 2, None]],
    }
    assert seen.all.shown()["inserted_blocks"] == 9
    assert [tenant for tenant, _ in seen.latest(2)] == [1, 2]


def test_another_life_of_the_engine_adds_to_what_the_last_one_told() -> None:
    """What was counted stays counted."""
    seen = BlockChurn()
    for minute, gained in ((1, 5), (2, 2)):
        totals = CacheEventTotals()
        totals.add(CacheNews((), (Gain(b"1/a", gained),)))
        seen.look(totals.take_moves(), owner_of, minute)

    assert seen.tenant(1).shown()["minutes"] == [[1, 5, 0, 0, None], [2, 2, 0, 0, None]]


def test_a_namespace_that_is_nobodys_is_left_out() -> None:
    """An engine that serves others too tells of them."""
    seen = BlockChurn()
    seen.look({b"x": BlockMoves(3, Counter({"expired": 1}))}, owner_of, 1)

    assert seen.latest(9) == []
    assert seen.all.shown()["inserted_blocks"] == 0


def test_history_is_bounded() -> None:
    """By minutes, and by tenants: those that moved last stay, the sum of all does not fall."""
    seen = BlockChurn()
    for minute in range(200):
        seen.look({b"1/a": BlockMoves(gained=1)}, owner_of, minute)
    many = {b"%d" % n: BlockMoves(gained=1) for n in range(block_churn.TENANTS_MAX + 5)}
    seen.look(many, lambda namespace: int(namespace), 300)

    assert len(seen.all.shown()["minutes"]) == block_churn.MINUTES
    assert len(seen.latest(10**9)) == block_churn.TENANTS_MAX
    assert seen.all.shown()["inserted_blocks"] == 200 + len(many)
