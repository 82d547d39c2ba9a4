"""Recovery: the copies that an engine has left in host memory when it died become copies again.

The table is read once, before the engine serves: all namespaces are known then, so that an erasure
misses none, and the slots of copies are taken. The copies enter the tree in turns, the root first.
What was being written, hangs on a copy that is gone, or is over its limit, is dropped. The bytes of
a copy are verified when it is loaded for the first time. Where a level keeps promises, those of
copies go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from engine.api import AT_REST, AtRest, Fidelity, Namespace, Payer
from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node
from engine.levels.host.copy_notes import CopyNotes
from engine.levels.places import RunPlaces
from engine.moves import PromiseTerms
from engine.storage.memory.slot_table import ROOT_SERIAL, SlotEntry, SlotTable

AT_START: Final = 8_192
"""Copies that enter the tree before the engine serves, in about a tenth of a second."""
A_TURN: Final = 128
"""Copies that enter the tree in a turn."""

DropReason = Literal["torn", "orphaned", "expired", "again", "erased"]
KeepPromise = Callable[[Node, float, PromiseTerms | None, float], None]
"""`KeptPromises.take_over`."""
Items = Sequence[tuple[int, SlotEntry]]


class KeptSlots(Protocol):
    """Host memory that outlives the engine: `KeptMemory` of `engine.storage.memory`, or a fake.

    `generation`: this engine's number among those that had it. `is_new`: no slot was ever filled.
    `later_s`: by how many seconds the boot clock is ahead of the engine's.
    """

    table: SlotTable
    generation: int
    is_new: bool
    later_s: Callable[[], float]

    def is_alone(self) -> bool:
        """Return whether no process of an earlier engine reads or writes slots any more."""


class Recovery:
    """The copies of one table that are not in the tree yet.

    `recovered`: copies that are. `dropped`: entries by reason: `torn` (it was being written),
    `orphaned` (it hung on a copy that is gone), `expired`, `again` (its run has been copied anew),
    `erased`.
    `fidelity`, `at_rest`: of their namespaces, as the table has them, where they are not `exact`
    and `remote`. `pending`, `pending_blocks`: bytes and copies by namespace that are still to come.
    `dropping`: namespaces whose copies are still to be dropped after an erasure.
    """

    def __init__(
        self,
        kept: KeptSlots,
        cache: PrefixCache,
        places: RunPlaces,
        keep: KeepPromise | None,
    ) -> None:
        """Read the table, and claim the slots of its copies; the book notes its own in it from now
        on. About 6 us a copy. `keep` is called with each copy that is promised; None where no level
        below the device keeps promises.
        """
        self._kept = kept
        self._table = table = kept.table
        self._cache, self._places = cache, places
        places.notes = self._notes = CopyNotes(
            table,
            kept.generation,
            kept.later_s,
            places.formats.terms_of,
            places.accounts.payer_of,
            places.formats.formats,
        )
        self._keep = keep
        self.recovered = 0
        self.dropped: Counter[DropReason] = Counter()
        self.fidelity: dict[Namespace, Fidelity] = {}
        self.at_rest: dict[Namespace, AtRest] = {}
        self.pending: Counter[Namespace] = Counter()
        self.pending_blocks: Counter[Namespace] = Counter()
        self.dropping: set[Namespace] = set()
        self._below: dict[int, list[tuple[int, SlotEntry]]] = {}
        self._next: list[tuple[Node | None, int, SlotEntry]] = []
        owners: dict[int, tuple[Payer, Namespace, int]] = {}
        slabs: dict[int, int] = {}
        for slot in range(table.slots):
            if (found := self._read(slot, slabs)) is not None:
                owners[slot] = (found[0].payer, found[0].namespace, found[1])
        places.claim(owners)
        for slot, entry in self._below.pop(ROOT_SERIAL, ()):
            self._next.append((None, slot, entry))
        for namespace, fidelity in self.fidelity.items():
            places.formats.allow(namespace, fidelity)
        if not kept.is_new:
            places.remains.soil_free()
        self._notes.set_time()
        places.accounts.is_closed = not kept.is_alone()

    @property
    def is_done(self) -> bool:
        """Return whether every entry is in the tree, or dropped."""
        return not self._next and not self._below

    def turn(self, now_s: float) -> bool:
        """Go on with what the engine before has left; return whether there was any."""
        self._notes.set_time()
        accounts = self._places.accounts
        if accounts.is_closed:
            accounts.is_closed = not self._kept.is_alone()
        if self.is_done:
            return False
        self.step(now_s)
        return True

    def disown(self) -> None:
        """Hand nothing on to the next engine: copies may not be what they are noted as."""
        self._table.end()

    def step(self, now_s: float, most: int = A_TURN) -> None:
        """Bring up to `most` entries into the tree, or drop them. About 15 us each."""
        for _ in range(most):
            if not self._next:
                self._drop_orphans()
                break
            self._bring(*self._next.pop(), now_s)

    def bring_all(self, namespace: Namespace, now_s: float) -> None:
        """Bring what hangs together of one namespace at once; the rest keeps its turns. What is
        left of it hangs on nothing. About 15 us a copy.
        """
        others = [item for item in self._next if item[2].namespace != namespace]
        self._next = others + [item for item in self._next if item[2].namespace == namespace]
        while len(self._next) > len(others):
            self._bring(*self._next.pop(), now_s)

    def erase(self, namespace: Namespace, now_s: float, *, is_part: bool) -> tuple[int, int]:
        """Have what is left of a namespace dropped in turns instead of brought; for an erasure that
        `is_part` of it, bring it now, but for what hangs on nothing. Return the blocks and bytes
        that will be dropped. O(1), or as `bring_all`.
        """
        if namespace not in self.pending or namespace in self.dropping:
            return 0, 0
        dropped = self.pending_blocks[namespace], self.pending[namespace]
        if is_part:
            dropped = 0, 0
            self.bring_all(namespace, now_s)
        if namespace in self.pending:
            self.dropping.add(namespace)
        return dropped

    # -- internals ----------------------------------------------------------------------------

    def _read(self, slot: int, slabs: dict[int, int]) -> tuple[SlotEntry, int] | None:
        """Return an entry and its format. `slabs`: the formats of slabs, which it adds to."""
        entry = self._table.read(slot)
        if entry is None and self._table.state(slot) == "free":
            return None
        form = None if entry is None else self._form_of(slot, entry, slabs)
        if entry is None or form is None:
            self.dropped["torn"] += 1
            self._table.clear(slot)
            return None
        self.pending[entry.namespace] += self._places.formats.formats[form].slot_bytes
        self.pending_blocks[entry.namespace] += 1
        self._places.changed.add(entry.namespace)
        self._below.setdefault(entry.parent, []).append((slot, entry))
        if entry.fidelity != "exact":
            self.fidelity[entry.namespace] = entry.fidelity
        if entry.at_rest != "remote":
            before = self.at_rest.get(entry.namespace, "remote")
            self.at_rest[entry.namespace] = min(before, entry.at_rest, key=AT_REST.index)
        return entry, form

    def _form_of(self, slot: int, entry: SlotEntry, slabs: dict[int, int]) -> int | None:
        """Return the format of an entry's copy; None if this engine, or the slab, has it not."""
        formats, layout = self._places.formats.formats, self._places.accounts.pool.layout
        names = [one.name for one in formats]
        if len(entry.run) != self._places.run_tokens or entry.format not in names:
            return None
        form = names.index(entry.format)
        slab, position = divmod(slot, layout.slots_per_slab)
        if position >= layout.slots_in(slab, formats[form].slot_bytes):
            return None
        return form if slabs.setdefault(slab, form) == form else None

    def _bring(self, parent: Node | None, slot: int, entry: SlotEntry, now_s: float) -> None:
        """Give a node the slot of an entry, or drop it, and queue what hangs on it."""
        notes, below = self._notes, self._below.pop(entry.serial, ())
        if entry.namespace in self.dropping:
            self._drop(slot, entry, "erased")
            for item in below:
                if item[1].namespace == entry.namespace:
                    self._next.append((None, *item))  # it is dropped as this one is
                else:
                    self._drop_all(*item, self._below.pop(item[1].serial, ()), "orphaned")
            return
        if parent is not None and (not parent.is_copied or parent.namespace != entry.namespace):
            self._drop_all(slot, entry, below, "orphaned")  # the parent has lost it meanwhile
            return
        limit_at_s = notes.off_boot_clock(entry.limit_at_s)
        if limit_at_s <= now_s:
            self._drop_all(slot, entry, below, "expired")
            return
        node = self._cache.add_run(entry.namespace, entry.payer, parent, entry.run)
        is_new = node.block < 0 and not node.is_copied
        if is_new:
            node.hits = entry.hits
            node.last_use_s = min(now_s, notes.off_boot_clock(entry.last_use_s))
        if node.host is None:
            self._unpend(slot, entry)
            self._places.recover(node, slot, entry.check)
            notes.adopt(node, entry.serial, entry.parent)
            self.recovered += 1
        else:  # it has been computed and copied again meanwhile
            self._drop(slot, entry, "again")
        self._cache.promises.extend_limit(node, limit_at_s, now_s, is_new=is_new)
        promise_at_s = notes.off_boot_clock(entry.promise_at_s)
        if self._keep is not None and promise_at_s > now_s:
            self._keep(node, promise_at_s, entry.terms, now_s)  # leases write its note
        for lease_id in entry.leases:
            self._cache.extend_lease(lease_id, node)
        for item in below:
            self._next.append((node, *item))

    def _drop_all(self, slot: int, entry: SlotEntry, below: Items, reason: DropReason) -> None:
        """Drop an entry and all that hangs on it."""
        self._drop(slot, entry, reason)
        stack = list(below)
        while stack:
            slot, entry = stack.pop()
            self._drop(slot, entry, reason)
            stack += self._below.pop(entry.serial, ())

    def _drop_orphans(self) -> None:
        """Drop what hangs on nothing that is there."""
        for entries in self._below.values():
            for slot, entry in entries:
                self._drop(slot, entry, "orphaned")
        self._below.clear()

    def _drop(self, slot: int, entry: SlotEntry, reason: DropReason) -> None:
        self.dropped[reason] += 1
        self._places.changed.add(entry.namespace)
        self._table.clear(slot)
        self._unpend(slot, entry)
        self._places.remains.soil_slots([slot])
        self._places.release(slot)

    def _unpend(self, slot: int, entry: SlotEntry) -> None:
        self.pending[entry.namespace] -= self._places.format_of(slot).slot_bytes
        self.pending_blocks[entry.namespace] -= 1
        if not self.pending_blocks[entry.namespace]:
            del self.pending[entry.namespace], self.pending_blocks[entry.namespace]
            self.dropping.discard(entry.namespace)
