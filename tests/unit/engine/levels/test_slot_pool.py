"""Slots of several sizes in one memory: none overlap, and an empty slab changes its format."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvariantViolation
from engine.levels.host.slot_pool import SlotPool
from engine.moves import SlotFormat, SlotLayout

FORMATS = (
    SlotFormat("", 640),
    SlotFormat("int8c", 320, "near"),
    SlotFormat("int4c", 192, "rough"),
)
LAYOUT = SlotLayout(3 * 1920 + 700, 1920, 192)
"""Three slabs of 3, 6 or 10 slots, and a shorter one of 1, 2 or 3."""


def full(pool: SlotPool, form: int) -> list[int]:
    """Take all slots of a format that there are."""
    taken = []
    while (slot := pool.take(form)) is not None:
        taken.append(slot)
    return taken


@pytest.mark.parametrize(("form", "most"), [(0, 10), (1, 20), (2, 33)])
def test_one_format_alone_has_all_memory(form: int, most: int) -> None:
    """Where all copies are exact nothing is lost but what slots of one size never fill."""
    pool = SlotPool(LAYOUT, FORMATS)
    taken = full(pool, form)

    assert len(taken) == most == LAYOUT.capacity(FORMATS[form].slot_bytes)
    assert max(taken) < LAYOUT.slots
    pool.check()


def test_a_slab_changes_its_format_only_when_it_is_empty() -> None:
    """A single copy keeps the whole slab in its format."""
    pool = SlotPool(LAYOUT, FORMATS)
    taken = full(pool, 0)
    first = sorted(pool.slots_of(pool.slab_of(taken[0])))
    for slot in first[1:]:
        pool.give_back(slot)
    assert pool.take(2) is None
    pool.give_back(first[0])

    assert len(full(pool, 2)) == 10
    assert pool.used_slots == [7, 0, 10]
    assert pool.used_bytes == 7 * 640 + 10 * 192
    pool.check()


def test_a_slot_is_given_back_once() -> None:
    """A second time would give one slot to two."""
    pool = SlotPool(LAYOUT, FORMATS)
    slot = pool.take(0)
    assert slot is not None
    pool.give_back(slot)

    with pytest.raises(InvariantViolation, match="freed twice"):
        pool.give_back(slot)


@pytest.mark.parametrize("slot", [-1, LAYOUT.slots, 3 * 10 + 1, 3])
def test_a_slot_that_its_size_has_not_has_no_place(slot: int) -> None:
    """A number says no size: 3 is a packed slot and no plain one."""
    with pytest.raises(IndexError, match=f"slot {slot} of 640 bytes"):
        LAYOUT.offset(slot, 640)


def test_slots_of_one_size_are_numbered_without_gaps() -> None:
    """The layout of one size alone, which a disk's tests use."""
    layout = SlotLayout.uniform(3, 100)

    assert (layout.slots, layout.capacity(100)) == (3, 3)
    assert [layout.offset(slot, 100) for slot in range(3)] == [0, 128, 256]


class RunPlaces:
    """The bytes of each slot that is taken, as a memory of bytes has them."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.owner: list[int] = [-1] * LAYOUT.memory_bytes
        self.taken: dict[int, int] = {}  # the format of each slot

    def range_of(self, slot: int, form: int) -> range:
        """Return the bytes of a slot."""
        size = FORMATS[form].slot_bytes
        start = LAYOUT.offset(slot, size)
        return range(start, start + size)

    def take(self, form: int) -> None:
        """Take a slot, whose bytes have no other owner."""
        slot = self.pool.take(form)
        if slot is None:
            return
        assert slot not in self.taken
        assert self.pool.format_of(slot) == form
        self.taken[slot] = form
        for byte in self.range_of(slot, form):
            assert self.owner[byte] == -1, (slot, self.owner[byte])
            self.owner[byte] = slot

    def give_back(self, slot: int) -> None:
        """Give a slot back."""
        for byte in self.range_of(slot, self.taken.pop(slot)):
            self.owner[byte] = -1
        self.pool.give_back(slot)


def run(pool: SlotPool, wanted: list[tuple[int, int]]) -> RunPlaces:
    """Take and give back in any order: 0 to 2 take a format, 3 gives one of those taken back."""
    places = RunPlaces(pool)
    for what, which in wanted:
        if what < len(FORMATS):
            places.take(what)
        elif places.taken:
            places.give_back(sorted(places.taken)[which % len(places.taken)])
        pool.check()
        assert pool.used == len(places.taken)
    return places


steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=60)


@given(steps)
def test_no_byte_has_two_owners(wanted: list[tuple[int, int]]) -> None:
    """In any order of taking and giving back; and all memory is free again in the end."""
    pool = SlotPool(LAYOUT, FORMATS)
    places = run(pool, wanted)
    for slot in list(places.taken):
        places.give_back(slot)

    assert len(full(pool, 0)) == 10


class HastyPool(SlotPool):
    """The planted fault: a slab takes another format while slots of it are in use."""

    def take(self, form: int) -> int | None:
        """Take a slot of any slab."""
        slot = super().take(form)
        if slot is None and (slab := next(iter(self._open[0]), None)) is not None:
            self._open[0].remove(slab)
            self._format[slab], self._free[slab] = form, list(range(9, -1, -1))
            self._open[form].add(slab)
            slot = super().take(form)
        return slot


def test_the_check_finds_a_slab_of_two_formats() -> None:
    """Random steps with the planted fault end in an overlap or a wrong recount."""
    chance = random.Random(3)
    wanted = [(chance.randrange(5), chance.randrange(40)) for _ in range(400)]

    with pytest.raises((AssertionError, InvariantViolation, KeyError)):
        run(HastyPool(LAYOUT, FORMATS), wanted)
