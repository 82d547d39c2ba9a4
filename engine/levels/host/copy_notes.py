"""Notes of the copies in host memory, from which the next engine takes them over.

They are entries of the slot table. What has changed is noted once a turn, so that a copy is noted
with its limit, or not at all; what must not outlast the call is noted at once: that a slot is
empty, and that a lease ends at a copy. Limits and promises only lengthen, so that a note that is a
turn old says less than is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from engine.api import AtRest, Fidelity, Namespace, Payer
from engine.cache.tree.prefix_tree import Node
from engine.errors import InvariantViolation
from engine.levels.promise_terms import told_terms
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
        boot_later_s: Callable[[], float],
        terms_of: Callable[[Namespace], tuple[Fidelity, AtRest]],
        payer_of: Callable[[int], Payer],
        formats: Sequence[SlotFormat],
    ) -> None:
        """`boot_later_s`: by how much the boot clock is ahead of the engine's. `terms_of`: the
        fidelity of a namespace, and how far its copies may go. `payer_of`: who pays for a slot in
        use."""
        self._table = table
        self._boot_later_s = boot_later_s
        self._terms_of, self._payer_of, self._formats = terms_of, payer_of, formats
        self._serials = [0] * table.slots
        self._last = generation << SERIAL_BITS
        self._changed: dict[Node, None] = {}
        self._later_s = 0.0
        self.unnoted_total = 0

    @property
    def waiting(self) -> int:
        """Return the copies whose notes are not written yet."""
        return len(self._changed)

    def set_time(self) -> None:
        """Note what the boot clock says: instants of copies are noted by it. Not by a reading of it
        beside a turn's `now_s`, which is older by as much as the turn has taken until then: notes
        of two turns would differ by that."""
        self._later_s = self._boot_later_s()

    def off_boot_clock(self, at_s: float) -> float:
        """Return the instant of this engine's clock."""
        return at_s - self._later_s

    def given(self, node: Node) -> None:
        """Have a node noted that has got its slot, and those below it: they hang on it now.
        O(children).
        """
        assert node.host is not None, "it has just got its slot"
        if len(node.host.check) != CHECK_BYTES:
            return  # its bytes could not be verified
        self._last += 1
        self._serials[node.slot] = self._last
        self._changed[node] = None
        for below in node.children.values():
            self.changed(below)

    def adopt(self, node: Node, serial: int, parent: int) -> None:
        """Take over the note of a recovered node, which says that it hangs on `parent`."""
        self._serials[node.slot] = serial
        if parent != self._parent_of(node):
            self._changed[node] = None

    def changed(self, node: Node) -> None:
        """Have a node noted anew, if it is in host memory. O(1)."""
        if node.slot >= 0 and self._serials[node.slot]:
            self._changed[node] = None

    def terms_moved(self, node: Node) -> None:
        """Have a node noted anew if its limit or its promise has moved since it was. O(1)."""
        place = node.host
        if place is not None and place.noted_s != _ends_of(node):
            self.changed(node)

    def leases_changed(self, node: Node) -> None:
        """Note at once which leases end at a node, if it has been noted before."""
        if node.slot >= 0 and self._serials[node.slot] and node not in self._changed:
            self._write(node)

    def emptied(self, node: Node, slot: int) -> None:
        """Note at once that a node has lost its slot. Below 1 us."""
        self._changed.pop(node, None)
        self._serials[slot] = 0
        self._table.clear(slot)

    def write_changed(self, most: int = NOTED_MAX) -> None:
        """Write the notes of up to `most` copies that have changed, the oldest change first."""
        for _ in range(min(most, len(self._changed))):
            node = next(iter(self._changed))
            del self._changed[node]
            self._write(node)

    def check(self, copies: Iterable[Node]) -> None:
        """Check that the table says what is true. Raises InvariantViolation. O(slots)."""
        noted, serials = set[int](), set(self._serials)
        for node in copies:
            if node.slot < 0 or not self._serials[node.slot]:
                continue
            noted.add(node.slot)
            if node in self._changed:
                continue
            found, known = self._table.read(node.slot), self._entry(node)
            if found is None and not self._is_unnoted(node):
                raise InvariantViolation(f"slot {node.slot} is not in the table")
            if found is not None and found.parent not in serials and known.parent == NO_SERIAL:
                found = replace(found, parent=NO_SERIAL)  # its parent has lost its slot since
            if found is not None and found.limit_at_s > known.limit_at_s + 0.001:
                raise InvariantViolation(f"slot {node.slot}: noted longer than its limit")
            if found is not None and _identity(found) != _identity(known):
                raise InvariantViolation(f"slot {node.slot} is noted as {found}, and has {known}")
        for slot, serial in enumerate(self._serials):
            if serial and slot not in noted:
                raise InvariantViolation(f"slot {slot} has a serial and no copy")

    # -- internals ----------------------------------------------------------------------------

    def _write(self, node: Node) -> None:
        entry = self._entry(node)
        if not self._table.write(node.slot, entry):
            self.unnoted_total += 1
        elif node.host is not None:
            node.host.noted_s = _ends_of(node)

    def _is_unnoted(self, node: Node) -> bool:
        return self.unnoted_total > 0 and self._table.state(node.slot) == "free"

    def _parent_of(self, node: Node) -> int:
        above = node.parent
        assert above is not None, "a node in the tree has a parent"
        if not above.run:
            return ROOT_SERIAL
        return (self._serials[above.slot] if above.slot >= 0 else 0) or NO_SERIAL

    def _entry(self, node: Node) -> SlotEntry:
        fidelity, at_rest = self._terms_of(node.namespace)
        assert node.host is not None, "it is in host memory"
        later_s, leases = self._later_s, node.ending_leases
        limit_at_s, until_s = _ends_of(node)
        return SlotEntry(
            self._serials[node.slot],
            self._parent_of(node),
            node.namespace,
            self._payer_of(node.host.slot),
            node.run,
            node.host.check,
            limit_at_s + later_s,
            until_s + later_s,
            node.last_use_s + later_s,
            node.hits,
            fidelity,
            self._formats[node.host.form].name,
            at_rest,
            tuple(leases) if leases else (),
            told_terms(node) if until_s > -math.inf else None,
        )


def _ends_of(node: Node) -> tuple[float, float]:
    """Return when a node's limit and its promise end."""
    terms = node.terms
    is_promised = terms is not None and node.promised
    return node.limit_at_s, terms.promise_at_s if is_promised and terms else -math.inf


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
        frozenset(entry.leases),
    )
