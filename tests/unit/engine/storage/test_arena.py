"""Host memory that two processes share, slot by slot."""

from __future__ import annotations

import os

import pytest

from engine.moves import ALIGNMENT, SlotLayout
from engine.storage.memory.arena import HostArena


def test_slots_are_apart_and_aligned() -> None:
    """A slot written to its last byte leaves its neighbours as they were."""
    arena = HostArena.create(SlotLayout.uniform(3, 100))
    arena.view(0, 100)[:] = b"a" * 100
    arena.view(1, 100)[:] = b"b" * 100
    arena.view(2, 100)[:] = b"c" * 100

    assert [bytes(arena.view(slot, 100)[:1]) for slot in range(3)] == [b"a", b"b", b"c"]
    assert bytes(arena.view(1, 100)) == b"b" * 100
    assert os.fstat(arena.fd).st_size == 3 * 2 * ALIGNMENT
    arena.close()


def test_what_one_process_writes_another_reads() -> None:
    """The memory outlives the mapping that made it."""
    ours = HostArena.create(SlotLayout.uniform(2, 64))
    theirs = HostArena(os.dup(ours.fd), SlotLayout.uniform(2, 64))
    ours.view(1, 64)[:] = bytes(range(64))
    ours.close()

    assert bytes(theirs.view(1, 64)) == bytes(range(64))
    theirs.close()


@pytest.mark.parametrize("slot", [-1, 2, 2**40])
def test_a_slot_outside_is_refused(slot: int) -> None:
    """A negative number is no slot from the end."""
    arena = HostArena.create(SlotLayout.uniform(2, 64))
    with pytest.raises(IndexError):
        arena.view(slot, 64)
    arena.close()


def test_a_smaller_memory_than_was_said_is_refused() -> None:
    """A mapping beyond the end of the file would end the process on its first touch."""
    arena = HostArena.create(SlotLayout.uniform(2, 64))
    with pytest.raises(ValueError, match="expected at least 192"):
        HostArena(os.dup(arena.fd), SlotLayout.uniform(3, 64))
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(arena.fd, 0)
    arena.close()


def test_an_arena_without_slots_is_refused() -> None:
    """The caller leaves a level out by making none."""
    with pytest.raises(ValueError, match="expected room for a slot"):
        HostArena.create(SlotLayout.uniform(0, 64))


def test_a_view_outlives_the_arena() -> None:
    """A copy under way ends on memory that is still there."""
    arena = HostArena.create(SlotLayout.uniform(1, 64))
    view = arena.view(0, 64)
    arena.close()
    arena.close()
    view[0] = 7

    assert view[0] == 7
