"""The block pool: a block is free exactly when it has no reference (rule *Reference*)."""

from __future__ import annotations

import pytest

from engine.cache.blocks.block_pool import BlockPool
from engine.errors import InvariantViolation


def test_every_block_is_allocated_once() -> None:
    """Two owners of one block would overwrite each other."""
    pool = BlockPool(5)

    given = [*pool.allocate(2), *pool.allocate(3)]

    assert sorted(given) == list(range(5))
    assert not pool.free
    list(pool.check())


def test_a_block_is_freed_with_its_last_reference() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)

    assert pool.add_ref(block) == 2
    assert pool.drop_ref(block) == 1
    assert block not in pool.free
    assert pool.drop_ref(block) == 0
    assert block in pool.free
    list(pool.check())


def test_a_double_free_is_an_invariant_violation() -> None:
    """A double free gives one block to two sequences."""
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.drop_ref(block)

    with pytest.raises(InvariantViolation, match="freed twice"):
        pool.drop_ref(block)


def test_a_reference_to_a_free_block_is_an_invariant_violation() -> None:
    """Use after free: the next owner is about to write the block."""
    pool = BlockPool(1)

    with pytest.raises(InvariantViolation, match="is free"):
        pool.add_ref(0)


def test_the_check_sees_a_block_listed_twice() -> None:
    """The check recounts the free list."""
    pool = BlockPool(3)
    pool.free.append(pool.free[0])

    with pytest.raises(InvariantViolation, match="free list"):
        list(pool.check())


def test_a_listed_block_in_use_is_not_allocated() -> None:
    """This assertion stays on in production."""
    pool = BlockPool(1)
    pool.ref_count[0] = 1

    with pytest.raises(InvariantViolation, match="free list"):
        pool.allocate(1)
