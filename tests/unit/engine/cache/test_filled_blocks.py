"""Blocks from another engine's device are found like any, under the limits they had there."""

from __future__ import annotations

import math

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import BlockTable, PrefixCache
from tests.unit.engine.cache.sequences import computed

SIZE = 4
TOKENS = tuple(range(5 * SIZE))
PAYER = Quota(payer=b"p")


def cache_of(blocks: int = 8) -> PrefixCache:
    return PrefixCache(blocks=blocks, block_size=SIZE)


def begin(cache: PrefixCache, quota: Quota = PAYER) -> BlockTable | None:
    return cache.fills.begin(b"us", quota, TOKENS, 0.0)


def fill(cache: PrefixCache, limits_at_s: list[float], now_s: float = 0.0) -> int:
    """Fill a prompt's blocks, of which so many come; return how many tokens are then found."""
    table = begin(cache)
    assert table is not None
    cache.fills.commit(table, TOKENS, limits_at_s, now_s)
    cache.fills.end(table)
    cache.check()
    return found(cache, now_s)


def found(cache: PrefixCache, now_s: float) -> int:
    return cache.find(b"us", (*TOKENS, 0), now_s).cached_tokens


def test_what_has_come_is_found_and_the_rest_is_free_again() -> None:
    """Behind what the device had."""
    cache = cache_of()
    cache.release(computed(cache, TOKENS[: 2 * SIZE]), TOKENS[: 2 * SIZE], 0.0)
    assert fill(cache, [math.inf] * 2) == 4 * SIZE
    assert (cache.stats().free, cache.stats().cached) == (4, 4)


def test_a_limit_is_the_one_at_the_source_and_others_stay() -> None:
    """The device's own runs had none, and get none; the new ones are found until then."""
    cache = cache_of()
    cache.release(computed(cache, TOKENS[: 2 * SIZE]), TOKENS[: 2 * SIZE], 0.0)
    assert fill(cache, [10.0, 5.0]) == 4 * SIZE
    assert [found(cache, now_s) for now_s in (4.0, 6.0, 11.0)] == [4 * SIZE, 3 * SIZE, 2 * SIZE]


def test_nothing_counts_after_an_erasure() -> None:
    """Of all of the namespace, or of what comes before it."""
    for tokens in (None, TOKENS[:SIZE]):
        cache = cache_of()
        cache.release(computed(cache, TOKENS[:SIZE]), TOKENS[:SIZE], 0.0)
        table = begin(cache)
        assert table is not None
        cache.erase(b"us", tokens=tokens)
        cache.fills.commit(table, TOKENS, [math.inf] * 4, 0.0)
        cache.fills.end(table)
        assert found(cache, 0.0) == 0
        assert cache.stats().free == 8
        cache.check()


def test_a_fill_takes_no_block_from_a_sequence_or_a_floor() -> None:
    """It begins only where all of it has room; what may be evicted goes first."""
    cache = cache_of()
    held = computed(cache, (9,) * 4 * SIZE, namespace=b"other")
    assert begin(cache) is None
    cache.release(held, (9,) * 4 * SIZE, 0.0)
    assert fill(cache, [math.inf] * 5) == 5 * SIZE

    cache = cache_of()
    floored = Quota(payer=b"floored", floor_blocks=4)
    held = computed(cache, (9,) * SIZE, namespace=b"other", quota=floored)
    assert begin(cache) is None, "three more blocks may be claimed at any time"
    cache.release(held, (9,) * SIZE, 0.0)
    assert begin(cache_of(), Quota(payer=b"p", ceiling_blocks=4)) is None


def test_a_fill_that_the_device_has_is_none() -> None:
    cache = cache_of()
    cache.release(computed(cache, TOKENS), TOKENS, 0.0)
    assert begin(cache) is None
    assert cache.stats().free == 3


def test_a_fill_is_no_use_of_what_it_pins() -> None:
    """A lease whose clock counts from the last use goes on, and what is over by then leaves."""
    cache = cache_of(16)
    retention = Retention("use", promise_s=5, limit_s=10, clock="last_use", renewed_on_read=True)
    leases = [LeaseRequest(2 * SIZE, retention, "l")]
    held = computed(cache, TOKENS[: 2 * SIZE], quota=PAYER, leases=leases)
    cache.release(held, TOKENS[: 2 * SIZE], 0.0)
    table = begin(cache)
    assert table is not None
    cache.fills.end(table)
    assert [found(cache, now_s) for now_s in (9.0, 11.0)] == [2 * SIZE, 0]


def test_a_fill_leaves_a_block_for_each_running_sequence() -> None:
    """They grow while it waits."""
    cache = cache_of(7)
    running = [computed(cache, (n,) * (SIZE - 1), namespace=b"other") for n in (7, 8)]
    assert begin(cache) is None, "five blocks of five"
    cache.release(running.pop(), (8,) * (SIZE - 1), 0.0, keep=False)
    assert begin(cache) is None, "five of six, and the fill's own table counts"
    cache.release(running.pop(), (7,) * (SIZE - 1), 0.0, keep=False)
    assert begin(cache) is not None
