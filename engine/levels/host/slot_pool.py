"""The slots of host memory: which are taken, and which size each slab is cut into.

All slots of a slab have one format. A slab whose slots are all free has none, and takes that of the
next slot wanted from it. The pool knows no copy, no payer and no byte: it deals numbers, as
`engine.moves.SlotLayout` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sortedcontainers import SortedList

from engine.errors import InvariantViolation
from engine.moves import SlotFormat, SlotLayout

NO_FORMAT: Final = -1
"""Of a slab without a slot in use."""


class SlotPool:
    """The slots of one arena, in the formats of its copies.

    `used_slots`: those in use, by index of the format. Formats are named by that index.
    """

    def __init__(self, layout: SlotLayout, formats: Sequence[SlotFormat]) -> None:
        self.layout = layout
        self._per_slab = layout.slots_per_slab
        self.formats = tuple(formats)
        self.used_slots = [0] * len(self.formats)
        self._format = [NO_FORMAT] * layout.slabs
        self._taken: list[set[int]] = [set() for _ in range(layout.slabs)]
        self._free: list[list[int]] = [[] for _ in range(layout.slabs)]  # of slabs with a format
        self._open = [SortedList() for _ in self.formats]  # slabs with a free slot
        self._empty = SortedList(range(layout.slabs))

    @property
    def used(self) -> int:
        """Return the slots in use."""
        return sum(self.used_slots)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the slots in use. O(formats)."""
        return sum(
            count * one.slot_bytes for count, one in zip(self.used_slots, self.formats, strict=True)
        )

    def take(self, form: int) -> int | None:
        """Return a free slot of a format, from a slab of it or else an empty one; None without.
        O(log slabs + slots of a slab).
        """
        if not self._open[form] and not self._open_slab(form):
            return None
        slab: int = self._open[form][0]  # the first fill up, so that the last become empty
        position = self._free[slab][-1]
        self._use(slab, position)
        return slab * self._per_slab + position

    def claim(self, slot: int, form: int) -> None:
        """Take one free slot of a format. O(slots of a slab). Raises InvariantViolation if it is
        not free, or if its slab has another format."""
        slab, position = divmod(slot, self._per_slab)
        if self._format[slab] == NO_FORMAT:
            self._give_format(slab, form)
        if self._format[slab] != form or position not in self._free[slab]:
            raise InvariantViolation(f"slot {slot} is no free slot of format {form}")
        self._use(slab, position)

    def has_room(self, form: int) -> bool:
        """Return whether a slot of a format can be taken. O(empty slabs) at most."""
        size = self.formats[form].slot_bytes
        return bool(self._open[form]) or any(self.layout.slots_in(n, size) for n in self._empty)

    def give_back(self, slot: int) -> None:
        """Make a slot free. O(log slabs). Raises InvariantViolation if it is free."""
        slab, position = divmod(slot, self._per_slab)
        form = self._format[slab]
        if position not in self._taken[slab]:
            raise InvariantViolation(f"slot {slot} was freed twice")
        self._taken[slab].remove(position)
        self.used_slots[form] -= 1
        if not self._free[slab]:
            self._open[form].add(slab)
        self._free[slab].append(position)
        if not self._taken[slab]:
            self._open[form].remove(slab)
            self._format[slab], self._free[slab] = NO_FORMAT, []
            self._empty.add(slab)

    def format_of(self, slot: int) -> int:
        """Return the format of a slot in use. O(1)."""
        return self._format[slot // self._per_slab]

    def bytes_of(self, slot: int) -> int:
        """Return the bytes of a slot in use. O(1)."""
        return self.formats[self.format_of(slot)].slot_bytes

    def slab_of(self, slot: int) -> int:
        """Return the number of a slot's slab. O(1)."""
        return slot // self._per_slab

    def slots_of(self, slab: int) -> list[int]:
        """Return the slots in use of a slab. O(these)."""
        first = slab * self._per_slab
        return [first + position for position in self._taken[slab]]

    def fits(self, slab: int, form: int) -> bool:
        """Return whether a slab could have slots of a format. O(1)."""
        return self.layout.slots_in(slab, self.formats[form].slot_bytes) > 0

    def is_used(self, slot: int) -> bool:
        """Return whether a slot is in use. O(1)."""
        slab, position = divmod(slot, self._per_slab)
        return 0 <= slab < self.layout.slabs and position in self._taken[slab]

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(slots)."""
        used = [0] * len(self.formats)
        for slab, form in enumerate(self._format):
            taken, free = self._taken[slab], self._free[slab]
            if (form == NO_FORMAT) != (not taken) or (form == NO_FORMAT) != (slab in self._empty):
                raise InvariantViolation(f"slab {slab} of format {form} has {len(taken)} slots")
            if form == NO_FORMAT:
                continue
            used[form] += len(taken)
            most = self.layout.slots_in(slab, self.formats[form].slot_bytes)
            if sorted((*taken, *free)) != list(range(most)):
                raise InvariantViolation(f"slab {slab} has other slots than its {most}")
            if (slab in self._open[form]) != bool(free):
                raise InvariantViolation(f"slab {slab} is offered with {len(free)} free slots")
        offered = sum(map(len, self._open)) + len(self._empty)
        if offered > self.layout.slabs:
            raise InvariantViolation(f"{offered} slabs are offered of {self.layout.slabs}")
        if used != self.used_slots:
            raise InvariantViolation(f"slots in use {self.used_slots}, recounted: {used}")

    def _use(self, slab: int, position: int) -> None:
        """Take a free slot of a slab that has a format. O(slots of a slab)."""
        form, free = self._format[slab], self._free[slab]
        free.remove(position)
        self._taken[slab].add(position)
        self.used_slots[form] += 1
        if not free:
            self._open[form].remove(slab)

    def _open_slab(self, form: int) -> bool:
        """Give an empty slab a format; return whether there was one that has room for it."""
        size = self.formats[form].slot_bytes
        for slab in self._empty:  # all but the last hold as many
            if self.layout.slots_in(slab, size):
                self._give_format(slab, form)
                return True
        return False

    def _give_format(self, slab: int, form: int) -> None:
        slots = self.layout.slots_in(slab, self.formats[form].slot_bytes)
        self._empty.remove(slab)
        self._format[slab] = form
        self._free[slab] = list(range(slots - 1, -1, -1))
        self._open[form].add(slab)
