"""The block table, as scheduler and runner read it: blocks, version, what is in place."""

from __future__ import annotations

from engine.cache import PrefixCache

WORDS = list(range(12))


def make() -> PrefixCache:
    """Four-token blocks."""
    return PrefixCache(blocks=16, block_size=4)


def test_appended_blocks_leave_the_version_alone() -> None:
    """A runner that has copied the table to its device need only send what is new."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 4, 0.0)
    version, first = table.version, list(table.blocks)

    cache.grow(table, 12, 0.0)

    assert table.version == version
    assert table.blocks[:1] == first
    assert len(table.blocks) == 3


def test_a_replaced_entry_changes_the_version() -> None:
    """Here the runner must look again."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 6, 0.0)
    cache.commit(table, WORDS, 6, 0.0)
    fork = cache.fork(table)
    version = fork.version

    cache.grow(fork, 7, 0.0)

    assert fork.version > version


def test_only_what_is_committed_counts_as_in_place() -> None:
    """Slots that were allocated hold nothing yet."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 12, 0.0)
    assert table.kv_tokens == 0

    cache.commit(table, WORDS, 5, 0.0)

    assert table.kv_tokens == 5
    assert cache.peek(b"us", WORDS, 0.0).cached_tokens == 4


def test_a_fork_holds_the_same_blocks_and_lives_on_alone() -> None:
    """The first may end at any time; what the other reads stays."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0, write=False)
    cache.grow(table, 12, 0.0)
    cache.commit(table, WORDS, 12, 0.0)
    fork = cache.fork(table)

    cache.release(table, WORDS, 0.0)

    assert fork.kv_tokens == 12
    assert cache.stats().pinned == 3
    assert table.blocks == []
    cache.release(fork, WORDS, 0.0)
    assert cache.stats().free == 16


def test_growth_may_start_beyond_what_is_in_place() -> None:
    """A step in flight is still writing the slots before."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 4, 0.0)

    assert cache.grow(table, 8, 0.0, start=4)

    assert table.kv_tokens == 0
    assert len(table.blocks) == 2


def test_the_namespace_is_that_of_its_request() -> None:
    """The scheduler compares it before it lets anybody wait for anybody."""
    assert make().begin(b"us", WORDS, 0.0).namespace == b"us"
