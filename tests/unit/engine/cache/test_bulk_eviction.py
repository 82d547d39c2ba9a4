"""Blocks that are evicted many at a time go in the order in which they would go one by one."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.eviction_policy import EvictionOrder
from engine.cache.tree.fair_share import FairShare
from engine.cache.tree.prefix_tree import Node
from tests.unit.engine.cache.quiet_levels import QuietLevels
from tests.unit.engine.cache.sequences import compute

SIZE = 2
QUOTAS = (
    Quota(payer=b"a"),
    Quota(floor_blocks=6, payer=b"b"),
    Quota(weight=2.0, payer=b"c"),
    Quota(ceiling_blocks=14, payer=b"d"),
)
SHORT = Retention("short", promise_s=3, limit_s=9)
SEEDS = range(40)
Victim = tuple[bytes, int, tuple[int, ...]]


def evicted_in_a_life(seed: int) -> list[Victim]:
    """Return what a random life of a small cache evicts, in order: namespace, depth and tokens."""
    chance, now_s = random.Random(seed), 0.0
    cache = PrefixCache(blocks=30, block_size=SIZE)
    evicted: list[Victim] = []
    running: list[tuple[BlockTable, list[int]]] = []

    class Noted(QuietLevels):
        def evicting(self, node: Node) -> None:
            evicted.append((node.namespace, len(node.path()), node.run))

    cache.attach(Noted())
    for number in range(60):
        now_s += chance.choice((0.0, 0.0, 1.0))  # equal times: serials decide
        if running and chance.random() < 0.6:
            table, tokens = running.pop(chance.randrange(len(running)))
            cache.release(table, tokens, now_s)
        quota = chance.choice(QUOTAS)
        namespace = quota.payer + bytes([chance.randrange(2)])
        tokens = [chance.randrange(2) for _ in range(chance.randrange(2, 33))]
        leases: tuple[LeaseRequest, ...] = ()
        if chance.random() < 0.2:
            leases = (LeaseRequest(len(tokens), SHORT, f"lease {number}"),)
        table = cache.begin(namespace, tokens, now_s, quota=quota, leases=leases)
        compute(cache, table, tokens, now_s)
        running.append((table, tokens))
    cache.check()
    return evicted


def one_by_one(self: Any, giver: Any, count: int) -> Any:
    """Evict as with window groups."""
    return [self._evict_one(giver) for _ in range(count)]


def evicted_one_by_one(seed: int) -> list[Victim]:
    """Return what a life evicts that takes each block alone."""
    with (
        patch.object(BlockManager, "_evict", one_by_one),
        patch.object(FairShare, "given_in_a_row", lambda self, *args, own: 1),
    ):
        return evicted_in_a_life(seed)


def test_many_blocks_are_evicted_in_the_order_of_single_ones() -> None:
    """Over payers with floors, weights and ceilings, shared prefixes, promises and equal times."""
    for seed in SEEDS:
        together = evicted_in_a_life(seed)
        assert together
        assert together == evicted_one_by_one(seed), seed


def test_the_comparison_sees_a_path_that_is_followed_too_far() -> None:
    """A planted fault: what becomes a leaf goes next, before older leaves."""
    with patch.object(EvictionOrder, "add_unless_first", lambda self, node: False):
        assert any(evicted_in_a_life(seed) != evicted_one_by_one(seed) for seed in SEEDS)


def test_the_comparison_sees_a_payer_that_gives_too_much() -> None:
    """A planted fault: a payer gives all that is wanted, also below another one's share."""

    def all_of_it(self: Any, giver: Any, taker: Any, wanted: int, most: int, *, own: bool) -> int:
        return int(min(most, giver.evictable if giver is taker else giver.spare_blocks()))

    with patch.object(FairShare, "given_in_a_row", all_of_it):
        assert any(evicted_in_a_life(seed) != evicted_one_by_one(seed) for seed in SEEDS)
