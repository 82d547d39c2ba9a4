"""The checker: in pieces, beside concurrent changes, it finds the same faults as at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from engine.api import LeaseRequest, Retention
from engine.cache import PrefixCache
from engine.cache.checker import PIECE_BLOCKS
from engine.errors import InvariantViolation
from tests.lines_run import lines_run
from tests.tables import each_row
from tests.unit.engine.cache.sequences import compute, computed

SIZE = 4
HOUR = Retention("hour", promise_s=3600, limit_s=7200)


def run(cache: PrefixCache, namespace: bytes, tokens: list[int], *, is_kept: bool = False) -> None:
    """Run a request from beginning to end."""
    leases = (LeaseRequest(len(tokens), HOUR, f"l{tokens[4]}"),) if is_kept else ()
    table = computed(cache, tokens, 0.0, namespace, leases=leases)
    cache.release(table, tokens, 0.0)


def crowded(namespaces: int = 40, large: int = 4) -> PrefixCache:
    """Return a cache with small namespaces and a large one of several pieces, half of it leased."""
    chance = random.Random(1)
    cache = PrefixCache(blocks=8_000, block_size=SIZE)
    for number in range(namespaces):
        run(
            cache, bytes([number]), [chance.randrange(9) for _ in range(14)], is_kept=number % 2 > 0
        )
    for number in range(large * PIECE_BLOCKS):
        tokens = [7, 7, 7, 7, number, *(chance.randrange(2) for _ in range(5))]
        run(cache, b"large", tokens, is_kept=number % 2 > 0)
    return cache


def of(cache: Any, namespace: bytes = b"large") -> Any:
    return cache._manager.accounts[namespace]


def leaf(cache: Any, namespace: bytes = b"large") -> Any:
    """Return the last block of some prompt in a namespace."""
    nodes = [node for node in of(cache, namespace).tree.root.subtree() if not node.children]
    return next(node for node in nodes if not node.promised)


def extra_reference(cache: Any) -> None:
    cache._manager.pool.ref_count[leaf(cache).block] += 1


def free_block_listed_twice(cache: Any) -> None:
    cache._manager.pool.free.append(cache._manager.pool.free[-1])


def leaked_block(cache: Any) -> None:
    block = cache._manager.pool.free.pop()
    cache._manager.pool.ref_count[block] = 1
    cache._manager.owner[block] = of(cache)


def wrong_owner(cache: Any) -> None:
    cache._manager.owner[leaf(cache).block] = of(cache, b"\1")


def leaf_missing_in_the_eviction_order(cache: Any) -> None:
    node = leaf(cache)
    score = node.eviction_score
    of(cache).payer_account.eviction_order.remove(node)
    node.eviction_score = score


def stale_eviction_score(cache: Any) -> None:
    leaf(cache).last_use_s += 1


def uncounted_promise(cache: Any) -> None:
    of(cache).promised_in["hour"] -= 1


def wrong_payer_sum(cache: Any) -> None:
    of(cache).payer_account.evictable += 1


def unreported_payer_change(cache: Any) -> None:
    cache._manager.fair_share._spare -= 1


def missing_lease_endpoint(cache: Any) -> None:
    of(cache).lease_endpoints._nodes.popitem()


def child_missing_in_the_order(cache: Any) -> None:
    (trunk,) = of(cache).tree.root.children.values()
    trunk.child_order.pop()


def tree_without_an_account(cache: Any) -> None:
    cache._manager.accounts.pop(b"\2")


FAULTS = (
    extra_reference,
    free_block_listed_twice,
    leaked_block,
    wrong_owner,
    leaf_missing_in_the_eviction_order,
    stale_eviction_score,
    uncounted_promise,
    wrong_payer_sum,
    unreported_payer_change,
    missing_lease_endpoint,
    child_missing_in_the_order,
    tree_without_an_account,
)


@each_row("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_in_pieces(fault: Callable[[Any], None]) -> None:
    cache = crowded(namespaces=10, large=2)
    cache.check()
    fault(cache)

    with pytest.raises(InvariantViolation):
        for _ in cache.recount():
            pass


def test_a_large_recount_has_many_small_pieces() -> None:
    """A new request waits for one piece. At once, 55,000 blocks under leases took a third of a
    second.
    """
    cache = crowded(large=20)
    pieces, recount = list[int](), cache.recount()
    with suppress(StopIteration):
        while True:
            pieces.append(lines_run(partial(next, recount)))

    assert len(pieces) > 20
    assert max(pieces) < sum(pieces) / 8


@each_row("what", ["a request", "an erasure", "a lease erased", "a lapse"])
def test_a_change_between_two_pieces_is_no_fault(what: str) -> None:
    """A namespace that has changed meanwhile is checked from its beginning."""
    cache, acts = crowded(), 0
    for number, _ in enumerate(cache.recount()):
        if number % 3 == 2 and acts < 6:
            acts += 1
            if what == "a request":
                run(cache, b"large", [7, 7, 7, 7, 90_000 + number])
            elif what == "an erasure":
                cache.erase(b"large", tokens=[7, 7, 7, 7, number * 30])
            elif what == "a lease erased":
                cache.erase(b"large", lease_id=next(iter(of(cache).lease_endpoints._nodes)))
            else:
                cache.expire(3_600.0 * acts)

    assert acts > 3
    cache.check()


@each_row("piece", range(8, 14))
def test_a_sequence_that_ends_between_two_pieces_is_no_fault(piece: int) -> None:
    """Counts taken while it ran do not match the blocks it leaves behind."""
    cache = crowded()
    tokens = [7, 7, 7, 7, *range(400, 400 + SIZE * 300)]
    table = computed(cache, tokens, 0.0, b"large")
    for number, _ in enumerate(cache.recount()):
        if number == piece:
            cache.release(table, tokens, 0.0)

    cache.check()


def test_a_recount_beside_running_sequences_ends() -> None:
    """Continuous work must not keep the checker from finishing a large namespace."""
    cache = crowded()
    table = cache.begin(b"large", [5] * 9, 1.0)
    tokens = [5] * 4_000
    pieces = 0
    for pieces, _ in enumerate(cache.recount(), 1):
        assert compute(cache, table, tokens, 1.0, end=9 + pieces)

    assert 4 < pieces < 100


def test_a_whole_block_that_a_fork_shares_is_no_fault() -> None:
    """Nothing more is written to it, so it need not be the sequence's own: here it is not in the
    tree either, since an erasure has stopped its writer."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = cache.begin(b"forked", [7] * SIZE, 0.0)
    assert cache.grow(table, SIZE, 0.0)
    cache.erase(b"forked")
    cache.commit(table, [7] * SIZE, SIZE, 0.0)
    fork = cache.fork(table)
    assert cache.grow(table, SIZE, 0.0)

    cache.check()
    for one in (table, fork):
        cache.release(one, [7] * SIZE, 0.0)
