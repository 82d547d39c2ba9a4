"""Whose bytes lie in the slots of host memory, also in those that are free.

A copy that is dropped, or a move that has failed, leaves its bytes in the slot until the next move
fills it. An erasure has to reach these too: their slots are *soiled* until they have been wiped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from engine.api import Namespace
from engine.errors import InvariantViolation
from engine.levels.copy_formats import OWN
from engine.levels.host.accounts import HostAccounts

IN_USE_MAX: Final = 512
"""Soiled slots that moves still use, which one call passes over."""


class SlotRemains:
    """The namespaces whose bytes may lie in each slot, and the slots that are to be wiped."""

    def __init__(self, accounts: HostAccounts, wipe: Callable[[int, int], None]) -> None:
        """`wipe` makes the bytes of a free slot zeros; it gets their number, too."""
        self._accounts = accounts
        self._pool, self._per_slab = accounts.pool, accounts.pool.layout.slots_per_slab
        self._forms: dict[int, int] = {}  # by slab: the format in which its slots were last used
        self._wipe = wipe
        self._namespaces: dict[int, tuple[Namespace, ...]] = {}
        self._slots: dict[Namespace, set[int]] = {}
        self._soiled: dict[int, None] = {}

    @property
    def soiled(self) -> int:
        """Return the slots that are to be wiped."""
        return len(self._soiled)

    def is_soiled(self, slot: int) -> bool:
        """Return whether a slot is to be wiped. O(1)."""
        return slot in self._soiled

    def taken(self, slot: int, namespace: Namespace) -> None:
        """Note that a slot is about to be filled with bytes of a namespace; wipe it before that if
        it is soiled. O(1), O(bytes of a slot) where it is.
        """
        self._note_format(slot)
        if slot in self._soiled:
            self._wipe_slot(slot)
        known = self._namespaces.get(slot, ())
        if namespace not in known:
            self._namespaces[slot] = (*known, namespace)
            self._slots.setdefault(namespace, set()).add(slot)

    def filled(self, slot: int, namespace: Namespace) -> None:
        """Note that all of a slot's bytes are of this namespace. O(1)."""
        for other in self._namespaces.get(slot, ()):
            if other != namespace:
                self._discard(slot, other)
        self._namespaces[slot] = (namespace,)
        self._soiled.pop(slot, None)  # what was to be wiped is overwritten

    def soil(self, namespace: Namespace) -> None:
        """Have the slots wiped that have bytes of a namespace, and no copy. O(its slots)."""
        self.soil_slots(
            slot for slot in self._slots.get(namespace, ()) if not self._accounts.has_node(slot)
        )

    def soil_slots(self, slots: Iterable[int]) -> None:
        """Have these slots wiped, as soon as they are free."""
        self._soiled.update(dict.fromkeys(slots))

    def soil_free(self) -> None:
        """Have all memory wiped that is in no slot in use: an earlier engine may have filled it.
        O(slots)."""
        layout = self._pool.layout
        for slab in range(layout.slabs):
            form = self._forms.setdefault(slab, OWN)
            first = slab * self._per_slab
            end = first + layout.slots_in(slab, self._pool.formats[form].slot_bytes)
            self.soil_slots(filter(self._accounts.is_free, range(first, end)))

    def wipe_some(self, most: int) -> None:
        """Wipe up to `most` soiled slots that are free. O(bytes wiped)."""
        first = list(islice(self._soiled, most + IN_USE_MAX))
        free = [slot for slot in first if self._accounts.is_free(slot)][:most]
        for slot in free:
            self._wipe_slot(slot)

    def check(self) -> None:
        """Recount. Raises InvariantViolation. O(slots)."""
        known = {slot: set(names) for slot, names in self._namespaces.items()}
        found: dict[int, set[Namespace]] = {}
        for namespace, slots in self._slots.items():
            for slot in slots:
                found.setdefault(slot, set()).add(namespace)
        if known != found:
            raise InvariantViolation(f"remains by slot {known}, by namespace {found}")
        if copies := [slot for slot in self._soiled if self._accounts.has_node(slot)]:
            raise InvariantViolation(f"slots of copies are to be wiped: {copies}")

    # -- internals ----------------------------------------------------------------------------

    def _note_format(self, slot: int) -> None:
        """Note the format that a slot's slab has now. Of another one no byte is left: its slots lay
        elsewhere."""
        slab, form = slot // self._per_slab, self._pool.format_of(slot)
        if self._forms.get(slab, form) != form:
            first = slab * self._per_slab
            for other in range(first, first + self._per_slab):
                if other in self._namespaces or other in self._soiled:
                    self._wipe_slot(other)
        self._forms[slab] = form

    def _wipe_slot(self, slot: int) -> None:
        form = self._forms[slot // self._per_slab]
        self._wipe(slot, self._pool.formats[form].slot_bytes)
        self._soiled.pop(slot, None)
        for namespace in self._namespaces.pop(slot, ()):
            self._discard(slot, namespace)

    def _discard(self, slot: int, namespace: Namespace) -> None:
        slots = self._slots[namespace]
        slots.discard(slot)
        if not slots:
            del self._slots[namespace]
