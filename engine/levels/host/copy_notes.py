"""Notes of the copies in host memory, from which the next engine takes them over.

They are entries of the slot table. What has changed is noted once a turn, so that a copy is noted
with its limit, or not at all; what must not outlast the call is noted at once: that a slot is
empty, and that a lease ends at a copy. Limits and promises only lengthen, so that a note that is a
turn old says less than is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from engine.api import AtRest, Fidelity, Namespace
from engine.errors import InvariantViolation
from engine.levels.stored_prefixes import Copy
from engine.moves import SlotFormat
from engine.storage.memory.slot_table import (
    CHECK_BYTES,
    NO_SERIAL,
    ROOT_SERIAL,
    SlotEntry,
    SlotTable,
)

NOTED_MAX: Final = 128
"""Copies whose notes one turn writes, at about 5 us each; the rest follow in the next turns."""
SERIAL_BITS: Final = 40
"""Serials of one engine: those of different engines differ in the bits above."""


class CopyNotes:
    """The notes of one engine's copies.

    `unnoted_total`: copies that the table has no room to describe, so that they end with the
    engine.
    """

    def __init__(
        self,
        table: SlotTable,
        generation: int,
        boot_s: Callable[[], float],
        terms_of: Callable[[Namespace], tuple[Fidelity, AtRest]],
        format_of: Callable[[int], SlotFormat],
    ) -> None:
        """`terms_of`: the fidelity of a namespace, and how far its copies may go. `format_of`: of a
        slot in use."""
        self._table = table
        self._boot_s = boot_s
        self._terms_of, self._format_of = terms_of, format_of
        self._serials = [0] * table.slots
        self._last = generation << SERIAL_BITS
        self._changed: dict[Copy, None] = {}
        self._later_s = 0.0
        self.unnoted_total = 0

    @property
    def waiting(self) -> int:
        """Return the copies whose notes are not written yet."""
        return len(self._changed)

    def set_time(self, now_s: float) -> None:
        """Note what the boot clock says at `now_s`: instants of copies are noted by it."""
        self._later_s = self._boot_s() - now_s

    def off_boot_clock(self, at_s: float) -> float:
        """Return the instant of this engine's clock."""
        return at_s - self._later_s

    def given(self, copy: Copy) -> None:
        """Have a copy noted that has got its slot, and those below it: they hang on it now.
        O(children).
        """
        if len(copy.check) != CHECK_BYTES:
            return  # its bytes could not be verified
        self._last += 1
        self._serials[copy.slot] = self._last
        self._changed[copy] = None
        for below in copy.children.values():
            self.changed(below)

    def adopt(self, copy: Copy, serial: int, parent: int) -> None:
        """Take over the note of a recovered copy, which says that it hangs on `parent`."""
        self._serials[copy.slot] = serial
        if parent != self._parent_of(copy):
            self._changed[copy] = None

    def changed(self, copy: Copy) -> None:
        """Have a copy noted anew, if it is in host memory. O(1)."""
        if copy.slot >= 0 and self._serials[copy.slot]:
            self._changed[copy] = None

    def leases_changed(self, copy: Copy) -> None:
        """Note at once which leases end at a copy, if it has been noted before."""
        if copy.slot >= 0 and self._serials[copy.slot] and copy not in self._changed:
            self._write(copy)

    def emptied(self, copy: Copy, slot: int) -> None:
        """Note at once that a copy has lost its slot. Below 1 us."""
        self._changed.pop(copy, None)
        self._serials[slot] = 0
        self._table.clear(slot)

    def write_changed(self, most: int = NOTED_MAX) -> None:
        """Write the notes of up to `most` copies that have changed, the oldest change first."""
        for _ in range(min(most, len(self._changed))):
            copy = next(iter(self._changed))
            del self._changed[copy]
            self._write(copy)

    def check(self, copies: Iterable[Copy]) -> None:
        """Check that the table says what is true. Raises InvariantViolation. O(slots)."""
        noted, serials = set[int](), set(self._serials)
        for copy in copies:
            if copy.slot < 0 or not self._serials[copy.slot]:
                continue
            noted.add(copy.slot)
            if copy in self._changed:
                continue
            found, known = self._table.read(copy.slot), self._entry(copy)
            if found is None and not self._is_unnoted(copy):
                raise InvariantViolation(f"slot {copy.slot} is not in the table")
            if found is not None and found.parent not in serials and known.parent == NO_SERIAL:
                found = replace(found, parent=NO_SERIAL)  # its parent has lost its slot since
            if found is not None and _identity(found) != _identity(known):
                raise InvariantViolation(f"slot {copy.slot} is noted as {found}, and has {known}")
        for slot, serial in enumerate(self._serials):
            if serial and slot not in noted:
                raise InvariantViolation(f"slot {slot} has a serial and no copy")

    # -- internals ----------------------------------------------------------------------------

    def _write(self, copy: Copy) -> None:
        if not self._table.write(copy.slot, self._entry(copy)):
            self.unnoted_total += 1

    def _is_unnoted(self, copy: Copy) -> bool:
        return self.unnoted_total > 0 and self._table.state(copy.slot) == "free"

    def _parent_of(self, copy: Copy) -> int:
        above = copy.parent
        assert above is not None, "a copy in the tree has a parent"
        if above.is_root:
            return ROOT_SERIAL
        return (self._serials[above.slot] if above.slot >= 0 else 0) or NO_SERIAL

    def _entry(self, copy: Copy) -> SlotEntry:
        fidelity, at_rest = self._terms_of(copy.namespace)
        later_s = self._later_s
        leases = copy.ending_leases
        return SlotEntry(
            self._serials[copy.slot],
            self._parent_of(copy),
            copy.namespace,
            copy.payer,
            copy.run,
            copy.check,
            copy.limit_at_s + later_s,
            copy.promise_at_s + later_s,
            copy.last_use_s + later_s,
            copy.hits,
            fidelity,
            self._format_of(copy.slot).name,
            at_rest,
            tuple(leases) if leases else (),
            copy.promise_terms() if copy.promise_at_s > -math.inf else None,
        )


def _identity(entry: SlotEntry) -> tuple[object, ...]:
    """Return what a note must say of its copy at any time."""
    return (
        entry.serial,
        entry.parent,
        entry.namespace,
        entry.payer,
        entry.run,
        entry.check,
        entry.format,
        math.isinf(entry.limit_at_s),
        frozenset(entry.leases),
    )
