"""The slot table: what is written comes back, and a writer may be killed at any byte."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import AT_REST
from engine.errors import InvariantViolation
from engine.moves import PromiseTerms
from engine.storage.memory.slot_table import (
    ENTRY_BYTES,
    HEADER_BYTES,
    SlotEntry,
    SlotTable,
    table_bytes,
)
from tests.fake_levels import KillableMemory, WriterKilled

SLOTS = 4
CHECK = b"sixteen bytes it"
ENTRY = SlotEntry(7, 3, b"namespace", b"payer", (1, 2, 3, 2**31 - 1), CHECK)
entries = st.builds(
    SlotEntry,
    serial=st.integers(1, 2**62),
    parent=st.sampled_from([0, 5, 2**64 - 1]),
    namespace=st.binary(max_size=9),
    payer=st.binary(max_size=3),
    run=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16).map(tuple),
    check=st.binary(min_size=16, max_size=16),
    limit_at_s=st.sampled_from([float("inf"), 12.5]),
    promise_at_s=st.sampled_from([float("-inf"), 3.25]),
    last_use_s=st.floats(0, 1e9),
    hits=st.integers(0, 2**32 - 1),
    fidelity=st.sampled_from(["exact", "near", "rough"]),
    format=st.sampled_from(["", "int8c"]),
    at_rest=st.sampled_from(AT_REST),
    leases=st.lists(st.text(max_size=6), max_size=3).map(tuple),
    terms=st.none()
    | st.builds(
        PromiseTerms, name=st.text(max_size=6), renew_promise_s=st.sampled_from([-math.inf, 3600.0])
    ),
)


def table(memory: Any = None) -> SlotTable:
    """Return a table over this memory."""
    return SlotTable(bytearray(table_bytes(SLOTS)) if memory is None else memory, SLOTS)


@given(entry=entries)
def test_what_is_written_comes_back(entry: SlotEntry) -> None:
    """To the last lease."""
    own = table()
    assert own.write(2, entry)

    assert own.read(2) == entry
    assert [own.state(slot) for slot in range(SLOTS)] == ["free", "free", "valid", "free"]


def test_a_cleared_entry_leaves_no_byte() -> None:
    """Its run is what a prompt said."""
    memory = bytearray(table_bytes(SLOTS))
    own = table(memory)
    own.write(1, ENTRY)
    own.clear(1)

    assert not any(memory)


@pytest.mark.parametrize(
    "wrong", [{"namespace": b"n" * ENTRY_BYTES}, {"check": b"short"}, {"leases": ("l" * 99,) * 10}]
)
def test_what_has_no_room_is_refused_and_leaves_the_slot_free(wrong: dict[str, Any]) -> None:
    """A part of it would say something else."""
    own = table()
    own.write(0, ENTRY)

    assert not own.write(0, replace(ENTRY, **wrong))
    assert own.state(0) == "free"


@given(
    kill_at=st.integers(0, 60),
    part=st.integers(0, 300),
    writes=st.lists(st.tuples(st.integers(0, SLOTS - 1), st.none() | entries), max_size=20),
)
def test_a_reader_after_a_kill_finds_what_was_written_or_nothing(
    kill_at: int, part: int, writes: list[tuple[int, SlotEntry | None]]
) -> None:
    """At every write, after any number of its bytes."""
    memory = KillableMemory(table_bytes(SLOTS))
    own = table(memory)
    memory.left, memory.bytes_left = kill_at, part
    known: dict[int, SlotEntry | None] = {}
    for slot, entry in writes:
        before = known.pop(slot, None)
        try:
            if entry is None:
                own.clear(slot)
            else:
                own.write(slot, entry)
        except WriterKilled:
            assert own.read(slot) in (None, before, entry)
            break
        known[slot] = entry
    for at, written in known.items():
        assert own.read(at) == written


def test_each_changed_byte_is_noticed() -> None:
    """Also those of an entry that was copied to another slot."""
    memory = bytearray(table_bytes(SLOTS))
    own = table(memory)
    own.write(1, replace(ENTRY, leases=("a lease",), format="int8c"))
    start = HEADER_BYTES + ENTRY_BYTES
    used = len(bytes(memory[start : start + ENTRY_BYTES]).rstrip(b"\0"))
    chance = random.Random(1)
    for at in range(used):
        before = memory[start + at]
        memory[start + at] ^= 1 << chance.randrange(8)
        assert own.read(1) is None, at
        memory[start + at] = before
    memory[start + ENTRY_BYTES : start + 2 * ENTRY_BYTES] = memory[start : start + ENTRY_BYTES]

    assert own.read(1) is not None
    assert own.state(2) == "torn"


def test_a_table_knows_what_it_was_begun_for() -> None:
    """And how many engines have had it."""
    own = table()
    assert not own.is_of(CHECK)
    own.begin(CHECK, 4)

    assert own.is_of(CHECK)
    assert not own.is_of(b"another shape it")
    assert [own.next_generation(), own.next_generation(), own.generation] == [5, 6, 6]
    own.end()
    assert (own.is_of(CHECK), own.generation) == (False, 6)


def test_a_serial_that_two_slots_have_is_found() -> None:
    """The checker's own check."""
    own = table()
    own.write(0, ENTRY)
    own.check()
    own.write(1, ENTRY)
    with pytest.raises(InvariantViolation, match="slots 0 and 1 have the serial 7"):
        own.check()


def test_too_little_memory_is_refused() -> None:
    """A slot beyond it, too."""
    with pytest.raises(ValueError, match="expected 8192"):
        SlotTable(bytearray(5000), SLOTS)
    with pytest.raises(IndexError, match="expected 0 to 3"):
        table().read(4)
