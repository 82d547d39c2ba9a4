"""The eviction policy: the cache evicts by any policy's scores, and LRU is the default."""

from __future__ import annotations

import pytest

from engine.api import Quota, Retention
from engine.cache import EvictionPolicy, LeastRecentlyUsed, PrefixCache
from engine.cache.tree.eviction_policy import EvictionOrder
from engine.cache.tree.prefix_tree import Node
from tests.fakes import FirstInFirstOut
from tests.unit.engine.cache.sequences import computed

SIZE = 4
HOUR = Retention("hour", promise_s=3600, limit_s=7200)
POLICIES = pytest.mark.parametrize("policy", [LeastRecentlyUsed(), FirstInFirstOut()])


def run(cache: PrefixCache, tokens: list[int], now_s: float, payer: bytes = b"") -> None:
    """Run a request that writes all its tokens."""
    table = computed(cache, tokens, now_s, quota=Quota(payer=payer))
    cache.release(table, tokens, now_s)


def cached_prompts(cache: PrefixCache, count: int) -> list[int]:
    """Return the numbers of the one-block prompts that are still cached."""
    return [n for n in range(count) if cache.peek(b"us", [n] * (SIZE + 1), 100.0).cached_tokens]


@pytest.mark.parametrize(("policy", "evicted"), [(LeastRecentlyUsed(), 1), (FirstInFirstOut(), 0)])
def test_evicts_the_leaf_with_the_lowest_score(policy: EvictionPolicy, evicted: int) -> None:
    cache = PrefixCache(blocks=3, block_size=SIZE, eviction_policy=policy)
    for number in range(3):
        run(cache, [number] * SIZE, float(number))
    table = cache.begin(b"us", [0] * (SIZE + 1), 5.0)  # reads prompt 0
    cache.release(table, [0] * (SIZE + 1), 5.0)

    run(cache, [3] * SIZE, 6.0)

    assert cached_prompts(cache, 4) == [n for n in range(4) if n != evicted]
    cache.check()


@POLICIES
def test_evicts_the_older_node_of_two_with_equal_scores(policy: EvictionPolicy) -> None:
    cache = PrefixCache(blocks=2, block_size=SIZE, eviction_policy=policy)
    run(cache, [0] * SIZE, 1.0)
    run(cache, [1] * SIZE, 1.0)

    run(cache, [2] * SIZE, 1.0)

    assert cached_prompts(cache, 3) == [1, 2]


@POLICIES
def test_evicts_no_inner_block_before_the_blocks_below_it(policy: EvictionPolicy) -> None:
    """A FIFO policy scores the beginning of a prompt lowest, and must still evict its end first."""
    cache = PrefixCache(blocks=4, block_size=SIZE, eviction_policy=policy)
    prompt = list(range(4 * SIZE))
    run(cache, prompt, 0.0)

    table = cache.begin(b"them", [9] * SIZE, 1.0)
    assert cache.grow(table, SIZE, 1.0)

    assert cache.peek(b"us", [*prompt, 99], 1.0).cached_tokens == 3 * SIZE
    cache.check()


@POLICIES
def test_a_new_payer_takes_over_the_evictable_leaves(policy: EvictionPolicy) -> None:
    cache = PrefixCache(blocks=6, block_size=SIZE, eviction_policy=policy)
    for number in range(4):
        run(cache, [number] * SIZE, float(number), payer=b"old")

    run(cache, [9] * SIZE, 9.0, payer=b"new")

    cache.check()
    assert min(cache.available_blocks(b"us", Quota(payer=b"new"))) == 6


def test_an_order_holds_no_leaf_whose_score_has_changed() -> None:
    """The checker relies on it: such a leaf would be evicted by an outdated score."""
    order = EvictionOrder(LeastRecentlyUsed())
    node = Node((1,), None, 1, None)
    order.add(node)
    assert order.holds(node)

    node.last_use_s = 5.0

    assert not order.holds(node)
    order.remove(node)
    assert len(order) == 0
