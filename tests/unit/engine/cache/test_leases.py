"""Leases: a promise and a limit, on the test's own clock (rules *Lease*, *Grant*)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from engine.api import LeaseGrant, LeaseRequest, Quota, Retention
from engine.cache import BlockTable, Fact, PrefixCache
from engine.cache.events import PromiseLost
from engine.cache.tree.leases import BlockTerms
from engine.cache.tree.places import HostPlace
from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation
from tests.tables import each_row
from tests.unit.engine.cache.quiet_levels import QuietLevels
from tests.unit.engine.cache.sequences import compute, computed

SIZE = 4
US, THEM = b"us", b"them"
OPEN = Quota()
FIVE = Retention("five", promise_s=300, limit_s=300)
STARTED = Retention("started", limit_s=100, clock="request_start")
ABSOLUTE = Retention("absolute", limit_s=100, clock="absolute", renewed_on_read=False)
ABSOLUTE_PROMISE = Retention(
    "fixed", promise_s=100, limit_s=500, clock="absolute", renewed_on_read=False
)
PINNED = Retention("pinned", limit_s=1000, clock="absolute", renewed_on_read=False, pinned=True)


def run(
    cache: PrefixCache,
    tokens: list[int],
    now_s: float,
    *leases: LeaseRequest,
    namespace: bytes = US,
    quota: Quota = OPEN,
    lasts_s: float = 0.0,
) -> tuple[LeaseGrant, ...]:
    """Run a request from beginning to end; return its lease grants."""
    table = cache.begin(namespace, tokens, now_s, quota=quota, leases=leases)
    compute(cache, table, tokens, now_s)
    grants = table.leases
    cache.release(table, tokens, now_s + lasts_s)
    return grants


def found(cache: PrefixCache, tokens: list[int], now_s: float, namespace: bytes = US) -> int:
    """Return the cached tokens of a prompt that continues `tokens`."""
    return cache.peek(namespace, [*tokens, 999], now_s).cached_tokens


def lease(retention: Retention, tokens: int = 8, lease_id: str = "") -> LeaseRequest:
    return LeaseRequest(tokens, retention, lease_id)


WORDS = list(range(8))


@each_row("retention", [FIVE, STARTED, ABSOLUTE, PINNED], ids=lambda r: r.name)
def test_a_prefix_is_found_until_just_before_its_limit(retention: Retention) -> None:
    """The limit is the first instant at which a prefix must not be matched."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 10.0, lease(retention))
    assert retention.limit_s is not None
    end_s = 10.0 + retention.limit_s

    assert found(cache, WORDS, end_s - 0.001) == 8
    assert found(cache, WORDS, end_s) == 0
    assert cache.stats().free == 16


def promised(cache: PrefixCache) -> int:
    """Return the blocks under a live promise."""
    return sum(sum(use.promised.values()) for use in cache.namespaces())


def test_a_read_renews_a_sliding_lease() -> None:
    """Five minutes from the last use, as the dialects promise."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE))

    run(cache, [*WORDS, 50], 200.0, lease(FIVE))

    assert found(cache, WORDS, 499.0) == 8
    assert found(cache, WORDS, 500.0) == 0


def test_a_read_never_moves_an_absolute_end() -> None:
    """However often it is used, the prefix ends at the promised time."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(ABSOLUTE))

    table = cache.begin(US, [*WORDS, 50], 90.0, leases=(lease(ABSOLUTE, tokens=0),))
    cache.release(table, [*WORDS, 50], 90.0)

    assert found(cache, WORDS, 99.9) == 8
    assert found(cache, WORDS, 100.0) == 0


def test_a_peek_renews_nothing() -> None:
    """A quote is not a use."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE))

    cache.peek(US, [*WORDS, 50], 299.0)

    assert found(cache, WORDS, 300.0) == 0


def test_a_block_in_use_outlives_a_sliding_limit_until_its_use_ends() -> None:
    """A clock that counts from the last use has not started while the use lasts."""
    cache = PrefixCache(blocks=16, block_size=SIZE)

    run(cache, WORDS, 0.0, lease(FIVE), lasts_s=1000.0)

    assert found(cache, WORDS, 1299.0) == 8
    assert found(cache, WORDS, 1300.0) == 0


def test_the_longest_of_two_leases_counts() -> None:
    """A shorter lease never shortens another promise."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(PINNED), lease(ABSOLUTE))

    assert found(cache, WORDS, 999.0) == 8


def test_a_block_beyond_the_lease_expires_with_the_leased_blocks() -> None:
    """No block can be found below an expired prefix."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, [*WORDS, *range(20, 28)], 0.0, lease(ABSOLUTE, tokens=4))

    assert found(cache, [*WORDS, *range(20, 28)], 99.0) == 16
    cache.expire(100.0)
    assert cache.stats().free == 16


def test_a_request_without_leases_lifts_the_limit() -> None:
    """Plain best effort has no limit: its blocks stay as long as there is room."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE))

    run(cache, [*WORDS, 50], 10.0)

    assert found(cache, WORDS, 10_000.0) == 8


def test_a_promised_block_is_not_evicted_under_pressure() -> None:
    """All other blocks go first; then other requests get no room."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE))

    for first in range(100, 2000, 100):
        run(cache, list(range(first, first + 20)), 1.0)

    assert found(cache, WORDS, 2.0) == 8
    cache.check()


def test_a_lapsed_promise_is_best_effort() -> None:
    """After its time a block is evicted like any other."""
    kept = Retention("kept", promise_s=10)
    cache = PrefixCache(blocks=4, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(kept))

    run(cache, list(range(100, 116)), 11.0)

    assert found(cache, WORDS, 11.0) == 0


def test_a_promise_beyond_the_promisable_part_is_clipped() -> None:
    """Promises and floors take at most 7/8 of the pool, so that work always moves."""
    cache = PrefixCache(blocks=8, block_size=SIZE)

    (grant,) = run(cache, list(range(32)), 0.0, lease(FIVE, tokens=32, lease_id="big"))

    assert grant == LeaseGrant("big", "five", "clipped", 28, "pool")


def test_a_promise_without_room_is_refused() -> None:
    """The grant says so at admission, and the request runs all the same."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    run(cache, list(range(28)), 0.0, lease(FIVE, tokens=28))

    (grant,) = run(cache, [7, 7, 7], 1.0, lease(FIVE, tokens=3), namespace=THEM)

    assert (grant.outcome, grant.tokens, grant.bound) == ("refused", 0, "pool")


def test_a_lapsed_promise_is_renewed_where_there_is_room() -> None:
    """A read restarts the time, except where the room has been promised to others meanwhile."""
    half = Retention("half", promise_s=300)
    cache = PrefixCache(blocks=8, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(half))
    run(cache, list(range(100, 124)), 300.0, lease(FIVE, tokens=24), namespace=THEM)

    run(cache, [*WORDS, 9], 300.0)

    assert promised(cache) == 7, "six of theirs, and one of two again"
    run(cache, [*WORDS, 9], 601.0)
    assert promised(cache) == 2


def test_a_promise_does_not_lapse_in_a_block_that_is_in_use() -> None:
    """It counts from the last use. Otherwise the beginning of a long answer would count as room,
    under blocks that must not go; handing out that room brought the engine down.
    """
    brief = Retention("brief", promise_s=5, limit_s=100)
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = cache.begin(US, WORDS, 0.0, quota=OPEN, leases=(lease(brief),))
    assert cache.grow(table, 8, 0.0)
    cache.commit(table, WORDS, 4, 0.0)
    cache.commit(table, WORDS, 8, 4.0)
    cache.expire(6.0)
    run(cache, list(range(100, 124)), 6.0, lease(PINNED, tokens=24), namespace=THEM)
    cache.release(table, WORDS, 7.0)

    cache.check()
    assert promised(cache) == 7
    cache.expire(11.9)
    assert found(cache, WORDS, 11.9) == 8


def test_promises_that_end_together_lapse_together() -> None:
    """A block in use at that moment counts like the unread ones below it until all are released;
    otherwise it would count as room and have none.
    """
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(ABSOLUTE_PROMISE))
    short = [*WORDS[:4], 70, 71]
    table = computed(cache, short, 90.0, end=6, quota=OPEN)
    cache.release(table, short, 101.0)

    cache.check()
    assert promised(cache) == 2
    cache.expire(101.0)
    cache.check()
    assert promised(cache) == 0


def test_a_block_counts_in_the_class_that_promises_it_longest() -> None:
    """Storage is billed by class: each block once, in one class, as its promises come and go."""
    hour = Retention("hour", promise_s=3600, limit_s=3600)

    def held_in() -> dict[str, int]:
        (use,) = cache.namespaces()
        return use.promised

    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE, 8))
    assert held_in() == {"five": 2}
    run(cache, [*WORDS, *WORDS], 100.0, lease(hour, 4, "h"), lease(FIVE, 16, "f"))
    assert held_in() == {"hour": 1, "five": 3}
    run(cache, [*WORDS, 7, 7, 7, 7], 399.0, lease(hour, 8, "h"))

    assert held_in() == {"hour": 2, "five": 2}
    cache.check()
    cache.expire(400.0)
    assert held_in() == {"hour": 2}
    cache.erase(US, lease_id="h")
    cache.check()


def test_a_promise_is_clipped_to_the_namespaces_ceiling() -> None:
    """A namespace is not promised more than it may hold."""
    cache = PrefixCache(blocks=16, block_size=SIZE)

    (grant,) = run(cache, WORDS, 0.0, lease(FIVE), quota=Quota(ceiling_blocks=2))

    assert (grant.outcome, grant.tokens, grant.bound) == ("clipped", 4, "ceiling")


def test_a_payer_with_all_its_promises_used_can_still_run() -> None:
    """Otherwise a payer at its ceiling with promises alone would be refused until they end."""
    quota = Quota(ceiling_blocks=16)
    cache = PrefixCache(blocks=64, block_size=SIZE)
    for first in range(0, 1_000, 100):
        run(cache, list(range(first, first + 8)), 0.0, lease(FIVE), quota=quota)

    assert promised(cache) == 14
    assert min(cache.available_blocks(US, quota)) == 2
    cache.check()


def test_a_promise_is_clipped_to_the_quota_of_promises() -> None:
    """Holding many blocks and being promised many are two limits."""
    cache = PrefixCache(blocks=16, block_size=SIZE)

    (grant,) = run(cache, WORDS, 0.0, lease(FIVE), quota=Quota(promised_blocks_max=1))

    assert (grant.outcome, grant.tokens, grant.bound) == ("clipped", 4, "quota")
    assert found(cache, WORDS, 1.0) == len(WORDS)


LONG = list(range(28))
"""Seven blocks, all that may be promised of eight."""


def preempted(
    cache: PrefixCache, *leases: LeaseRequest, committed: int = 8, now_s: float = 0.0
) -> BlockTable:
    """Begin the prompt `LONG` under leases that are granted, and preempt it after `committed`
    tokens."""
    table = cache.begin(US, LONG, now_s, leases=leases)
    assert all(one.outcome == "granted" for one in table.leases)
    assert compute(cache, table, LONG, now_s, end=committed)
    assert cache.suspend(table, LONG, now_s)
    cache.check()
    return table


def test_a_preempted_sequence_keeps_the_room_of_its_promise() -> None:
    """What it was granted, it is granted again, whatever others ask for in between."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = preempted(cache, lease(FIVE, tokens=28))
    (other,) = run(cache, list(range(100, 116)), 1.0, lease(FIVE, tokens=16), namespace=THEM)
    again = cache.begin(US, LONG, 2.0, leases=(lease(FIVE, tokens=28),), suspended=table)
    cache.check()

    assert (other.outcome, other.bound) == ("refused", "pool")
    assert [one.outcome for one in again.leases] == ["granted"]
    assert compute(cache, again, LONG, 2.0)
    cache.release(again, LONG, 2.0)
    cache.check()
    assert promised(cache) == 7


def test_the_room_outlives_a_quota_that_shrinks() -> None:
    """A changed quota holds from the next request on; this one has begun already."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = preempted(cache, lease(FIVE, tokens=28))
    small = Quota(promised_blocks_max=1)
    again = cache.begin(
        US, LONG, 2.0, quota=small, leases=(lease(FIVE, tokens=28),), suspended=table
    )

    assert [one.outcome for one in again.leases] == ["granted"]
    cache.release(again, LONG, 2.0)
    cache.check()


def test_a_preempted_sequence_that_ends_leaves_no_reservation() -> None:
    """Cancelled while it waits, it keeps the promises of what it computed alone; once."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = preempted(cache, lease(FIVE, tokens=28), committed=4)
    cache.release(table, LONG, 1.0, keep=False)
    cache.check()

    (grant,) = run(cache, list(range(100, 128)), 1.0, lease(FIVE, tokens=28), namespace=THEM)
    assert grant.tokens == 24
    with pytest.raises(InvariantViolation, match="released twice"):
        cache.release(table, LONG, 1.0, keep=False)


def test_a_sequence_without_promises_leaves_nothing_when_preempted() -> None:
    """It is released, as ever."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = cache.begin(US, LONG, 0.0, leases=(lease(Retention("none", limit_s=9), 28),))

    assert not cache.suspend(table, LONG, 0.0)
    cache.release(table, LONG, 0.0)
    assert not cache.namespaces()


def test_a_promise_that_ran_out_while_its_sequence_waited_is_told_as_lost() -> None:
    """The room was another's by then. What was not computed yet had kept its room."""
    facts: list[Fact] = []
    cache = PrefixCache(blocks=8, block_size=SIZE, facts=facts.append)
    table = preempted(cache, lease(FIVE, tokens=28))
    (other,) = run(cache, WORDS, 300.0, lease(FIVE), namespace=THEM)
    again = cache.begin(US, LONG, 300.0, leases=(lease(FIVE, tokens=28),), suspended=table)

    assert other.outcome == "granted"
    assert [one.tokens for one in again.leases] == [20]
    assert [fact for fact in facts if isinstance(fact, PromiseLost)] == [PromiseLost(US, 2)]
    cache.release(again, LONG, 300.0)
    cache.check()


def test_a_preemption_restarts_no_clock() -> None:
    """An absolute promise, and an absolute limit, count from the first time it began."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    asked = lease(ABSOLUTE_PROMISE, tokens=28)
    table = preempted(cache, asked)
    again = computed(cache, LONG, 50.0, leases=(asked,), suspended=table)
    cache.release(again, LONG, 50.0)

    cache.expire(99.9)
    assert promised(cache) == 7
    cache.expire(100.0)
    assert promised(cache) == 0
    assert found(cache, LONG, 499.9) == 28
    assert found(cache, LONG, 500.0) == 0


def test_an_erased_sequence_is_promised_nothing_again() -> None:
    """Nor is that a loss: it was asked for."""
    facts: list[Fact] = []
    cache = PrefixCache(blocks=8, block_size=SIZE, facts=facts.append)
    table = preempted(cache, lease(FIVE, tokens=28))
    cache.erase(US)
    again = cache.begin(
        US, LONG, 2.0, leases=(lease(FIVE, tokens=28),), write=False, suspended=table
    )

    assert [one.outcome for one in again.leases] == ["refused"]
    assert not any(isinstance(fact, PromiseLost) for fact in facts)
    cache.release(again, LONG, 2.0)
    cache.check()
    assert not cache.namespaces()


def test_a_lease_beyond_the_prompt_covers_no_output_after_a_preemption() -> None:
    """It is granted what it was granted before the outputs were there."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    asked = lease(FIVE, tokens=28)
    table = computed(cache, WORDS, leases=(asked,))
    assert cache.suspend(table, WORDS, 0.0)
    again = cache.begin(US, LONG, 0.0, leases=(asked,), suspended=table)

    assert [one.tokens for one in again.leases] == [8]
    cache.release(again, LONG, 0.0)
    cache.check()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_promise_stays_above_blocks_that_are_to_be_promised(is_preempted: bool) -> None:
    """It would return with the next of them, to a device whose room is promised to others."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    cache.attach(QuietLevels(keeps=True), 16)
    table = cache.begin(US, WORDS, 0.0, leases=(lease(FIVE),))
    assert cache.grow(table, 8, 0.0)
    cache.commit(table, WORDS, 4, 0.0)
    node = table.node
    if is_preempted:
        assert cache.suspend(table, WORDS, 0.0)
    cache.promises.settle(node)

    assert node.is_bound
    cache.check()
    cache.release(table, WORDS, 0.0, keep=False)
    assert node.promised_below
    cache.check()


def test_what_hangs_on_a_block_that_its_level_lost_is_told_as_lost() -> None:
    """Without room for that block, what was to be promised under it is not promised either."""
    facts: list[Fact] = []
    cache = PrefixCache(blocks=8, block_size=SIZE, facts=facts.append)
    cache.attach(QuietLevels(keeps=True), 16)
    quota = Quota(payer=US, promised_blocks_max=7)
    node = kept_below(cache, LONG[:SIZE])
    table = cache.begin(US, LONG, 0.0, quota=quota, leases=(lease(FIVE, tokens=28),))
    assert [one.outcome for one in table.leases] == ["granted"]
    assert node.parent is not None
    node.host, node.parent.copied_children = None, 0
    cache.promises.place_lost(node, 0.0)
    cache.remove_placeless(node)
    kept_below(cache, [90] * SIZE)  # it takes the last of the quota
    assert compute(cache, table, LONG, end=8)

    assert [one.blocks for one in facts if isinstance(one, PromiseLost)] == [1, 6]
    cache.release(table, LONG, 0.0)
    cache.check()


def kept_below(cache: PrefixCache, tokens: Sequence[int]) -> Node:
    """Return a first run of `tokens` that is in host memory alone, which keeps its promise."""
    node = cache.add_run(US, US, None, tuple(tokens))
    node.host = HostPlace(0, 0, has_windows=False)
    assert node.parent is not None
    node.parent.copied_children += 1
    terms = BlockTerms(math.inf)
    terms.extend_promise(300.0, "five")
    cache.promises.take_over(node, terms, 0.0)
    return node


def test_a_promise_never_computed_lapses_with_its_request() -> None:
    """A request that is cancelled during its prompt leaves no reservation."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    table = cache.begin(US, list(range(28)), 0.0, leases=(lease(FIVE, tokens=28),))
    cache.release(table, list(range(28)), 0.0)

    (grant,) = run(cache, list(range(100, 128)), 1.0, lease(FIVE, tokens=28))

    assert grant.outcome == "granted"


def test_erasing_a_lease_keeps_blocks_that_another_covers() -> None:
    cache = PrefixCache(blocks=16, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE, tokens=4, lease_id="a"), lease(FIVE, lease_id="b"))

    cache.erase(US, lease_id="b")

    assert found(cache, WORDS, 1.0) == 4
    cache.erase(US, lease_id="a")
    assert found(cache, WORDS, 1.0) == 0


def test_next_lapse_is_the_earliest_end_of_a_live_promise() -> None:
    """A renewed promise ends later, and a pinned one or an erased one tells no time."""
    cache = PrefixCache(blocks=32, block_size=SIZE)
    run(cache, WORDS, 0.0, lease(FIVE))
    run(cache, [50, *WORDS], 10.0, lease(FIVE))
    before = cache.promises.next_lapse_s()
    run(cache, [*WORDS, 1], 20.0)  # renews the first promise
    after = cache.promises.next_lapse_s()
    cache.erase(US)

    assert (before, after) == (300.0, 310.0)
    assert cache.promises.next_lapse_s() is None
