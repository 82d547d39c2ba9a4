"""Rule *Fair share*: expired blocks go first, then blocks of the payer furthest over its share."""

from __future__ import annotations

import pytest

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from tests.tables import each_row
from tests.unit.engine.cache.sequences import compute, computed

SIZE = 4
OPEN = Quota()


def fill(
    cache: PrefixCache, namespace: bytes, blocks: int, now_s: float = 0.0, quota: Quota = OPEN
) -> None:
    """Run `blocks` prompts of one block each, which differ in their first token."""
    for number in range(blocks):
        ask(cache, namespace, [number, *namespace[:3].ljust(3)], now_s + number, quota)


def ask(
    cache: PrefixCache,
    namespace: bytes,
    tokens: list[int],
    now_s: float,
    quota: Quota = OPEN,
    leases: tuple[LeaseRequest, ...] = (),
) -> bool:
    """Run one request to its end; return whether there was room."""
    table = cache.begin(namespace, tokens, now_s, quota=quota, leases=leases)
    has_room = compute(cache, table, tokens, now_s)
    cache.release(table, tokens, now_s)
    cache.check()
    return has_room


def held(cache: PrefixCache) -> dict[bytes, int]:
    """Return the blocks held by namespace."""
    return {use.namespace: use.blocks for use in cache.namespaces()}


def test_a_flood_evicts_only_its_own_blocks() -> None:
    """A tenant that streams unique prompts costs other tenants no hit."""
    cache = PrefixCache(blocks=10, block_size=SIZE)
    fill(cache, b"quiet", 4)

    fill(cache, b"flood", 50, now_s=100)

    assert held(cache)[b"quiet"] >= 4


def test_payer_furthest_over_its_share_gives_first() -> None:
    """Equal weights lead to equal shares."""
    cache = PrefixCache(blocks=12, block_size=SIZE)
    fill(cache, b"early", 12)

    fill(cache, b"later", 12, now_s=100)

    assert held(cache) == {b"early": 6, b"later": 6}


def test_a_larger_weight_gives_a_larger_share() -> None:
    """Twice the weight is twice the blocks above the floor."""
    cache = PrefixCache(blocks=12, block_size=SIZE)
    fill(cache, b"heavy", 12, quota=Quota(weight=2.0))

    fill(cache, b"light", 12, now_s=100)

    assert held(cache) == {b"heavy": 8, b"light": 4}


def test_other_payers_never_take_a_floor() -> None:
    """This holds even if all blocks of the other payer are in use."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    fill(cache, b"floor", 3, quota=Quota(floor_blocks=3))
    table = cache.begin(b"other", list(range(20)), 10.0)
    assert cache.grow(table, 20, 10.0)

    assert not ask(cache, b"other", [90, 91, 92, 93], 11.0)
    assert held(cache)[b"floor"] == 3


def test_a_ceiling_holds_while_the_pool_has_room() -> None:
    """Above its ceiling a namespace evicts its own blocks, although blocks are free."""
    cache = PrefixCache(blocks=16, block_size=SIZE)

    fill(cache, b"small", 9, quota=Quota(ceiling_blocks=3))

    assert held(cache) == {b"small": 3}
    assert cache.stats().free == 13


def test_a_sequence_longer_than_its_ceiling_gets_no_room() -> None:
    """The cache refuses at once rather than evict the blocks that the sequence reads."""
    cache = PrefixCache(blocks=16, block_size=SIZE)

    assert not ask(cache, b"small", list(range(16)), 0.0, Quota(ceiling_blocks=3))


def test_expired_blocks_go_before_live_ones() -> None:
    """An old block that may be matched is worth more than a recent one that may not."""
    cache = PrefixCache(blocks=4, block_size=SIZE)
    fill(cache, b"wanted", 2)
    brief = LeaseRequest(8, Retention("brief", limit_s=5))
    assert ask(cache, b"over", list(range(8)), 10.0, leases=(brief,))

    assert ask(cache, b"third", [7, 7, 7, 7], 15.0)

    assert held(cache)[b"wanted"] == 2
    assert cache.stats().expired_blocks_total == 2
    assert cache.stats().evicted_blocks_total == 0


def test_evicts_leaves_before_their_ancestors() -> None:
    """A prefix without its beginning could never be found."""
    cache = PrefixCache(blocks=4, block_size=SIZE)
    ask(cache, b"us", list(range(16)), 0.0)

    ask(cache, b"us", [90, 91, 92, 93], 1.0)

    assert cache.peek(b"us", list(range(17)), 2.0).cached_tokens == 12


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_available_blocks_can_be_allocated_and_no_more(blocks: int) -> None:
    """The scheduler admits by this number."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    fill(cache, b"floor", 2, quota=Quota(floor_blocks=2))
    fill(cache, b"other", 4, now_s=10)
    room = int(min(cache.available_blocks(b"us", Quota(ceiling_blocks=blocks))))
    assert room == min(6, blocks)

    table = cache.begin(b"us", list(range(100)), 20.0, quota=Quota(ceiling_blocks=blocks))

    assert not cache.grow(table, (room + 1) * SIZE, 20.0)
    assert cache.grow(table, room * SIZE, 20.0)


def test_inside_its_floor_a_payer_waits_rather_than_evicts() -> None:
    """Guaranteed blocks are not spent on making room for their own payer."""
    cache = PrefixCache(blocks=6, block_size=SIZE)
    quota = Quota(floor_blocks=4)
    fill(cache, b"us", 2, quota=quota)
    hog = cache.begin(b"hog", list(range(16)), 5.0)
    assert cache.grow(hog, 16, 5.0)

    assert not ask(cache, b"us", [90, 91, 92, 93], 6.0, quota)

    assert held(cache)[b"us"] == 2


# --- payers --------------------------------------------------------------------------------------


def test_all_namespaces_of_a_payer_share_one_floor() -> None:
    """Otherwise a client that makes up a key for each prompt would get a floor for each."""
    cache = PrefixCache(blocks=20, block_size=SIZE)
    hoard = Quota(floor_blocks=4, payer=b"hoarder")
    for number in range(20):
        fill(cache, b"h%02d" % number, 1, now_s=number, quota=hoard)

    fill(cache, b"later", 16, now_s=100)

    assert held(cache)[b"later"] == 8
    assert sum(held(cache).values()) == 20, "12: its floor, and an equal share of the rest"


def test_all_namespaces_of_a_payer_share_one_ceiling() -> None:
    """Its oldest leaf goes first, in any of its namespaces; other payers lose nothing."""
    cache = PrefixCache(blocks=20, block_size=SIZE)
    fill(cache, b"other", 4)
    bounded = Quota(ceiling_blocks=3, payer=b"bounded")
    for number in range(5):
        fill(cache, b"n%d" % number, 1, now_s=10 + number, quota=bounded)

    assert held(cache) == {b"other": 4, b"n2": 1, b"n3": 1, b"n4": 1}


def test_promises_are_bounded_by_payer() -> None:
    """Blocks promised to one namespace cannot be promised to the payer's next."""
    cache = PrefixCache(blocks=40, block_size=SIZE)
    quota = Quota(promised_blocks_max=3, payer=b"both")
    lease = Retention("leased", promise_s=60, limit_s=60)
    outcomes = []
    for name in (b"one", b"two", b"three"):
        tokens, asked = list(range(2 * SIZE)), (LeaseRequest(2 * SIZE, lease),)
        table = computed(cache, tokens, 0.0, name, quota=quota, leases=asked)
        cache.release(table, tokens, 0.0)
        outcomes += [grant.outcome for grant in table.leases]
        cache.check()

    assert outcomes == ["granted", "clipped", "refused"]


def test_a_floor_outlives_its_namespaces() -> None:
    """A payer that holds nothing keeps its guarantee."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    quota = Quota(floor_blocks=6, payer=b"p")
    fill(cache, b"a", 2, quota=quota)
    cache.erase(b"a")
    cache.check()

    assert held(cache) == {}
    assert cache.max_sequence_tokens(b"other", OPEN) < 3 * SIZE
    assert cache.max_sequence_tokens(b"b", quota) >= 8 * SIZE


def test_floors_beyond_the_pool_are_cut_in_one_proportion() -> None:
    """An operator's typing error must not exclude all other payers."""
    cache = PrefixCache(blocks=16, block_size=SIZE)
    ask(cache, b"a", [1], 0.0, Quota(floor_blocks=10**12, payer=b"a"))
    assert cache.max_sequence_tokens(b"other", OPEN) >= 2 * SIZE

    ask(cache, b"b", [1], 0.0, Quota(floor_blocks=10**12, payer=b"b"))

    assert cache.max_sequence_tokens(b"other", OPEN) == 2 * SIZE, "an eighth is never guaranteed"
    assert cache.max_sequence_tokens(b"a", Quota(floor_blocks=10**12, payer=b"a")) >= 9 * SIZE
    fill(cache, b"other", 20)
    assert held(cache)[b"other"] == 14


@each_row(("context_blocks", "left_blocks"), [(0, 2), (2, 2), (6, 6), (8, 8), (9, 8), (64, 8)])
def test_floors_leave_room_for_the_longest_sequence(context_blocks: int, left_blocks: int) -> None:
    """However large one floor is, other payers can run a prompt that fits the context. Where the
    pool does not hold two such prompts, half of it is left, and a request that needs less is not
    refused.
    """
    cache = PrefixCache(blocks=16, block_size=SIZE, context_tokens=context_blocks * SIZE)
    ask(cache, b"a", [1], 0.0, Quota(floor_blocks=10**9, payer=b"a"))
    cache.check()

    assert cache.floor_blocks_max == 16 - left_blocks
    assert cache.max_sequence_tokens(b"other", OPEN) == left_blocks * SIZE


def test_floors_that_fit_are_not_cut() -> None:
    cache = PrefixCache(blocks=16, block_size=SIZE)
    for name, floor in ((b"a", 4), (b"b", 10)):
        fill(cache, name, floor, quota=Quota(floor_blocks=floor, payer=name))

    fill(cache, b"flood", 30, now_s=100.0)

    assert held(cache) == {b"a": 4, b"b": 10, b"flood": 2}


def test_set_quota_ends_a_floor_at_once() -> None:
    """A payer that sends no further request cannot bring the lower floor with one."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    fill(cache, b"a", 6, quota=Quota(floor_blocks=6, payer=b"p"))

    cache.set_quota(Quota(payer=b"p"))
    cache.set_quota(Quota(floor_blocks=8, payer=b"never seen"))
    fill(cache, b"other", 20, now_s=100.0)

    assert held(cache) == {b"a": 4, b"other": 4}
    cache.erase(b"a")
    cache.check()
    assert cache.max_sequence_tokens(b"other", OPEN) >= 8 * SIZE


def test_a_namespace_may_change_its_payer() -> None:
    """Its blocks count for the new payer."""
    cache = PrefixCache(blocks=8, block_size=SIZE)
    fill(cache, b"a", 2, quota=Quota(payer=b"old"))
    fill(cache, b"a", 1, now_s=10, quota=Quota(payer=b"new"))

    assert (cache.over_share(b"old"), cache.over_share(b"new")) == (0, 2)
