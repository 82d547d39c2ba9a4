"""The block table as the scheduler and the runner read it."""

from __future__ import annotations

import pytest

from engine.cache import PrefixCache
from engine.errors import InvariantViolation
from tests.unit.engine.cache.sequences import computed

WORDS = list(range(12))


def make() -> PrefixCache:
    """Make a cache of four-token blocks."""
    return PrefixCache(blocks=16, block_size=4)


def test_appended_blocks_keep_the_version() -> None:
    """A runner with a device copy of the table sends only the new entries."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 4, 0.0)
    version, first = table.version, list(table.blocks)

    cache.grow(table, 12, 0.0)

    assert table.version == version
    assert table.blocks[:1] == first
    assert len(table.blocks) == 3


def test_a_fork_keeps_its_blocks_when_the_first_table_ends() -> None:
    cache = make()
    table = computed(cache, WORDS, write=False)
    fork = cache.fork(table)

    cache.release(table, WORDS, 0.0)

    assert fork.kv_tokens == 12
    assert cache.stats().pinned == 3
    assert table.blocks == []
    cache.release(fork, WORDS, 0.0)
    assert cache.stats().free == 16


def test_growth_may_start_beyond_kv_tokens() -> None:
    """A step in flight still writes the slots before."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 4, 0.0)

    assert cache.grow(table, 8, 0.0, start=4)

    assert table.kv_tokens == 0
    assert len(table.blocks) == 2


def test_a_table_may_write_to_the_end_of_its_last_block_without_asking() -> None:
    """A decoding sequence asks for room once for each block."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    assert table.writable_tokens == 0

    cache.grow(table, 5, 0.0)

    assert table.writable_tokens == 8
    cache.check()


def test_tables_that_share_a_block_ask_before_they_write() -> None:
    """The first of them to write it gets a copy, and the other then has it alone."""
    cache = make()
    table = computed(cache, WORDS, end=6)

    fork = cache.fork(table)

    assert (table.writable_tokens, fork.writable_tokens) == (0, 0)
    cache.grow(fork, 7, 0.0)
    assert (table.writable_tokens, fork.writable_tokens) == (0, 8)
    cache.check()


def test_blocks_that_a_move_holds_are_not_written_without_asking() -> None:
    """A load that has failed may still fill them."""
    cache = make()
    table = cache.begin(b"us", WORDS, 0.0)
    cache.grow(table, 8, 0.0)

    held = cache.moves.hold_blocks(table, 0, 0.0)

    assert table.writable_tokens == 0
    cache.moves.unhold(held)


def test_the_check_finds_a_shared_block_that_counts_as_writable() -> None:
    """The fault would write one sequence's KV into another's block."""
    cache = make()
    table = computed(cache, WORDS, end=6)
    cache.fork(table)

    table.writable_tokens = 8

    with pytest.raises(InvariantViolation, match="writable block"):
        cache.check()


def test_tokens_within_a_block_are_committed_together() -> None:
    """As `commit` does it for each table, where no block fills."""
    cache = make()
    tables = [cache.begin(name, WORDS, 0.0) for name in (b"us", b"them")]
    for table, filled in zip(tables, (1, 6), strict=True):
        cache.grow(table, 8, 0.0)
        cache.commit(table, WORDS, filled, 0.0)

    cache.commit_tokens(tables)

    assert [table.kv_tokens for table in tables] == [2, 7]
    assert cache.stats().cached == 0
    cache.check()
