"""Window groups: which blocks a sequence keeps, where a hit stands, what leaves first."""

from __future__ import annotations

import pytest

from engine.api import LeaseRequest, Quota, Retention, tokens_within
from engine.cache import BlockTable, PrefixCache
from engine.cache.tree.window_groups import HOLE, WindowGroups
from tests.tables import each_row
from tests.unit.engine.cache.sequences import compute

NAME = b"north"
HOUR = Retention("hour", promise_s=3600)


def make_cache(blocks: int = 200, size: int = 2, windows: tuple[int, ...] = (4,)) -> PrefixCache:
    """Return a cache with group 0 and a group for each window."""
    return PrefixCache(blocks=blocks, block_size=size, windows=windows)


def computed(
    cache: PrefixCache,
    prompt: list[int],
    now_s: float = 0.0,
    *,
    leases: tuple[LeaseRequest, ...] = (),
    step: int = 2,
) -> BlockTable:
    """Begin a prompt and compute it, `step` tokens at a time."""
    table = cache.begin(NAME, prompt, now_s, leases=leases)
    while table.kv_tokens < len(prompt):
        end = min(len(prompt), table.kv_tokens + step)
        assert compute(cache, table, prompt, now_s, end=end)
    return table


def run(cache: PrefixCache, prompt: list[int], now_s: float = 0.0) -> int:
    """Compute and release a prompt; return the tokens it found."""
    table = computed(cache, prompt, now_s)
    cache.release(table, prompt, now_s)
    cache.check()
    return table.kv_tokens


def hit(cache: PrefixCache, prompt: list[int]) -> tuple[int, int]:
    """Return the tokens of a prompt that are found, and those whose windows are gone."""
    found = cache.peek(NAME, [*prompt, 99], 0.0)
    return found.cached_tokens, found.resume_gap_tokens


def test_a_window_below_two_tokens_is_refused() -> None:
    """A window of one token keeps nothing that a later query reads."""
    with pytest.raises(ValueError, match="windows of"):
        WindowGroups((8, 1), 16)


@each_row("windows", [(), (4,), (3, 5), (8, 8, 8)])
@each_row("size", [2, 4])
def test_the_longest_sequence_fits_and_one_block_more_does_not(
    windows: tuple[int, ...], size: int
) -> None:
    """`tokens_within` is the inverse of `blocks_of`."""
    groups = WindowGroups(windows, size)
    for blocks in range(80):
        tokens = tokens_within(blocks, windows, size)

        assert groups.blocks_of(tokens) <= blocks
        assert groups.blocks_of(tokens + 1) > blocks


def test_a_sequence_keeps_the_blocks_of_its_window() -> None:
    """Blocks behind the window become holes, and stay cached (rule *Window*)."""
    cache = make_cache(windows=(4, 8))
    table = computed(cache, list(range(40)))

    assert [len(row) for row in table.beside] == [len(table.blocks)] * 2
    assert [row.count(HOLE) for row in table.beside] == [18, 16]
    assert table.held_blocks == 20 + 2 + 4
    stats = cache.stats()
    assert (stats.pinned, stats.cached, stats.window_blocks) == (26, 34, 40)
    cache.check()


def test_a_sequence_never_holds_more_than_its_window_and_two_blocks() -> None:
    """Decoding token by token, a window group has at most window / block + 2 blocks."""
    cache = make_cache(windows=(8,), size=4)
    table = computed(cache, list(range(100)), step=1)

    assert table.held_blocks <= 25 + 8 // 4 + 2


def test_room_is_taken_in_all_groups_or_in_none() -> None:
    """`grow` changes nothing where the blocks suffice for a part of the groups."""
    cache = make_cache(blocks=5, windows=(4, 8))
    table = cache.begin(NAME, [1, 2, 3, 4], 0.0)

    assert not cache.grow(table, 4, 0.0)
    assert (table.blocks, cache.stats().free) == ([], 5)
    assert cache.grow(table, 2, 0.0)
    assert cache.stats().free == 2


def test_an_answer_and_a_prompt_can_be_resumed() -> None:
    """Hits stand at the end of the prompt and at the end of the answer (rule *Resume point*)."""
    cache = make_cache()
    prompt = list(range(20))
    table = computed(cache, prompt)
    tokens = [*prompt, *range(50, 63)]
    for end in range(21, 34):
        assert compute(cache, table, tokens, end=end)
    cache.release(table, tokens, 0.0)

    assert hit(cache, tokens) == (33, 0)
    assert hit(cache, prompt) == (20, 0)
    cache.check()


def test_blocks_that_no_resume_point_needs_leave_first() -> None:
    """Under pressure the middle of a prompt loses its window blocks, and the hit stays whole."""
    cache = make_cache(blocks=48)
    prompt = list(range(40))
    run(cache, prompt)
    run(cache, list(range(100, 120)), 1.0)

    assert cache.stats().evicted_blocks_total == 12
    assert hit(cache, prompt) == (40, 0)
    assert hit(cache, prompt[:10]) == (0, 10)


def test_the_least_recently_resumed_point_leaves_whole() -> None:
    """Of two prompts the one resumed less recently loses its window, and all of it."""
    cache = make_cache(blocks=40)
    first, second = list(range(12)), list(range(100, 112))
    run(cache, first, 0.0)
    run(cache, second, 1.0)
    assert run(cache, [*first, 1], 2.0) == 13
    for number in range(4):
        run(cache, [1000 + number * 50 + i for i in range(10)], 3.0 + number)

    assert hit(cache, first)[0] == 12
    assert hit(cache, second)[0] == 0
    cache.check()


def test_walking_over_a_point_does_not_make_it_recent() -> None:
    """A longer hit over the same path leaves the recency of the point below it."""
    cache = make_cache()
    run(cache, list(range(12)), 1.0)
    run(cache, list(range(24)), 2.0)
    account = cache.tree_root(NAME)
    assert account is not None
    node, times = account, []
    run(cache, list(range(36)), 5.0)
    while node.children:
        node = next(iter(node.children.values()))
        assert node.beside is not None
        block = node.beside[0]
        times.append(None if block is None else block.resumed_at_s)

    assert times[4:6] == [2.0, 2.0]  # resumed at 12 tokens by the second request
    assert times[10:12] == [5.0, 5.0]


def test_a_tombstone_is_filled_by_a_sequence_that_computes_it() -> None:
    """A prompt that finds group 0 and no window recomputes, and can be resumed again (rule
    *Window*).
    """
    cache = make_cache(blocks=48)
    prompt = list(range(40))
    run(cache, prompt)
    run(cache, list(range(100, 120)), 1.0)
    assert hit(cache, prompt[:10]) == (0, 10)

    table = computed(cache, [*prompt[:10], 7])

    assert cache.stats().resume_gap_tokens_total == 10
    cache.release(table, [*prompt[:10], 7], 2.0)
    assert hit(cache, prompt[:10]) == (10, 0)
    cache.check()


def test_the_place_where_two_prompts_parted_can_be_resumed() -> None:
    """A recompute of what group 0 still had leaves a resume point where the prompts part."""
    cache = make_cache(blocks=56)
    shared = list(range(20))
    run(cache, [*shared, *range(50, 70)])
    run(cache, list(range(200, 226)), 1.0)  # the window at 20 tokens goes: no point needs it
    assert hit(cache, shared) == (0, 20)

    run(cache, [*shared, *range(80, 90)], 2.0)
    for number in range(3):
        run(cache, [1000 + number * 50 + i for i in range(4)], 3.0)

    assert hit(cache, shared) == (20, 0)


def test_a_promise_takes_group_0_and_the_last_window() -> None:
    """A promise of 20 tokens over blocks of two is ten blocks and the two of the window."""
    cache = make_cache(blocks=100)
    prompt = list(range(20))
    table = cache.begin(NAME, prompt, 0.0, leases=(LeaseRequest(20, HOUR, "l"),))
    assert (table.leases[0].outcome, table.reserved) == ("granted", 12)
    assert compute(cache, table, prompt)
    cache.release(table, prompt, 0.0)

    assert cache.use(NAME).promised == {"hour": 12}
    for number in range(8):  # a flood takes all but what is promised
        run(cache, [1000 + number * 50 + i for i in range(24)], 1.0)
    assert hit(cache, prompt) == (20, 0)
    assert cache.use(NAME).promised == {"hour": 12}
    cache.expire(3700.0)
    assert cache.use(NAME).promised == {}
    cache.check()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_that_ends_early_keeps_a_promise_that_can_be_resumed(is_preempted: bool) -> None:
    """The promise of 20 tokens moves to the window of the ten that were computed, also where the
    request ends while it waits after a preemption."""
    cache = make_cache(blocks=100)
    prompt = list(range(20))
    table = cache.begin(NAME, prompt, 0.0, leases=(LeaseRequest(20, HOUR, "l"),))
    assert compute(cache, table, prompt, end=10)
    if is_preempted:
        assert cache.suspend(table, prompt, 0.0)
        cache.check()
    cache.release(table, prompt, 0.0)

    assert cache.use(NAME).promised == {"hour": 7}
    for number in range(8):
        run(cache, [1000 + number * 50 + i for i in range(24)], 1.0)
    assert hit(cache, prompt) == (10, 0)


def test_a_promise_without_room_for_its_window_is_clipped() -> None:
    """Eight blocks hold six of group 0 and the two of the window there."""
    cache = make_cache()
    quota = Quota(promised_blocks_max=8)
    table = cache.begin(
        NAME, list(range(20)), 0.0, quota=quota, leases=(LeaseRequest(20, HOUR, "l"),)
    )

    assert (table.leases[0].outcome, table.leases[0].tokens) == ("clipped", 12)
    assert table.leases[0].bound == "quota"


def test_a_promise_ends_where_a_window_is_gone() -> None:
    """A lease that ends at a tombstone on the path is clipped to what can be resumed."""
    cache = make_cache(blocks=48)
    prompt = list(range(40))
    run(cache, prompt)
    run(cache, list(range(100, 120)), 1.0)
    assert hit(cache, prompt[:10]) == (0, 10)

    table = cache.begin(NAME, [*prompt, 1], 2.0, leases=(LeaseRequest(10, HOUR, "l"),))

    assert (table.leases[0].outcome, table.leases[0].bound) == ("refused", "window")
    cache.release(table, [*prompt, 1], 2.0)
    cache.check()


def test_a_partial_hit_copies_the_slots_of_every_group() -> None:
    """A token-exact end copies a block of each group; sources stay pinned until the launch."""
    cache = make_cache(size=4, windows=(8, 6))
    run(cache, list(range(14)))

    table = cache.begin(NAME, [*range(10), 77, 78], 1.0)

    assert table.kv_tokens == 10
    copies = cache.take_copies()
    assert [copy.tokens for copy in copies] == [2, 2, 2]
    assert [row[-1] for row in (table.blocks, *table.beside)] == [copy.dst for copy in copies]
    cache.check()


def test_a_fork_shares_the_blocks_of_every_group() -> None:
    """Two samples share all blocks, and each copies its own last ones before writing."""
    cache = make_cache(size=4)
    prompt = list(range(10))
    table = computed(cache, prompt)
    pinned = cache.stats().pinned

    fork = cache.fork(table)

    assert (fork.beside, cache.stats().pinned) == (table.beside, pinned)
    assert cache.grow(fork, 11, 0.0)
    assert len(cache.take_copies()) == 2
    assert fork.beside[0][-1] != table.beside[0][-1]
    cache.check()
    cache.release(table, prompt, 0.0)
    cache.release(fork, prompt, 0.0)
    cache.check()
    assert cache.stats().pinned == 0


def test_an_erasure_takes_the_blocks_of_every_group() -> None:
    """An erased namespace leaves nothing, and the receipt counts all blocks."""
    cache = make_cache(windows=(4, 8))
    run(cache, list(range(20)))

    assert cache.erase(NAME) == 30
    assert cache.stats().free == 200
    cache.check()
