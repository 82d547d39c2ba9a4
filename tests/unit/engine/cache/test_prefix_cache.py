"""The rules of engine/cache/README.md, by number, through `PrefixCache`."""

from __future__ import annotations

import pytest

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import Fact, PrefixCache
from engine.cache.blocks.block_table import BlockTable
from engine.cache.events import BlocksErased, Committed, Copied, Evicted, Matched
from engine.cache.tree.prefix_tree import TreeMatch
from engine.errors import InvariantViolation
from tests.lines_run import lines_run
from tests.tables import each_row
from tests.unit.engine.cache.sequences import compute, computed

SIZE = 4
US, THEM = b"us", b"them"


def make(blocks: int = 16) -> PrefixCache:
    """Make a cache of four-token blocks."""
    return PrefixCache(blocks=blocks, block_size=SIZE)


def run(cache: PrefixCache, tokens: list[int], namespace: bytes = US, now_s: float = 0.0) -> int:
    """Run a request from beginning to end; return its cached tokens."""
    table = cache.begin(namespace, tokens, now_s)
    found = table.kv_tokens
    assert compute(cache, table, tokens, now_s)
    cache.release(table, tokens, now_s)
    return found


def words(count: int, first: int = 0) -> list[int]:
    """Return `count` different tokens."""
    return list(range(first, first + count))


def test_rule_1_a_block_is_free_or_cached_or_pinned() -> None:
    """Every block is in one of three states, and the counts always add up."""
    cache = make(8)
    table = computed(cache, words(8))
    running = cache.stats()

    cache.release(table, words(8), 0.0)

    ended = cache.stats()
    assert (running.free, running.cached, running.pinned) == (6, 0, 2)
    assert (ended.free, ended.cached, ended.pinned) == (6, 2, 0)
    cache.check()


def test_rule_2_a_pinned_block_is_never_evicted() -> None:
    """This holds under any pressure."""
    cache = make(4)
    computed(cache, words(12))
    other = cache.begin(US, words(8, 100), 0.0)

    assert not cache.grow(other, 8, 0.0)
    assert cache.peek(US, words(12), 0.0).cached_tokens == 11


def test_rule_3_a_shared_block_is_copied_before_it_is_written() -> None:
    """A fork writes where the other still reads."""
    cache = make()
    table = computed(cache, words(6))
    fork = cache.fork(table)
    shared = list(table.blocks)

    assert cache.grow(fork, 7, 0.0)

    (copy,) = cache.take_copies()
    assert (copy.src, copy.dst, copy.tokens) == (shared[1], fork.blocks[1], 2)
    assert table.blocks == shared
    assert fork.blocks[0] == shared[0]
    assert fork.version > 0


def test_rule_3_a_block_with_one_holder_is_written_in_place() -> None:
    """The last of two forks needs no copy."""
    cache = make()
    table = computed(cache, words(6))
    fork = cache.fork(table)
    cache.release(fork, words(6), 0.0, keep=False)

    assert cache.grow(table, 7, 0.0)

    assert cache.take_copies() == ()


def test_rule_4_the_tail_is_kept_for_the_next_turn() -> None:
    """The next turn of a conversation finds it to the last token."""
    cache = make()
    run(cache, words(10))

    assert run(cache, words(15)) == 10


def test_rule_4_a_longer_tail_replaces_a_shorter() -> None:
    cache = make()
    run(cache, words(5))
    run(cache, words(7))

    assert cache.stats().cached == 2
    assert run(cache, [*words(7), 99]) == 7


def test_rule_4_a_full_block_is_found_while_its_writer_runs() -> None:
    """Blocks are committed as they fill, not when their sequence ends."""
    cache = make()
    computed(cache, words(9))

    assert cache.peek(US, words(9), 0.0).cached_tokens == 8


@each_row("shared", range(13))
def test_rule_5_a_hit_is_exact_to_the_token(shared: int) -> None:
    """The hit ends at the first token that differs."""
    cache = make()
    run(cache, words(12))

    assert run(cache, [*words(shared), *words(6, 100)]) == shared


def test_rule_5_a_partial_hit_copies_the_block() -> None:
    """Two sequences continue differently from the middle of a block."""
    cache = make()
    run(cache, words(8))

    table = cache.begin(US, [*words(6), 50], 0.0)

    (copy,) = cache.take_copies()
    assert copy.tokens == 2
    assert copy.dst == table.blocks[1]
    assert copy.src != copy.dst


def test_rule_5_a_partial_hit_is_dropped_without_a_free_block() -> None:
    """The request itself is never refused for a copy."""
    cache = make(2)
    computed(cache, words(8))

    other = cache.begin(US, [*words(6), 50], 0.0)

    assert other.kv_tokens == 4


def test_rule_6_one_token_of_a_cached_prompt_is_computed() -> None:
    """Without a computed position there are no logits to sample from."""
    cache = make()
    run(cache, words(8))

    assert run(cache, words(8)) == 7


def test_rule_9_the_least_recently_used_leaf_goes_first() -> None:
    """Inside one namespace the default eviction order is the order of use."""
    cache = make(4)
    for first in (0, 100, 200, 300):
        run(cache, words(4, first), now_s=first)
    run(cache, [*words(4), 9], now_s=400)

    assert cache.peek(US, [*words(4, 200), 9], 401).cached_tokens == 4
    assert cache.peek(US, [*words(4, 100), 9], 401).cached_tokens == 0


def test_rule_11_equal_blocks_computed_twice_become_one() -> None:
    """After a race both sequences use the same blocks, and the second copy is freed."""
    cache = make()
    first, second = cache.begin(US, words(8), 0.0), cache.begin(US, words(8), 0.0)
    assert compute(cache, first, words(8))

    assert compute(cache, second, words(8))

    assert second.blocks == first.blocks
    assert second.version > 0
    assert cache.stats().free == 14
    cache.check()


def test_rule_12_nothing_is_found_before_it_is_committed() -> None:
    """A failed step leaves no cached block behind."""
    cache = make()
    table = cache.begin(US, words(8), 0.0)
    assert cache.grow(table, 8, 0.0)

    assert cache.peek(US, words(8), 0.0).cached_tokens == 0

    cache.release(table, words(8), 0.0)
    assert cache.stats().free == 16


def test_rule_13_another_namespace_finds_nothing() -> None:
    cache = make()
    run(cache, words(8))

    assert run(cache, words(8), THEM) == 0
    assert cache.peek(b"", words(8), 0.0).cached_tokens == 0


def test_a_request_may_neither_read_nor_write() -> None:
    """Zero retention: it leaves no block and uses none of others."""
    cache = make()
    run(cache, words(8))

    table = cache.begin(US, words(8), 0.0, read=False, write=False)
    assert table.kv_tokens == 0
    assert compute(cache, table, words(8))
    cache.release(table, words(8), 0.0)

    assert cache.stats().cached == 2


def test_growing_without_room_changes_nothing() -> None:
    """The scheduler preempts and tries again, so the failed call must not have taken effect."""
    cache = make(3)
    table = computed(cache, words(8))
    before = (list(table.blocks), table.version, cache.stats())

    assert not cache.grow(table, 20, 0.0)

    assert (table.blocks, table.version, cache.stats()) == before


def test_releasing_twice_is_an_invariant_violation() -> None:
    """A second release would free blocks of another sequence."""
    cache = make()
    table = cache.begin(US, words(4), 0.0)
    cache.release(table, words(4), 0.0)

    with pytest.raises(InvariantViolation, match="twice"):
        cache.release(table, words(4), 0.0)


def test_erasing_a_namespace_keeps_the_others() -> None:
    """It goes at once, to the last block."""
    cache = make()
    run(cache, words(8))
    run(cache, words(8), THEM)

    assert cache.erase(US) == 2

    assert cache.peek(US, words(8), 0.0).cached_tokens == 0
    assert cache.peek(THEM, words(8), 0.0).cached_tokens == 7


def test_erasing_a_prefix_erases_its_continuations() -> None:
    """A document is erased together with every question about it."""
    cache = make()
    run(cache, [*words(8), 50, 51, 52, 53])
    run(cache, [*words(4), 60, 61, 62, 63])

    cache.erase(US, tokens=words(6))

    assert cache.peek(US, words(12), 0.0).cached_tokens == 4
    assert cache.peek(US, [*words(4), 60, 61, 62, 63], 0.0).cached_tokens == 7


def test_an_erased_block_in_use_is_freed_with_its_last_reader() -> None:
    """The reader continues undisturbed, and commits nothing."""
    cache = make()
    table = computed(cache, words(8))

    cache.erase(US)
    assert compute(cache, table, words(12))

    assert cache.peek(US, words(12), 0.0).cached_tokens == 0
    cache.release(table, words(12), 0.0)
    assert cache.stats().free == 16


def test_facts_report_counts_without_tokens() -> None:
    """Analytics and routing read the facts."""
    told: list[Fact] = []
    cache = PrefixCache(blocks=2, block_size=SIZE, facts=told.append)
    run(cache, words(4))
    run(cache, [0, 1, 99])
    run(cache, words(8, 200), THEM)
    cache.erase(THEM)

    assert Matched(US, 4, 0) in told
    assert Committed(US, 1, 4, 1) in told
    assert Copied(US, 2) in told
    assert Evicted(US, THEM, 1, 0.0) in told
    assert BlocksErased(THEM, 2) in told


def test_facts_report_new_blocks_and_their_lifetime() -> None:
    """Churn is counted from these; blocks that were cached already are not new."""
    told: list[Fact] = []
    cache = PrefixCache(blocks=2, block_size=SIZE, facts=told.append)
    for now_s, prompt, who in (
        (1.0, words(4), US),
        (2.0, words(4), US),
        (9.0, words(8, 200), THEM),
    ):
        table = computed(cache, prompt, now_s, who, read=who == THEM)
        cache.release(table, prompt, now_s)

    new = [fact.new_blocks for fact in told if isinstance(fact, Committed)]
    lived = [fact.lived_s for fact in told if isinstance(fact, Evicted)]
    assert new == [1, 0, 2]
    assert lived == [8.0]


def test_rule_9_inside_its_floor_a_payer_waits_for_what_others_have_pinned() -> None:
    """It loses what it would hold above its floor, and no more, however little others leave."""
    cache, floor, own = make(), Quota(floor_blocks=6, ceiling_blocks=6), words(16)
    first = computed(cache, own, quota=floor)
    cache.release(first, own, 0.0)
    held = cache.begin(THEM, words(48, 100), 0.0)
    assert cache.grow(held, 48, 0.0)
    table = cache.begin(US, words(12, 50), 1.0, quota=floor)
    grew = cache.grow(table, 12, 1.0)
    room = cache.available_blocks(US, floor)
    found = cache.peek(US, [*own, 0], 1.0).cached_tokens
    cache.release(held, words(48, 100), 1.0, keep=False)

    assert (grew, room, found) == (False, (0, 6), 16)
    assert cache.grow(table, 12, 1.0)
    assert cache.peek(US, [*own, 0], 1.0).cached_tokens == 12
    cache.check()


def test_a_floor_that_was_raised_over_promises_of_others_holds_as_far_as_it_can() -> None:
    """Its payer replaces its own blocks rather than wait for the end of promises."""
    cache, own = make(), words(16)
    lease = LeaseRequest(48, Retention("kept", promise_s=100.0))
    kept = computed(cache, words(48, 100), 0.0, THEM, leases=(lease,))
    cache.release(kept, words(48, 100), 0.0)
    first = computed(cache, own)
    cache.release(first, own, 0.0)
    raised = Quota(floor_blocks=6)
    table = cache.begin(US, words(12, 50), 1.0, quota=raised)

    assert cache.grow(table, 12, 1.0)
    assert cache.peek(US, [*own, 0], 1.0).cached_tokens == 4
    cache.check()


def test_floors_of_others_reduce_the_longest_sequence() -> None:
    """A request that can never run is refused at admission, not after a wait."""
    cache = make(8)
    cache.release(cache.begin(THEM, [0], 0.0, quota=Quota(floor_blocks=6)), [0], 0.0)

    assert cache.max_sequence_tokens(US, Quota()) == 8
    assert cache.max_sequence_tokens(US, Quota(ceiling_blocks=1)) == 4
    assert cache.max_sequence_tokens(THEM, Quota(floor_blocks=6)) == 32


def recount_lines(namespaces: int) -> int:
    """Return the lines that run to check 800 blocks that so many namespaces hold."""
    cache = make(2_000)
    for number in range(400):
        run(cache, words(5, 9 * number), f"user {number % namespaces}".encode())
    return lines_run(cache.check)


def test_the_cost_of_a_recount_does_not_grow_with_namespaces() -> None:
    """A scan of all blocks per namespace took a minute with one namespace per user, and a watchdog
    ended it.
    """
    assert recount_lines(400) < 3 * recount_lines(10)


def test_begin_reuses_a_current_match() -> None:
    """The scheduler looks up before it admits; a long prompt is not walked twice."""
    cache, prompt = make(400), words(800)
    run(cache, prompt)
    ask = [*prompt, 1]

    def lines_of_begin(found: TreeMatch | None) -> int:
        tables: list[BlockTable] = []
        lines = lines_run(lambda: tables.append(cache.begin(US, ask, 1.0, found=found)))
        assert tables[0].kv_tokens == 800
        cache.release(tables[0], ask, 1.0)
        return lines

    lines_of_begin(None)
    looking_up = lines_run(lambda: cache.find(US, ask, 1.0))

    assert lines_of_begin(cache.find(US, ask, 1.0)) < lines_of_begin(None) - looking_up / 2
    cache.check()


@pytest.mark.parametrize("change", ["more", "less", "none of it"])
def test_begin_looks_up_again_after_a_change(change: str) -> None:
    """Between lookup and begin other sequences may be preempted, and leave or lose blocks."""
    cache = make()
    run(cache, words(6))
    found = cache.find(US, words(12), 1.0)
    if change == "more":
        run(cache, words(10), now_s=1.0)
    else:
        cache.erase(US, tokens=words(5 if change == "less" else 1))

    table = cache.begin(US, words(12), 1.0, found=found)

    assert table.kv_tokens == {"more": 10, "less": 4, "none of it": 0}[change]
    cache.check()


def test_begin_ignores_a_match_in_a_deleted_namespace() -> None:
    """The same holds for an empty match in a namespace that is new since."""
    cache = make()
    nothing = cache.find(US, words(12), 1.0)
    run(cache, words(6))
    found = cache.find(US, words(12), 1.0)
    warm = cache.begin(US, words(12), 1.0, found=nothing)
    cache.release(warm, words(12), 1.0)
    cache.erase(US)
    run(cache, words(3))

    table = cache.begin(US, words(12), 1.0, found=found)

    assert (warm.kv_tokens, table.kv_tokens) == (6, 3)
    cache.check()
